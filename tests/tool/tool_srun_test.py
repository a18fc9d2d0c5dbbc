"""The tool as srun starts it: processes that find their rank in Slurm's variables."""

import filecmp
import json
import os
import subprocess
import unittest

from tool_support import TOOL, TestWithFolder, make_checkpoint, run_tool


class Launched(TestWithFolder):
    def launch(self, ranks, step, *args):
        """What each process has said, in order; all must end well."""
        slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": str(step),
                 "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_TASKS_PER_NODE": str(ranks)}
        processes = [subprocess.Popen([TOOL, *map(str, args)], text=True, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE,
                                      env={**os.environ, **slurm, "SLURM_PROCID": str(rank),
                                           "SLURM_LOCALID": str(rank)})
                     for rank in range(ranks)]
        said = [process.communicate(timeout=200) for process in processes]
        self.assertEqual([process.returncode for process in processes], ranks * [0], said)
        return [out for out, _ in said]

    def test_run_gives_the_bits_of_one_rank_and_prints_once(self):
        checkpoint = make_checkpoint(f"{self.d}/model", dtype="f32")
        run = ["run", "--checkpoint", checkpoint, "--tokens", self.tokens(), "--threads", 1,
               "--output"]
        self.assert_fine(run_tool(*run, f"{self.d}/alone.npy"))
        first, *others = self.launch(2, 0, *run, f"{self.d}/launched.npy", "--json", "--check")
        report = json.loads(first)
        self.assertEqual((report["ranks"], report["engine"]), (2, "mpi"))
        self.assertTrue(report["check"]["holds"])
        self.assertEqual(others, [""])
        self.assertTrue(filecmp.cmp(f"{self.d}/alone.npy", f"{self.d}/launched.npy",
                                    shallow=False))

    def test_verify_and_bench_print_once(self):
        first, *others = self.launch(3, 1, "verify", "--cases", 60, "--ranks", 3)
        self.assertIn("60 cases checked against the reference: all hold", first)
        self.assertEqual(others, ["", ""])
        first, *others = self.launch(3, 2, "verify", "--soak", 240, "--json")
        self.assertTrue(json.loads(first)["holds"])
        self.assertEqual(others, ["", ""])
        first, *others = self.launch(2, 3, "bench", "--hidden", 64, "--inner", 32, "--experts", 8,
                                     "--top-k", 2, "--num-tokens", 16, "--threads", 1,
                                     "--iterations", 3, "--json")
        self.assertEqual(json.loads(first)["lines"][0]["case"]["R"], 2)
        self.assertEqual(others, [""])


if __name__ == "__main__":
    unittest.main()
