"""Adapters beside a model: train, evaluate, generate and study, and what is refused by name."""

import json
import unittest

from tool_files_test import content_of
from tool_models_bad_input_test import TestBadModelInput
from tool_models_test import TestWithWeights
from tool_study_test import TestBadStudy, TestWithStudy
from tool_support import run_tool


class Adapters(TestWithWeights):
    def beside(self, adapters, *args, output="beside", init="base", steps=4):
        return run_tool("train", "--init", f"{self.d}/{init}", "--adapters", adapters, "--text",
                        self.text, "--output", f"{self.d}/{output}", "--steps", steps,
                        "--sequences", 4, "--threads", 1, *args)

    def test_learn_beside_the_model_of_a_run_and_are_used_with_it(self):
        self.assert_fine(self.train("--balance", "0.01", output="base", steps=4))
        before = self.weights("base")
        for adapters, words, size in (
                ("perft:kind=routed,adapters=3,top-k=2,rank=4", "routed adapters 2 of 3, rank 4",
                 2 * (3 * 2 * 4 * 32 + 3 * 32)),
                ("perft:kind=embedded,rank=2,alpha=4", "embedded adapters 4, rank 2",
                 2 * 4 * 2 * 2 * 32),
                ("perft:kind=dense,adapters=2,rank=3", "dense adapters 2, rank 3",
                 2 * 2 * 2 * 3 * 32),
                ("perft:kind=shared", "shared adapters 1, rank 16", 2 * 2 * 16 * 32)):
            kind = words.split(" ", maxsplit=1)[0]
            done = self.beside(adapters, output=kind)
            self.assert_fine(done)
            self.assertIn(f"{words}, {size} numbers that learn", done.stdout)
            after = self.weights(kind)
            of_adapters = {name for name in after if ".mlp.adapters." in name}
            self.assertEqual(sum(len(after[name]) for name in of_adapters), 4 * size)
            self.assertEqual({name: after[name] for name in after.keys() - of_adapters}, before)
            with open(f"{self.d}/{kind}/step-000004/config.json", encoding="utf-8") as file:
                config = json.load(file)
            self.assertEqual(config["switchyard"]["adapters"]["kind"], kind)
            self.assertEqual(config["switchyard"]["balance"], 0)
            # All that is said again: nothing is left to do, and the files are as they were.
            files = content_of(f"{self.d}/{kind}")
            self.assertIn("done before", self.beside(adapters, "--resume", output=kind).stdout)
            self.assertEqual(content_of(f"{self.d}/{kind}"), files)
            self.assert_fine(run_tool("evaluate", "--model", f"{self.d}/{kind}", "--text",
                                      self.held_out, "--leak-audit", "--threads", 1))
            self.assert_fine(run_tool("generate", "--model", f"{self.d}/{kind}", "--prompt", "all",
                                      "--max-new-tokens", 4, "--json", "--threads", 1))
        # Its own configuration has the adapters: a run goes on with them.
        self.assert_fine(run_tool("train", "--config", f"{self.d}/routed/step-000004/config.json",
                                  "--init", f"{self.d}/routed", "--text", self.text, "--output",
                                  f"{self.d}/on", "--steps", 2, "--sequences", 4, "--threads", 1))
        self.assertEqual({name: content for name, content in self.weights("on").items()
                          if ".mlp.adapters." not in name}, before)


