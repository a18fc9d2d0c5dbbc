"""The package on CUDA tensors: the published all-to-all by every variant against plain torch, graphs
that are replayed with other routing, calls on another stream, and the layer. One process at first;
then two and four processes, each with a GPU, or two that share the only one (SWITCHYARD_TEST_WORLDS
names other numbers). Skipped without torch and a GPU."""

import json
import multiprocessing
import os
import queue
import time
import types
import unittest
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = None

import switchyard as sw

from gpu_checks import GPUS, check_layer, check_stages, require
from near import furthest
from test_submission import free_port, load_submission, make_data

ROOT = Path(__file__).resolve().parents[2]


def cases_for(world):
    with open(ROOT / "data" / "all2all.json", encoding="utf-8") as file:
        spec = json.load(file)
    cases = [c for c in spec["tests_small"] if c["world_size"] == world] + spec["tests"]
    return [dict(c, world_size=world) for c in cases
            if c["num_experts"] >= world]


def to_gpu(data, device):
    return types.SimpleNamespace(
        num_tokens=data.num_tokens, x=data.x.to(device), indices=data.indices.to(device),
        weights=data.weights.to(device))


def close(out, want, what):
    out = out.float().cpu()
    require(out.shape == want.shape, what, tuple(out.shape), tuple(want.shape))
    require(torch.allclose(out, want, rtol=1e-2, atol=5e-3), what, "values differ by",
            (out - want).abs().max() if out.numel() else "")


def stand_in(rows, rank):
    return (rows * (1 + rank)).to(rows.dtype)


def round_trip(ep, d_in, rank, **options):
    """By the native interface, on all rows that there can be: nothing waits for the host."""
    d = ep.dispatch(d_in.x, d_in.indices, d_in.weights, **options)
    d = d.wait() if options else d
    y = ep.combine(stand_in(d.x[d.row_x.long()], rank), d, **options)
    return y.wait() if options else y


def flat_trip(ep, d_in, rank):
    d = ep.dispatch_flat(d_in.x, d_in.indices, d_in.weights)
    return ep.combine_flat(stand_in(d.x, rank), d)


def bucketed_trip(ep, d_in, rank):
    num, x, meta = ep.dispatch_bucketed(d_in.x, d_in.indices, d_in.weights)
    out = torch.empty_like(d_in.x)
    return ep.combine_bucketed(out, d_in.weights, meta, stand_in(x, rank), num)


def make_exchange(comm, case, device, **options):
    return sw.ExpertParallel(comm, num_experts=case["num_experts"],
                             top_k=case["experts_per_token"], hidden=case["hidden_dim"],
                             max_tokens=case["max_num_tokens"], dtype="f16", device=device,
                             timeout_s=30, **options)


# What follows runs on every rank; `comm` is its communicator.


def check_published(comm, device):
    """Every published test, through the example and by each interface directly."""
    submission = load_submission()
    for case in cases_for(comm.size):
        config, data, want = make_data(case, comm.rank)
        data = to_gpu(data, device)
        for variant in ("native", "flat", "bucketed"):
            os.environ["SWITCHYARD_VARIANT"] = variant
            for _ in range(2):
                out = submission.custom_kernel((config, data, comm.rank, comm.size))
                close(out, want, f"{variant} {case}")
    submission._kept.clear()  # all ranks give memory back together


