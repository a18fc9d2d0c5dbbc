"""The Python package on the CPU: each call against numpy in double, on numpy and torch tensors.

Run with PYTHONPATH=python and SWITCHYARD_LIBRARY naming libswitchyard.so.
"""

import ctypes
import os
import tempfile
import unittest
import unittest.mock

import numpy as np

import switchyard as sw
from switchyard import _native, _tensors

from rank_threads import on_threads

try:
    import torch
except ImportError:
    torch = None

needs_torch = unittest.skipIf(torch is None, "torch is not installed")


def silu(x):
    return x / (1.0 + np.exp(-x))


def layer_in_double(x, w13, w2, expert, weight):
    """Plain loops: y[t] = sum over k of weight * W2 (silu(W1 x) * (W3 x))."""
    x, w13, w2 = (np.asarray(a, dtype=np.float64) for a in (x, w13, w2))
    inner = w2.shape[2]
    y = np.zeros_like(x)
    for t in range(x.shape[0]):
        for e, w in zip(expert[t], weight[t]):
            if e >= 0:
                gate, up = w13[e, :inner] @ x[t], w13[e, inner:] @ x[t]
                y[t] += float(w) * (w2[e] @ (silu(gate) * up))
    return y


class Problem:
    """T tokens, E experts, K of them each; weights scaled by 1/sqrt(fan-in)."""

    def __init__(self, t=9, e=6, k=3, h=20, i=11, seed=0):
        g = np.random.default_rng(seed)

        def normal(*shape):
            return (g.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

        self.x = g.standard_normal((t, h)).astype(np.float32)
        self.gate = normal(e, h)
        self.w13 = normal(e, 2 * i, h)
        self.w2 = normal(e, h, i)
        self.top_k = k
        self.logits = self.x @ self.gate.T


class Route(unittest.TestCase):
    def test_the_largest_logits_are_chosen_and_weights_sum_to_one(self):
        p = Problem()
        expert, weight = sw.route(p.logits, p.top_k)
        np.testing.assert_array_equal(expert, np.argsort(-p.logits, axis=1)[:, :p.top_k])
        np.testing.assert_allclose(weight.sum(axis=1), 1.0, rtol=1e-6)

    @needs_torch
    def test_torch_and_numpy_give_the_same_bits(self):
        p = Problem()
        for options in ({}, {"score": "sigmoid", "scale": 2.5}, {"score": "topk-softmax"}):
            expert, weight = sw.route(p.logits, p.top_k, **options)
            texpert, tweight = sw.route(torch.from_numpy(p.logits), p.top_k, **options)
            np.testing.assert_array_equal(expert, texpert.numpy())
            np.testing.assert_array_equal(weight, tweight.numpy())

    def test_bad_values_are_errors_that_name_them(self):
        p = Problem()
        with self.assertRaises(sw.SwitchyardError) as caught:
            sw.route(p.logits, 7)
        self.assertEqual(caught.exception.code, "invalid argument")
        self.assertIn("7", str(caught.exception))
        with self.assertRaisesRegex(sw.SwitchyardError, "score='soft'"):
            sw.route(p.logits, 2, score="soft")
        with self.assertRaisesRegex(sw.SwitchyardError, "logits is f16|logits"):
            sw.route(p.logits.astype(np.float16), 2)
        with self.assertRaisesRegex(sw.SwitchyardError, "gap"):
            sw.route(p.logits[:, ::2], 2)


class Experts(unittest.TestCase):
    def test_the_fused_call_agrees_with_loops_in_double(self):
        p = Problem()
        expert, weight = sw.route(p.logits, p.top_k)
        expert[0, 0] = -1
        want = layer_in_double(p.x, p.w13, p.w2, expert, weight)
        np.testing.assert_allclose(sw.experts(p.x, p.w13, p.w2, expert, weight), want, atol=1e-5)
        if torch is not None:
            tensors = [torch.from_numpy(a) for a in (p.x, p.w13, p.w2, expert, weight)]
            np.testing.assert_allclose(sw.experts(*tensors).numpy(), want, atol=1e-5)

    @needs_torch
    def test_bf16_torch_tensors_are_taken(self):
        p = Problem(h=32, i=16)
        expert, weight = sw.route(p.logits, p.top_k)
        x, w13, w2 = (torch.from_numpy(a).bfloat16() for a in (p.x, p.w13, p.w2))
        y = sw.experts(x, w13, w2, torch.from_numpy(expert), torch.from_numpy(weight))
        self.assertEqual(y.dtype, torch.bfloat16)
        want = layer_in_double(x.float(), w13.float(), w2.float(), expert, weight)
        np.testing.assert_allclose(y.float().numpy(), want, atol=0.02, rtol=0.02)

    def test_an_expert_id_out_of_range_is_named(self):
        p = Problem()
        expert, weight = sw.route(p.logits, p.top_k)
        expert[2, 1] = 6
        with self.assertRaisesRegex(sw.SwitchyardError, r"expert\[2, 1\] is 6"):
            sw.experts(p.x, p.w13, p.w2, expert, weight)


class Tensors(unittest.TestCase):
    def test_a_place_tells_a_transposed_view_and_another_type_apart(self):
        a = np.zeros((4, 4), np.float32)
        places = {_tensors.place_of(t) for t in (a, a.T, a[:2], a[1:3], a.view(np.int32), a.copy())}
        self.assertEqual(len(places), 6)
        self.assertEqual(_tensors.place_of(a), _tensors.place_of(a[:]))


class Layer(unittest.TestCase):
    def test_a_layer_from_arrays_routes_and_runs(self):
        p = Problem()
        layer = sw.Layer(gate=p.gate, w13=p.w13, w2=p.w2, top_k=p.top_k, num_threads=2)
        expert, weight = sw.route(p.logits, p.top_k)
        want = layer_in_double(p.x, p.w13, p.w2, expert, weight)
        np.testing.assert_allclose(layer(p.x), want, atol=1e-5)
        self.assertEqual((layer.hidden, layer.top_k, layer.num_experts), (20, 3, 6))

    def test_a_gate_of_16_bits_routes_as_its_values_in_f32(self):
        p = Problem()
        gates = [p.gate.astype(np.float16)]
        if torch is not None:
            gates.append(torch.from_numpy(p.gate).bfloat16())
        for gate in gates:
            wide = gate.astype(np.float32) if isinstance(gate, np.ndarray) else gate.float()
            got, want = (sw.Layer(gate=g, w13=p.w13, w2=p.w2, top_k=p.top_k)(p.x)
                         for g in (gate, wide))
            np.testing.assert_array_equal(got, want)

    def test_a_router_that_is_used_in_place_follows_what_is_written_there(self):
        p = Problem()
        gate, bias = p.gate.copy(), np.zeros(6, np.float32)
        arrays = {"w13": p.w13, "w2": p.w2, "top_k": p.top_k}
        layer = sw.Layer(gate=gate, router_bias=bias, router_in_place=True, **arrays)
        copied = sw.Layer(gate=gate, router_bias=bias, **arrays)
        before = layer(p.x)
        np.testing.assert_array_equal(before, copied(p.x))
        gate[:] = gate[::-1].copy()
        bias[2] = 1.5
        self.assertFalse(np.array_equal(layer(p.x), before))
        want = sw.Layer(gate=gate, router_bias=bias, **arrays)(p.x)
        np.testing.assert_array_equal(layer(p.x), want)
        np.testing.assert_array_equal(copied(p.x), before)
        gate.flags.writeable = False
        with self.assertRaisesRegex(sw.SwitchyardError, "gate is read-only"):
            sw.Layer(gate=gate, router_in_place=True, **arrays)

    def test_an_experts_weights_are_read_back_with_the_bits_that_were_given(self):
        p = Problem()
        one = sw.Experts(p.w13, p.w2)
        for held in (one, sw.Layer(p.gate, p.w13, p.w2, top_k=p.top_k)):
            w13, w2 = np.zeros_like(p.w13[4]), np.zeros_like(p.w2[4])
            held.read_expert(4, w13, w2)
            np.testing.assert_array_equal(w13, p.w13[4])
            np.testing.assert_array_equal(w2, p.w2[4])
            half = np.zeros(w2.shape, np.float16)
            held.read_expert(4, w2=half)
            np.testing.assert_array_equal(half, p.w2[4].astype(np.float16))
            for message, arguments in (("expert=6 is none of this rank's, 0 to 5", (6, w13)),
                                       ("w2", (0, None, w13)),
                                       ("no biases", (0, None, None, w2[0]))):
                with self.assertRaisesRegex(sw.SwitchyardError, message):
                    held.read_expert(*arguments)

    def test_a_layer_from_a_checkpoint_runs_on_tokens(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "made")
            sw.make_checkpoint(path, "qwen3-moe", hidden=32, inner=16, num_experts=8, top_k=2,
                               dtype="f32", seed=3)
            layer = sw.Layer.from_checkpoint(path)
            x = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
            y = layer(x)
            self.assertTrue(np.isfinite(y).all() and np.abs(y).max() > 0)
            np.testing.assert_array_equal(y, sw.Layer.from_checkpoint(path)(x))
        with self.assertRaisesRegex(sw.SwitchyardError, "made"):
            sw.Layer.from_checkpoint(path)


class Library(unittest.TestCase):
    def test_a_library_of_another_version_is_refused_with_both_versions(self):
        compare = _native._Native._compare_versions
        compare("there.so", "1.2.3", ours="1.2.9")
        with self.assertRaisesRegex(sw.SwitchyardError, r"there.so is version 1.3.0, .* 1.2.9") as caught:
            compare("there.so", "1.3.0", ours="1.2.9")
        self.assertEqual(caught.exception.code, "unsupported")

    def test_the_package_and_the_library_have_one_version(self):
        self.assertEqual(_native.native.version().decode(), _native._own_version())

    def test_structs_are_as_large_as_the_librarys(self):
        # The library refuses any other size.
        for kind, name in ((_native.RouterConfig, "router_config"),
                           (_native.ExpertConfig, "expert_config"),
                           (_native.ExpertParallelConfig, "ep_config"),
                           (_native.LayerOptions, "layer_options"),
                           (_native.CheckpointRecipe, "checkpoint_recipe")):
            struct = _native.initialised(kind, name)
            self.assertEqual(struct.struct_size, ctypes.sizeof(kind), name)

    def test_a_struct_that_nobody_sized_is_refused_by_name(self):
        options = _native.LayerOptions()
        options.struct_size = 0
        arrays = _native.LayerArrays()
        with self.assertRaisesRegex(sw.SwitchyardError, "struct_size is 0"):
            arrays.struct_size = 0
            _native.native.layer_from_arrays(ctypes.byref(arrays), ctypes.byref(options), None,
                                             ctypes.byref(ctypes.c_void_p()))


class SharedExperts(unittest.TestCase):
    def test_arrays_of_shared_experts_are_added_with_and_without_their_gate(self):
        p = Problem()
        rng = np.random.default_rng(5)
        hidden, width = p.x.shape[1], 2 * p.w2.shape[2]
        w13 = rng.standard_normal((2 * width, hidden)).astype(np.float32) / 8
        w2 = rng.standard_normal((hidden, width)).astype(np.float32) / 8
        gate = rng.standard_normal(hidden).astype(np.float32)
        router = rng.standard_normal((p.w13.shape[0], hidden)).astype(np.float32)
        without = sw.Layer(router, p.w13, p.w2, p.top_k)(p.x)
        x = p.x.astype(np.float64)
        added = (silu(x @ w13[:width].T) * (x @ w13[width:].T)) @ w2.T
        for given, share in ((None, 1), (gate, 1 / (1 + np.exp(-x @ gate))[:, None])):
            layer = sw.Layer(router, p.w13, p.w2, p.top_k, shared_w13=w13, shared_w2=w2,
                             shared_gate=given)
            np.testing.assert_allclose(layer(p.x), without + share * added, atol=1e-5)
            layer.check()  # a CPU's errors are the call's own

    def test_half_of_them_is_an_error_that_names_both(self):
        p = Problem()
        router = np.zeros((p.w13.shape[0], p.x.shape[1]), np.float32)
        with self.assertRaisesRegex(sw.SwitchyardError, "shared_w13 and shared_w2"):
            sw.Layer(router, p.w13, p.w2, p.top_k, shared_w13=p.w13[0])


class InstructionSets(unittest.TestCase):
    def test_one_that_the_cpu_lacks_is_refused_with_the_reason(self):
        p = Problem()
        expert, weight = sw.route(p.logits, p.top_k)
        want = layer_in_double(p.x, p.w13, p.w2, expert, weight)
        for name in ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16", "mmx"):
            with self.subTest(name), unittest.mock.patch.dict(os.environ, SWITCHYARD_ISA=name):
                try:
                    y = sw.Experts(p.w13, p.w2)(p.x, expert, weight)
                except sw.SwitchyardError as error:
                    wrong = "invalid argument" if name == "mmx" else "unsupported"
                    self.assertEqual(error.code, wrong)
                    self.assertNotEqual(name, "portable")
                    self.assertRegex(str(error), f"{name}(: the CPU or the system lacks|: it is for|, want)")
                else:
                    self.assertNotEqual(name, "mmx")
                    np.testing.assert_allclose(y, want, atol=1e-5)


class Ranks(unittest.TestCase):
    def test_dispatch_and_combine_over_threads_equal_one_rank(self):
        p = Problem(t=12, e=8, k=3)
        expert, weight = sw.route(p.logits, p.top_k)
        want = layer_in_double(p.x, p.w13, p.w2, expert, weight)
        num_ranks = 3

        def body(rank, comm):
            rows = slice(rank * 4, rank * 4 + 4)
            ep = sw.ExpertParallel(comm, num_experts=8, top_k=3, hidden=20, max_tokens=4,
                                   dtype="f32")
            d = ep.dispatch(p.x[rows], expert[rows], weight[rows])
            first = rank * 8 // num_ranks
            results = np.zeros((d.row_x.shape[0], 20), dtype=np.float32)
            for local in range(len(d.expert_begin) - 1):
                inner = p.w2.shape[2]
                for s in range(d.expert_begin[local], d.expert_begin[local + 1]):
                    row = d.x[d.row_x[s]].astype(np.float64)
                    w13 = p.w13[first + local].astype(np.float64)
                    hidden = silu(w13[:inner] @ row) * (w13[inner:] @ row)
                    results[s] = p.w2[first + local].astype(np.float64) @ hidden
            return ep.combine(results, d)

        out = on_threads(body, num_ranks)
        np.testing.assert_allclose(np.concatenate(out), want, atol=1e-5)

    def test_the_old_name_of_combine_wire_still_works(self):
        p = Problem(t=4, e=8, k=3)

        def body(rank, comm):
            outputs = []
            for options in ({"combine_wire": "bf16"}, {"wire": "bf16"}, {}):
                layer = sw.Layer(gate=p.gate, w13=p.w13, w2=p.w2, top_k=3, comm=comm, max_tokens=4,
                                 **options)
                outputs.append(layer(p.x))
            return outputs

        for new, old, exact in on_threads(body, 2):
            np.testing.assert_array_equal(new, old)
            self.assertFalse(np.array_equal(new, exact))

    def test_a_communicator_is_freed_after_the_objects_that_use_it(self):
        freed = []
        with unittest.mock.patch.object(_native.native, "made_up_free", freed.append, create=True):
            comm = _native.Handle("made_up_free")
            inside = [_native.Handle("made_up_free", within=comm) for _ in range(2)]
            for number, handle in enumerate((comm, *inside), start=1):
                handle.pointer = number
            comm.__del__()  # as the garbage collector may: in a cycle it minds no order
            self.assertEqual(freed, [])
            inside[1].__del__()
            self.assertEqual(freed, [3])
            inside[0].__del__()
            self.assertEqual(freed, [3, 2, 1])
            del comm, inside, handle
        self.assertEqual([f for f in freed if f in (1, 2, 3)], [3, 2, 1])

    def test_a_rank_that_never_comes_is_a_timeout(self):
        comms = sw.Communicator.threads(2)
        with self.assertRaises(sw.SwitchyardError) as caught:
            sw.ExpertParallel(comms[0], num_experts=4, top_k=2, hidden=8, max_tokens=2,
                              timeout_s=0.2)
        self.assertEqual(caught.exception.code, "timeout")


if __name__ == "__main__":
    unittest.main()
