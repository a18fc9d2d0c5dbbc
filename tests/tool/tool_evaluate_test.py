"""evaluate --specialisation, --ablate and --sources: what a trained model has come to."""

import json
import os
import shutil
import unittest

from tool_models_test import TestWithModel
from tool_support import run_tool

WHOLE = os.path.join(os.path.dirname(__file__), "..", "data", "whole_models")


class EvaluateTest(TestWithModel):
    def evaluate(self, *args, model="run", text=None):
        return run_tool("evaluate", "--model", f"{self.d}/{model}", "--text", text or self.held_out,
                        "--threads", 1, *args)

    def found(self, *args, **kwargs):
        done = self.evaluate(*args, "--json", **kwargs)
        self.assert_fine(done)
        return json.loads(done.stdout)


class RoutingOfATrainedModelTest(EvaluateTest):
    def test_stands_beside_chance_an_untrained_router_and_earlier_checkpoints(self):
        self.assert_fine(self.train("--save-every", 20, "--learning-rate", "0.01", steps=60))
        found = self.found("--specialisation", "--against", f"{self.d}/run", "--ablate", "drop")
        special = found["specialisation"]
        self.assertEqual(special["tokens"], 599)
        self.assertEqual(special["untrained_seed"], 17)
        self.assertEqual([layer["layer"] for layer in special["layers"]], [0, 1])
        for layer in special["layers"]:
            self.assertEqual(sum(layer["counts"]), 2 * 599)
            mean = 599 / 2
            deviation = (sum((n - mean) ** 2 for n in layer["counts"]) / 4) ** 0.5
            self.assertAlmostEqual(layer["load"]["cv"], deviation / mean)
            self.assertGreater(layer["token_type"]["plug_in"], layer["token_type"]["null_mean"])
            self.assertNotEqual(layer["token_type"], layer["untrained"]["token_type"])
            self.assertNotIn("document", layer)
            self.assertEqual([row[i] for i, row in enumerate(layer["coactivation"])], [1] * 4)
        self.assertEqual([c["step"] for c in special["checkpoints"]], [20, 40])
        first, second = special["checkpoints"]
        self.assertTrue(first["path"].endswith("run/step-000020"))
        for entry in first, second:
            self.assertTrue(all(0 < share <= 1 for share in entry["saturation"] + entry["churn"]))
        # The second is the last before the one that is evaluated: all have as many experts.
        for churn, saturation in zip(second["churn"], second["saturation"]):
            self.assertAlmostEqual(churn, 1 - saturation)
        self.assertNotAlmostEqual(first["churn"][0], 1 - first["saturation"][0])
        before = self.found("--specialisation", "--against", f"{self.d}/run",
                            model="run/step-000040")["specialisation"]["checkpoints"]
        self.assertEqual([c["step"] for c in before], [20])
        # With its own values again behind all others that were loaded.
        self.assertEqual(found["ablations"]["tokens"], 599)
        self.assertEqual(found["ablations"]["passes"], 2 + 2 * (1 + 4))
        self.assertAlmostEqual(found["ablations"]["nats_per_byte"], found["nats_per_byte"], places=6)
        self.assertGreater(found["ablations"]["shuffled"]["nats_per_byte"], 0)
        for layer, of in zip(found["ablations"]["layers"], special["layers"]):
            self.assertEqual([e["assignments"] for e in layer["experts"]], of["counts"])
            self.assertIsNone(layer["shuffled"]["error"])  # of one block

        done = self.evaluate("--specialisation", "--against", f"{self.d}/run/step-000020",
                             "--ablate", "renormalise", text=self.text)
        self.assert_fine(done)
        for word in ("untrained", "seed 17", "chosen together", "step-000020", "saturation",
                     "ablations: 12 forwards of 16384 tokens", "renormalise", "routing shuffled",
                     " +- ", "specialisation on 19999 tokens"):
            self.assertIn(word, done.stdout)

    def test_a_router_that_was_never_trained_is_its_own_untrained_one(self):
        self.assert_fine(self.train("--freeze", "router", "--balance", 0, "--z", 0, "--seed", 5,
                                    "--learning-rate", "0.01"))
        special = self.found("--specialisation")["specialisation"]
        self.assertEqual(special["untrained_seed"], 5)
        for layer in special["layers"]:
            self.assertEqual(layer["untrained"]["token_type"], layer["token_type"])
            self.assertEqual(layer["untrained"]["counts"], layer["counts"])

    def test_the_same_weights_are_saturated_and_do_not_churn(self):
        self.assert_fine(self.train())
        shutil.copytree(f"{self.d}/run/step-000012", f"{self.d}/copy")
        of = self.found("--specialisation", "--against", f"{self.d}/copy", "--max-tokens", 200)
        self.assertEqual(of["specialisation"]["tokens"], 192)  # three windows of 64
        self.assertEqual(of["specialisation"]["checkpoints"][0]["saturation"], [1, 1])
        self.assertEqual(of["specialisation"]["checkpoints"][0]["churn"], [0, 0])

    def test_two_documents_tell_of_experts_too(self):
        self.assert_fine(self.train())
        second = self.file("second.txt", "0123456789 " * 60)
        done = run_tool("evaluate", "--model", f"{self.d}/run", "--text", self.held_out, second,
                        "--specialisation", "--json")
        self.assert_fine(done)
        for layer in json.loads(done.stdout)["specialisation"]["layers"]:
            self.assertGreaterEqual(layer["document"]["plug_in"], 0)
            self.assertIn("document", layer["untrained"])

    def test_without_parameters_or_a_seed_there_is_no_untrained_router(self):
        for words, router in (("no parameters", "hash"), ("no optimizer.safetensors", "top-k")):
            self.assert_fine(self.train("--router", router, "--balance", 0, "--z", 0, output=router,
                                        steps=2))
            if router == "top-k":
                os.remove(f"{self.d}/top-k/step-000002/optimizer.safetensors")
            done = self.evaluate("--specialisation", model=router)
            self.assert_fine(done)
            self.assertIn(words, done.stdout)
            special = self.found("--specialisation", model=router)["specialisation"]
            self.assertIsNone(special["untrained_seed"])
            self.assertEqual([layer["untrained"] for layer in special["layers"]], [None, None])


