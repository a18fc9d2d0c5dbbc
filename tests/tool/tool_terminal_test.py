"""What reaches a person: nothing but text, in lines of its own, wherever stderr goes."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import time
import unittest

import numpy as np

from tool_support import (TOOL, TestWithFolder, make_checkpoint, run_tool, write_raw_safetensors,
                          write_safetensors)

VERIFY = ["verify", "--ranks", "1", "--threads", "1"]


class Terminal:
    """The tool on a terminal of its own, which is both its stdout and its stderr."""

    def __init__(self, *args, columns=0):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

        def take_terminal():
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen([TOOL, *map(str, args)], stdin=slave, stdout=slave,
                                        stderr=slave, preexec_fn=take_terminal)
        os.close(slave)
        self.master = master
        self.seen = b""

    def read(self):
        """A little more; False at the end."""
        try:
            part = os.read(self.master, 1 << 16)
        except OSError:
            part = b""
        self.seen += part
        return bool(part)

    def wait_for(self, words):
        while words not in self.seen:
            assert self.read(), self.seen

    def wait_for_handler(self):
        """Of SIGINT."""
        def caught():
            with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as file:
                return next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))

        while not caught() & 1 << (signal.SIGINT - 1):
            assert self.process.poll() is None
            time.sleep(0.01)

    def press(self, key):
        os.write(self.master, key)

    def finish(self):
        """(exit code, lines as they stand on the screen; the last one has the cursor)."""
        while self.read():
            pass
        os.close(self.master)
        return self.process.wait(), self.screen()

    def screen(self):
        lines, column = [""], 0
        text = self.seen.decode().replace("\033[K", "\0")
        for char in text:
            if char == "\n":
                lines.append("")
                column = 0
            elif char == "\r":
                column = 0
            elif char == "\0":
                lines[-1] = lines[-1][:column]
            else:
                lines[-1] = lines[-1][:column] + char + lines[-1][column + 1:]
                column += 1
        return lines


class Lines(TestWithFolder):
    def test_the_bar_of_verify_is_gone_when_it_says_what_it_found(self):
        terminal = Terminal(*VERIFY, "--cases", "1500")
        code, screen = terminal.finish()
        self.assertRegex(terminal.seen, rb"\] [0-9]+/1500 cases")
        self.assertEqual((code, screen),
                         (0, ["1500 cases checked against the reference: all hold", ""]))

    def test_the_bar_of_a_run_and_of_bench_leave_no_trace(self):
        model = make_checkpoint(f"{self.d}/model", hidden=512, inner=512, experts=16)
        for args, first in ((["run", "--checkpoint", model, "--text", f"{self.d}/text.txt"], "mixtral"),
                            (["bench", "--hidden", "64", "--inner", "32", "--experts", "4",
                              "--top-k", "2", "--num-tokens", "1,2,3", "--iterations", "1"], None),
                            (["run", "--checkpoint", model, "--text", f"{self.d}/text.txt",
                              "--ranks", "2", "--engine", "mpi"], "switchyard: --engine")):
            terminal = Terminal(*args)
            _, screen = terminal.finish()
            self.assertEqual(screen[-1], "")
            for line in screen:
                self.assertNotRegex(line, r"^\[[# ]*\]|\] [0-9]+/[0-9]+ ")
            if first:
                self.assertTrue(screen[0].startswith(first), screen)

    def test_a_bar_is_no_wider_than_the_terminal(self):
        with open(f"{self.d}/long.txt", "w", encoding="utf-8") as file:
            file.write("All happy families are alike. " * 1000)
        widest, seen = {}, {}
        for columns in 0, 60:
            terminal = Terminal("train", "--preset", "smoke", "--text", f"{self.d}/long.txt",
                                "--steps", "5", "--output", f"{self.d}/run-{columns}",
                                "--threads", "1", columns=columns)
            code, screen = terminal.finish()
            self.assertEqual((code, screen[-1]), (0, ""))
            bars = [line for line in terminal.seen.decode().replace("\033[K", "\r").split("\r")
                    if line.startswith("[") and "/5 " in line]
            widest[columns] = max(map(len, bars))
            seen[columns] = " ".join(bars)
        for word in "loss", "tokens/s", "load CV", "to come":
            self.assertIn(word, seen[0])
        self.assertGreater(widest[0], 60)
        self.assertEqual(widest[60], 60)

    def test_an_interrupt_leaves_the_cursor_at_the_begin_of_a_line(self):
        with open(f"{self.d}/long.txt", "w", encoding="utf-8") as file:
            file.write("All happy families are alike. " * 1000)
        model = make_checkpoint(f"{self.d}/model", hidden=256, inner=256)
        with_bar = Terminal(*VERIFY, "--cases", "1000000")
        with_bar.wait_for(b"/1000000 cases")
        without = Terminal("run", "--checkpoint", model, "--text", f"{self.d}/long.txt",
                           "--iterations", "1000000")
        without.wait_for_handler()
        time.sleep(1)  # the bar of the weights has come and gone
        for terminal in with_bar, without:
            terminal.press(b"\x03")
            code, screen = terminal.finish()
            self.assertEqual(code, 130)
            self.assertEqual(screen[-1], "", screen)
            self.assertNotRegex(screen[-2] if len(screen) > 1 else "", r"cases")


class Names(TestWithFolder):
    """Names from files."""
    ESCAPE = "\x1b]0;owned\x07\x1b[2J\u009b31m\u202egnp.\r\nswitchyard: all is well\x7f"

    def assert_plain(self, done, code=2):
        self.assertEqual(done.returncode, code, done.stderr[:2000])
        for output in done.stdout, done.stderr:
            for char in output:
                fine = char == "\n" or (ord(char) >= 32 and not 127 <= ord(char) < 160)
                self.assertTrue(fine and char not in "\u202e\u2066", repr(output[:500]))
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertLess(len(done.stderr), 4000)

    def bad_files(self, name):
        """(arguments, words) of runs in which that name would be printed."""
        model = make_checkpoint(f"{self.d}/model")
        run = ["run", "--checkpoint", model, "--tokens"]
        one = {"dtype": "F32", "shape": [3, 64], "data_offsets": [0, 768]}
        data = bytes(768)
        path = lambda kind: f"{self.d}/{kind}.safetensors"
        raw = lambda kind, header: write_raw_safetensors(path(kind), header, data)
        raw("unused", json.dumps({name: {**one, "dtype": "F99"}}).encode())
        yield [*run, path("unused")], "F99"
        raw("type", json.dumps({"a": {**one, "dtype": name}}).encode())
        yield [*run, path("type")], "unknown dtype"
        raw("twice", b"{%b:1,%b:1}" % ((json.dumps(name).encode(),) * 2))
        yield [*run, path("twice")], "duplicate key"
        raw("json", b'{"a": %b}' % name.encode())
        yield [*run, path("json")], "not valid JSON"
        write_safetensors(path("two"), {name: ("F32", [0], b""), "b": ("F32", [0], b"")})
        yield [*run, path("two")], "2 tensors"
        write_safetensors(path("odd"), {name: ("I8", [0], b"")})
        yield [*run, path("odd")], "is I8"
        with open(f"{model}/config.json", encoding="utf-8") as file:
            config = json.load(file)
        for key, words in (("model_type", "model_type"), ("hidden_size", "hidden_size"),
                           ("hidden_act", "hidden_act")):
            with open(f"{model}/config.json", "w", encoding="utf-8") as file:
                json.dump({**config, key: name}, file)
            yield ["run", "--checkpoint", model, "--text", f"{self.d}/text.txt"], words
        with open(f"{model}/model.safetensors.index.json", "w", encoding="utf-8") as file:
            json.dump({"weight_map": {"a": name}}, file)
        yield ["run", "--checkpoint", model, "--text", f"{self.d}/text.txt"], "cannot be read"
        with open(f"{model}/model.safetensors.index.json", "w", encoding="utf-8") as file:
            json.dump({"weight_map": {name: "model.safetensors"}}, file)
        yield ["run", "--checkpoint", model, "--text", f"{self.d}/text.txt"], "has no tensor"

    def test_names_from_files_reach_the_terminal_as_text_and_cut(self):
        for kind, name in (("escapes", self.ESCAPE), ("long", "x" * 3_000_000),
                           ("both", self.ESCAPE * 50_000)):
            for args, words in self.bad_files(name):
                with self.subTest(kind=kind, words=words):
                    done = run_tool(*args)
                    self.assert_plain(done)
                    self.assertIn(words, done.stderr)

    def test_words_of_the_command_line_too(self):
        escape = self.ESCAPE.replace("\r\n", "")
        for args in ([escape], ["run", "--compute", escape], ["run", "--" + escape], ["help", escape],
                     ["verify", "--case", escape], ["verify", "--case", json.dumps([escape])],
                     ["verify", "--case", "[" + 50_000 * "1,"], ["completion", escape],
                     ["run", "--checkpoint", escape, "--text", "a"],
                     ["bench", "--model", escape], ["bench", "--suite", "topk", "--isa", escape],
                     ["bench", "--suite", "all2all", "--variant", escape],
                     ["report", escape, "--output", f"{self.d}/out"],
                     ["report", f"{self.d}/text.txt", "--output", f"{self.d}/{escape}/out"]):
            with self.subTest([arg[:50] for arg in args]):
                self.assert_plain(run_tool(*args))

    def test_what_is_text_stays_as_it_is(self):
        name = f"{self.d}/größe-重み-😀.npy"
        done = run_tool("run", "--checkpoint", make_checkpoint(f"{self.d}/model"), "--tokens", name)
        self.assert_one_line(done, 2, [name])


class Stderr(TestWithFolder):
    """Nobody listens: the exit code says it all."""

    def run_with(self, stderr, *args):
        close = (lambda: os.close(2)) if stderr == "closed" else None
        with open("/dev/full" if stderr == "full" else "/dev/null", "w", encoding="utf-8") as file:
            return subprocess.run([TOOL, *args], stdout=subprocess.PIPE, stderr=file, text=True,
                                  preexec_fn=close, timeout=60, check=False)

    def test_closed_or_full_it_changes_no_exit_code(self):
        model = make_checkpoint(f"{self.d}/model")
        out = f"{self.d}/out.npy"
        run = ["run", "--checkpoint", model, "--text", f"{self.d}/text.txt", "--output", out]
        for stderr in "closed", "full":
            with self.subTest(stderr):
                self.assertEqual(self.run_with(stderr, "runn").returncode, 2)
                self.assertEqual(self.run_with(stderr, *run, "--layer", "9").returncode, 2)
                self.assertEqual(self.run_with(stderr, *VERIFY, "--cases", "20").returncode, 0)
                self.assertEqual(self.run_with(stderr, *run).returncode, 0)
                self.assertEqual(np.load(out).shape, (90, 64))

    def test_what_is_printed_never_gets_into_a_file_that_took_its_place(self):
        model = make_checkpoint(f"{self.d}/model")
        outputs = []
        for closed in (), (2,), (1, 2), (0, 1, 2), (0,):
            outputs.append(f"{self.d}/{len(outputs)}.npy")
            results = f"{outputs[-1]}.jsonl"

            def close(closed=closed):
                for descriptor in closed:
                    os.close(descriptor)

            run = lambda *args: subprocess.run([TOOL, *args], stdout=subprocess.DEVNULL,
                                               stderr=subprocess.DEVNULL, preexec_fn=close,
                                               check=False).returncode
            want = 3 if 1 in closed else 0  # stdout cannot be written
            self.assertEqual(run("run", "--checkpoint", model, "--text", f"{self.d}/text.txt",
                                 "--output", outputs[-1]), want)
            self.assertEqual(run("bench", "--hidden", "64", "--inner", "32", "--experts", "4",
                                 "--top-k", "2", "--num-tokens", "1", "--iterations", "1",
                                 "--results", results), want)
            if os.path.exists(results):
                with open(results, encoding="utf-8") as file:
                    for line in file:
                        json.loads(line)
            with open(outputs[-1], "rb") as file, open(outputs[0], "rb") as first:
                self.assertEqual(file.read(), first.read())


class Completion(TestWithFolder):
    """What bash offers where the last of these words is being typed."""

    def offers(self, *words):
        script = f"{self.d}/completion"
        with open(script, "w", encoding="utf-8") as file:
            file.write(run_tool("completion", "bash").stdout)
        quoted = " ".join(f"'{word}'" for word in words)
        # compopt works only while bash completes; here it says what it was told.
        command = (f"compopt() {{ echo \"$@\" >&2; }}; source {script}; COMP_WORDS=({quoted}); "
                   f"COMP_CWORD={len(words) - 1}; _switchyard; "
                   "printf '%s\\n' \"${COMPREPLY[@]}\"")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        return done.stdout.split(), done.stderr.split()

    def test_models_and_instruction_sets_are_offered(self):
        for command in "bench", "make-checkpoint":
            offered, _ = self.offers("switchyard", command, "--model", "")
            self.assertIn("qwen3-30b-a3b", offered)
            self.assertGreater(len(offered), 5)
        self.assertEqual(self.offers("switchyard", "bench", "--model", "olm")[0], ["olmoe-1b-7b"])
        self.assertIn("portable", self.offers("switchyard", "run", "--isa", "")[0])

    def test_a_word_with_a_number_is_offered_up_to_the_number_without_a_space(self):
        self.assertEqual(self.offers("switchyard", "run", "--layout", "al"),
                         (["aligned:"], ["-o", "nospace"]))
        self.assertEqual(self.offers("switchyard", "run", "--layout", ""),
                         (["compact", "aligned:", "padded"], []))
        self.assertEqual(self.offers("switchyard", "run", "--layout", "p"), (["padded"], []))
        self.assertEqual(self.offers("switchyard", "bench", "--skew", "z"),
                         (["zipf:"], ["-o", "nospace"]))
        self.assertEqual(self.offers("switchyard", "bench", "--experts", "")[0], ["ffn", "identity"])

    def test_after_the_colon_which_bash_makes_a_word_no_files_are_offered(self):
        for words in (["aligned", ":"], ["aligned", ":", "1"]):
            self.assertEqual(self.offers("switchyard", "run", "--layout", *words),
                             ([], ["+o", "default"]))


if __name__ == "__main__":
    unittest.main()
