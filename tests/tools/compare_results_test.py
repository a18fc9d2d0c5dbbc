"""What tools/compare_results.py says of result lines before and after a change."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

TOOL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools",
                    "compare_results.py")


class CompareResults(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.files = 0

    def lines(self, *times, program="grouped_gemm_bench"):
        """A file with one line for each time of the stages s0, s1, ..."""
        self.files += 1
        path = os.path.join(self.folder.name, f"{self.files}.jsonl")
        with open(path, "w") as file:
            for i, time in enumerate(times):
                file.write(json.dumps({"program": program, "stage": f"s{i}", "case": {"T": 1},
                                       "median_us": time}) + "\n")
        return path

    def compare(self, before, after, *more):
        return subprocess.run([sys.executable, TOOL, "--before", *before, "--after", *after, *more],
                              capture_output=True, text=True, check=False)

    def test_equal_times_are_not_slower(self):
        done = self.compare([self.lines(10, 20)], [self.lines(10.1, 20.2)])
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("2 times: 2 within 2%", done.stdout)

    def test_a_time_that_is_slower_in_every_run_fails_and_is_named_first(self):
        done = self.compare([self.lines(10, 20), self.lines(10.1, 20)],
                            [self.lines(10, 21), self.lines(10, 20.8)])
        self.assertEqual(done.returncode, 1)
        self.assertIn("! grouped_gemm_bench: s1", done.stdout.splitlines()[1])

    def test_a_slow_median_inside_the_spread_of_before_is_shown_but_does_not_fail(self):
        done = self.compare([self.lines(10), self.lines(11)], [self.lines(10.9), self.lines(10.9)])
        self.assertEqual(done.returncode, 0)
        self.assertIn("0 within 2%", done.stdout)

    def test_a_renamed_benchmark_is_compared_with_what_it_was(self):
        done = self.compare([self.lines(10, program="decode_bench")],
                            [self.lines(12, program="streaming_bench")])
        self.assertEqual(done.returncode, 1)

    def test_nothing_in_common_is_an_error(self):
        done = self.compare([self.lines(10, program="a")], [self.lines(10, program="b")])
        self.assertEqual(done.returncode, 2)
        self.assertIn("no time in common", done.stderr)


if __name__ == "__main__":
    unittest.main()
