"""Dispatch and combine by all three interfaces, on threads and processes, against numpy."""

import multiprocessing
import os
import tempfile
import threading
import time
import unittest

import numpy as np

import switchyard as sw

from rank_threads import on_threads

try:
    import torch
except ImportError:
    torch = None

E, K, H, R, T = 10, 3, 24, 4, 7


class Data:
    """A rank's tokens; rank 1 has none. Whole numbers, so that every sum is exact."""

    def __init__(self, rank, seed=0):
        g = np.random.default_rng(100 * seed + rank)
        tokens = 0 if rank == 1 else T - rank
        self.x = g.integers(-8, 9, (tokens, H)).astype(np.float32)
        self.expert = np.array([g.permutation(E)[:K] for _ in range(tokens)],
                               dtype=np.int32).reshape(tokens, K)
        self.weight = g.integers(1, 5, (tokens, K)).astype(np.float32)
        if tokens:
            self.expert[0, 0] = -1

    def want(self, weight=None):
        """Expert e gives x * (e + 1)."""
        weight = self.weight if weight is None else weight
        factor = ((self.expert + 1) * weight).sum(axis=1, keepdims=True)
        return self.x * factor


def first_expert(rank, num_ranks=R):
    return rank * E // num_ranks


def exchange(comm, **options):
    return sw.ExpertParallel(comm, num_experts=E, top_k=K, hidden=H, max_tokens=T,
                             **{"dtype": "f32", **options})


def native_results(d, rank):
    local = np.repeat(np.arange(len(d.expert_begin) - 1), np.diff(d.expert_begin))
    return d.x[d.row_x] * (first_expert(rank) + local + 1).astype(np.float32)[:, None]


