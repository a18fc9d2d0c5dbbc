"""Objects of the package: called from several threads, copied, after fork(), at exit."""

import contextlib
import copy
import os
import pickle
import subprocess
import sys
import threading
import types
import unittest
import unittest.mock

import numpy as np

import switchyard as sw
from rank_threads import together
from switchyard import _native, _streams

T, E, K, H, I = 9, 6, 2, 64, 32


def made(num_threads=1):
    g = np.random.default_rng(3)
    gate, w13, w2 = (g.standard_normal(shape).astype(np.float32) / 8 for shape in
                     ((E, H), (E, 2 * I, H), (E, H, I)))
    return (sw.Layer(gate, w13, w2, K, num_threads=num_threads),
            sw.Experts(w13, w2, num_threads=num_threads))


def tokens(rows, seed):
    return np.random.default_rng(seed).standard_normal((rows, H)).astype(np.float32)


def on_four_threads(body):
    together(body, 4)


class Threads(unittest.TestCase):
    def test_four_threads_on_one_object_get_what_one_gets(self):
        layer, experts = made(num_threads=2)
        inputs = [tokens(rows, rows) for rows in (1, 7, 40, 19)]
        ids = [np.arange(x.shape[0] * K, dtype=np.int32).reshape(-1, K) % E for x in inputs]
        weights = [np.full(i.shape, 0.5, np.float32) for i in ids]
        want = [(layer(x), experts(x, i, w)) for x, i, w in zip(inputs, ids, weights)]

        def body(number):
            for _ in range(200):
                x, i, w = inputs[number], ids[number], weights[number]
                np.testing.assert_array_equal(layer(x), want[number][0])
                np.testing.assert_array_equal(experts(x, i, w), want[number][1])

        on_four_threads(body)

    def test_four_threads_on_one_communicator_take_turns(self):
        comm = sw.Communicator.threads(1)[0]
        exchanges = [sw.ExpertParallel(comm, E, K, H, T, dtype="f32") for _ in range(4)]
        x = tokens(T, 1)
        expert = np.arange(T * K, dtype=np.int64).reshape(T, K) % E
        weight = np.full((T, K), 0.5, np.float32)

        def body(number):
            for _ in range(50):
                ep = exchanges[number]
                d = ep.dispatch(x, expert, weight, async_=number % 2 == 0)
                d = d.wait() if number % 2 == 0 else d
                np.testing.assert_allclose(ep.combine(d.x[d.row_x], d), x, rtol=1e-6)

        on_four_threads(body)


class Streams(unittest.TestCase):
    def test_a_call_on_another_stream_waits_for_the_last_one_unless_one_is_captured(self):
        said = []
        now = types.SimpleNamespace(stream=None, captured=False)
        cuda = types.SimpleNamespace(device=lambda device: contextlib.nullcontext(),
                                     current_stream=lambda: now.stream,
                                     is_current_stream_capturing=lambda: now.captured)

        def stream(name):
            return types.SimpleNamespace(
                name=name, wait_stream=lambda other: said.append(f"{name} waits for {other.name}"))

        first, second, capture = map(stream, ("first", "second", "capture"))
        order = _streams.CurrentStream()
        tensor = types.SimpleNamespace(device="cuda:0")
        with unittest.mock.patch.dict(sys.modules, torch=types.SimpleNamespace(cuda=cuda)):
            for now.stream, now.captured in ((first, False), (first, False), (second, False),
                                             (capture, True), (capture, True), (first, False)):
                order.run(said.append, (now.stream.name,), tensor, id(now.stream))
        self.assertEqual(said, ["first", "first", "second waits for first", "second", "capture",
                                "capture", "first"])


