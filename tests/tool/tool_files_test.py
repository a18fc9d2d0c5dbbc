"""The files that the tool reads and writes: none that is read is written over, what is written is
whole or not there, and what cannot be read is said so at once."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
import unittest

import numpy as np

from tool_support import TOOL, TestWithFolder, make_checkpoint, not_sanitized, run_tool, write_safetensors

# Takes seconds to write, so that one can look meanwhile.
LARGE = ["make-checkpoint", "--family", "mixtral", "--hidden", "1024", "--inner", "2048",
         "--experts", "16", "--top-k", "2", "--layers", "4", "--shards", "5", "--output"]
NOBODY = 65534


def content_of(folder):
    """{path: bytes} of all files below a folder."""
    out = {}
    for root, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(root, name), "rb") as file:
                out[os.path.join(root, name)] = file.read()
    return out


def wait_until(holds, process):
    """Until it holds, as long as the process runs."""
    while not holds():
        if process.poll() is not None:
            raise AssertionError(f"ended too early with {process.returncode}")
        time.sleep(0.001)


def memory_limit(kind, size):
    """What sets a limit before a program starts. A sanitizer's build reserves more than any: none."""
    if os.environ.get("SWITCHYARD_TEST_SANITIZED"):
        return None
    return lambda: resource.setrlimit(kind, (size, size))


class OutputsThatAreInputs(TestWithFolder):
    def setUp(self):
        super().setUp()
        self.model = make_checkpoint(f"{self.d}/model", shards=2)
        self.tokens()
        self.run = ["run", "--checkpoint", self.model, "--tokens", f"{self.d}/tokens.npy"]

    def assert_refused(self, words, *args):
        before = content_of(self.d)
        self.assert_one_line(run_tool(*args), 2, words)
        self.assertEqual(content_of(self.d), before)

    def other_names_of(self, path, folder):
        """The file by other ways to it."""
        name = os.path.basename(path)
        os.symlink(path, f"{self.d}/link-{name}")
        os.link(path, f"{self.d}/hard-{name}")
        os.symlink(folder, f"{self.d}/folder-of-{name}")
        return [path, f"{folder}/../{os.path.basename(folder)}/./{name}", f"{self.d}/link-{name}",
                f"{self.d}/hard-{name}", f"{self.d}/folder-of-{name}/{name}"]

    def test_no_file_of_the_checkpoint_is_written_over_by_any_name(self):
        for shard in "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors":
            for name in self.other_names_of(f"{self.model}/{shard}", self.model):
                for option in "--output", "--routing-output":
                    with self.subTest(name=name, option=option):
                        self.assert_refused([option, name, "--checkpoint", shard], *self.run,
                                            option, name)

    def test_no_tokens_text_or_routing_is_written_over(self):
        for name in self.other_names_of(f"{self.d}/tokens.npy", self.d):
            self.assert_refused(["--output", name, "--tokens"], *self.run, "--output", name)
        tokens = np.load(f"{self.d}/tokens.npy")
        named = f"{self.d}/t.safetensors"
        write_safetensors(named, {"a": ("F32", tokens.shape, tokens.tobytes())})
        for option in "--output", "--routing-output":
            self.assert_refused([option, "--tokens"], "run", "--checkpoint", self.model,
                                "--tokens", f"{named}:a", option, named)
        os.symlink("text.txt", f"{self.d}/text.npy")
        self.assert_refused(["--output", "--text"], "run", "--checkpoint", self.model, "--text",
                            f"{self.d}/text.txt", "--output", f"{self.d}/text.npy")
        routing = f"{self.d}/routing.safetensors"
        self.assert_fine(run_tool(*self.run, "--routing-output", routing))
        for option in "--output", "--routing-output":
            self.assert_refused([option, "--routing-input"], *self.run, "--routing-input", routing,
                                option, routing)

    def test_two_outputs_are_two_files(self):
        out = f"{self.d}/out.safetensors"
        os.symlink(self.d, f"{self.d}/here")
        for other in out, f"{self.d}/here/out.safetensors":
            self.assert_refused(["--routing-output", other, "--output"], *self.run, "--output", out,
                                "--routing-output", other)
        for other in f"{self.d}/r", f"{self.d}/here/r":
            self.assert_refused(["--csv", "--results"], "bench", "--suite", "topk", "--results",
                                f"{self.d}/r", "--csv", other)

    def test_no_result_file_becomes_its_own_report_and_no_checkpoint_a_result_file(self):
        results = f"{self.d}/r.jsonl"
        self.assert_fine(run_tool("bench", "--hidden", "64", "--inner", "32", "--experts", "4",
                                  "--top-k", "2", "--num-tokens", "1", "--iterations", "1",
                                  "--results", results))
        for name in self.other_names_of(results, self.d):
            self.assert_refused(["--output", name, "r.jsonl"], "report", f"{self.d}/text.txt",
                                results, "--output", name)
        shard = f"{self.model}/model-00001-of-00002.safetensors"
        for option in "--results", "--csv":
            self.assert_refused([option, "--checkpoint"], "bench", "--suite", "load",
                                "--checkpoint", self.model, option, shard)

    def test_the_same_output_may_be_written_again(self):
        for _ in range(2):
            self.assert_fine(run_tool(*self.run, "--output", f"{self.d}/out.npy",
                                      "--routing-output", f"{self.d}/out.safetensors"))