class Interfaces(unittest.TestCase):
    def test_native_gives_the_weighted_sum_and_num_rows_as_an_array(self):
        def body(rank, comm):
            data, ep = Data(rank), exchange(comm)
            d = ep.dispatch(data.x, data.expert, data.weight)
            self.assertEqual((d.num_rows.shape, d.num_rows[0]), ((1,), d.x.shape[0]))
            np.testing.assert_array_equal(ep.combine(native_results(d, rank), d), data.want())
        on_threads(body, R)

    def test_flat_rows_lie_in_source_token_k_order_with_their_meta(self):
        def body(rank, comm):
            data, ep = Data(rank), exchange(comm)
            d = ep.dispatch_flat(data.x, data.expert, data.weight)
            rows, meta = [], []
            for source in range(R):
                other = Data(source)
                for (t, k), e in np.ndenumerate(other.expert):
                    if first_expert(rank) <= e < first_expert(rank + 1):
                        rows.append(other.x[t])
                        meta.append((t * K + k, e))
            np.testing.assert_array_equal(d.x, np.array(rows).reshape(-1, H))
            np.testing.assert_array_equal(d.meta, np.array(meta).reshape(-1, 2))
            y = ep.combine_flat(d.x * (d.meta[:, 1:] + 1).astype(np.float32), d)
            np.testing.assert_array_equal(y, data.want())
        on_threads(body, R)

    def test_buckets_and_meta_are_as_published_and_other_weights_count_in_combine(self):
        def body(rank, comm):
            data, ep = Data(rank), exchange(comm)
            for capacity in (None, 16):
                num, x, meta = ep.dispatch_bucketed(data.x, data.expert, data.weight, capacity)
                local = first_expert(rank + 1) - first_expert(rank)
                self.assertEqual(x.shape, (local, capacity or T * R, H))
                self.assertEqual(meta.shape, (local, capacity or T * R, 5))
                y = np.zeros_like(x)
                for e, rows in enumerate(num):
                    for expert, source, token, k, _ in meta[e, :rows]:
                        self.assertEqual(expert, first_expert(rank) + e)
                        self.assertEqual(Data(source).expert[token, k], expert)
                    sources = [tuple(entry[1:4]) for entry in meta[e, :rows]]
                    self.assertEqual(sources, sorted(sources))
                    for c in range(rows):
                        np.testing.assert_array_equal(x[e, c], Data(meta[e, c, 1]).x[meta[e, c, 2]])
                    y[e, :rows] = x[e, :rows] * (first_expert(rank) + e + 1)
                out = np.full((T, H), 7, dtype=np.float32)
                got = ep.combine_bucketed(out, 2 * data.weight, meta, y, num)
                np.testing.assert_array_equal(got, data.want(2 * data.weight))
                self.assertTrue((out[len(data.x):] == 7).all())
                with self.assertRaisesRegex(sw.SwitchyardError, "expert_meta is not"):
                    ep.combine_bucketed(out, data.weight, meta.copy(), y, num)
        on_threads(body, R)

    def test_rows_of_an_earlier_dispatch_and_unknown_devices_are_refused(self):
        def body(rank, comm):
            with self.assertRaisesRegex(sw.SwitchyardError, "neither cpu nor cuda"):
                exchange(comm, device="gpu")
            data = Data(rank)
            ep = exchange(comm, device="cpu")
            old = ep.dispatch(data.x, data.expert, data.weight)
            ep.combine(old.x[old.row_x], old)
            new = ep.dispatch(data.x, data.expert, data.weight)
            with self.assertRaisesRegex(sw.SwitchyardError, "earlier dispatch"):
                ep.combine(new.x[new.row_x], old)
            ep.combine(new.x[new.row_x], new)
            ep.check()
        on_threads(body, R)

    def test_a_result_is_there_until_the_second_following_dispatch_and_stale_then(self):
        everybody = threading.Barrier(R)

        def body(rank, comm):
            data, ep = Data(rank), exchange(comm)
            first = ep.dispatch(data.x, data.expert, data.weight)
            kept = [view.copy() for view in (first.x, first.row_x, first.row_weight,
                                             first.expert_begin)]
            ep.dispatch_flat(data.x, data.expert, data.weight)  # elsewhere
            ep.dispatch(-data.x, data.expert[:, ::-1].copy(), 2 * data.weight)
            everybody.wait()
            for view, before in zip((first.x, first.row_x, first.row_weight, first.expert_begin),
                                    kept):
                np.testing.assert_array_equal(view, before)
            ep.dispatch(-data.x, data.expert, data.weight)
            for name in ("x", "row_x", "row_weight", "expert_begin", "num_rows"):
                with self.assertRaisesRegex(sw.SwitchyardError, f"{name} is stale"):
                    getattr(first, name)
            flat = ep.dispatch_flat(data.x, data.expert, data.weight)
            self.assertEqual(flat.meta.shape[1], 2)
            ep.dispatch_flat(data.x, data.expert, data.weight)
            with self.assertRaisesRegex(sw.SwitchyardError, "meta is stale"):
                flat.meta
            with self.assertRaisesRegex(AttributeError, "no rows"):
                first.rows
        on_threads(body, R)

    def test_a_weight_that_is_no_number_is_an_error_that_names_its_token(self):
        comm = sw.Communicator.threads(1)[0]
        ep = exchange(comm)
        x, expert = np.ones((3, H), np.float32), np.zeros((3, K), np.int32)
        weight = np.ones((3, K), np.float32)
        weight[1, 2] = np.nan
        for call in (ep.dispatch, ep.dispatch_flat, ep.dispatch_bucketed):
            with self.assertRaisesRegex(sw.SwitchyardError, "token 1 has a NaN weight"):
                call(x, expert, weight)
            comm.recover()

    def test_a_bucket_that_is_too_small_is_an_error_that_names_the_expert(self):
        def body(rank, comm):
            ep = exchange(comm, timeout_s=20)
            x, expert = np.ones((2, H), np.float32), np.full((2, K), 5, np.int32)
            weight = np.ones((2, K), np.float32)
            with self.assertRaisesRegex(sw.SwitchyardError, "expert 5 gets 12 rows"):
                ep.dispatch_bucketed(x, expert, weight, capacity=11)
            comm.recover()
            num, _, _ = ep.dispatch_bucketed(x, expert, weight, capacity=12)
            self.assertEqual(num.sum(), 12 if rank == 1 else 0)
        on_threads(body, 2)

    def test_capacity_drops_before_anything_is_sent(self):
        def body(rank, comm):
            ep = sw.ExpertParallel(comm, num_experts=2, top_k=1, hidden=H, max_tokens=4,
                                   dtype="f32", capacity_factor=1.0, drop_policy="probs")
            weight = np.array([[1], [4], [3], [2]], dtype=np.float32)
            x = np.ones((4, H), np.float32)
            d = ep.dispatch(x, np.zeros((4, 1), np.int32), weight)
            self.assertEqual(d.num_rows[0], 4 if rank == 0 else 0)  # 2 slots per source
            y = ep.combine(d.x[d.row_x], d)
            np.testing.assert_array_equal(y[:, 0], [0, 4, 3, 0])
        on_threads(body, 2)

    def test_bad_values_are_errors_that_name_them(self):
        comm = sw.Communicator.threads(1)[0]
        for options, words in (({"mode": "fast"}, "mode='fast'"), ({"ctas": 0}, "ctas=0"),
                               ({"drop_policy": "coin"}, "drop_policy='coin'"),
                               ({"dtype": "f64"}, "dtype='f64'")):
            with self.assertRaisesRegex(sw.SwitchyardError, words):
                exchange(comm, **options)
        ep = exchange(comm)
        d = ep.dispatch_flat(np.ones((1, H), np.float32), np.zeros((1, K), np.int32),
                             np.ones((1, K), np.float32))
        with self.assertRaisesRegex(sw.SwitchyardError, "another"):
            exchange(comm).combine_flat(d.x, d)
        with self.assertRaisesRegex(sw.SwitchyardError, "dimension 0 is 2"):
            ep.combine_flat(np.ones((2, H), np.float32), d)
        with self.assertRaisesRegex(sw.SwitchyardError, "capacity=-1"):
            ep.dispatch_bucketed(np.ones((1, H), np.float32), np.zeros((1, K), np.int32),
                                 np.ones((1, K), np.float32), capacity=-1)