def check_modes(comm, device):
    """Both modes, other streams, fewer receiving rows than places, nobody's tokens."""
    case = cases_for(comm.size)[3]
    _, data, want = make_data(case, comm.rank)
    data = to_gpu(data, device)
    bits = {}
    for mode in ("throughput", "low-latency"):
        ep = make_exchange(comm, case, device, mode=mode)
        for _ in range(3):
            y = round_trip(ep, data, comm.rank)
            close(y, want, mode)
        bits[mode] = y.clone()
        close(round_trip(ep, data, comm.rank, async_=True), want, f"{mode}, another stream")
        with torch.cuda.stream(torch.cuda.Stream(device)):
            close(round_trip(ep, data, comm.rank), want, f"{mode}, the caller's stream")
        none = types.SimpleNamespace(x=data.x[:0], indices=data.indices[:0],
                                     weights=data.weights[:0])
        y = round_trip(ep, none, comm.rank)
        torch.cuda.synchronize(device)
        require(tuple(y.shape) == (0, case["hidden_dim"]), "no tokens", tuple(y.shape))
        ep.check()
        del ep
    require(torch.equal(bits["throughput"], bits["low-latency"]), "modes differ in bits")


def check_views(comm, device):
    """What a dispatch gives, row by row: index lists of the native one, meta of the others."""
    case = cases_for(comm.size)[3]
    _, data, _ = make_data(case, comm.rank)
    data = to_gpu(data, device)
    first = comm.rank * case["num_experts"] // comm.size
    top_k = case["experts_per_token"]
    everybody = [make_data(case, r)[1] for r in range(comm.size)]
    want = {}  # local expert -> rows in the order source, token, k
    flat = []
    for source, other in enumerate(everybody):
        for t in range(other.num_tokens):
            for k in range(top_k):
                e = int(other.indices[t, k])
                if e * comm.size // case["num_experts"] == comm.rank:
                    want.setdefault(e - first, []).append((source, t, k))
                    flat.append((source, t, k, e))
    ep = make_exchange(comm, case, device)

    d = ep.dispatch(data.x, data.indices, data.weights)
    begin = d.expert_begin.tolist()
    row_x = d.row_x.tolist()
    for local in range(len(begin) - 1):
        rows = want.get(local, [])
        require(begin[local + 1] - begin[local] == len(rows), "rows of expert", local)
        for i, (source, t, k) in enumerate(rows):
            row = row_x[begin[local] + i]
            require(torch.equal(d.x[row].cpu(), everybody[source].x[t]), "row", local, i)
            require(float(d.row_weight[begin[local] + i]) == float(everybody[source].weights[t, k]),
                    "weight", local, i)
    ep.combine(stand_in(d.x[d.row_x.long()], comm.rank), d)

    d = ep.dispatch_flat(data.x, data.indices, data.weights)
    require(int(d.num_rows) == len(flat), "flat rows", int(d.num_rows), len(flat))
    meta = d.meta.tolist()
    for i, (source, t, k, e) in enumerate(flat):
        require(meta[i] == [t * top_k + k, e], "flat meta", i, meta[i])
        require(torch.equal(d.x[i].cpu(), everybody[source].x[t]), "flat row", i)
    require(all(m == [-1, -1] for m in meta[len(flat):]), "meta behind the last row")
    ep.combine_flat(d.x, d)

    num, x, given = ep.dispatch_bucketed(data.x, data.indices, data.weights)
    meta = given.cpu()
    for local, rows in enumerate(num.tolist()):
        require(rows == len(want.get(local, [])), "bucket", local, rows)
        for i, (source, t, k) in enumerate(want.get(local, [])):
            require(meta[local, i].tolist() == [first + local, source, t, k, 0], "bucket meta")
            require(torch.equal(x[local, i].cpu(), everybody[source].x[t]), "bucket row")
        require(bool((meta[local, rows:] == -1).all()), "meta behind a bucket's rows")
    ep.combine_bucketed(torch.empty_like(data.x), data.weights, given, x, num)
    torch.cuda.synchronize(device)
    ep.check()


