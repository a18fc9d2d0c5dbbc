"""train, evaluate and generate: what is wrong on the command line and in files is refused by name."""

import json
import os
import unittest

from tool_files_test import content_of
from tool_models_test import TestWithModel, made_text
from tool_support import run_tool


class TestBadModelInput(TestWithModel):
    def refused(self, words, *args):
        before = content_of(self.d)
        self.assert_one_line(run_tool(*args), 2, words)
        self.assertEqual(content_of(self.d), before)

    def refused_training(self, words, *args, text=None, config=None):
        self.refused(words, "train", "--config", config or self.config, "--text",
                     text or self.text, "--output", f"{self.d}/new", "--steps", 3, *args)


class BadModelInput(TestBadModelInput):
    def test_texts(self):
        empty = self.file("empty.txt", "")
        one = self.file("one.txt", "x")
        short = self.file("short.txt", "x" * 64)
        self.refused_training(["--text", "empty.txt", "0 bytes"], text=empty)
        self.refused_training(["--text", "one.txt", "1 bytes"], text=one)
        self.refused_training(["--text", "absent.txt"], text=f"{self.d}/absent.txt")
        self.refused_training(["sequences of 64 bytes", "65", "64"], text=short)
        self.refused_training(["--valid", "empty.txt"], "--valid", empty)
        self.refused_training(["--valid-every"], "--valid-every", 2)

    def test_options(self):
        # Where there is a GPU, for the other option.
        self.refused_training(["--backend", "cuda"], "--backend", "cuda", "--isa", "portable")
        self.refused_training(["16 sequences", "3 ranks"], "--ranks", 3)
        self.refused_training(["expert-choice", "2 ranks"], "--ranks", 2, "--router",
                              "expert-choice")
        self.refused_training(["capacity_factor", "2 ranks"], "--ranks", 2, "--capacity-factor", 1)
        self.refused(["--ranks", "one rank", "2"], "evaluate", "--model", "x", "--text", self.text,
                     "--ranks", 2)
        self.refused_training(["--preset", "--config"], "--preset", "smoke")
        self.refused_training(["--decay", "wsd"], "--decay", 2)
        self.refused_training(["--drop-policy", "--capacity-factor"], "--drop-policy", "probs")
        self.refused_training(["router", "top-q"], "--router", "top-q")
        self.refused_training(["reroute", "gshard"], "--router", "gshard", "--capacity-factor", 1,
                              "--drop-policy", "reroute", "--balance", 0, "--z", 0)
        self.refused_training(["--router: hash", "want --balance 0 instead of 0.25 and --z 0 instead of 0.5\n"],
                              "--router", "hash", "--balance", "0.25", "--z", "0.5")
        os.mkdir(f"{self.d}/new")
        self.refused_training(["--text", "--output", "log.jsonl"],
                              text=self.file("new/log.jsonl", made_text(20000)))
        for option, word in (("--results", "--text"), ("--valid", "is trained on")):
            self.refused_training([option, word, self.text], option, self.text)
        self.refused_training(["--results", "--estimate"], "--estimate", "--results", f"{self.d}/r.jsonl")
        self.refused_training(["16", "3"], "--accumulate", 3)
        self.refused_training(["--on-nan"], "--on-nan", "hope")
        self.refused_training(["'gate'", "router", "experts"], "--freeze", "gate")
        self.refused_training(["freeze", "router", "balance=0.5"], "--freeze", "router", "--balance", "0.5")
        self.refused_training(["freeze", "router", "z=0.5"], "--freeze", "experts,router", "--z", "0.5")
        self.refused_training(["--adapters", "perft", "--init DIR"], "--adapters", "perft")
        self.refused_training(["absent"], "--init", f"{self.d}/absent")
        self.refused(["--steps"], "train", "--config", self.config, "--text", self.text,
                     "--output", f"{self.d}/new")
        self.refused(["--preset", "huge"], "train", "--preset", "huge", "--text", self.text,
                     "--output", f"{self.d}/new")

    def test_configurations(self):
        for words, model in ((["vocabulary", "300"], self.model(vocab_size=300)),
                             (["model.json"], {"model_type": "qwen3_moe"}),
                             (["5"], self.model(num_experts_per_tok=5))):
            self.refused_training(words, config=self.file("model.json", json.dumps(model)))
        self.refused_training(["model.json"], config=self.file("model.json", "{"))

    def test_checkpoints(self):
        self.assert_fine(self.train(steps=2))
        run = f"{self.d}/run"
        step = f"{run}/step-000002"
        self.refused(["--output", "has a run already", "2 steps", "--resume"], "train", "--config",
                     self.config, "--text", self.text, "--output", run, "--steps", 2)
        self.refused(["--checkpoint", "run of train", step], "run", "--checkpoint", run, "--text",
                     self.held_out)
        resume = ["train", "--config", self.config, "--text", self.text, "--output", run,
                  "--steps", 2, "--sequences", 4, "--resume"]
        self.refused(["seed", "18", "17", "init"], *resume, "--seed", 18)
        self.refused(["--output", "book.txt", "want a directory"], "train", "--config", self.config,
                     "--text", self.text, "--output", self.text, "--steps", 2)
        use = {"evaluate": ["--text", self.held_out], "generate": ["--prompt", "a"]}
        for command, args in use.items():
            self.refused(["--model"], command, *args)
            self.refused(["absent"], command, "--model", f"{self.d}/absent", *args)
            self.refused(["--backend", "cuda"], command, "--model", run, *args, "--backend", "cuda")
            self.refused(["--ranks"], command, "--model", run, *args, "--ranks", 2)
        with open(f"{step}/optimizer.safetensors", "r+b") as file:
            file.truncate(1000)
        self.refused(["optimizer.safetensors", "truncated"], *resume)
        # Of another shape: the configuration of a wider model beside these weights.
        with open(f"{step}/config.json", encoding="utf-8") as file:
            config = json.load(file)
        for words, change in ((["model.safetensors", "shape"], {"hidden_size": 48}),
                              (["model.safetensors", "none of this model's"],
                               {"num_hidden_layers": 1}),
                              (["vocabulary", "512"], {"vocab_size": 512})):
            with open(f"{step}/config.json", "w", encoding="utf-8") as file:
                json.dump({**config, **change}, file)
            for command, args in use.items():
                self.refused(words, command, "--model", run, *args)

    def test_layers_without_a_model_around_them(self):
        for family in "olmoe", "mixtral":
            self.assert_fine(run_tool("make-checkpoint", "--family", family, "--hidden", 64,
                                      "--inner", 32, "--experts", 8, "--top-k", 2, "--output",
                                      f"{self.d}/{family}"))
            for command, args in (("evaluate", ["--text", self.held_out]),
                                  ("generate", ["--prompt", "a"])):
                self.refused([f"{family}/config.json", "layers of experts alone", "a whole model"],
                             command, "--model", f"{self.d}/{family}", *args)

    def test_prompts(self):
        self.assert_fine(self.train(steps=1))
        ask = ["generate", "--model", f"{self.d}/run"]
        self.refused(["--prompt", "--prompt-file"], *ask)
        self.refused(["--prompt", "--prompt-file"], *ask, "--prompt", "a", "--prompt-file", self.text)
        self.refused(["empty"], *ask, "--prompt-file", self.file("empty.txt", ""))
        self.refused(["--max-new-tokens", "64 positions", "at most 55"], *ask, "--prompt", "a" * 10,
                     "--max-new-tokens", 56)
        self.refused(["--top-p"], *ask, "--prompt", "a", "--top-p", "1.5")
        self.refused(["--temperature"], *ask, "--prompt", "a", "--temperature", "-1")
        newest = f"{self.d}/run/step-000001"
        for name in ("model.safetensors", "optimizer.safetensors"):
            self.refused(["--logits", "--model", name], *ask, "--prompt", "a", "--logits", f"{newest}/{name}")
        os.symlink(self.held_out, f"{self.d}/link.txt")
        for same in self.held_out, f"{self.d}/./held,out.txt", f"{self.d}/link.txt":
            self.refused(["--ngram-floor", same, "is evaluated"], "evaluate", "--model",
                         f"{self.d}/run", "--text", self.text, self.held_out, "--ngram-floor", same)
        self.refused(["two windows"], "evaluate", "--model", f"{self.d}/run", "--text",
                     self.file("short.txt", "x" * 100), "--leak-audit")


if __name__ == "__main__":
    unittest.main()