class Asynchronous(unittest.TestCase):
    def test_calls_in_another_thread_keep_their_order_and_give_the_same(self):
        def body(rank, comm):
            data, ep = Data(rank), exchange(comm)
            for _ in range(10):
                d = ep.dispatch(data.x, data.expert, data.weight, async_=True).wait()
                y = ep.combine(native_results(d, rank), d, async_=True)
                flat = ep.dispatch_flat(data.x, data.expert, data.weight)  # behind the combine
                np.testing.assert_array_equal(y.wait(), data.want())
                rows = flat.x * (flat.meta[:, 1:] + 1).astype(np.float32)
                np.testing.assert_array_equal(
                    ep.combine_flat(rows, flat, async_=True).wait(), data.want())
        on_threads(body, R)

    def test_wait_raises_the_error_and_the_next_call_works(self):
        comm = sw.Communicator.threads(1)[0]
        ep = exchange(comm)
        x, weight = np.ones((1, H), np.float32), np.ones((1, K), np.float32)
        handle = ep.dispatch(x, np.full((1, K), 99, np.int32), weight, async_=True)
        with self.assertRaisesRegex(sw.SwitchyardError, "99"):
            handle.wait()
        comm.recover()
        self.assertEqual(ep.dispatch(x, np.zeros((1, K), np.int32), weight).num_rows[0], 1)


