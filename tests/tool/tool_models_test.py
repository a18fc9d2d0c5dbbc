"""train, evaluate and generate: a small model from text to text, what an interrupt or a full disk
leaves."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
import unittest

from tool_files_test import content_of, wait_until
from tool_support import TOOL, TestWithFolder, run_tool

WORDS = ["all ", "happy ", "families ", "are ", "alike, ", "every ", "unhappy ", "one is so\n"]


def made_text(size, seed=1):
    """Words in an order that is not learnt by heart at once."""
    text, state = "", seed
    while len(text) < size:
        state = (state * 1103515245 + 12345) % (1 << 31)
        text += WORDS[(state >> 16) % len(WORDS)]
    return text[:size]


class TestWithModel(TestWithFolder):
    """A text, a held-out one, and a model that a second trains."""

    def setUp(self):
        super().setUp()
        self.text = self.file("book.txt", made_text(20000))
        self.held_out = self.file("held,out.txt", made_text(600, seed=9))
        self.config = self.file("model.json", json.dumps(self.model()))

    def file(self, name, content):
        with open(f"{self.d}/{name}", "w", encoding="utf-8") as file:
            file.write(content)
        return f"{self.d}/{name}"

    @staticmethod
    def model(**changes):
        """As config.json of Qwen3-MoE."""
        return {"model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 32,
                "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                "head_dim": 16, "max_position_embeddings": 64, "num_experts": 4,
                "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 16,
                "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                "tie_word_embeddings": False, **changes}

    def train(self, *args, output="run", steps=12, **kwargs):
        return run_tool("train", "--config", self.config, "--text", self.text, "--output",
                        f"{self.d}/{output}", "--steps", steps, "--sequences", 4, "--threads", 1,
                        *args, **kwargs)

    def log(self, output="run"):
        with open(f"{self.d}/{output}/log.jsonl", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def checkpoints(self, output="run"):
        return sorted(n for n in os.listdir(f"{self.d}/{output}") if n.startswith("step-"))


class FromTextToText(TestWithModel):
    def test_a_model_is_trained_measured_and_asked(self):
        results = f"{self.d}/results.jsonl"
        done = self.train("--valid", self.held_out, "--save-every", 20, "--learning-rate", "0.01",
                          "--results", results, steps=60)
        self.assert_fine(done)
        for word in ("L2 H32", "estimate", "held out", "step-000060"):
            self.assertIn(word, done.stdout)
        log = self.log()
        self.assertEqual([line["step"] for line in log], list(range(1, 61)))
        self.assertAlmostEqual(log[0]["loss"], 5.545, delta=0.1)
        self.assertLess(log[-1]["loss"], 3.0)
        self.assertIn("valid_loss", log[-1])
        for key in "norm", "lr", "tokens_per_s", "share", "load_cv", "dropped":
            self.assertIn(key, log[-1])
        self.assertEqual(self.checkpoints(), ["step-000020", "step-000040", "step-000060"])
        with open(results, encoding="utf-8") as file:
            line = json.loads(file.read())
        for key in "commit", "machine", "versions", "seed", "model", "share", "estimate":
            self.assertIn(key, line)
        self.assertEqual((line["suite"], line["stage"], line["steps"]), ("train", "train_step", 60))
        self.assert_fine(run_tool("report", results, "--output", f"{self.d}/page.html"))
        # Its own kind of file: any command reads a layer of it.
        self.assert_fine(run_tool("run", "--checkpoint", f"{self.d}/run/step-000060", "--text",
                                  self.held_out, "--max-tokens", 32, "--check"))

        counted = self.file("counted.txt", made_text(20000))
        done = run_tool("evaluate", "--model", f"{self.d}/run", "--text", self.held_out,
                        self.text, "--ngram-floor", counted, "--leak-audit", "--json")
        self.assert_fine(done)
        found = json.loads(done.stdout)
        self.assertEqual([d["name"] for d in found["documents"]], [self.held_out, self.text])
        self.assertAlmostEqual(found["documents"][0]["nats_per_byte"], log[-1]["valid_loss"],
                               places=6)
        self.assertAlmostEqual(found["bits_per_byte"], found["nats_per_byte"] / 0.6931471805599453)
        self.assertEqual(found["bytes"], 600 + 20000 - 2)
        self.assertEqual(len(found["floors"]), 8)
        self.assertTrue(found["causal"])
        self.assertEqual(found["drop"], 0)
        self.assertEqual([p["same"] for p in found["leaks"]], [True] * 6)
        done = run_tool("evaluate", "--model", f"{self.d}/run/step-000020", "--text", self.held_out,
                        "--ngram-floor", self.text, "--leak-audit")
        self.assert_fine(done)
        for word in ("nats/byte", "order 8", "leak audit: holds", "step-000020"):
            self.assertIn(word, done.stdout)

        ask = ["generate", "--model", f"{self.d}/run", "--max-new-tokens", 20]
        text = run_tool(*ask, "--prompt", "all ", "--temperature", "0")
        self.assert_fine(text)
        self.assertTrue(text.stdout.startswith("all "), text.stdout)
        self.assertEqual(len(text.stdout), len("all ") + 20 + 1)
        prompt = self.file("prompt.txt", "all ")
        same = run_tool(*ask, "--prompt-file", prompt, "--temperature", "0")
        self.assertEqual(same.stdout, text.stdout)
        drawn = [run_tool(*ask, "--prompt", "all ", "--top-k", 40, "--top-p", "0.95", "--ids",
                          "--batch", batch).stdout.splitlines() for batch in (1, 3)]
        self.assertEqual(drawn[0][0], drawn[1][0])
        self.assertEqual(len(drawn[1]), 3)
        self.assertEqual(len(drawn[0][0].split()), 20)
        made = json.loads(run_tool(*ask, "--prompt", "all ", "--temperature", "0", "--json").stdout)
        self.assertEqual(bytes(made["tokens"][0]).decode("latin-1"), text.stdout[4:-1])

    def test_that_there_is_nothing_to_resume_is_said(self):
        done = self.train("--resume", steps=2)
        self.assert_fine(done)
        self.assertIn("run: nothing to resume, a new run\n", done.stdout)
        done = self.train("--resume", steps=2)
        self.assert_fine(done)
        self.assertNotIn("nothing to resume", done.stdout)

    def test_an_estimate_makes_nothing(self):
        done = self.train("--estimate", "--json")
        self.assert_fine(done)
        found = json.loads(done.stdout)
        self.assertEqual(found["estimate"]["tokens"], 12 * 4 * 64)
        self.assertGreater(found["estimate"]["seconds"], 0)
        self.assertFalse(os.path.exists(f"{self.d}/run"))

    def test_operations_are_counted_by_the_experts_that_the_router_takes(self):
        self.assert_fine(self.train("--router", "switch", "--json", steps=1))
        with open(f"{self.d}/run/step-000001/config.json", encoding="utf-8") as file:
            self.assertEqual(json.load(file)["num_experts_per_tok"], 1)
        self.assertEqual(self.log()[0]["picks"], 1)

    def test_any_bytes_of_a_command_line_get_into_json(self):
        self.assert_fine(self.train(steps=1))
        done = run_tool("generate", "--model", f"{self.d}/run", "--prompt", "\udcff",
                        "--max-new-tokens", 2, "--json")  # the byte 255
        self.assert_fine(done)
        self.assertIn(r"\xff", json.loads(done.stdout)["options"]["prompt"])

    def test_a_router_that_looks_ahead_is_said_to(self):
        self.assert_fine(self.train("--router", "expert-choice", steps=2))
        done = run_tool("evaluate", "--model", f"{self.d}/run", "--text", self.held_out,
                        "--leak-audit", "--json")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertFalse(json.loads(done.stdout)["causal"])
        self.assertIn(False, [p["same"] for p in json.loads(done.stdout)["leaks"]])
        self.assert_one_line(run_tool("generate", "--model", f"{self.d}/run", "--prompt", "a",
                                      "--max-new-tokens", 2), 2, ["expert-choice"])

    def test_a_capacity_drops_in_training_and_is_measured_beside_the_loss_without(self):
        self.assert_fine(self.train("--capacity-factor", "0.5", steps=3))
        self.assertGreater(self.log()[0]["dropped"], 0.4)
        done = run_tool("evaluate", "--model", f"{self.d}/run", "--text", self.held_out, "--json")
        self.assert_fine(done)
        self.assertGreater(json.loads(done.stdout)["drop"], 0.4)
        self.assertIn("nats_per_byte_at_capacity", json.loads(done.stdout))
        done = run_tool("evaluate", "--model", f"{self.d}/run", "--text",
                        self.file("short.txt", "no window"), "--json")
        self.assert_fine(done)
        self.assertIsNone(json.loads(done.stdout)["drop"])


class RunsThatEndEarly(TestWithModel):
    def start(self, *args, steps=100000):
        return subprocess.Popen([TOOL, "train", "--config", self.config, "--text", self.text,
                                 "--output", f"{self.d}/run", "--steps", str(steps),
                                 "--warmup", "2", "--sequences", "4", "--threads", "1",
                                 *map(str, args)],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def logged(self, lines):
        def there():
            try:
                return len(self.log()) >= lines
            except (OSError, ValueError):
                return False
        return there

    def assert_sound(self, checkpoint):
        """Each of its files is whole: a generation reads it, and a run goes on from it."""
        self.assert_fine(run_tool("generate", "--model", checkpoint, "--prompt", "a",
                                  "--max-new-tokens", 2, "--ids"))

    def test_an_interrupt_saves_and_the_run_goes_on_with_the_same_bytes(self):
        for number in signal.SIGINT, signal.SIGTERM:
            shutil.rmtree(f"{self.d}/run", ignore_errors=True)
            process = self.start("--save-every", 0)
            wait_until(self.logged(3), process)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 130, out + err)
            steps = len(self.log())
            self.assertEqual(self.checkpoints(), [f"step-{steps:06}"])
            self.assert_sound(f"{self.d}/run")
        # Two steps more, by a second process, are those of one that was never interrupted.
        again = self.start("--resume", "--save-every", steps + 2)
        wait_until(lambda: os.path.isdir(f"{self.d}/run/step-{2 * (steps + 2):06}"), again)
        again.kill()
        again.communicate()
        wanted = content_of(f"{self.d}/run/step-{steps + 2:06}")
        os.rename(f"{self.d}/run", f"{self.d}/first")
        whole = self.start("--save-every", steps + 2)
        wait_until(lambda: os.path.isdir(f"{self.d}/run/step-{steps + 2:06}"), whole)
        whole.kill()
        whole.communicate()
        self.assertEqual(content_of(f"{self.d}/run/step-{steps + 2:06}"), wanted)

    def test_a_kill_at_any_moment_leaves_the_newest_checkpoint_whole(self):
        for delay in range(6):
            process = self.start("--save-every", 1, "--keep", 2, *(["--resume"] if delay else []))
            newest = max(self.checkpoints(), default="") if delay else ""
            wait_until(lambda: os.path.isdir(f"{self.d}/run")
                       and max(self.checkpoints(), default="") > newest, process)
            time.sleep(0.003 * delay)
            process.kill()
            process.communicate()
            self.assert_sound(f"{self.d}/run")
        left = [n for n in os.listdir(f"{self.d}/run") if n.startswith(".")]
        self.assertLessEqual(len(left), 2, left)  # of the last kill
        process = self.start("--resume")
        wait_until(lambda: not any(n.startswith(".") for n in os.listdir(f"{self.d}/run")), process)
        process.kill()
        process.communicate()

    def test_a_full_disk_loses_no_older_checkpoint(self):
        self.assert_fine(self.train(steps=2, output="whole"))
        size = max(len(c) for c in content_of(f"{self.d}/whole").values())
        process = self.start("--save-every", 2, steps=6)
        wait_until(lambda: os.path.isdir(f"{self.d}/run/step-000002"), process)
        process.kill()
        process.communicate()
        before = content_of(f"{self.d}/run/step-000002")
        shutil.rmtree(f"{self.d}/run/step-000004", ignore_errors=True)
        shutil.rmtree(f"{self.d}/run/step-000006", ignore_errors=True)
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        done = subprocess.run([TOOL, "train", "--config", self.config, "--text", self.text,
                               "--output", f"{self.d}/run", "--steps", "6", "--warmup", "2",
                               "--sequences", "4", "--threads", "1", "--save-every", "2",
                               "--resume"], capture_output=True, text=True, preexec_fn=limit,
                              timeout=60)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("write", done.stderr)
        self.assertEqual(content_of(f"{self.d}/run/step-000002"), before)
        self.assertEqual(self.checkpoints(), ["step-000002"])
        self.assertEqual([n for n in os.listdir(f"{self.d}/run") if n.startswith(".")], [])

    def test_a_loss_that_is_no_number_ends_the_run_by_step(self):
        done = self.train("--learning-rate", "1e30", "--warmup", 0, "--save-every", 1)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("step ", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)


class TestWithWeights(TestWithModel):
    def weights(self, output):
        """Of the newest checkpoint: bytes of each tensor."""
        path = f"{self.d}/{output}/{self.checkpoints(output)[-1]}/model.safetensors"
        with open(path, "rb") as file:
            content = file.read()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8:8 + size])
        header.pop("__metadata__", None)
        return {name: content[8 + size:][slice(*tensor["data_offsets"])]
                for name, tensor in header.items()}


class FrozenGroups(TestWithWeights):
    def test_stay_as_the_run_that_is_begun_with_has_left_them(self):
        self.assert_fine(self.train(output="first", steps=4))
        for groups, part in ("experts", "experts"), ("router,norm", "gate.weight"):
            self.assert_fine(self.train("--init", f"{self.d}/first", "--freeze", groups, steps=4,
                                        output=groups))
            before, after = self.weights("first"), self.weights(groups)
            for name, content in after.items():
                is_frozen = part in name or ("norm" in groups and "norm" in name)
                self.assertEqual(content == before[name], is_frozen, name)
        self.assert_one_line(self.train("--init", f"{self.d}/first", "--resume", output="first",
                                        steps=4), 2, ["init/fingerprint"])


if __name__ == "__main__":
    unittest.main()
