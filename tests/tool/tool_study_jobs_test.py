"""study --jobs: several runs at a time are those of one at a time."""

import os
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
        self.assert_one_line(done, 2, ["choice/tune-0.01: cannot make the directory"])
        before = self.finished()
        self.assertTrue(all("choice" not in run for run in before))
        os.remove(f"{self.d}/out/choice")
        self.assert_fine(self.run_study())
        self.assertLessEqual(before.items(), self.finished().items())


class TooMany(TestBadStudy):
    def test_more_than_there_are_places(self):
        self.refused(["--jobs 2", "1 thread"], *self.args("--jobs", 2))
        self.refused(["--jobs 2", "equal_time", "want 1"], "study",
                     self.write("timed.json", equal_time=True), "--output", f"{self.d}/new",
                     "--threads", 2, "--jobs", 2)


if __name__ == "__main__":
    unittest.main()
