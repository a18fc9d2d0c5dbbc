"""The examples. all2all_submission.py as the published harness drives it: workers that are used
again, a process group made and destroyed for each test, none at world size 1, and a worker that may
be another rank the next time. Over gloo, on CPU tensors. layer_over_ranks.py as a launcher starts
it."""

import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import types
import unittest
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = None

ROOT = Path(__file__).resolve().parents[2]
SUBMISSION = ROOT / "examples" / "python" / "all2all_submission.py"


def load_submission():
    spec = importlib.util.spec_from_file_location("submission", SUBMISSION)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_data(case, rank, later=False):
    """One rank's input, drawn as the benchmark describes it, and what must come out. In its later
    edition each expert has a weight of its own."""
    g = torch.Generator().manual_seed(case["seed"] + rank)
    top_k, hidden = case["experts_per_token"], case["hidden_dim"]
    tokens = int(torch.randint(1, case["max_num_tokens"], [1], generator=g))
    indices = torch.stack([torch.randperm(case["num_experts"], generator=g)[:top_k]
                           for _ in range(tokens)]).to(torch.int32)
    weights = torch.rand(tokens, top_k, generator=g)
    x = torch.randn(tokens, hidden, generator=g).to(torch.float16)
    experts, world = case["num_experts"], case["world_size"]
    factor = 1.0 + torch.arange(experts) * world // experts
    if later:
        factor = 4 * torch.randn(experts, generator=torch.Generator().manual_seed(case["seed"]))
    want = torch.zeros(tokens, hidden)
    for k in range(top_k):
        y = (x * factor[indices[:, k].long()].reshape(-1, 1)).to(torch.float16).float()
        want += weights[:, k:k + 1] * y
    config = types.SimpleNamespace(
        num_experts=case["num_experts"], experts_per_token=top_k, hidden_dim=hidden,
        max_num_tokens=case["max_num_tokens"], in_dtype=torch.float16, out_dtype=torch.float16)
    data = types.SimpleNamespace(num_tokens=tokens, indices=indices, weights=weights, x=x)
    if later:
        data.expert_local_weight = factor[experts * rank // world:experts * (rank + 1) // world]
    return config, data, want


def run_case(submission, case, rank, port):
    """What the harness does on one rank for one test: "" or what is wrong."""
    world = case["world_size"]
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                                world_size=world)
    try:
        # Half of what the check leaves room for, in the later edition a tenth.
        for variant, later, room in (("native", False, 0.5), ("flat", False, 0.5),
                                     ("bucketed", False, 0.5), ("native", True, 0.1)):
            os.environ["SWITCHYARD_VARIANT"] = variant
            config, data, want = make_data(case, rank, later)
            for _ in range(2):
                out = submission.custom_kernel((config, data, rank, world))
                if tuple(out.shape) != tuple(want.shape) or out.dtype != torch.float16:
                    return f"{variant}: {tuple(out.shape)} {out.dtype}"
                if not torch.allclose(out.float(), want, rtol=room * 1e-2, atol=room * 5e-3):
                    return f"{variant}: values differ by {(out.float() - want).abs().max()}"
        return ""
    except Exception as error:
        return repr(error)
    finally:
        if world > 1:
            dist.destroy_process_group()


def worker(tasks, results):
    torch.set_num_threads(1)
    submission = load_submission()
    while (task := tasks.get()) is not None:
        results.put(run_case(submission, *task))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@unittest.skipIf(torch is None, "torch is not installed")
class Submission(unittest.TestCase):
    def test_every_published_test_passes_with_every_interface(self):
        with open(ROOT / "data" / "all2all.json", encoding="utf-8") as file:
            spec = json.load(file)
        spawn = multiprocessing.get_context("spawn")
        queues = [spawn.Queue() for _ in range(8)]
        results = spawn.Queue()
        workers = [spawn.Process(target=worker, args=(queue, results)) for queue in queues]
        for process in workers:
            process.start()
        try:
            for number, case in enumerate(spec["tests_small"] + spec["tests"]):
                case = {key: value for key, value in case.items() if key != "note"}
                port, world = free_port(), case["world_size"]
                for rank in range(world):  # another worker is rank 0 in every test
                    queues[(rank + number) % 8].put((case, rank, port))
                with self.subTest(**case):
                    said = [results.get(timeout=200) for _ in range(world)]
                    self.assertEqual(said, [""] * world)
        finally:
            for queue in queues:
                queue.put(None)
            for process in workers:
                process.join(30)
                if process.is_alive():
                    process.kill()


@unittest.skipIf(torch is None, "torch is not installed")
class LayerOverRanks(unittest.TestCase):
    def test_one_call_and_its_steps_agree_alone_and_over_three_ranks(self):
        example = ROOT / "examples" / "python" / "layer_over_ranks.py"
        alone = {name: value for name, value in os.environ.items()
                 if name not in ("RANK", "WORLD_SIZE")}
        for world in 1, 3:
            where = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"} if world > 1 else {}
            ranks = [subprocess.Popen([sys.executable, example], text=True, stdout=subprocess.PIPE,
                                      env={**alone, **where, "RANK": str(rank)})
                     for rank in range(world)]
            self.check(world, "".join(process.communicate(timeout=120)[0] for process in ranks))

    def check(self, world, said):
        """What the ranks have printed, lines of several perhaps in one."""
        found = re.findall(rf"rank (\d) of {world} on \w+: 32 tokens, (\d+) rows for its experts, "
                           r"largest difference (\d\.\de[-+]\d\d)", said)
        self.assertEqual(sorted(int(rank) for rank, _, _ in found), list(range(world)), said)
        self.assertEqual(sum(int(rows) for _, rows, _ in found), world * 32 * 4)
        self.assertLess(max(float(difference) for _, _, difference in found), 1e-5)

    def test_the_same_program_runs_under_mpirun_and_srun(self):
        example = ROOT / "examples" / "python" / "layer_over_ranks.py"
        plain = {**os.environ, "OMP_NUM_THREADS": "1"}
        step = {**plain, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "7"}
        ranks = [subprocess.Popen([sys.executable, example], text=True, stdout=subprocess.PIPE,
                                  env={**step, "SLURM_PROCID": str(rank)}) for rank in range(2)]
        self.check(2, "".join(process.communicate(timeout=120)[0] for process in ranks))
        mpirun = shutil.which("mpirun")
        if mpirun is None:
            self.skipTest("no mpirun")
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        done = subprocess.run([mpirun, "-np", "3", sys.executable, str(example)], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**plain, **root},
                              timeout=120)
        if "without MPI" in done.stderr:
            self.skipTest("the library is built without MPI")
        self.check(3, done.stdout)


if __name__ == "__main__":
    unittest.main()
