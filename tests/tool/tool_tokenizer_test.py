"""tokenizer, and what train, evaluate and generate make of its vocabulary."""

import json
import os
import shutil
import unittest

from tool_models_test import TestWithModel, made_text
from tool_support import run_tool

VOCAB = 320


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


class TestWithTokenizer(TestWithModel):
    """A vocabulary beside the text, and a model of so many tokens."""

    def setUp(self):
        super().setUp()
        self.tokenizer = f"{self.d}/book.model"
        done = self.learn(self.tokenizer)
        if "no sentencepiece" in done.stderr:
            self.skipTest("this build has no sentencepiece")
        self.assert_fine(done)
        self.made = done.stdout
        self.bytes_config = self.config
        self.config = self.file("pieces.json", json.dumps(self.model(vocab_size=VOCAB)))

    def learn(self, output, *args, vocab=VOCAB):
        return run_tool("tokenizer", "--text", self.text, "--vocab", vocab, "--output", output,
                        *args)

    def refused(self, words, *args):
        done = run_tool(*args)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)


class FromPiecesToText(TestWithTokenizer):
    def test_a_model_is_trained_measured_and_asked(self):
        self.assertIn(f"{VOCAB} pieces", self.made)
        done = self.train("--tokenizer", self.tokenizer, "--valid", self.held_out,
                          "--learning-rate", "0.01", steps=60)
        self.assert_fine(done)
        for word in ("tokens of a vocabulary of 320", "64 tokens a step"):
            self.assertIn(word, done.stdout)
        log = self.log()
        self.assertLess(log[-1]["loss"], log[0]["loss"] / 2)
        # Both by bytes, of texts that are alike.
        self.assertAlmostEqual(log[-1]["loss"], log[-1]["valid_loss"], delta=0.3)
        self.assertEqual(bytes_of(f"{self.d}/run/step-000060/tokenizer.model"),
                         bytes_of(self.tokenizer))

        os.remove(self.tokenizer)  # the checkpoint has what it needs
        ask = ["evaluate", "--model", f"{self.d}/run", "--text", self.held_out]
        done = run_tool(*ask, "--ngram-floor", self.text, "--leak-audit", "--json")
        self.assert_fine(done)
        found = json.loads(done.stdout)
        self.assertAlmostEqual(found["nats_per_byte"], log[-1]["valid_loss"], places=6)
        self.assertAlmostEqual(found["bits_per_byte"], found["nats_per_byte"] / 0.6931471805599453)
        self.assertLess(found["tokens"], found["bytes"] / 2)
        self.assertTrue(600 - 16 <= found["bytes"] < 600, found["bytes"])
        self.assertEqual([d["bytes"] for d in found["documents"]], [found["bytes"]])
        with open(self.held_out, encoding="utf-8") as file:
            self.assertEqual(len(file.read()), 600)
        floors = found["floors"]
        self.assert_fine(self.train(steps=1, output="by_byte", config=self.bytes_config))
        done = run_tool("evaluate", "--model", f"{self.d}/by_byte", "--text", self.held_out,
                        "--ngram-floor", self.text, "--json")
        self.assertEqual(json.loads(done.stdout)["floors"], floors)
        done = run_tool(*ask)
        self.assert_fine(done)
        self.assertRegex(done.stdout, "bytes +tokens +nats/byte")

        ask = ["generate", "--model", f"{self.d}/run", "--prompt", "all happy fam", "--temperature",
               0, "--max-new-tokens", 12]
        text = run_tool(*ask)
        self.assert_fine(text)
        self.assertTrue(text.stdout.startswith("all happy fam"), text.stdout)
        self.assertGreater(len(text.stdout), len("all happy fam") + 2 * 12)
        made = json.loads(run_tool(*ask, "--json").stdout)
        self.assertEqual("all happy fam" + made["text"][0] + "\n", text.stdout)
        self.assertEqual(len(made["tokens"][0]), 12)
        ids = run_tool(*ask, "--ids")
        self.assertEqual(ids.stdout.split(), [str(i) for i in made["tokens"][0]])

    def train(self, *args, config=None, **kwargs):
        self.config, kept = config or self.config, self.config
        try:
            return super().train(*args, **kwargs)
        finally:
            self.config = kept

    def test_a_run_goes_on_with_what_it_had(self):
        self.assert_fine(self.train("--tokenizer", self.tokenizer, "--save-every", 10, steps=20))
        shutil.copytree(f"{self.d}/run/step-000010", f"{self.d}/cut/step-000010")
        shutil.copy(f"{self.d}/run/log.jsonl", f"{self.d}/cut/log.jsonl")
        self.assert_fine(self.train("--save-every", 10, "--resume", steps=20, output="cut"))
        for name in os.listdir(f"{self.d}/run/step-000020"):
            self.assertEqual(bytes_of(f"{self.d}/run/step-000020/{name}"),
                             bytes_of(f"{self.d}/cut/step-000020/{name}"), name)
        # What begins with it has its tokens too, and no others.
        self.assert_fine(self.train("--init", f"{self.d}/run", steps=1, output="next"))
        self.assertTrue(os.path.exists(f"{self.d}/next/step-000001/tokenizer.model"))
        other = f"{self.d}/other.model"
        self.assert_fine(run_tool("tokenizer", "--text", self.held_out, "--vocab", VOCAB,
                                  "--output", other))
        start = ["train", "--config", self.config, "--text", self.text, "--steps", 20,
                 "--sequences", 4, "--tokenizer", other, "--output"]
        self.refused(["--init", "another tokenizer"], *start, f"{self.d}/new", "--init",
                     f"{self.d}/run")
        self.refused(["tokenizer", "fingerprint"], *start, f"{self.d}/run", "--resume")

    def test_a_preset_takes_the_vocabulary(self):
        done = run_tool("train", "--preset", "smoke", "--text", self.text, "--tokenizer",
                        self.tokenizer, "--output", f"{self.d}/new", "--estimate", "--json")
        self.assert_fine(done)
        self.assertEqual(json.loads(done.stdout)["model"]["vocab_size"], VOCAB)