class CheckpointsInPlace(TestWithFolder):
    """make-checkpoint over an older checkpoint."""

    def start(self, directory):
        process = subprocess.Popen([TOOL, *LARGE, directory], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def test_an_older_one_with_more_files_leaves_none_of_them(self):
        model = f"{self.d}/model"
        for shards, files in (5, 7), (3, 5), (1, 2), (4, 6):
            make_checkpoint(model, shards=shards)
            self.assertEqual(len(os.listdir(model)), files, os.listdir(model))

    def test_files_of_others_in_the_directory_stay(self):
        model = make_checkpoint(f"{self.d}/model", shards=3)
        others = ["tokenizer.json", "model-notes.txt", "out.safetensors", "adapter-00001-of-00002"]
        for name in others:
            with open(f"{model}/{name}", "w", encoding="utf-8") as file:
                file.write("mine")
        make_checkpoint(model)
        self.assertEqual(sorted(os.listdir(model)),
                         sorted([*others, "config.json", "model.safetensors"]))

    def test_one_that_is_interrupted_leaves_the_older_one_and_nothing_else(self):
        model = make_checkpoint(f"{self.d}/model", shards=2)
        before = content_of(model)
        for signal_number in signal.SIGINT, signal.SIGTERM:
            process = self.start(model)
            # Into the third file, so that finished ones lie beside it.
            wait_until(lambda: len(os.listdir(model)) > len(before) + 2, process)
            process.send_signal(signal_number)
            self.assertEqual(process.wait(10), 130)
            self.assertEqual(content_of(model), before)

    @not_sanitized
    def test_one_that_is_killed_leaves_the_older_one_and_the_next_clears_up(self):
        model = make_checkpoint(f"{self.d}/model", shards=2)
        before = content_of(model)
        process = self.start(model)
        wait_until(lambda: len(os.listdir(model)) > len(before) + 2, process)
        process.kill()
        process.wait()
        after = content_of(model)
        self.assertEqual({name: after[name] for name in before}, before)
        make_checkpoint(model, shards=2)
        self.assertEqual(content_of(model), before)

    @not_sanitized
    def test_one_that_is_killed_while_files_are_replaced_leaves_no_mixture(self):
        old, new = (make_checkpoint(f"{self.d}/{name}", seed=seed, shards=400)
                    for name, seed in (("old", 1), ("new", 2)))
        wanted = []
        for model in old, new:
            out = f"{model}.npy"
            self.assert_fine(run_tool("run", "--checkpoint", model, "--text",
                                      f"{self.d}/text.txt", "--output", out))
            wanted.append(np.load(out).tobytes())
        config = f"{old}/config.json"
        for _ in range(5):
            make_checkpoint(old, seed=1, shards=400)
            process = subprocess.Popen([TOOL, "make-checkpoint", "--family", "mixtral", "--hidden",
                                        "64", "--inner", "32", "--experts", "4", "--top-k", "2",
                                        "--seed", "2", "--shards", "400", "--output", old],
                                       stdout=subprocess.DEVNULL)
            while os.path.exists(config) and process.poll() is None:
                pass
            process.kill()
            process.wait()
            done = run_tool("run", "--checkpoint", old, "--text", f"{self.d}/text.txt", "--output",
                            f"{self.d}/out.npy")
            if done.returncode == 0:
                self.assertIn(np.load(f"{self.d}/out.npy").tobytes(), wanted)
            else:
                self.assert_one_line(done, 2, [old])

    def test_two_at_once_do_not_mix(self):
        model = f"{self.d}/model"
        first = self.start(model)
        wait_until(lambda: os.path.isdir(model) and os.listdir(model), first)
        first.send_signal(signal.SIGSTOP)
        second = run_tool("make-checkpoint", "--family", "mixtral", "--hidden", "64", "--inner",
                          "32", "--experts", "4", "--top-k", "2", "--output", model)
        first.send_signal(signal.SIGCONT)
        self.assert_one_line(second, 3, [model, "another"])
        self.assertEqual(first.wait(60), 0)
        self.assertEqual(len(os.listdir(model)), 7, os.listdir(model))

    def test_the_disk_is_asked_for_room_first(self):
        def sizes(layers, shards):
            return ["make-checkpoint", "--family", "mixtral", "--hidden", "1048576", "--inner",
                    "1048576", "--experts", "4096", "--top-k", "2", "--layers", layers, "--shards",
                    shards, "--output", f"{self.d}/a/b"]

        for layers in 1, 1024:  # 27 PB; 27 EB, more than 64 bits count
            for shards in 1, 1024:
                begin = time.monotonic()
                done = run_tool(*sizes(layers, shards), timeout=60)
                self.assert_one_line(done, 3, [f"{self.d}/a/b", "PB" if layers == 1 else "EB",
                                               "free"])
                self.assertLess(time.monotonic() - begin, 30)
                self.assertFalse(os.path.exists(f"{self.d}/a"))

    def test_a_run_that_is_interrupted_while_it_writes_leaves_the_older_output(self):
        model = make_checkpoint(f"{self.d}/model", hidden=1024, inner=32)
        np.save(f"{self.d}/wide.npy", np.ones((60000, 1024), np.float16))
        out = f"{self.d}/out.npy"
        with open(out, "w", encoding="utf-8") as file:
            file.write("older")
        before = sorted(os.listdir(self.d))
        process = subprocess.Popen([TOOL, "run", "--checkpoint", model, "--tokens",
                                    f"{self.d}/wide.npy", "--warmup", "0", "--iterations", "1",
                                    "--output-dtype", "f32", "--output", out],
                                   stdout=subprocess.DEVNULL)
        wait_until(lambda: len(os.listdir(self.d)) > len(before), process)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(10), 130)
        self.assertEqual(sorted(os.listdir(self.d)), before)
        with open(out, encoding="utf-8") as file:
            self.assertEqual(file.read(), "older")