class SourcesTest(EvaluateTest):
    def test_passages_are_attributed_beside_chance_and_ngrams(self):
        numbers = self.file("numbers.txt", "".join(f"{n * n % 9973} " for n in range(3000)))
        others = self.file("others.txt", "".join(f"{n * 7919 % 9973} " for n in range(300)))
        self.assert_fine(self.train("--text", numbers, "--learning-rate", "0.02", steps=40))  # of both
        sources = ["--sources", self.text, numbers, "--passages", 15]
        done = run_tool("evaluate", "--model", f"{self.d}/run", "--text", self.held_out, others,
                        *sources, "--json")
        self.assert_fine(done)
        found = json.loads(done.stdout)["attribution"]
        self.assertEqual((found["passages"], found["passage"], found["excerpt"]), (15, 32, 33))
        self.assertEqual(found["chance"], 0.5)
        taken = [source["taken_for"] for source in found["sources"]]
        self.assertEqual([sum(row) for row in taken], [15, 15])
        self.assertEqual([s["name"] for s in found["sources"]], [self.text, numbers])
        self.assertEqual(found["correct"], taken[0][0] + taken[1][1])
        self.assertGreater(found["accuracy"], 0.5)
        self.assertEqual(len(found["ngrams"]), 8)
        for of in found, *found["ngrams"]:  # Wilson's ends solve (p - share)^2 = z^2 p (1 - p) / n
            self.assertAlmostEqual(of["accuracy"], of["correct"] / 30)
            for end in of["low"], of["high"]:
                self.assertAlmostEqual((end - of["accuracy"]) ** 2,
                                       1.959963984540054 ** 2 * end * (1 - end) / 30)
        self.assertEqual(found["ngrams"][0]["accuracy"], 1)  # letters and digits
        done = run_tool("evaluate", "--model", f"{self.d}/run", "--text", self.held_out, others,
                        *sources)
        self.assert_fine(done)
        for word in ("attribution: 60 sequences of 64 bytes", "chance 50.0%", "n-gram 8", "taken for",
                     "15 of 32 bytes from each of 2"):
            self.assertIn(word, done.stdout)