class WhatIsRefused(TestWithTokenizer):
    def test_vocabularies(self):
        self.assert_fine(self.learn(f"{self.d}/again.model"))
        self.assertEqual(bytes_of(f"{self.d}/again.model"), bytes_of(self.tokenizer))
        with self.subTest("written whole or not at all"):
            self.refused(["--vocab", "100000"], "tokenizer", "--text", self.text, "--vocab", 100000,
                         "--output", f"{self.d}/large.model")
            self.assertFalse(os.path.exists(f"{self.d}/large.model"))
        self.refused(["--vocab", "257"], "tokenizer", "--text", self.text, "--vocab", 257,
                     "--output", f"{self.d}/x.model")
        self.refused(["--output", "--text"], "tokenizer", "--text", self.text, "--output",
                     self.text)
        self.refused(["absent"], "tokenizer", "--text", f"{self.d}/absent", "--output",
                     f"{self.d}/x.model")

    def test_models(self):
        start = ["train", "--text", self.text, "--steps", 2, "--sequences", 4, "--output",
                 f"{self.d}/new", "--config"]
        self.refused(["vocabulary of 256", "320"], *start, self.bytes_config, "--tokenizer",
                     self.tokenizer)
        self.refused(["vocabulary of 320", "256"], *start, self.config)
        self.refused(["absent"], *start, self.config, "--tokenizer", f"{self.d}/absent")
        for content in "", "no model", "x" * 3000:
            self.refused(["broken.model"], *start, self.config, "--tokenizer",
                         self.file("broken.model", content))
        self.assertFalse(os.path.exists(f"{self.d}/new"))
        self.refused(["--output", "--tokenizer"], "train", "--config", self.config, "--text",
                     self.text, "--tokenizer", self.file("log.jsonl", ""), "--steps", 2, "--output",
                     self.d)

    def test_checkpoints(self):
        self.assert_fine(self.train("--tokenizer", self.tokenizer, steps=2))
        inside = f"{self.d}/run/step-000002/tokenizer.model"
        use = {"evaluate": ["--text", self.held_out], "generate": ["--prompt", "a"]}
        self.assert_fine(self.learn(f"{self.d}/more.model", vocab=VOCAB + 1))
        shutil.copy(f"{self.d}/more.model", inside)
        for command, args in use.items():
            self.refused(["tokenizer.model", "321", "320"], command, "--model", f"{self.d}/run",
                         *args)
        with open(inside, "r+b") as file:
            file.truncate(1000)
        for command, args in use.items():
            self.refused(["tokenizer.model"], command, "--model", f"{self.d}/run", *args)
        os.remove(inside)
        for command, args in use.items():
            self.refused(["320"], command, "--model", f"{self.d}/run", *args)
        self.assert_fine(run_tool("generate", "--model", f"{self.d}/run", "--prompt-ids", "3,4",
                                  "--max-new-tokens", 2))


class BytesOfAnyKind(TestWithTokenizer):
    def test_text_that_is_no_utf8_is_text(self):
        book = f"{self.d}/any.txt"
        with open(book, "wb") as file:
            file.write(b"".join(bytes([1 + (7 * i + i // 13) % 255]) for i in range(3000)))
            file.write(b"\r\n  x\n\n\n \xe2\x96\x81\xff" + made_text(3000).encode())
        done = run_tool("train", "--config", self.config, "--text", book, "--steps", 2,
                        "--sequences", 4, "--tokenizer", self.tokenizer, "--output",
                        f"{self.d}/run")
        self.assert_fine(done)
        done = run_tool("generate", "--model", f"{self.d}/run", "--prompt-file",
                        self.file("cut.txt", "\u4f60"), "--max-new-tokens", 3, "--json")
        self.assert_fine(done)


if __name__ == "__main__":
    unittest.main()