def process_body(rank, unique_id, results):
    """A rank of its own process; rank 2 dies in the second exchange."""
    try:
        comm = sw.Communicator(rank, 3, unique_id)
        ep = sw.ExpertParallel(comm, num_experts=6, top_k=1, hidden=H, max_tokens=2,
                               dtype="f32", timeout_s=1.0)
        x, expert = np.full((2, H), rank, np.float32), np.array([[0], [5]], np.int32)
        weight = np.ones((2, 1), np.float32)
        d = ep.dispatch(x, expert, weight)
        right = (ep.combine(d.x[d.row_x], d) == x).all()
        comm.set_timeout(1.0)
        if rank == 2:
            os.kill(os.getpid(), 9)
        said = []
        for call in (lambda: ep.combine(d.x[d.row_x], ep.dispatch(x, expert, weight)),
                     comm.recover):
            start = time.monotonic()
            try:
                call()
                said.append("no error")
            except sw.SwitchyardError as error:
                said.append(error.code)
            said.append(time.monotonic() - start)
        results.put((rank, bool(right), said))
    except BaseException as error:
        results.put((rank, False, repr(error)))


def meeting_body(rank, how, results):
    """A rank of its own process that finds the others by an environment, or by a file."""
    try:
        os.environ.update(how.get("environment", {}))
        if "rank_variable" in how:
            os.environ[how["rank_variable"]] = str(rank)
            comm = sw.Communicator.from_env()
        else:
            comm = sw.Communicator(rank, 3, sw.Communicator.unique_id(how["file"], rank))
        data, ep = Data(rank), exchange(comm)
        d = ep.dispatch(data.x, data.expert, data.weight)
        rows = d.x[d.row_x] * (rank * E // 3 + np.repeat(
            np.arange(len(d.expert_begin) - 1), np.diff(d.expert_begin)) + 1)[:, None]
        right = (ep.combine(rows.astype(np.float32), d) == data.want()).all()
        results.put((rank, comm.rank, comm.size, bool(right)))
    except BaseException as error:
        results.put((rank, repr(error)))


class Processes(unittest.TestCase):
    def meet(self, how):
        spawn = multiprocessing.get_context("spawn")
        results = spawn.Queue()
        ranks = [spawn.Process(target=meeting_body, args=(rank, how, results))
                 for rank in range(3)]
        for process in ranks:
            process.start()
        said = sorted(results.get(timeout=60) for _ in ranks)
        for process in ranks:
            process.join()
        self.assertEqual(said, [(rank, rank, 3, True) for rank in range(3)])

    def test_processes_meet_by_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            self.meet({"file": f"{folder}/id"})

    def test_processes_meet_by_an_address_and_a_port(self):
        self.meet({"rank_variable": "RANK",
                   "environment": {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
                                   "MASTER_PORT": str(os.getpid())}})

    def test_processes_meet_under_srun(self):
        self.meet({"rank_variable": "SLURM_PROCID",
                   "environment": {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3",
                                   "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}})

    def test_a_killed_rank_is_a_timeout_and_so_is_the_recovery(self):
        spawn = multiprocessing.get_context("spawn")
        results, unique_id = spawn.Queue(), sw.Communicator.unique_id()
        ranks = [spawn.Process(target=process_body, args=(rank, unique_id, results))
                 for rank in range(3)]
        for process in ranks:
            process.start()
        said = sorted(results.get(timeout=60) for _ in range(2))
        for process in ranks:
            process.join()
        self.assertEqual(ranks[2].exitcode, -9)
        self.assertEqual([entry[0] for entry in said], [0, 1])
        for _, right, (first, first_s, second, second_s) in said:
            self.assertTrue(right)
            self.assertEqual((first, second), ("timeout", "timeout"))
            self.assertLess(first_s, 5)
            self.assertLess(second_s, 5)

    def test_an_id_of_nobody_is_refused(self):
        with self.assertRaisesRegex(sw.SwitchyardError, "id is none"):
            sw.Communicator(0, 1, b"../../etc/passwd")
        with self.assertRaisesRegex(sw.SwitchyardError, "rank 3"):
            sw.Communicator(3, 2, sw.Communicator.unique_id())

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_without_a_process_group_torch_is_one_rank(self):
        self.assertEqual(sw.Communicator.from_torch().size, 1)


if __name__ == "__main__":
    unittest.main()
