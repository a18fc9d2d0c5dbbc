"""How many tokens generate makes by itself, and where it says that it cannot run."""

import json
import unittest

import tool_models_test
from tool_support import run_tool


class Generate(tool_models_test.TestWithModel):
    def setUp(self):
        super().setUp()
        self.assert_fine(self.train(steps=1))
        self.ask = ["generate", "--model", f"{self.d}/run"]

    def refused(self, words, *args):
        self.assert_one_line(run_tool(*self.ask, *args), 2, words)

    def test_without_a_number_there_are_as_many_tokens_as_positions(self):
        for length in (1, 4, 63, 64):
            done = run_tool(*self.ask, "--prompt", "a" * length, "--json")
            self.assert_fine(done)  # the last token needs no position
            self.assertEqual(len(json.loads(done.stdout)["tokens"][0]), 64 - length + 1)
        self.config = self.file("long.json", json.dumps(self.model(max_position_embeddings=300)))
        self.text = self.file("long.txt", tool_models_test.made_text(2000))
        self.assert_fine(self.train(output="long", steps=1))
        done = run_tool("generate", "--model", f"{self.d}/long", "--prompt", "a", "--ids")
        self.assert_fine(done)
        self.assertEqual(len(done.stdout.split()), 128)
        said = " ".join(run_tool("generate", "--help").stdout.split())
        self.assertIn("without it 128, or fewer where the model has no more positions", said)

    def test_what_has_no_room_is_refused(self):
        self.refused(["65 tokens", "64 positions"], "--prompt", "a" * 65)
        self.refused(["--max-new-tokens: 56", "10 tokens", "64 positions"], "--prompt", "a" * 10,
                     "--max-new-tokens", 56)

    def test_a_sequence_has_the_same_tokens_in_every_batch(self):
        def tokens(*args):
            done = run_tool(*self.ask, "--prompt", "ab", "--max-new-tokens", 20, "--temperature", 1.5, "--json",
                            *args)
            self.assert_fine(done)
            return json.loads(done.stdout)["tokens"]

        three = tokens("--batch", 3, "--batch-invariant")
        self.assertEqual(three, tokens("--batch", 3))
        self.assertEqual(three[:1], tokens("--batch-invariant"))
        self.assertNotEqual(three[0], three[1])

    def test_logits_of_no_kind_are_refused_by_the_option(self):
        self.refused(["--logits: ", "l.txt", ".npy"], "--prompt", "a", "--logits", f"{self.d}/l.txt")

    def test_a_gpu_is_asked_for_in_words(self):
        on_gpu = ["--prompt", "a", "--backend", "cuda"]
        self.refused(["--ranks", "one rank"], *on_gpu, "--ranks", 2)
        done = run_tool(*self.ask, *on_gpu, "--max-new-tokens", 3, "--ids")
        if done.returncode == 0:
            self.assertEqual(len(done.stdout.split()), 3)
            self.refused(["--isa"], *on_gpu, "--isa", "portable")
            self.refused(["f16"], *on_gpu, "--compute", "f16")
        else:
            self.assert_one_line(done, 2, ["--backend", "cuda cannot be used", "here: cpu"])


if __name__ == "__main__":
    unittest.main()