class FilesThatAreNone(TestWithFolder):
    """Devices, pipes, loops of links, and what may not be read."""

    def setUp(self):
        super().setUp()
        self.model = make_checkpoint(f"{self.d}/model")
        self.tokens()
        self.run = ["run", "--checkpoint", self.model]
        self.good = [*self.run, "--tokens", f"{self.d}/tokens.npy"]
        self.bench = ["bench", "--hidden", "64", "--inner", "32", "--experts", "4", "--top-k", "2",
                      "--num-tokens", "1", "--iterations", "1"]

    def uses(self, name):
        """(arguments, option) of every option that takes a file, with a file of that name."""
        path = f"{self.d}/{name}"
        for ending in ".npy", ".safetensors":
            if not os.path.lexists(path + ending):
                os.symlink(name, path + ending)
        return [
            ([*self.run, "--tokens", path + ".npy"], name),
            ([*self.run, "--tokens", path + ".safetensors"], name),
            ([*self.run, "--text", path], "--text"),
            ([*self.good, "--routing-input", path + ".safetensors"], name),
            (["run", "--checkpoint", path, "--tokens", f"{self.d}/tokens.npy"], self.d),
            (["run", "--checkpoint", path + ".safetensors", "--text", f"{self.d}/text.txt"], name),
            (["report", path, "--output", f"{self.d}/out.html"], name),
            ([*self.good, "--output", path + ".npy"], "--output"),
            ([*self.good, "--routing-output", path + ".safetensors"], "--routing-output"),
            ([*self.bench, "--results", path], "--results"),
            ([*self.bench, "--csv", path], "--csv"),
            (["report", f"{self.d}/text.txt", "--output", path], "--output"),
        ]

    def assert_refused(self, args, words, **options):
        done = run_tool(*args, timeout=30, **options)
        self.assert_one_line(done, 2, words)

    def test_a_pipe_is_refused_and_not_waited_for(self):
        os.mkfifo(f"{self.d}/pipe")
        for args, option in self.uses("pipe"):
            with self.subTest(args[-4:]):
                self.assert_refused(args, [option])

    def test_a_loop_of_links_is_named(self):
        os.symlink("loop", f"{self.d}/loop")
        for args, option in self.uses("loop"):
            with self.subTest(args[-4:]):
                self.assert_refused(args, [option, "Too many levels of symbolic links"])
        model = make_checkpoint(f"{self.d}/looped", shards=2)
        os.remove(f"{model}/model.safetensors.index.json")
        os.symlink("model.safetensors.index.json", f"{model}/model.safetensors.index.json")
        self.assert_refused(["run", "--checkpoint", model, "--text", f"{self.d}/text.txt"],
                            ["index.json", "Too many levels"])
        self.assert_refused(["make-checkpoint", "--family", "mixtral", "--hidden", "64", "--inner",
                             "32", "--experts", "4", "--top-k", "2", "--output",
                             f"{self.d}/loop/model"], ["loop/model", "Too many levels"])

    def test_a_name_that_is_too_long_is_cut_and_refused(self):
        name = self.d + "/" + 5000 * "x"
        for args in (["run", "--checkpoint", name, "--text", f"{self.d}/text.txt"],
                     [*self.run, "--text", name], [*self.run, "--tokens", name + ".npy"],
                     [*self.good, "--output", name + ".npy"], [*self.bench, "--results", name],
                     ["report", name, "--output", f"{self.d}/out.html"]):
            done = run_tool(*args, timeout=30)
            self.assert_one_line(done, 2, ["File name too long"])
            self.assertLess(len(done.stderr), 3000)

    def test_what_may_not_be_read_is_named(self):
        drop, tool = None, TOOL
        if os.geteuid() == 0:  # who may read everything
            drop = lambda: os.setuid(NOBODY)
            os.chmod(self.d, 0o777)
            tool = shutil.copy(TOOL, f"{self.d}/tool")  # which may lie below a home that is locked
        os.mkdir(f"{self.d}/locked")
        make_checkpoint(f"{self.d}/locked/model")
        os.chmod(f"{self.d}/locked", 0)
        self.addCleanup(os.chmod, f"{self.d}/locked", 0o755)
        text = ["--text", f"{self.d}/text.txt"]
        for args in (["run", "--checkpoint", f"{self.d}/locked/model", *text],
                     ["run", "--checkpoint", f"{self.d}/locked", *text],
                     ["report", f"{self.d}/locked/r", "--output", f"{self.d}/out.html"],
                     [*self.run, "--text", f"{self.d}/locked/t"],
                     [*self.good, "--output", f"{self.d}/locked/out.npy"]):
            done = subprocess.run([tool, *args], capture_output=True, text=True, timeout=30,
                                  preexec_fn=drop, check=False)
            with self.subTest(args):
                self.assert_one_line(done, 2, [f"{self.d}/locked", "Permission denied"])

    def test_a_device_without_end_is_refused(self):
        limit = memory_limit(resource.RLIMIT_AS, 4 << 30)
        for args in (["report", "/dev/zero", "--output", f"{self.d}/out.html"],
                     [*self.run, "--text", "/dev/zero"]):
            done = subprocess.run([TOOL, *args], capture_output=True, text=True, timeout=30,
                                  preexec_fn=limit, check=False)
            self.assert_one_line(done, 2, ["/dev/zero", "is not a regular file"])

    def test_a_line_without_end_is_no_result_line(self):
        path = f"{self.d}/r.jsonl"
        with open(path, "wb") as file:
            file.truncate(1 << 33)  # zeros that take no room
        limit = memory_limit(resource.RLIMIT_DATA, 1 << 30)
        done = subprocess.run([TOOL, "report", path, "--output", f"{self.d}/out.html"],
                              capture_output=True, text=True, timeout=60, preexec_fn=limit,
                              check=False)
        self.assert_one_line(done, 2, ["r.jsonl", "line 1"])


class FullDisk(TestWithFolder):
    BENCH = ["bench", "--hidden", "64", "--inner", "32", "--experts", "4", "--top-k", "2",
             "--num-tokens", "1,2", "--iterations", "1"]

    def test_results_say_what_the_disk_says_and_keep_whole_lines(self):
        self.assert_one_line(run_tool(*self.BENCH, "--results", "/dev/full"), 3,
                             ["/dev/full", "No space left on device"])
        path = f"{self.d}/r.jsonl"
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
        done = subprocess.run([TOOL, *self.BENCH, "--results", path], capture_output=True,
                              text=True, preexec_fn=limit, check=False)
        self.assert_one_line(done, 3, ["r.jsonl", "File too large"])
        with open(path, encoding="utf-8") as file:
            text = file.read()
        self.assertTrue(text.endswith("\n"))
        self.assertGreater(len([json.loads(line) for line in text.splitlines()]), 0)


if __name__ == "__main__":
    unittest.main()
