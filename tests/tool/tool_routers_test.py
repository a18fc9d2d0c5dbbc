"""Routers by name at the command line."""

import json
import unittest

from tool_support import TestWithFolder, make_checkpoint, run_tool
from tool_test import read_safetensors


class Routers(TestWithFolder):
    def test_a_router_by_name_takes_the_place_of_the_models(self):
        checkpoint = make_checkpoint(f"{self.d}/model", dtype="f32")

        def routing(router, *more):
            self.assert_fine(run_tool(
                "run", "--checkpoint", checkpoint, "--text", f"{self.d}/text.txt", "--max-tokens", "24",
                "--router", router, "--check", "--routing-output", f"{self.d}/routing.safetensors",
                *more))
            return read_safetensors(f"{self.d}/routing.safetensors")

        for router in ("switch", "gshard", "noisy-top-k", "v-moe", "adamoe", "top-p:threshold=0.7", "relu",
                       "expert-threshold", "zipf:s=1"):
            routing(router, "--routing-stats")
        for more in (), ("--capacity-factor", "0.8"), ("--ranks", "2"):
            beside = routing("moe++:constant=2,copy=1,zero=1", *more)
            self.assertEqual(beside["counts"].shape, (8,))  # 4 and 4
            self.assertGreater(beside["counts"][4:].sum(), 0)
        done = run_tool("run", "--checkpoint", checkpoint, "--text", f"{self.d}/text.txt", "--router",
                        "moe++:residual=yes")
        self.assertEqual(done.returncode, 2)
        self.assertIn("residual=yes adds logits of the layer before", done.stderr)
        turns = routing("round-robin:top-k=3")
        self.assertEqual(set(turns["counts"].tolist()), {18})  # 24 * 3 / 4
        self.assertEqual(turns["expert"].shape, (24, 3))
        choice = routing("expert-choice:capacity-factor=2,group=8")
        self.assertEqual(set(choice["counts"].tolist()), {24})  # 3 groups of C = 2 * 8 * 2 / 4
        for ranks in ("1", "2"):
            ids = routing("hash", "--ranks", ranks)["expert"]
            with open(f"{self.d}/text.txt", "rb") as file:
                text = file.read(24)
            for i, j in ((i, j) for i in range(24) for j in range(i) if text[i] == text[j]):
                self.assertEqual(ids[i].tolist(), ids[j].tolist())

    def test_bench_trains_layers_whose_routers_have_more_than_a_gate(self):
        sizes = ("--num-tokens", "32", "--experts", "8", "--top-k", "2", "--hidden", "32", "--inner", "16",
                 "--iterations", "1", "--threads", "1")
        for router in ("switch", "noisy-top-k:network=hadamard", "adamoe", "moe++", "expert-threshold",
                       "top-k:network=mlp,width=5"):
            self.assert_fine(run_tool("bench", "--pass", "both", "--router", router, *sizes))
        done = run_tool("bench", "--router", "moe++", "--peer", "onednn", *sizes)
        self.assertEqual(done.returncode, 2)
        self.assertIn("no peer runs the zero-computation experts of --router moe++", done.stderr)

    def test_a_chain_runs_its_iterations_and_says_what_does_not_go_with_them(self):
        checkpoint = make_checkpoint(f"{self.d}/model", dtype="bf16")
        run = ("run", "--checkpoint", checkpoint, "--text", f"{self.d}/text.txt", "--max-tokens", "24",
               "--router", "chain:iterations=3,outer-residual=yes")
        for ranks in "1", "2":
            done = run_tool(*run, "--check", "--ranks", ranks)
            self.assert_fine(done)
            self.assertIn("residual", done.stdout)
        for option in ("--routing-stats",), ("--routing-output", f"{self.d}/r.safetensors"):
            done = run_tool(*run, *option)
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"{option[0]}, --router: both are given", done.stderr)
        sizes = ("--num-tokens", "32", "--experts", "8", "--top-k", "4", "--hidden", "32", "--inner", "16",
                 "--iterations", "1", "--threads", "1")
        self.assert_fine(run_tool("bench", "--pass", "both", "--router", "chain", *sizes))
        done = run_tool("bench", "--router", "chain", "--peer", "onednn", *sizes)
        self.assertEqual(done.returncode, 2)
        self.assertIn("no peer runs the iterations of --router chain", done.stderr)

    def test_the_suite_chain_has_a_chain_beside_one_pass_of_as_many_experts(self):
        results = f"{self.d}/chain.jsonl"
        self.assert_fine(run_tool("bench", "--suite", "chain", "--scale", "32", "--iterations", "2",
                                  "--warmup", "1", "--threads", "1", "--results", results))
        with open(results, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        layers = [line for line in lines if line.get("stage") == "layer"]
        self.assertEqual(len(layers), 6)
        for line in layers:
            self.assertEqual(line["case"]["K"] * line["iterations"], line["pass_top_k"])
            self.assertEqual(line["rows"]["used"], line["rows"]["pass"])
            self.assertGreater(line["chain_over_pass"], line["chain_less_a_plan_over_pass"])

    def test_routers_lists_every_router_with_what_its_spelling_may_have(self):
        done = run_tool("routers", "--json")
        self.assert_fine(done)
        table = {router["name"]: router for router in json.loads(done.stdout)}
        self.assertFalse(table["expert-choice"]["causal"])
        self.assertTrue(table["expert-choice"]["variable"])
        self.assertFalse(table["hash"]["trainable"])
        self.assertFalse(table["soft-moe"]["causal"])
        self.assertEqual([name for name, kind in table.items() if not kind["on_gpu"]], [])
        self.assertIn("slots", [option["name"] for option in table["soft-moe"]["options"]])
        factor = next(o for o in table["expert-choice"]["options"] if o["name"] == "capacity-factor")
        self.assertEqual((factor["value"], factor["high"]), ("F", 1e6))
        text = run_tool("routers").stdout
        for name, router in table.items():
            self.assertIn(f"{name}: {router['rule']}", text)
            for option in router["options"]:
                self.assertIn(f"    {option['name']}={option['value']}  ", text)

    def test_a_network_that_a_checkpoint_has_no_parameters_for_is_refused(self):
        checkpoint = make_checkpoint(f"{self.d}/model", dtype="bf16")
        done = run_tool("run", "--checkpoint", checkpoint, "--text", f"{self.d}/text.txt",
                        "--max-tokens", "24", "--router", "top-k:network=mlp")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("network=mlp", done.stderr)
        self.assertIn("network=linear", done.stderr)

    def test_verify_checks_routers_by_name(self):
        for router in "all", "expert-choice:capacity-factor=2", "top-p:network=cosine":
            done = run_tool("verify", "--cases", "60", "--pass", "both", "--router", router)
            self.assert_fine(done)


if __name__ == "__main__":
    unittest.main()
