"""study: several runs at a time are those of one at a time, and what is said of routers."""

import fcntl
import json
import math
import os
import shutil
import unittest

from tool_study_test import FromFileToFindings, TestBadStudy, TestWithStudy
from tool_support import run_tool

ARMS = FromFileToFindings.ARMS
del FromFileToFindings  # its tests are not run again


class SeveralAtATime(TestWithStudy):
    def run_jobs(self, jobs, output="out"):
        return run_tool("study", self.study, "--output", f"{self.d}/{output}", "--threads", jobs,
                        "--jobs", jobs)

    def test_several_at_a_time_are_those_one_by_one(self):
        self.write(arms=[{"name": "alone"}, *ARMS], reference="joint")
        self.assert_fine(self.run_study())
        at_once = self.run_jobs(4, "at-once")
        self.assert_fine(at_once)
        self.assertIn("4 runs at a time", at_once.stdout)
        self.assertEqual(self.weights("at-once"), self.weights())
        for key in "arms", "sentences", "runs":
            found, want = self.found("at-once")[key], self.found()[key]
            if key == "arms":
                for arm in (*found, *want):
                    for name in "seconds", "tokens_per_s":
                        arm.pop(name)
                    for point in arm["curve"]:
                        point.pop("seconds")
            self.assertEqual(found, want, key)

    def test_one_that_is_refused_ends_those_beside_it(self):
        os.mkdir(f"{self.d}/out")
        self.file("out/choice", "a file, where an arm's runs would lie")
        done = self.run_jobs(3)
        self.assert_one_line(done, 2, ["choice/tune-0.0", ": cannot make the directory"])
        before = self.finished()
        self.assertTrue(all("choice" not in run for run in before))
        os.remove(f"{self.d}/out/choice")
        self.assert_fine(self.run_study())
        self.assertLessEqual(before.items(), self.finished().items())