class BadAdapters(TestBadModelInput):
    def test_of_a_run(self):
        self.assert_fine(self.train(output="base", steps=1))
        base = ["--init", f"{self.d}/base", "--adapters"]
        for words, adapters in (
                (["--adapters", "'lora'", "perft"], "lora"),
                (["kind='mixed'", "routed|embedded|dense|shared"], "perft:kind=mixed"),
                (["rank='0'", "whole number from 1"], "perft:rank=0"),
                (["adapters='0'", "whole number from 1"], "perft:adapters=0"),
                (["top_k=5 exceeds num_experts=4"], "perft:top-k=5"),
                (["top-k", "kind=dense", "want kind=routed"], "perft:kind=dense,top-k=1"),
                (["adapters", "kind=embedded", "as many as"], "perft:kind=embedded,adapters=4"),
                (["num_adapters=2", "shared", "want 1"], "perft:kind=shared,adapters=2"),
                (["alpha=0"], "perft:alpha=0"),
                (["no option 'width'", "rank"], "perft:width=3")):
            self.refused_training(["--adapters", *words], *base, adapters)
        self.refused_training(["freeze: router", "shared"], *base, "perft:kind=shared", "--freeze",
                              "router")
        self.refused_training(["balance=0.5", "want balance 0"], *base, "perft", "--balance", "0.5")
        self.refused_training(["adapters over 2 ranks"], *base, "perft", "--ranks", 2)
        self.refused(["--steps", "--init"], "train", *base, "perft", "--text", self.text,
                     "--output", f"{self.d}/new")
        config = f"{self.d}/base/step-000001/config.json"
        with open(config, encoding="utf-8") as file:
            model = json.load(file)
        for words, adapters in ((["'mixed'"], {"kind": "mixed"}), (["rank=0"], {"rank": 0}),
                                (["unknown key 'width'"], {"width": 1}),
                                (["top_k=5", "num_adapters=4"], {"top_k": 5})):
            model["switchyard"]["adapters"] = adapters
            bad = self.file("bad.json", json.dumps(model))
            self.refused_training(words, "--init", f"{self.d}/base", config=bad)
        model["switchyard"]["adapters"] = {"kind": "shared"}
        self.refused_training(["shared", "want a base", "init"],
                              config=self.file("model.json", json.dumps(model)))


class AdaptersInStudies(TestWithStudy):
    def test_adapters_learn_beside_an_arm_before(self):
        of_router = {"model": {"balance": 0, "z": 0}, "init": "base"}
        self.write(arms=[{"name": "base"},
                         {"name": "routed", **of_router,
                          "adapters": {"num_adapters": 3, "top_k": 2, "rank": 2}},
                         {"name": "embedded", **of_router,
                          "adapters": {"kind": "embedded", "rank": 2, "alpha": 4}}],
                   reference="routed", seeds=[1])
        done = self.run_study()
        self.assert_fine(done)
        for words in ("routed adapters 2 of 3, rank 2, 240 numbers that learn",
                      "embedded adapters 4, rank 2, 256 numbers that learn", "begins with base"):
            self.assertIn(words, done.stdout)
        found, lines = self.found(), self.lines()
        self.assertTrue(found["runs"]["whole"])
        self.assertEqual([arm["adapters"] for arm in found["arms"]], [0, 240, 256])
        for name in "routed", "embedded":
            line = lines[f"{name}/seed-1"]
            self.assertEqual(line["model"]["switchyard"]["adapters"]["kind"], name)
            self.assertTrue(line["init"].endswith("out/base/seed-1"))
            self.assertLess(line["curve"][0]["loss"], lines["base/seed-1"]["curve"][0]["loss"])
        self.assertIn("all runs were done", self.run_study().stdout)


class BadAdaptersInStudies(TestBadStudy):
    def test_of_an_arm(self):
        for words, arm in (
                (["adapters", "want init"], {"adapters": {}}),
                (["'second'", "balance=0.01", "want balance 0"],
                 {"adapters": {}, "init": "top"}),
                (["adapters.kind: 'mixed'", "embedded"],
                 {"adapters": {"kind": "mixed"}, "init": "top"}),
                (["adapters.rank: 0", "from 1"], {"adapters": {"rank": 0},
                                                  "init": "top"}),
                (["adapters", "'width'", "rank"], {"adapters": {"width": 1},
                                                   "init": "top"}),
                (["adapters", "'top_k'"], {"adapters": {"kind": "shared", "top_k": 1},
                                           "init": "top"}),
                (["top_k=5", "num_adapters=4"], {"adapters": {"top_k": 5},
                                                 "init": "top"}),
                (["freeze: norm", "adapters"],
                 {"adapters": {}, "init": "top", "freeze": "norm"})):
            arms = [{"name": "top"}, {"name": "second", **arm}]
            self.refused(words, *self.args(study=self.write("bad.json", arms=arms,
                                                            reference="top")))


if __name__ == "__main__":
    unittest.main()
