"""generate and evaluate of whole models of transformers' families, from their own files."""

import json
import os
import shutil
import unittest

import numpy as np

from tool_support import TestWithFolder, run_tool

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "whole_models")


def golden(name):
    """Ids, logits and greedy tokens that transformers gave."""
    with open(f"{DATA}/{name}/model.safetensors", "rb") as file:
        content = file.read()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + size])
    found = []
    for key, kind in (("ids", "<i4"), ("logits", "<f4"), ("tokens", "<i4")):
        entry = header[f"golden.{key}"]
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        found.append(np.frombuffer(content[begin:end], kind).reshape(entry["shape"]))
    return found


class WholeModels(TestWithFolder):
    def file(self, name, content):
        with open(f"{self.d}/{name}", "w", encoding="utf-8") as file:
            file.write(content)
        return f"{self.d}/{name}"

    def refused(self, words, *args):
        self.assert_one_line(run_tool(*args), 2, words)

    def test_tokens_and_logits_are_those_of_transformers(self):
        ids, logits, tokens = golden("gpt_oss")
        ask = ["generate", "--model", f"{DATA}/gpt_oss", "--prompt-ids", ",".join(map(str, ids)),
               "--max-new-tokens", len(tokens), "--temperature", 0]
        done = run_tool(*ask, "--logits", f"{self.d}/logits.npy")
        self.assert_fine(done)
        self.assertEqual(done.stdout.split(), [str(t) for t in tokens])
        ours = np.load(f"{self.d}/logits.npy")
        self.assertEqual(ours.shape, logits.shape)
        self.assertLess(np.abs(ours - logits).max(), 1e-4 * np.abs(logits).max())
        made = json.loads(run_tool(*ask, "--json", "--batch", 2).stdout)
        self.assertEqual(made["tokens"], [tokens.tolist()] * 2)
        self.assertNotIn("text", made)
        self.refused(["logits.txt", ".npy"], *ask, "--logits", f"{self.d}/logits.txt")

    def test_losses_are_those_of_the_logits(self):
        ids, logits, _ = golden("olmoe")
        rows = logits[:-1].astype(np.float64)
        nats = np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(rows)), ids[1:]]
        text = self.file("ids.txt", "\n".join(map(str, ids)))
        done = run_tool("evaluate", "--model", f"{DATA}/olmoe", "--text", text, text, "--ids",
                        "--json")
        self.assert_fine(done)
        found = json.loads(done.stdout)
        self.assertEqual((found["family"], found["tokens"]), ("olmoe", 2 * len(nats)))
        self.assertAlmostEqual(found["nats_per_token"], nats.mean(), places=5)
        table = run_tool("evaluate", "--model", f"{DATA}/olmoe", "--text", text, "--ids")
        self.assert_fine(table)
        for word in "olmoe L2 H32", "nats/token", f"{nats.mean():.4f}":
            self.assertIn(word, table.stdout)

    def test_what_cannot_be_is_refused(self):
        model = ["--model", f"{DATA}/mixtral"]
        ask = ["generate", *model]
        text = self.file("text.txt", "all happy families")
        self.refused(["--prompt-ids"], *ask)
        self.refused(["more than one"], *ask, "--prompt-ids", "1", "--prompt", "a")
        self.refused(["64 tokens, not of bytes", "--prompt-ids"], *ask, "--prompt", "a")
        self.refused(["64 tokens, not of bytes", "--prompt-ids"], *ask, "--prompt-file", text)
        self.refused(["--prompt-ids", "'x'"], *ask, "--prompt-ids", "1,x")
        self.refused(["--prompt-ids", "'99999999999'"], *ask, "--prompt-ids", "99999999999")
        self.refused(["--prompt-ids", "no number"], *ask, "--prompt-ids", " , ")
        self.refused(["--prompt-ids: 64", "0 to 63"], *ask, "--prompt-ids", "1 64")
        self.refused(["64 positions"], *ask, "--prompt-ids", "1", "--max-new-tokens", 65)
        self.refused(["--backend", "cpu", "not cuda"], *ask, "--prompt-ids", "1", "--backend", "cuda")
        score = ["evaluate", *model, "--text"]
        self.refused(["--ids", "64 tokens"], *score, text)
        self.refused(["'all'"], *score, text, "--ids")
        self.refused(["1 tokens"], *score, self.file("one.txt", "5"), "--ids")
        self.refused(["token 64"], *score, self.file("two.txt", "5 64"), "--ids")
        self.refused(["--leak-audit"], *score, text, "--leak-audit")
        self.refused(["--ngram-floor"], *score, text, "--ngram-floor", text)

    def test_damage_is_named(self):
        damaged = f"{self.d}/model"
        shutil.copytree(f"{DATA}/qwen3_moe", damaged)
        with open(f"{damaged}/config.json", encoding="utf-8") as file:
            config = json.load(file)
        for words, change in ((["rope_type", "llama3"], {"rope_parameters": {"rope_type": "llama3"}}),
                              (["phi"], {"model_type": "phi"}),
                              (["shape"], {"hidden_size": 48}),
                              (["attention_bias", "true"], None)):
            with open(f"{damaged}/config.json", "w", encoding="utf-8") as file:
                json.dump({**config, **(change or {"model_type": "mixtral", "attention_bias": True,
                                                   "mlp_only_layers": []})}, file)
            self.refused(words, "generate", "--model", damaged, "--prompt-ids", "1")
        with open(f"{damaged}/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        with open(f"{damaged}/model.safetensors", "r+b") as file:
            file.truncate(20000)
        self.refused(["model.safetensors", "truncated"], "generate", "--model", damaged,
                     "--prompt-ids", "1")


if __name__ == "__main__":
    unittest.main()