class Copies(unittest.TestCase):
    def test_what_the_library_holds_is_not_copied_and_the_error_says_what_to_do(self):
        layer, experts = made()
        comm = sw.Communicator.threads(1)[0]
        ep = sw.ExpertParallel(comm, E, K, H, T, dtype="f32")
        for target in (layer, experts, comm, ep):
            for call in (copy.copy, copy.deepcopy, pickle.dumps):
                with self.assertRaisesRegex(sw.SwitchyardError,
                                            f"a {type(target).__name__} .* make another one") as caught:
                    call(target)
                self.assertEqual(caught.exception.code, "unsupported")

    def test_an_error_reaches_another_process_whole(self):
        error = pickle.loads(pickle.dumps(sw.SwitchyardError("timeout", "rank 1 did not come")))
        self.assertEqual((error.code, str(error)), ("timeout", "rank 1 did not come"))


def in_a_child(body):
    """What body() says in a child of fork(), which has 20 s."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(20)  # a hang becomes a signal
        try:
            said = str(body())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said if status == 0 else f"status {status}: {said}"


class Fork(unittest.TestCase):
    def test_a_child_has_threads_of_its_own_and_frees_without_waiting(self):
        x = tokens(T, 1)
        for num_threads in (1, 2):
            objects = list(made(num_threads))
            want = objects[0](x)

            def call():
                same = np.array_equal(objects[0](x), want)
                return f"same {same}"

            def free():
                objects.clear()
                return "freed"

            self.assertEqual(in_a_child(call), "same True")
            self.assertEqual(in_a_child(free), "freed")
            np.testing.assert_array_equal(objects[0](x), want)

    def test_a_communicators_lock_and_worker_do_not_hold_up_a_child(self):
        comm = sw.Communicator.threads(1)[0]
        ep = sw.ExpertParallel(comm, E, K, H, T, dtype="f32")
        x = tokens(T, 1)
        routing = np.zeros((T, K), np.int32), np.full((T, K), 0.5, np.float32)
        ep.combine((d := ep.dispatch(x, *routing, async_=True).wait()).x[d.row_x], d)
        inside, go_on = threading.Event(), threading.Event()
        other = threading.Thread(target=comm.run, args=(lambda: (inside.set(), go_on.wait()),))
        other.start()
        inside.wait()
        said = in_a_child(lambda: ep.dispatch(x, *routing, async_=True).wait().num_rows[0])
        go_on.set()
        other.join()
        self.assertEqual(said, str(T))


class Exit(unittest.TestCase):
    def test_a_handle_is_freed_once_though_its_module_is_gone(self):
        freed = []
        with unittest.mock.patch.object(_native.native, "made_up_free", freed.append, create=True):
            handle = _native.Handle("made_up_free")
        handle.pointer = 7
        with unittest.mock.patch.object(_native, "native", None):  # as at the end of the process
            handle.__del__()
            handle.__del__()
        self.assertEqual(freed, [7])

    def test_the_end_of_the_process_frees_nothing_by_itself(self):
        freed = []
        with unittest.mock.patch.object(_native.native, "made_up_free", freed.append, create=True):
            handle = _native.Handle("made_up_free")
        handle.pointer = 7
        handle.__del__(is_finalizing=lambda: True)
        self.assertEqual(freed, [])

    def test_objects_that_live_until_the_end_make_no_noise(self):
        code = ("import json, numpy as np, switchyard as sw\n"
                "f = np.float32\n"
                "layer = sw.Layer(np.ones((2, 4), f), np.ones((2, 4, 4), f), np.ones((2, 4, 2), f), 1,"
                " num_threads=2)\n"
                "experts = sw.Experts(np.ones((2, 4, 4), f), np.ones((2, 4, 2), f), num_threads=2)\n"
                "comm = sw.Communicator.threads(1)[0]\n"
                "ep = sw.ExpertParallel(comm, 2, 1, 4, 4, dtype='f32')\n"
                "class Holder: pass\n"
                "a = Holder(); a.me, a.layer = a, layer\n"
                "json.kept = [sw, layer, experts, ep, comm]\n"
                "print(layer(np.ones((1, 4), f)).shape)\n")
        done = subprocess.run([sys.executable, "-X", "dev", "-c", code], text=True, timeout=60,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual((done.returncode, done.stdout.strip(), done.stderr), (0, "(1, 4)", ""))


if __name__ == "__main__":
    unittest.main()