def check_graph(comm, device):
    """A captured round trip, replayed a hundred times with other routing."""
    case = dict(cases_for(comm.size)[3])
    for mode, trip in (("throughput", round_trip), ("low-latency", round_trip),
                       ("auto", flat_trip), ("auto", bucketed_trip)):
        ep = make_exchange(comm, case, device, mode=mode)
        _, data, _ = make_data(case, comm.rank)
        data = to_gpu(data, device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            trip(ep, data, comm.rank)
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = trip(ep, data, comm.rank)
        for replay in range(100):
            g = torch.Generator().manual_seed(1000 * replay + comm.rank)
            tokens = data.num_tokens
            indices = torch.rand(tokens, case["num_experts"], generator=g).argsort(1)
            data.indices.copy_(indices[:, :case["experts_per_token"]].to(torch.int32))
            data.weights.copy_(torch.rand(data.weights.shape, generator=g))
            graph.replay()
            if replay % 10 not in (0, 9):
                continue
            owner = data.indices.cpu() * comm.size // case["num_experts"]
            x, weight = data.x.cpu(), data.weights.cpu()
            want = torch.zeros(x.shape)
            for k in range(case["experts_per_token"]):
                want += weight[:, k:k + 1] * (x * (1 + owner[:, k:k + 1])).to(x.dtype).float()
            close(y, want, f"{mode} {trip.__name__} replay {replay}")
        ep.check()
        del ep


def check_wires(comm, device):
    """An fp8 wire gives values with scales, a limited window counts what it drops, capacity too."""
    case = cases_for(comm.size)[5]
    _, data, want = make_data(case, comm.rank)
    data = to_gpu(data, device)
    ep = make_exchange(comm, case, device, dispatch_wire="fp8")
    d = ep.dispatch(data.x, data.indices, data.weights)
    hidden = case["hidden_dim"]
    require(tuple(d.scale.shape) == (d.x.shape[0], (hidden + 127) // 128), "scales")
    scale = d.scale.repeat_interleave(128, dim=1)[:, :hidden]
    rows = (d.x.float() * scale).to(torch.float16)
    y = ep.combine(stand_in(rows[d.row_x.long()], comm.rank), d)
    # An element of e4m3 is off by 2^-4 of itself at most, and so is a sum of K of them at most.
    error, place = furthest(y, want)
    require(error < 0.07, "fp8 wire: relative error", error, "at", place)
    ep = make_exchange(comm, case, device, mode="throughput", max_recv_rows=1)
    d = ep.dispatch(data.x, data.indices, data.weights)
    ep.combine(stand_in(d.x[d.row_x.long()], comm.rank), d)
    require(int(d.num_rows) <= 1 and int(d.num_rows) + int(d.dropped_rows) > 1, "dropped",
            int(d.num_rows), int(d.dropped_rows))
    ep = make_exchange(comm, case, device, capacity_factor=0.25)
    d = ep.dispatch(data.x, data.indices, data.weights)
    ep.combine(stand_in(d.x[d.row_x.long()], comm.rank), d)
    # Of every source an expert takes max(1, ceil(T*K/(4E))) assignments.
    counts = (d.expert_begin[1:] - d.expert_begin[:-1]).tolist()
    most = sum(max(1, -(-make_data(case, r)[1].num_tokens * case["experts_per_token"]
                        // (4 * case["num_experts"]))) for r in range(comm.size))
    require(max(counts) <= most, "capacity", max(counts), most)


def check_errors(comm, device):
    """Errors by name, and an object that goes on after them."""
    case = cases_for(comm.size)[3]
    _, data, want = make_data(case, comm.rank)
    ep = make_exchange(comm, case, device)
    cpu = data
    data = to_gpu(data, device)

    def refused(call, *words):
        try:
            call()
        except sw.SwitchyardError as error:
            require(all(word in str(error) for word in words), words, error)
            return error.code  # the error itself would keep the frame, and with it the exchange
        raise AssertionError(f"not refused: {words}")

    refused(lambda: ep.dispatch(cpu.x, cpu.indices, cpu.weights), "x lies on")
    refused(lambda: ep.dispatch(data.x.float()[:, ::2], data.indices, data.weights), "x")
    d = ep.dispatch(data.x, data.indices, data.weights)
    refused(lambda: ep.combine(d.x[:, :8], d), "rows")
    ep.combine(stand_in(d.x[d.row_x.long()], comm.rank), d)
    old = d
    d = ep.dispatch(data.x, data.indices, data.weights)
    refused(lambda: ep.combine(d.x, old), "earlier dispatch")
    ep.combine(stand_in(d.x[d.row_x.long()], comm.rank), d)
    torch.cuda.synchronize(device)

    bad = data.indices.clone()
    if comm.rank == 0:
        bad[0, 0] = case["num_experts"]
    d = ep.dispatch(data.x, bad, data.weights)
    torch.cuda.synchronize(device)
    if comm.rank == 0:  # the others may have seen all that they waited for before they are told
        code = refused(ep.check, "expert")
        require(code == "invalid argument", code)
    comm.recover()
    close(round_trip(ep, data, comm.rank), want, "after recover()")

    # A weight that is not a number makes its token so, and no other.
    data.weights[0, 1] = float("nan")
    for trip in (round_trip, flat_trip, bucketed_trip):
        for _ in range(2):
            y = trip(ep, data, comm.rank).clone()
            require(bool(y[0].isnan().all()), trip.__name__, "NaN")
            close(y[1:], want[1:], trip.__name__ + " beside NaN")
    torch.cuda.synchronize(device)
    ep.check()


CHECKS = (check_stages, check_published, check_modes, check_views, check_graph, check_wires,
          check_errors, check_layer)


def rank_main(rank, world, port, results):
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))  # not all cores for each rank
    backend = "nccl" if GPUS >= world else "gloo"
    name = "setting up"
    try:
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                                world_size=world)
        comm = sw.Communicator.from_torch()
        for check in CHECKS:
            name = check.__name__
            start = time.monotonic()
            check(comm, device)
            torch.cuda.synchronize(device)
            dist.barrier()
            results.put((rank, name, "", time.monotonic() - start))
        dist.destroy_process_group()
    except BaseException as error:  # told to the test
        results.put((rank, name, repr(error), 0))


@unittest.skipIf(GPUS == 0, "no torch with a GPU")
class OneProcess(unittest.TestCase):
    def setUp(self):
        self.comm = sw.Communicator.threads(1)[0]
        self.device = torch.device("cuda", 0)


def _one_process(check):
    def test(self):
        check(self.comm, self.device)

    return test


for _check in CHECKS:
    setattr(OneProcess, _check.__name__.replace("check", "test"), _one_process(_check))


@unittest.skipIf(GPUS == 0, "no torch with a GPU")
class Processes(unittest.TestCase):
    def test_ranks_as_processes(self):
        default = "2,4" if GPUS >= 4 else "2"
        for world in map(int, os.environ.get("SWITCHYARD_TEST_WORLDS", default).split(",")):
            with self.subTest(world=world):
                self.run_world(world)

    def run_world(self, world):
        if GPUS < world:  # a layer asks for it where ranks share a GPU
            os.environ["CUDA_MODULE_LOADING"] = "EAGER"
        spawn = multiprocessing.get_context("spawn")
        results = spawn.Queue()
        port = free_port()
        ranks = [spawn.Process(target=rank_main, args=(rank, world, port, results))
                 for rank in range(world)]
        for process in ranks:
            process.start()
        wrong = []
        try:
            for _ in range(world * len(CHECKS)):
                try:
                    rank, name, said, seconds = results.get(timeout=10 if wrong else 60)
                except queue.Empty:  # where one rank has failed the others may wait for it
                    wrong.append((-1, "waiting", "no rank says anything any more"))
                    break
                if rank == 0 or said:
                    print(f"  {world} ranks, {name}: {said or 'holds'} (rank {rank}, "
                          f"{seconds:.1f} s)", flush=True)
                if said:
                    wrong.append((rank, name, said))
                    if len(wrong) == world:
                        break
        finally:
            for process in ranks:
                process.join(1 if wrong else 20)
                if process.is_alive():
                    process.kill()
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
