"""Sweeps with the tool: estimates, resuming, result lines."""

import json
import os
import signal
import subprocess
import time
import unittest

from tool_support import SANITIZED, TOOL, TestWithFolder, not_sanitized, run_tool

SIZES = {"experts": 8, "top_k": 2, "hidden": 64, "inner": 32, "compute": "f32"}


class Sweep(TestWithFolder):
    def grid(self, **keys):
        path = f"{self.d}/grid.json"
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"work": "layer", "name": "mine", **SIZES, **keys}, file)
        return path

    def lines(self, path):
        """Of the points, and of the sweep as a whole; every line is whole."""
        with open(path, encoding="utf-8") as file:
            text = file.read()
        self.assertTrue(text.endswith("\n"))
        lines = [json.loads(line) for line in text.splitlines()]
        return ([line for line in lines if "point" in line],
                [line for line in lines if line["stage"] == "sweep"])

    def assert_each_point_once(self, lines, points):
        """All lines of every point, none twice."""
        stages = {}
        for line in lines:
            stages.setdefault(json.dumps(line["point"], sort_keys=True), []).append(line["stage"])
        self.assertEqual(len(stages), points)
        for line in lines:
            own = stages[json.dumps(line["point"], sort_keys=True)]
            self.assertEqual(len(own), line["lines"])
            self.assertEqual(len(set(own)), len(own), own)

    def test_the_plain_formula_is_that_of_the_published_examples(self):
        for samples, prompt, generate, rate, seconds, words in (
                (2000, 300, 150, 3000, 300, "5 minutes"), (10000, 500, 300, 1000, 8000, "2.22 hours")):
            args = ["sweep", "--estimate", "--samples", samples, "--prompt", prompt, "--generate",
                    generate, "--tokens-per-second", rate]
            self.assertIn(words, run_tool(*args).stdout)
            self.assertEqual(json.loads(run_tool(*args, "--json").stdout)["seconds"], seconds)

    def test_a_line_has_what_a_line_of_bench_has_and_its_point(self):
        grid, results = self.grid(num_tokens=[4, 40]), f"{self.d}/results.jsonl"
        done = run_tool("sweep", "--grid", grid, "--iterations", 3, "--warmup", 1, "--results", results)
        self.assert_fine(done)
        self.assertIn("mine: 2 points; estimate: ", done.stdout)
        self.assertRegex(done.stdout, r"mine: 2 points in .*, estimate [+-]\d+%; memory .*, estimate [+-]")
        points, whole = self.lines(results)
        self.assert_each_point_once(points, 2)
        for line in points:
            self.assertEqual(line["suite"], "mine")
            self.assertEqual(line["work"], "layer")
            self.assertEqual(line["points"], 2)
            self.assertEqual(line["samples"], 3)
            self.assertEqual(line["case"]["T"], line["point"]["num_tokens"])
            self.assertLessEqual({"schema", "time", "commit", "machine", "versions", "median_us"},
                                 line.keys())
        self.assertEqual(len(whole), 1)
        self.assertLessEqual({"seconds", "measured_seconds", "bytes", "measured_bytes"},
                             whole[0]["estimate"].keys())
        with open(grid, encoding="utf-8") as file:
            self.assertIn('"work"', file.read())

    def test_an_estimate_measures_nothing(self):
        done = run_tool("sweep", "--suite", "capacity", "--estimate", "--json")
        self.assert_fine(done)
        report = json.loads(done.stdout)
        self.assertEqual((report["estimate"]["points"], report["lines"]), (63, []))
        self.assertGreater(report["estimate"]["seconds"], 0)
        self.assertGreater(report["estimate"]["bytes"], 0)

    @not_sanitized
    def test_what_is_done_is_skipped_and_another_seed_is_another_sweep(self):
        results = f"{self.d}/results.jsonl"
        args = ["--iterations", 1, "--warmup", 0, "--results", results]
        self.assert_fine(run_tool("sweep", "--grid", self.grid(num_tokens=[4, 8]), *args))
        grid = self.grid(num_tokens=[4, 8, 16])
        done = run_tool("sweep", "--grid", grid, *args)
        self.assertIn("mine: 3 points, 2 of them done; estimate", done.stdout)
        points, whole = self.lines(results)
        self.assert_each_point_once(points, 3)
        self.assertEqual([line["points_measured"] for line in whole], [2, 1])
        before = os.path.getsize(results)
        self.assertIn("3 of them done", run_tool("sweep", "--grid", grid, *args).stdout)
        self.assertEqual(os.path.getsize(results), before)
        done = run_tool("sweep", "--grid", grid, *args, "--seed", 3)
        self.assertIn("mine: 3 points; estimate", done.stdout)

    @not_sanitized
    def test_one_that_is_killed_resumes_without_a_lost_or_doubled_line(self):
        grid, results = self.grid(num_tokens=list(range(1, 61))), f"{self.d}/results.jsonl"
        args = ["sweep", "--grid", grid, "--iterations", "20", "--results", results]
        kills = 0
        for _ in range(6):
            size = os.path.getsize(results) if os.path.exists(results) else 0
            process = subprocess.Popen([TOOL, *args], stdout=subprocess.DEVNULL)
            try:
                while process.poll() is None and (
                        not os.path.exists(results) or os.path.getsize(results) <= size):
                    time.sleep(0.001)
                time.sleep(0.003 * kills)
                process.send_signal(signal.SIGKILL)
            finally:
                kills += process.wait() == -signal.SIGKILL
            with open(results, "a", encoding="utf-8") as file:  # as if the write had been cut
                file.write('{"suite": "mine", "po')
        self.assertGreater(kills, 0)
        self.assert_fine(run_tool(*args))
        points, _ = self.lines(results)
        self.assert_each_point_once(points, 60)

    def test_a_router_that_cannot_run_is_left_out_and_said(self):
        done = run_tool("sweep", "--suite", "routers", "--scale", 64, "--iterations", 1, "--warmup", 0,
                        "--json")
        self.assert_fine(done)
        report = json.loads(done.stdout)
        names = {router["name"] for router in json.loads(run_tool("routers", "--json").stdout)}
        names -= {"soft-moe", "perft"}  # none of a layer
        seen = {line["point"]["router"] for line in report["lines"] if "point" in line}
        left_out = {entry["point"]["router"] for entry in report["left_out"]}
        self.assertEqual(seen | left_out, names)
        self.assertFalse(seen & left_out)
        self.assertLessEqual({"top-k", "expert-choice", "hash", "relu"}, seen)

    def test_every_suite_runs_at_a_small_scale(self):
        for suite, points in (("pack", 54), ("topk", 9), ("layer", 216), ("padding", 36),
                              ("strong-scaling", 32), ("weak-scaling", 32)):
            if SANITIZED and suite in ("layer", "weak-scaling"):  # grids of what the others measure
                continue
            done = run_tool("sweep", "--suite", suite, "--scale", 64, "--iterations", 1, "--warmup", 0,
                            "--json")
            self.assert_fine(done)
            lines = json.loads(done.stdout)["lines"]
            self.assert_each_point_once([line for line in lines if "point" in line], points)

    def test_a_point_that_is_refused_is_named_and_what_is_done_before_it_is_kept(self):
        grid, results = self.grid(num_tokens=[8, 12, 16], router="expert-choice:group=8"), f"{self.d}/r.jsonl"
        args = ["sweep", "--grid", grid, "--iterations", 1, "--warmup", 0]
        done = run_tool(*args, "--json", "--results", results)
        self.assert_one_line(done, 2, ["mine {", '"num_tokens":12', "group=8 of expert choice", "12 tokens"])
        self.assertEqual({line["point"]["num_tokens"] for line in json.loads(done.stdout)["lines"]}, {8})
        self.assertEqual({line["point"]["num_tokens"] for line in self.lines(results)[0]}, {8})
        done = run_tool(*args, "--results", results)
        self.assertIn("3 points, 1 of them done", done.stdout)
        self.assert_one_line(done, 2, ['"num_tokens":12', "group=8"])
        done = run_tool("sweep", "--grid", self.grid(num_tokens=4, top_k=[2, 9]))  # before any is measured
        self.assert_one_line(done, 2, ['"top_k":9', "--grid", "--top-k: 9 exceeds --experts 8"])

    def test_wrong_use_is_said(self):
        grid = self.grid(num_tokens=4)
        for args, words in (
                (["sweep"], ["--suite NAME", "--grid FILE"]),
                (["sweep", "--suite", "pack", "--grid", grid], ["both given"]),
                (["sweep", "--suite", "nothing"], ["'nothing'", "capacity"]),
                (["sweep", "--grid", f"{self.d}/none.json"], ["none.json"]),
                (["sweep", "--grid", grid, "--results", grid], ["--results", "--grid reads"]),
                (["sweep", "--suite", "pack", "--estimate", "--results", "x"], ["--estimate"]),
                (["sweep", "--estimate", "--samples", 5], ["--prompt is missing"]),
                (["sweep", "--samples", 5, "--prompt", 1, "--generate", 1, "--tokens-per-second", 1],
                 ["without --estimate"]),
                (["sweep", "--estimate", "--samples", 5, "--suite", "pack"], ["no --suite"]),
                (["sweep", "--grid", self.grid(num_tokens=4, colour=1)], ["'colour'", "num_tokens"])):
            self.assert_one_line(run_tool(*args), 2, words)
        with open(f"{self.d}/bad.jsonl", "w", encoding="utf-8") as file:
            file.write("nothing\n{}\n")
        self.assert_one_line(run_tool("sweep", "--grid", self.grid(num_tokens=4), "--results",
                                      f"{self.d}/bad.jsonl"), 2, ["--results", "line 1"])
        big = self.grid(num_tokens=1, experts=1048576, hidden=1048576, inner=1048576)
        self.assert_one_line(run_tool("sweep", "--grid", big), 2, ["mine", "more than the"])


if __name__ == "__main__":
    unittest.main()
