"""The tool under mpirun: the same layer on processes."""

import filecmp
import json
import os
import subprocess
import unittest

from tool_support import TOOL, TestWithFolder, make_checkpoint, run_tool

ALLOW_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Launched(TestWithFolder):
    def launch(self, ranks, *args):
        return subprocess.run([os.environ["MPIEXEC"], "--oversubscribe", "-np", str(ranks), TOOL,
                               *map(str, args)], capture_output=True, text=True, timeout=200,
                              env={**os.environ, **ALLOW_ROOT}, check=False)

    def test_processes_give_the_bits_of_one_rank_and_rank_0_reports(self):
        checkpoint = make_checkpoint(f"{self.d}/model", dtype="f32")
        run = ["run", "--checkpoint", checkpoint, "--tokens", self.tokens(), "--threads", 1,
               "--output"]
        self.assert_fine(run_tool(*run, f"{self.d}/alone.npy"))
        done = self.launch(2, *run, f"{self.d}/launched.npy", "--json", "--check")
        self.assert_fine(done)
        report = json.loads(done.stdout)
        self.assertEqual((report["ranks"], report["engine"]), (2, "mpi"))
        self.assertTrue(report["check"]["holds"])
        self.assertTrue(filecmp.cmp(f"{self.d}/alone.npy", f"{self.d}/launched.npy",
                                    shallow=False))

    def test_bench_measures_on_processes(self):
        done = self.launch(2, "bench", "--hidden", 64, "--inner", 32, "--experts", 8, "--top-k", 2,
                           "--num-tokens", 16, "--threads", 1, "--iterations", 3, "--json")
        self.assert_fine(done)
        lines = json.loads(done.stdout)["lines"]
        self.assertIn("exchange", [line["stage"] for line in lines])
        self.assertEqual(lines[0]["case"]["engine"], "mpi")

    def test_exchanges_are_measured_on_processes_beside_mpi_itself(self):
        done = self.launch(2, "bench", "--suite", "all2all", "--scale", 64, "--iterations", 2,
                           "--warmup", 1, "--variant", "native,bucketed", "--peer", "mpi", "--json")
        self.assert_fine(done)
        lines = json.loads(done.stdout)["lines"]
        self.assertEqual({line["case"]["R"] for line in lines}, {1, 2})
        self.assertEqual({line["case"]["engine"] for line in lines}, {"mpi"})
        peers = [line["peers"]["mpi"] for line in lines
                 if line["stage"] == "dispatch+combine" and line["variant"] == "native"
                 and line["case"]["R"] == 2]
        self.assertEqual(len(peers), 1 + 9 + 2 * 5 + 1)  # a small test, tests, benchmarks, the bar
        self.assertTrue(all(us > 0 for us in peers))

    def test_the_fixed_size_findings_are_all_tested_beside_mpi(self):
        done = self.launch(2, "bench", "--suite", "fixed-size", "--scale", 64, "--iterations", 2,
                           "--warmup", 1, "--peer", "mpi", "--json")
        self.assert_fine(done)
        out = json.loads(done.stdout)
        self.assertTrue(all(line["peers"]["mpi"] > 0 for line in out["lines"]))
        self.assertNotIn("not tested", [finding["verdict"] for finding in out["findings"]])

    def test_verify_runs_its_cases_on_processes_and_prints_once(self):
        done = self.launch(4, "verify", "--cases", 120)
        self.assert_fine(done)
        self.assertEqual(done.stdout, "120 cases checked against the reference: all hold\n")

    def test_a_case_that_fails_on_purpose_is_an_error_on_all_processes_and_they_go_on(self):
        # Every 200th case has a NaN or an id out of range: the ranks leave, recover and go on.
        done = self.launch(3, "verify", "--cases", 600, "--ranks", "3", "--json")
        self.assert_fine(done)
        self.assertEqual(json.loads(done.stdout), {"cases": 600, "holds": True, "seed": 17})

    def test_faults_of_processes_end_in_time_and_the_next_exchange_is_right(self):
        for fault in "throw", "late", "corrupt-count":
            done = self.launch(3, "verify", "--fault", fault, "--ranks", 3)
            self.assert_fine(done)
            self.assertEqual(done.stdout.count("the next exchange is right on every rank"), 1)

    def test_many_exchanges_of_processes_are_right_and_take_no_more_memory(self):
        done = self.launch(3, "verify", "--soak", 2400)
        self.assert_fine(done)
        self.assertRegex(done.stdout, r"\A2400 exchanges over 24 shapes on 3 ranks: every bit is "
                                      r"right; memory .*\n\Z")

    def test_verify_refuses_more_ranks_than_processes(self):
        done = self.launch(2, "verify", "--ranks", "2,3")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--ranks: 3 given, but mpirun has started 2", done.stderr)

    def test_another_number_of_ranks_than_was_launched_is_refused(self):
        checkpoint = make_checkpoint(f"{self.d}/model")
        done = self.launch(2, "run", "--checkpoint", checkpoint, "--tokens", self.tokens(),
                           "--ranks", 3)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--ranks: 3 given, but mpirun has started 2", done.stderr)


if __name__ == "__main__":
    unittest.main()
