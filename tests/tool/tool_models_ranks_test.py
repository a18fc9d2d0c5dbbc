"""train over ranks: the losses of one, and runs that change their number."""

import json
import os
import subprocess
import unittest

import tool_models_test
from tool_files_test import wait_until
from tool_support import TOOL, run_tool


class OverRanks(tool_models_test.TestWithModel):
    def losses(self, output):
        return [line["loss"] for line in self.log(output)]

    def assert_near(self, output, wanted):
        for loss, other in zip(self.losses(output), wanted, strict=True):
            self.assertAlmostEqual(loss, other, delta=1e-6)

    def test_any_number_of_ranks_has_the_losses_of_one(self):
        self.assert_fine(self.train("--valid", self.held_out, output="one"))
        wanted = self.losses("one")
        for ranks in 2, 4:
            results = f"{self.d}/lines{ranks}.jsonl"
            done = self.train("--ranks", ranks, "--valid", self.held_out, "--results", results,
                              output=f"r{ranks}")
            self.assert_fine(done)
            self.assertIn(f"{ranks} ranks, 1 thread", done.stdout)
            self.assert_near(f"r{ranks}", wanted)
            self.assertAlmostEqual(self.log(f"r{ranks}")[-1]["valid_loss"],
                                   self.log("one")[-1]["valid_loss"], delta=1e-6)
            with open(results, encoding="utf-8") as file:
                self.assertEqual(json.loads(file.read())["case"]["R"], ranks)
        estimates = [json.loads(self.train("--estimate", "--json", "--ranks", ranks).stdout)
                     for ranks in (1, 4)]
        self.assertLess(estimates[0]["estimate"]["bytes"], estimates[1]["estimate"]["bytes"])

    def test_a_killed_run_goes_on_with_another_number_of_ranks(self):
        self.assert_fine(self.train(steps=40, output="whole"))
        process = subprocess.Popen(
            [TOOL, "train", "--config", self.config, "--text", self.text, "--output",
             f"{self.d}/run", "--steps", "40", "--sequences", "4", "--threads", "1", "--ranks", "4",
             "--save-every", "2", "--keep", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_until(lambda: os.path.isdir(f"{self.d}/run/step-000004"), process)
        process.kill()
        process.communicate()
        self.assert_fine(run_tool("evaluate", "--model", f"{self.d}/run", "--text", self.held_out))
        done = self.train("--resume", "--ranks", 2, steps=40)
        self.assert_fine(done)
        self.assertIn("resumed behind step", done.stdout)
        self.assert_near("run", self.losses("whole"))


if __name__ == "__main__":
    unittest.main()