class OneProcessAtATime(TestWithStudy):
    def test_another_one_is_refused_and_may_ask_for_an_estimate(self):
        self.assert_fine(self.run_study("--only", "hash"))
        before = self.lines()
        held = os.open(f"{self.d}/out", os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        done = self.run_study()
        self.assert_one_line(done, 3, [f"{self.d}/out: another process runs a study there"])
        self.assertEqual(self.lines(), before)
        self.assert_fine(self.run_study("--estimate"))
        os.close(held)
        self.assert_fine(self.run_study())
        self.assertLessEqual(before.keys(), self.lines().keys())


class ArmsThatComeLater(TestWithStudy):
    def test_what_nobody_began_with_is_gone(self):
        base = ARMS[0]
        self.write(arms=[base], reference=base["name"], seeds=[1])
        self.assert_fine(self.run_study())
        tuned = [name for name in sorted(os.listdir(f"{self.d}/out/joint")) if "tune" in name]
        self.assertEqual(len(tuned), 2)
        for name in tuned:
            self.assertEqual(sorted(os.listdir(f"{self.d}/out/joint/{name}")),
                             ["log.jsonl", "result.json"])
        later = {"name": "later", "init": "joint"}
        self.write(arms=[base, later], reference="joint", seeds=[1])
        done = self.run_study()
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("whose weights went when no arm began with it", done.stderr)
        for name in tuned:  # as it says
            shutil.rmtree(f"{self.d}/out/joint/{name}")
        self.assert_fine(self.run_study())
        self.assertTrue(self.found()["runs"]["whole"])
        self.assertEqual({name.split("/")[1] for name in self.weights() if name.startswith("joint/")},
                         {*tuned, "seed-1"})


class TooMany(TestBadStudy):
    def test_more_than_there_are_places(self):
        self.refused(["--jobs 2", "1 thread"], *self.args("--jobs", 2))
        self.refused(["--jobs 2", "equal_time", "want 1"], "study",
                     self.write("timed.json", equal_time=True), "--output", f"{self.d}/new",
                     "--threads", 2, "--jobs", 2)


def uniform_drops(tokens, experts, top_k, factor):
    """Share that a capacity drops where each token has top_k of the experts, all alike: E (n - C)+ of a
    binomial (T, K / E), by hand."""
    room = math.ceil(factor * tokens * top_k / experts - 1e-9)
    p = top_k / experts
    each = [math.comb(tokens, n) * p**n * (1 - p)**(tokens - n) for n in range(tokens + 1)]
    return sum(max(0, n - room) * share for n, share in enumerate(each)) * experts / (tokens * top_k)


class OfRouters(TestWithStudy):
    ARMS = [{"name": "top-2", "router": "top-k:top-k=2"},
            {"name": "tight", "router": "top-k:top-k=2", "model": {"capacity_factor": 1.1}},
            {"name": "hash", "router": "hash:top-k=2", "model": {"balance": 0, "z": 0}},
            {"name": "dense", "model": {"first_dense": 1, "dense_inner": 16}}]

    def setUp(self):
        super().setUp()
        self.write(arms=self.ARMS)
        self.assert_fine(self.run_study())
        self.arms = {arm["name"]: arm for arm in self.found()["arms"]}

    def test_information_over_steps_and_at_the_end(self):
        lines = self.lines()
        for name, arm in self.arms.items():
            of = arm["information"]
            if name == "dense":
                self.assertEqual(set(of.values()), {None})
                continue
            ends = [lines[f"{name}/seed-{seed}"]["information"] for seed in (1, 2)]
            for key, value in of.items():
                self.assertAlmostEqual(value, sum(end[key] for end in ends) / 2, places=12)
            # A token says something of its experts, permuted ones nothing; nats of four experts.
            self.assertTrue(0.05 < of["trained"] <= math.log(4), (name, of))
            self.assertLess(abs(of["null"]), 0.02, name)
            curve = arm["curve"]
            self.assertEqual(len(curve), 3)
            self.assertTrue(all(isinstance(point["information"], float) for point in curve), name)
            # Where the model is that of the end, so is what it says.
            self.assertAlmostEqual(curve[-1]["information"], of["trained"], places=9)
        # A table by the byte knows no training.
        of = self.arms["hash"]["information"]
        self.assertEqual(of["trained"], of["untrained"])
        self.assertEqual(len({point["information"] for point in self.arms["hash"]["curve"]}), 1)
        self.assertNotEqual(self.arms["top-2"]["information"]["trained"],
                            self.arms["top-2"]["information"]["untrained"])

    def test_drops_stand_beside_those_of_uniform_loads(self):
        for name, arm in self.arms.items():
            if name != "tight":
                self.assertIsNone(arm["uniform_dropped"], name)
        self.assertAlmostEqual(self.arms["tight"]["uniform_dropped"],
                               uniform_drops(4 * 32, 4, 2, 1.1), places=12)
        self.assertGreater(self.arms["tight"]["dropped"], self.arms["tight"]["uniform_dropped"])

    def test_the_page_has_them(self):
        page = f"{self.d}/page.html"
        self.assert_fine(run_tool("report", f"{self.d}/out", "--output", page))
        with open(page, encoding="utf-8") as file:
            page = file.read()
        for word in ("What is paid for what", "Loss against operations", "nothing is better",
                     "What a token tells of its experts", "of untrained routers", "uniform loads would",
                     f"{self.arms['tight']['uniform_dropped']:.4f}",
                     f"{self.arms['hash']['information']['trained']:.3f}"):
            self.assertIn(word, page)
        # One that was made before they were has a page without them.
        study = self.found()
        for arm in study["arms"]:
            for key in "information", "uniform_dropped":
                arm.pop(key)
            for point in arm["curve"]:
                for key in "information", "information_null":
                    point.pop(key)
        self.file("out/study.json", json.dumps(study))
        self.assert_fine(run_tool("report", f"{self.d}/out", "--output", f"{self.d}/old.html"))

if __name__ == "__main__":
    unittest.main()
