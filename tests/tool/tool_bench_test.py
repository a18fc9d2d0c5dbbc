"""Measuring with the tool: tables, result lines, suites, reports."""

import glob
import json
import os
import subprocess
import sys
import unittest

from tool_support import TestWithFolder, make_checkpoint, not_sanitized, run_tool

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
COMPACT = os.path.join(ROOT, "tools", "compact_results.py")


class Bench(TestWithFolder):
    SIZES = ["--hidden", "64", "--inner", "32", "--experts", "8", "--top-k", "2"]
    KEYS = {"schema", "time", "commit", "machine", "versions", "seed", "case", "stage", "backend",
            "samples", "median_us", "p95_us", "mean_us", "std_us", "bytes", "flops",
            "flops_executed", "intensity", "gbps", "tflops", "tokens_per_s", "limit_us", "limit_by",
            "share", "routing_share", "load", "peak_bytes", "peers"}

    def bench(self, *args):
        done = run_tool("bench", "--iterations", "3", "--warmup", "1", *args)
        self.assert_fine(done)
        return done.stdout

    def test_a_result_line_has_the_keys_of_the_contract(self):
        path = f"{self.d}/results.jsonl"
        for _ in range(2):  # the second run appends
            self.bench(*self.SIZES, "--num-tokens", "0,1,40", "--results", path)
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        stages = {line["stage"] for line in lines}
        self.assertLessEqual({"router_gemm", "select", "plan", "layer"}, stages)
        self.assertEqual(len(lines) % 2, 0)
        for line in lines:
            self.assertEqual(self.KEYS - line.keys(), set())
            self.assertEqual(line["schema"], 1)
            self.assertEqual(line["samples"], 3)
            self.assertLessEqual({"E", "K", "H", "I", "T", "R", "compute", "layout", "skew"},
                                 line["case"].keys())
            self.assertLessEqual({"cpu", "isa", "gpu", "driver"}, line["machine"].keys())
            self.assertLessEqual({"cv", "max_over_mean", "kl", "dropped"}, line["load"].keys())
        self.bench(*self.SIZES, "--num-tokens", "1", "--skew", "zipf:1", "--batch-invariant",
                   "--results", path)
        html = f"{self.d}/report.html"
        with open(path, "a", encoding="utf-8") as file:
            file.write('{"program": "streaming_bench", "stage": "streaming"}\n')
        done = run_tool("report", path, "--output", html)
        self.assert_fine(done)
        with open(html, encoding="utf-8") as file:
            page = file.read()
        self.assertNotRegex(page, r"<link|<script[^>]* src|<img|@import|url\(")  # nothing is loaded
        self.assertIn("<h3>streaming_bench", page)  # lines of other programs too
        self.assertRegex(page, "<tr>.*<td class=t>yes.*<td class=t>zipf:1<")  # batch_invariant

    def test_soft_moe_is_measured_beside_the_combine_of_as_many_rows(self):
        lines = json.loads(self.bench("--suite", "soft-moe", "--scale", "32", "--json"))["lines"]
        self.assertEqual({line["case"]["name"] for line in lines},
                         {"soft-moe", "soft-moe-groups", "soft-moe-causal"})
        first = [line for line in lines if line["case"] == lines[0]["case"]]
        stages = {line["stage"]: line for line in first}
        self.assertLessEqual({"soft_logits", "soft_dispatch", "gemm1+activation", "gemm2",
                              "soft_combine", "layer", "combine"}, stages.keys())
        for line in first:
            self.assertEqual(self.KEYS - line.keys(), set())
            self.assertEqual((line["slots"], line["group"]), (4, 128))
            self.assertAlmostEqual(line["write_back_over_combine"] *
                                   stages["combine"]["median_us"],
                                   stages["soft_combine"]["median_us"], delta=1)
        # Logits, slots and outputs: 2 T S H each.
        for stage in "soft_logits", "soft_dispatch", "soft_combine":
            self.assertEqual(stages[stage]["flops"], 2 * 128 * 128 * 32)

    def test_loading_is_measured_beside_reading_and_copying_warm_and_cold(self):
        model = make_checkpoint(f"{self.d}/model", family="olmoe", layers=2, hidden=256, inner=128)
        done = run_tool("bench", "--suite", "load", "--checkpoint", model, "--iterations", "1",
                        "--warmup", "0", "--json")
        self.assertIn(done.returncode, (0, 1), done.stderr)  # 1: the time that is wanted is missed
        lines = json.loads(done.stdout)["lines"]
        self.assertEqual([(line["case"]["name"], line["stage"]) for line in lines],
                         [(case, stage) for case in ("load warm", "load cold")
                          for stage in ("read", "copy", "load")])
        for line in lines:
            self.assertEqual(line["weights_bytes"], 2 * 4 * 3 * 256 * 128 * 2)
            self.assertGreater(line["file_bytes"], line["weights_bytes"])
            self.assertGreater(line["median_us"], 0)

    def test_loading_weights_as_they_are_stored_keeps_the_bytes_of_codes_and_scales(self):
        model = make_checkpoint(f"{self.d}/codes", family="gpt-oss", hidden=128, inner=64, experts=4)
        done = run_tool("bench", "--suite", "load", "--checkpoint", model, "--weights", "stored",
                        "--iterations", "1", "--warmup", "0", "--json")
        self.assertIn(done.returncode, (0, 1), done.stderr)
        codes = 4 * 3 * 128 * 64 * (16 + 1) // 32
        for line in json.loads(done.stdout)["lines"]:
            self.assertEqual(line["stored_bytes"], codes)
            self.assertEqual(line["bar"], "Q9")
            self.assertEqual(line["value"], line["weights_bytes"] / codes)
            self.assertEqual(line["holds"], line["value"] <= 1.02)
            self.assertLessEqual(line["value"], 1.1)

    def test_skew_is_seen_in_the_load(self):
        cv = {}
        for skew in "uniform", "zipf:1.5", "hot:1":
            report = json.loads(self.bench(*self.SIZES, "--num-tokens", "500", "--skew", skew,
                                           "--json"))
            cv[skew] = report["lines"][0]["load"]
        self.assertLess(cv["uniform"]["cv"], 0.2)
        self.assertGreater(cv["zipf:1.5"]["cv"], 0.3)
        self.assertAlmostEqual(cv["hot:1"]["max_over_mean"], 500 / (1000 / 8))

    def test_identity_experts_give_back_the_tokens_in_every_layout_and_across_ranks(self):
        for layout in "compact", "padded", "aligned:16":
            for ranks in 1, 3:
                out = self.bench("--hidden", "256", "--inner", "32", "--experts", "32", "--top-k",
                                 "2", "--num-tokens", "1024", "--experts", "identity", "--layout",
                                 layout, "--ranks", ranks, "--compute", "f16")
                self.assertIn("holds: combine(pack(x)) = x", out)

    def test_suites_run_at_a_small_scale(self):
        for suite, cases in ("topk", 9), ("pack", 54), ("forward", 18), ("training", 20), ("fused-moe", 10):
            done = run_tool("bench", "--suite", suite, "--scale", "64", "--iterations", "1",
                            "--warmup", "0", "--json")
            self.assert_fine(done)
            lines = json.loads(done.stdout)["lines"]
            self.assertEqual(len({json.dumps(line["case"]) for line in lines}), cases)

    def test_the_forward_of_training_is_timed_beside_that_of_inference(self):
        done = run_tool("bench", "--hidden", "64", "--inner", "64", "--experts", "4", "--top-k", "2",
                        "--num-tokens", "256", "--pass", "forward-train", "--iterations", "3", "--warmup",
                        "1", "--json")
        self.assert_fine(done)
        lines = json.loads(done.stdout)["lines"]
        self.assertNotIn("forward of inference", [line["stage"] for line in lines])
        whole = lines[-1]
        self.assertEqual(whole["stage"], "layer")
        self.assertGreater(whole["inference_us"], 0)
        limits = sum(line["limit_us"] for line in lines[:-1])
        self.assertAlmostEqual(whole["limits_of_stages_us"], limits, delta=1e-3 * limits)

    @not_sanitized
    def test_generation_is_timed_by_batch_and_length_prompts_apart(self):
        path = f"{self.d}/generate.jsonl"
        done = run_tool("bench", "--suite", "generate", "--only", "smoke", "--scale", "4", "--warmup", "0",
                        "--iterations", "2", "--json", "--results", path)
        self.assert_fine(done)
        lines = json.loads(done.stdout)["lines"]
        with open(path, encoding="utf-8") as file:
            self.assertEqual(len(file.readlines()), len(lines))
        points = {(line["prompt"], line["batch"], line["stage"]): line for line in lines}
        self.assertEqual(set(points), {(prompt, batch, stage) for prompt in (8, 128)
                                       for batch in (1, 8, 64) for stage in ("prompt", "token_step")})
        for (prompt, batch, stage), line in points.items():
            self.assertEqual(line["case"]["T"], batch * prompt if stage == "prompt" else batch)
            # Of 32 new tokens the first three steps do not count.
            self.assertEqual(line["samples"], 2 if stage == "prompt" else 2 * 29)
            self.assertLessEqual(line["median_us"], line["p95_us"])
            self.assertAlmostEqual(line["tokens_per_s"], line["case"]["T"] / line["median_us"] * 1e6, delta=1)
            self.assertGreater(line["memory_bytes"], 0)
        # The same numbers of the model are read whatever the batch, but for experts and the cache.
        one, many = (points[8, batch, "token_step"]["bytes"] for batch in (1, 64))
        self.assertLess(many, 64 * one)
        self.assertLess(one, many)
        # Keys and values: 2 layers x 2 numbers x 64 x 4 bytes a position and sequence.
        longer = points[128, 64, "token_step"]["bytes"] - points[8, 64, "token_step"]["bytes"]
        self.assertAlmostEqual(longer, 64 * 120 * 2 * 2 * 64 * 4, delta=1)
        # A token of a longer prompt sees more of it.
        self.assertGreater(points[128, 8, "prompt"]["flops"] / 128, points[8, 8, "prompt"]["flops"] / 8)

    @not_sanitized
    def test_the_layer_suite_covers_three_paths(self):
        done = run_tool("bench", "--suite", "layer", "--scale", "1024", "--stages", "layer",
                        "--threads", "1", "--iterations", "1", "--warmup", "0", "--json")
        self.assert_fine(done)
        out = json.loads(done.stdout)
        self.assertEqual(len(out["lines"]), 432)
        self.assertEqual({line["case"]["layout"] for line in out["lines"]},
                         {"padded", "compact", "aligned:64"})

    @not_sanitized
    def test_all2all_checks_every_variant_on_every_published_shape(self):
        path = f"{self.d}/results.jsonl"
        out = json.loads(self.bench("--suite", "all2all", "--scale", "64", "--json", "--results",
                                    path))
        rows = [line for line in out["lines"] if line["stage"] == "round_trip"]
        names = ["reference", "sorted", "flat", "bucketed", "native"]
        self.assertEqual({line["variant"] for line in rows}, set(names))
        # 11 tests, and 5 benchmarks with drawn and with full token counts.
        self.assertEqual(len(rows), 5 * (11 + 2 * 5))
        for line in rows:
            self.assertEqual(self.KEYS - line.keys(), set())
            self.assertTrue(line["holds"])
            self.assertLess(line["error"], 1)
        self.assertEqual({line["case"]["R"] for line in rows}, {1, 2, 8})
        self.assertEqual([entry["variant"] for entry in out["ranking"]], names)
        for entry in out["ranking"]:
            for rule in "every_token", "drawn_tokens":
                self.assertGreater(entry[rule]["slowest_rank_median_us"], 0)
                self.assertGreater(entry[rule]["published_mean_us"], 0)
        self.assert_fine(run_tool("report", path, "--output", f"{self.d}/report.html"))

    def test_a_compacted_file_gives_the_same_report_and_the_newest_line_counts_in_both(self):
        path = f"{self.d}/results.jsonl"
        for isa in ([], ["--isa", "portable"]):
            self.bench(*self.SIZES, "--num-tokens", "3,5", "--results", path, *isa)
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        old = {**lines[-1], "time": "2020-01-01T00:00:00Z", "median_us": 123456789.0}
        with open(path, "a", encoding="utf-8") as file:  # an old run, appended later
            file.write(json.dumps(old) + "\n")
        pages = []
        for turn in range(2):
            html = f"{self.d}/report{turn}.html"
            self.assert_fine(run_tool("report", path, "--output", html))
            with open(html, encoding="utf-8") as file:
                pages.append(file.read())
            done = subprocess.run([sys.executable, COMPACT, path], capture_output=True, text=True,
                                  check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(pages[0], pages[1])
        self.assertNotIn("<td>123 s", pages[0])
        self.assertEqual(pages[0].count("<section class=suite"),
                         len({line["machine"]["isa"] for line in lines}))
        with open(path, encoding="utf-8") as file:
            self.assertEqual(len(file.readlines()), len(lines) + 1)  # and the header

    @not_sanitized
    def test_the_files_of_results_are_read(self):
        files = sorted(glob.glob(os.path.join(ROOT, "results", "*.jsonl")))
        self.assertGreater(len(files), 3)
        html = f"{self.d}/report.html"
        self.assert_fine(run_tool("report", *files, "--output", html))
        lines = 0
        for path in files:
            with open(path, encoding="utf-8") as file:
                lines += sum('"header": {' not in line for line in file)
        with open(html, encoding="utf-8") as file:
            tables = file.read().split("<section id=suites>")[1].split("<section id=words>")[0]
        self.assertEqual(tables.count("<tr><td"), lines)  # every line stands in a table

    def test_all2all_prints_a_row_per_variant_and_says_what_it_scaled(self):
        out = self.bench("--suite", "all2all", "--scale", "64", "--variant", "flat,native",
                         "--ranks", "3")
        self.assertEqual(out.count("  holds"), 2 * 21)
        self.assertIn("divided by 64", out)
        self.assertIn("3 ranks (threads); published for 8", out)
        self.assertIn("geometric mean of 5 benchmarks", out)

    def test_fixed_size_has_four_sweeps_checked_plotted_and_judged(self):
        path = f"{self.d}/results.jsonl"
        out = json.loads(self.bench("--suite", "fixed-size", "--scale", "64", "--json",
                                    "--results", path))
        points = {}
        for line in out["lines"]:
            self.assertEqual(self.KEYS - line.keys(), set())
            self.assertTrue(line["holds"])
            self.assertGreater(line["M"], 0)
            self.assertTrue(0 <= line["padding"] < 1)
            ranks, row = line["case"]["R"], 2 * line["case"]["H"]
            self.assertEqual(line["wire_bytes"], ranks * (ranks - 1) * line["M"] * row)
            points.setdefault(line["sweep"], []).append(line["value"])
        self.assertEqual(points, {"batch": [1, 2, 4, 8, 16, 32],
                                  "sequence": [128, 256, 512, 1024, 2048, 4096],
                                  "local_experts": [1, 2, 4, 8, 16, 32],
                                  "top_k": list(range(1, 9))})
        self.assertEqual(len(out["findings"]), 3)
        for finding in out["findings"]:
            self.assertIn(finding["verdict"], ["holds", "does not hold", "not tested"])
            self.assertEqual(finding["on"], "CPU ranks")
        html = f"{self.d}/report.html"
        self.assert_fine(run_tool("report", path, "--output", html))
        with open(html, encoding="utf-8") as file:
            page = file.read()
        if "built without dygraphs" not in page:
            self.assertEqual(page.count(": time over "), 4)

    @not_sanitized
    def test_torch_is_timed_on_the_same_data_where_it_is_there(self):
        done = run_tool("bench", *self.SIZES, "--peer", "torch", "--num-tokens", "5,0", "--json",
                        "--compute", "f32", "--iterations", "2", "--warmup", "0")
        if done.returncode == 2:  # no torch for the python3 of PATH
            self.assert_one_line(done, 2, ["--peer: torch cannot be used", "python3"])
            self.skipTest(done.stderr)
        self.assert_fine(done)
        layers = [line for line in json.loads(done.stdout)["lines"] if line["stage"] == "layer"]
        self.assertGreater(layers[0]["peers"]["torch"], 0)
        self.assertGreater(layers[0]["torch"]["median_us"]["experts+combine"], 0)
        self.assertNotIn("torch", layers[1]["peers"])
        for suite, stages in (("topk", ["select"]), ("fused-moe", ["layer"]),
                              ("pack", ["pack", "combine"])):
            done = run_tool("bench", "--suite", suite, "--scale", "128", "--peer", "torch", "--json",
                            "--iterations", "1", "--warmup", "0")
            self.assert_fine(done)
            lines = json.loads(done.stdout)["lines"]
            self.assertNotIn("error", lines[0]["torch"])
            for line in lines:
                self.assertEqual("torch" in line["peers"], line["stage"] in stages, line)

    def test_no_torch_is_wrong_use(self):
        with open(f"{self.d}/torch.py", "w", encoding="utf-8") as file:
            file.write("raise ImportError('no torch in this folder')")
        done = run_tool("bench", *self.SIZES, "--peer", "torch", env={"PYTHONPATH": self.d})
        self.assert_one_line(done, 2, ["--peer: torch cannot be used", "no torch in this folder"])
        done = run_tool("bench", *self.SIZES, "--peer", "torch", env={"PATH": "/nowhere"})
        self.assert_one_line(done, 2, ["--peer: torch cannot be used", "python3 cannot be started"])
        done = run_tool("bench", *self.SIZES, "--peer", "torch", "--ranks", "2")
        self.assert_one_line(done, 2, ["--peer", "--ranks 1"])

    def test_the_published_data_may_differ_in_a_few_outputs(self):
        done = run_tool("bench", "--suite", "fused-moe", "--scale", "64", "--data", "published",
                        "--iterations", "1", "--warmup", "0", "--json")
        self.assert_fine(done)
        for line in json.loads(done.stdout)["lines"]:
            self.assertEqual(line["data"], "published")
            self.assertGreaterEqual(line["outside"], 0)
        done = run_tool("bench", "--suite", "pack", "--data", "published")
        self.assert_one_line(done, 2, ["--data", "fused-moe"])

    def test_csv_and_stage_filter(self):
        path = f"{self.d}/out.csv"
        self.bench(*self.SIZES, "--num-tokens", "16", "--csv", path, "--stages", "layer,plan")
        with open(path, encoding="utf-8") as file:
            rows = file.read().splitlines()
        self.assertEqual(len(rows), 3)
        self.assertEqual({len(row.split(",")) for row in rows}, {22})

    def test_a_case_that_is_refused_is_named_and_what_is_done_before_it_is_kept(self):
        csv = f"{self.d}/cases.csv"
        done = run_tool("bench", *self.SIZES, "--router", "expert-choice:group=8", "--num-tokens", "8,12,16",
                        "--iterations", 1, "--warmup", 0, "--json", "--csv", csv)
        self.assert_one_line(done, 2, ["T=12 E=", "group=8 of expert choice", "12 tokens"])
        self.assertNotIn("invalid argument: invalid argument", done.stderr)
        self.assertEqual({line["case"]["T"] for line in json.loads(done.stdout)["lines"]}, {8})
        with open(csv, encoding="utf-8") as file:
            self.assertGreater(len(file.readlines()), 1)

    def test_ranks_show_the_exchange(self):
        out = self.bench(*self.SIZES, "--num-tokens", "64", "--ranks", "2")
        self.assertIn("exchange", out)


class Soak(TestWithFolder):
    def test_many_exchanges_over_all_shapes_are_right_and_take_no_more_memory(self):
        # A build with the address sanitizer keeps what is freed, unless it is told how much.
        sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=1"
        done = run_tool("verify", "--soak", 4800, "--ranks", 5, "--json",
                        env={"ASAN_OPTIONS": sanitizer})
        self.assert_fine(done)
        out = json.loads(done.stdout)
        self.assertTrue(out["holds"], out)
        self.assertEqual((out["soak"], out["ranks"], out["shapes"]), (4800, 5, 24))
        self.assertGreater(out["bytes_after"], 0)


if __name__ == "__main__":
    unittest.main()
