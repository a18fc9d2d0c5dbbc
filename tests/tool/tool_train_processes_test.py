"""train over processes: the bytes of ranks that are threads, one voice, and ranks that are killed."""

import json
import os
import resource
import shutil
import signal
import subprocess
import unittest

import tool_models_test
from tool_files_test import content_of, memory_limit, wait_until
from tool_mpi_test import ALLOW_ROOT
from tool_support import TOOL, run_tool

MEASURED = "tokens_per_s", "share"


class Launched(tool_models_test.TestWithModel):
    def args(self, output, steps=12, text=None):
        return [TOOL, "train", "--config", self.config, "--text", text or self.text, "--output",
                f"{self.d}/{output}", "--steps", str(steps), "--sequences", "4", "--threads", "1"]

    def bytes_of(self, output):
        """Checkpoints, and what of the log is no time."""
        folder = f"{self.d}/{output}"
        files = {os.path.relpath(path, folder): content
                 for path, content in content_of(folder).items() if "log.jsonl" not in path}
        self.assertTrue(files)
        return files, [{key: value for key, value in line.items() if key not in MEASURED}
                       for line in self.log(output)]

    def start_mpirun(self, ranks, args):
        return subprocess.Popen([os.environ["MPIEXEC"], "--oversubscribe", "-np", str(ranks),
                                 *map(str, args)], text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, env={**os.environ, **ALLOW_ROOT})

    def mpirun(self, ranks, args):
        process = self.start_mpirun(ranks, args)
        out, err = process.communicate(timeout=200)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    step = 0

    def start(self, args_of_ranks, limit_of_first=None):
        """Processes as srun starts them, which nobody ends for them."""
        Launched.step += 1
        ranks = len(args_of_ranks)
        slurm = {"SLURM_JOB_ID": f"train{os.getpid()}", "SLURM_STEP_ID": str(Launched.step),
                 "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_TASKS_PER_NODE": str(ranks)}
        return [subprocess.Popen(args, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 preexec_fn=limit_of_first if rank == 0 else None,
                                 env={**os.environ, **slurm, "SLURM_PROCID": str(rank),
                                      "SLURM_LOCALID": str(rank)})
                for rank, args in enumerate(args_of_ranks)]

    def assert_one_voice(self, processes, code, *words):
        said = [process.communicate(timeout=200) for process in processes]
        self.assertEqual([process.returncode for process in processes], len(said) * [code], said)
        self.assertEqual([err for _, err in said[1:]], (len(said) - 1) * [""])
        self.assertEqual(said[0][1].count("\n"), 1, said[0][1])
        for word in words:
            self.assertIn(word, said[0][1])

    def test_processes_write_the_bytes_of_threads_and_one_of_them_prints(self):
        for ranks in 1, 2, 4:
            more = ["--valid", self.held_out, "--save-every", "5", "--keep", "2"]
            threads = self.train(*more, "--ranks", ranks, output=f"threads{ranks}")
            self.assert_fine(threads)
            results = f"{self.d}/lines{ranks}.jsonl"
            done = self.mpirun(ranks, [*self.args(f"mpi{ranks}"), *more, "--results", results])
            self.assert_fine(done)
            self.assertEqual(self.bytes_of(f"mpi{ranks}"), self.bytes_of(f"threads{ranks}"))
            self.assertEqual(done.stdout.count("held out"), 1)
            self.assertEqual(done.stdout.count("12 steps in"), 1)
            with open(results, encoding="utf-8") as file:
                self.assertEqual(json.loads(file.read())["case"]["R"], ranks)

    def test_an_interrupt_saves_and_the_run_goes_on_with_the_same_bytes(self):
        self.assert_fine(self.train("--ranks", 2, steps=400, output="whole"))
        wanted, wanted_log = self.bytes_of("whole")
        # To one rank, or to mpirun, which tells all a second later, when the run may have ended; Open
        # MPI's own exit code is then 1.
        for how, code in ("srun", 130), ("mpirun", 1):
            run = self.args(how, 400)
            processes = (self.start(2 * [run]) if how == "srun" else
                         [self.start_mpirun(2, run)])
            wait_until(lambda log=f"{self.d}/{how}/log.jsonl": os.path.exists(log) and
                       os.path.getsize(log) > 0, processes[0])
            processes[-1].send_signal(signal.SIGINT)
            said = [process.communicate(timeout=100) for process in processes]
            self.assertEqual({process.returncode for process in processes}, {code}, said)
            self.assertEqual(len(os.listdir(f"{self.d}/{how}")), 2, said)  # the log, a checkpoint
            done = self.train("--resume", "--ranks", 2, steps=400, output=how)
            self.assert_fine(done)
            if how == "srun" or "steps were done before" not in done.stdout:
                self.assertIn("resumed behind step", done.stdout)
            files, log = self.bytes_of(how)
            self.assertEqual({name: files[name] for name in wanted}, wanted)
            self.assertEqual(log, wanted_log)

    def test_a_killed_rank_ends_the_others_in_time_and_the_run_goes_on_with_the_same_bytes(self):
        saves = ["--save-every", "8", "--keep", "1"]
        self.assert_fine(self.train("--ranks", 2, *saves, steps=160, output="whole"))
        for killed in 1, 0:
            run = [*self.args(f"run{killed}", 160), *saves]
            processes = self.start(2 * [[*run, "--timeout", "2000"]])
            wait_until(lambda log=f"{self.d}/run{killed}/log.jsonl": os.path.exists(log) and
                       len(self.log(f"run{killed}")) > 8, processes[0])
            processes[killed].kill()
            said = [process.communicate(timeout=60) for process in processes]
            self.assertEqual(processes[1 - killed].returncode, 3, said)
            for word in "timeout: ", f"waiting for rank {killed}":
                self.assertIn(word, said[1 - killed][1])
            self.assertEqual(len(self.checkpoints(f"run{killed}")), 1)
            self.assertLess(self.checkpoints(f"run{killed}"), self.checkpoints("whole"))
            again = self.start(2 * [[*run, "--resume"]])
            said = [process.communicate(timeout=200) for process in again]
            self.assertEqual([process.returncode for process in again], [0, 0], said)
            self.assertIn("resumed behind step", said[0][0])
            self.assertEqual(self.bytes_of(f"run{killed}"), self.bytes_of("whole"))

    def test_what_one_rank_meets_ends_all_with_one_message(self):
        other = self.file("other.txt", tool_models_test.made_text(20000, seed=2))
        run = self.args("run")
        self.assert_one_voice(self.start([run, self.args("run", text=other)]), 3,
                              "(rank 0)", "ranks disagree: rank 1 has fingerprint of the text=")
        missing = f"{self.d}/none.txt"
        self.assert_one_voice(self.start([self.args("run", text=missing), run]), 2,
                              "(rank 0)", missing)
        self.assert_one_voice(self.start([run, self.args("run", text=missing)]), 2,
                              "(rank 0)", "rank 1: ", missing)
        self.assertFalse(os.path.exists(f"{self.d}/run"))
        # A file of rank 0 may not grow, as on a full disk: less than a checkpoint, more than what
        # ranks share in memory.
        large = self.file("large.json", json.dumps(self.model(moe_intermediate_size=4096)))
        run[run.index(self.config)] = large
        limit = memory_limit(resource.RLIMIT_FSIZE, 10 << 20)
        if limit is not None:
            self.assert_one_voice(self.start(4 * [[*run, "--save-every", "1"]], limit), 3,
                                  "(rank 0)", "File too large")
            self.assertEqual(os.listdir(f"{self.d}/run"), ["log.jsonl"])
        run = self.args("run")
        # A run without a checkpoint begins again, once.
        self.assert_fine(self.mpirun(2, run))
        self.assert_one_voice(self.start(2 * [run]), 2, "(rank 0)", "has a run already")

    def test_every_process_reads_the_tokenizer(self):
        learn = ["tokenizer", "--vocab", 320, "--output"]
        done = run_tool(*learn, f"{self.d}/book.model", "--text", self.text)
        if "no sentencepiece" in done.stderr:
            self.skipTest("this build has no sentencepiece")
        self.assert_fine(done)
        self.assert_fine(run_tool(*learn, f"{self.d}/other.model", "--text", self.held_out))
        self.config = self.file("pieces.json", json.dumps(self.model(vocab_size=320)))
        takes = ["--valid", self.held_out, "--tokenizer", f"{self.d}/book.model"]
        self.assert_fine(self.train(*takes, "--ranks", 2, "--save-every", 6, output="threads"))
        wanted, wanted_log = self.bytes_of("threads")
        self.assertIn("step-000012/tokenizer.model", wanted)
        self.assert_fine(self.mpirun(2, [*self.args("mpi"), *takes, "--save-every", "6"]))
        self.assertEqual(self.bytes_of("mpi"), (wanted, wanted_log))
        # A run that goes on has it without being told.
        shutil.rmtree(f"{self.d}/mpi/step-000012")
        self.assert_fine(self.mpirun(2, [*self.args("mpi"), *takes[:2], "--save-every", "6",
                                         "--resume"]))
        self.assertEqual(self.bytes_of("mpi"), (wanted, wanted_log))
        run = [*self.args("new"), *takes]
        self.assert_one_voice(self.start([run, [*run[:-1], f"{self.d}/other.model"]]), 3,
                              "(rank 0)", "rank 1 has fingerprint of the tokenizer=")
        self.assert_one_voice(self.start([run, [*run[:-1], f"{self.d}/none"]]), 2,
                              "(rank 0)", "rank 1: ", f"{self.d}/none")
        self.assertFalse(os.path.exists(f"{self.d}/new"))

    def test_other_numbers_of_ranks_and_commands_without_ranks_are_refused(self):
        done = self.mpirun(2, [*self.args("run"), "--ranks", "3"])
        self.assertEqual(done.returncode, 2)
        self.assertIn("--ranks: 3 given, but mpirun has started 2", done.stderr)
        self.assert_fine(self.train())
        study = self.file("study.json", "{}")
        for command in (["evaluate", "--model", f"{self.d}/run", "--text", self.text],
                        ["generate", "--model", f"{self.d}/run", "--prompt", "a"],
                        ["study", study, "--output", f"{self.d}/study"]):
            done = self.mpirun(2, [TOOL, *command])
            self.assertEqual(done.returncode, 2)
            self.assertEqual(done.stdout, "")
            self.assertIn(f"--ranks: {command[0]} runs on one rank so far, not as 2 processes of "
                          "mpirun", done.stderr)


if __name__ == "__main__":
    unittest.main()