class RefusedEvaluationTest(EvaluateTest):
    def refused(self, words, *args, **kwargs):
        self.assert_one_line(self.evaluate(*args, **kwargs), 2, words)

    def test_what_is_wrong_is_named(self):
        self.assert_fine(self.train(steps=2))
        run = f"{self.d}/run"
        self.refused(["--against", run, "--specialisation"], "--against", run)
        self.refused(["--max-tokens", "64", "--ablate"], "--max-tokens", 64)
        self.refused(["--max-tokens", "'0'", "1 to"], "--ablate", "drop", "--max-tokens", 0)
        self.refused(["--ablate", "'zero'", "drop|renormalise"], "--ablate", "zero")
        for option in ["--specialisation"], ["--ablate", "drop"]:
            self.refused([option[0], "cuda", "--backend cpu"], *option, "--backend", "cuda")
        against = ["--specialisation", "--against"]
        self.refused([f"{self.d}/absent"], *against, f"{self.d}/absent")
        self.refused(["--against", run, "no checkpoint before step-000002", "--save-every"], *against,
                     run)
        self.refused(["--against", "step-000002", "is what is evaluated"], *against,
                     f"{run}/step-000002")
        self.assert_fine(self.train("--router", "switch", output="other", steps=2))
        self.refused(["--against", "other/step-000002", "norm_topk_prob false", "same model"], *against,
                     f"{self.d}/other")

    def test_sources_that_do_not_go_with_the_text(self):
        self.assert_fine(self.train(steps=1))
        two = self.file("two.txt", "0123456789 " * 60)
        self.refused(["--sources", "1 files for 1 of --text", "at least 2"], "--sources", self.text)
        self.refused(["--sources", "2 files for 1"], "--sources", self.text, two)
        self.refused(["--passages", "3", "--sources"], "--passages", 3)
        both = ["evaluate", "--model", f"{self.d}/run", "--text", self.held_out, two, "--sources"]
        self.assert_one_line(run_tool(*both, self.text, two), 2, ["--sources", two, "is evaluated"])
        short = self.file("short.txt", "too short")
        self.assert_one_line(run_tool(*both, self.text, short), 2,
                             ["--sources", "short.txt", "33 bytes"])
        both[4] = short
        self.assert_one_line(run_tool(*both, self.text, self.held_out), 2,
                             ["--text", "short.txt", "32 bytes"])
        both[4] = two
        self.assert_fine(self.train("--router", "expert-choice", output="ahead", steps=1))
        self.assert_one_line(run_tool("evaluate", "--model", f"{self.d}/ahead", *both[3:], self.text,
                                      self.file("more.txt", "9876543210 " * 60)), 2,
                             ["--sources", "expert-choice", "later tokens"])

    def test_of_dense_and_of_released_models(self):
        self.config = self.file("dense.json", json.dumps(self.model(mlp_only_layers=[0, 1])))
        self.assert_fine(self.train(output="dense", steps=1))
        self.refused(["--ablate", "dense", "MoE"], "--ablate", "drop", model="dense")
        for option in (["--specialisation"], ["--against", "x"], ["--ablate", "drop"],
                       ["--max-tokens", 5], ["--sources", "x"], ["--passages", 5]):
            done = run_tool("evaluate", "--model", f"{WHOLE}/olmoe", "--text", self.held_out,
                            "--ids", *option)
            self.assert_one_line(done, 2, [option[0], "models that train has written"])


if __name__ == "__main__":
    unittest.main()
