"""Experts given as codes with scales, against the numbers that these mean by numpy's arithmetic."""

import unittest

import numpy as np

try:
    import torch
except ImportError:
    torch = None

import switchyard as sw
from switchyard import SwitchyardError

from near import furthest

E, H, I, T = 4, 160, 96, 9


def e4m3(codes):
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    codes = codes.astype(np.int32)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, np.ldexp(mantissa * 1.0, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    return np.where(codes & 128, -size, size).astype(np.float32)


def e2m1(codes):
    """Of bytes [..., n] the 2n values, the even one in the low half."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    both = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return np.where(both & 8, -table[both & 7], table[both & 7])


class Made:
    """Codes, scales and numbers of experts of one format."""

    def __init__(self, mxfp4, gated=True, seed=1):
        draw = np.random.default_rng(seed)
        self.gate = draw.standard_normal((E, H)).astype(np.float32)
        self.x = draw.standard_normal((T, H)).astype(np.float32)
        halves = 2 if gated else 1

        def matrices(num, rows, cols):
            if mxfp4:
                codes = draw.integers(0, 256, (E, num * rows, cols // 2), np.uint8)
                scales = draw.integers(118, 124, (E, num * rows, cols // 32), np.uint8)
                factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
                return codes, scales, e2m1(codes) * np.repeat(factors, 32, 2)
            codes = draw.integers(0, 256, (E, num * rows, cols), np.uint8)
            codes[(codes & 127) == 127] = 3  # no NaN
            down, across = -(-rows // 128), -(-cols // 128)
            scales = draw.uniform(0.001, 0.003, (E, num * down, across)).astype(np.float32)
            of = scales.reshape(E, num, down, across).repeat(128, 2)[:, :, :rows].repeat(128, 3)[..., :cols]
            return codes, scales, e4m3(codes) * of.reshape(E, num * rows, cols)

        self.w13, self.w13_scales, self.numbers13 = matrices(halves, I, H)
        self.w2, self.w2_scales, self.numbers2 = matrices(1, H, I)

    def stored(self, **options):
        given = {"w13": self.w13, "w2": self.w2, "w13_scales": self.w13_scales, "w2_scales": self.w2_scales}
        return sw.Layer(self.gate, top_k=2, **(given | options))

    def exact(self, **options):
        return sw.Layer(self.gate, self.numbers13, self.numbers2, top_k=2, **options)

    def stored_experts(self, **options):
        given = {"w13": self.w13, "w2": self.w2, "w13_scales": self.w13_scales, "w2_scales": self.w2_scales}
        return sw.Experts(**(given | options))

    def routing(self):
        draw = np.random.default_rng(7)
        expert = np.argsort(draw.random((T, E)), 1)[:, :2].astype(np.int32)
        return expert, draw.random((T, 2)).astype(np.float32)


class Stored(unittest.TestCase):
    def test_outputs_have_the_bits_of_the_numbers_kept_as_codes_or_not(self):
        for mxfp4 in False, True:
            for gated in True, False:
                made = Made(mxfp4, gated)
                for compute in "f32", "bf16":
                    want = made.exact(compute=compute)(made.x)
                    self.assertGreater(np.abs(want).max(), 0.01)
                    for weights in "stored", "exact", "mxfp4" if mxfp4 else "e4m3":
                        with self.subTest(mxfp4=mxfp4, gated=gated, compute=compute, weights=weights):
                            have = made.stored(compute=compute, weights=weights)(made.x)
                            np.testing.assert_array_equal(have, want)
                np.testing.assert_array_equal(made.stored()(made.x), made.exact(compute="bf16")(made.x))

    def test_biases_shared_experts_of_numbers_and_interleaved_blocks_go_with_them(self):
        made, draw = Made(mxfp4=True), np.random.default_rng(5)
        b13, b2, shared_w13, shared_w2 = (draw.standard_normal(shape).astype(np.float32) for shape in
                                          ((E, 2 * I), (E, H), (2 * I, H), (H, I)))
        more = {"b13": b13, "b2": b2, "shared_w13": shared_w13, "shared_w2": shared_w2, "compute": "f32"}
        want = made.exact(**more)(made.x)
        np.testing.assert_array_equal(made.stored(weights="stored", **more)(made.x), want)

        def interleaved(array):
            return np.ascontiguousarray(np.stack([array[:, :I], array[:, I:]], 2).reshape(array.shape))
        more["b13"] = interleaved(b13)
        layer = made.stored(w13=interleaved(made.w13).reshape(E, 2 * I, H // 32, 16),
                            w2=made.w2.reshape(E, H, I // 32, 16),
                            w13_scales=interleaved(made.w13_scales), w13_layout="interleaved",
                            weights="stored", **more)
        np.testing.assert_array_equal(layer(made.x), want)

    def test_the_arrays_may_go(self):
        made = Made(mxfp4=False)
        want, layer = made.exact(compute="bf16")(made.x), made.stored(weights="stored")
        for array in made.w13, made.w2, made.w13_scales, made.w2_scales:
            array[...] = 0
        np.testing.assert_array_equal(layer(made.x), want)

    def test_what_does_not_fit_is_named(self):
        made, made4 = Made(mxfp4=False), Made(mxfp4=True)
        spoilt = made.w13.copy()
        spoilt[3, I + 2, 7] = 127
        infinite = made.w2_scales.copy()
        infinite[1, 1, 0] = np.inf
        for words, of, options in (
                ("w13_scales and w2_scales must both be given", made, {"w2_scales": None}),
                ("w13 is float32 and has scales", made, {"w13": made.numbers13}),
                ("both scales as floats", made, {"w2_scales": made4.w2_scales}),
                ("w13_scales is int32: want both scales", made,
                 {"w13_scales": made.w13_scales.astype(np.int32)}),
                ("w13_scales: dimension 1 is 1, want 2", made, {"w13_scales": made.w13_scales[:, :1].copy()}),
                ("w13: dimension 2 is 79, want 80", made4, {"w13": made4.w13[:, :, :79].copy()}),
                ("trainable=True does not go with w13_scales", made, {"trainable": True}),
                ("transposed=True does not go", made, {"transposed": True}),
                ("'interleaved' does not go with scales of 128 rows", made, {"w13_layout": "interleaved"}),
                ("w13 of expert 3: row 2 of up, column 7 is NaN", made,
                 {"w13": spoilt, "weights": "stored"}),
                ("w2's scales of expert 1: row 1 of down, column 0 is inf", made,
                 {"w2_scales": infinite, "weights": "stored"}),
                ("mxfp4", made, {"weights": "mxfp4"})):
            with self.subTest(words), self.assertRaises(SwitchyardError) as caught:
                of.stored(**options)
            self.assertIn(words, str(caught.exception))

    @unittest.skipUnless(hasattr(torch, "float8_e4m3fn"), "torch has no float8_e4m3fn")
    def test_torchs_types_of_a_byte_are_codes_and_no_scales_of_another_format(self):
        made = Made(mxfp4=False)
        given = {"w13": torch.from_numpy(made.w13).view(torch.float8_e4m3fn),
                 "w2": torch.from_numpy(made.w2).view(torch.float8_e4m3fn)}
        np.testing.assert_array_equal(made.stored(**given)(made.x), made.stored()(made.x))
        scales = torch.from_numpy(Made(mxfp4=True).w13_scales).view(torch.float8_e4m3fn)
        with self.assertRaisesRegex(SwitchyardError, "w13_scales is float8_e4m3fn: want both"):
            made.stored(w13_scales=scales)


class StoredExperts(unittest.TestCase):
    def test_outputs_have_the_bits_of_the_numbers_kept_as_codes_or_not(self):
        for mxfp4 in False, True:
            for gated in True, False:
                made = Made(mxfp4, gated)
                expert, weight = made.routing()
                for compute in None, "f32", "bf16":
                    layer = made.exact(compute=compute or "bf16")
                    want = layer(made.x, expert=expert, weight=weight)
                    self.assertGreater(np.abs(want).max(), 0.01)
                    for weights in "stored", "exact", "mxfp4" if mxfp4 else "e4m3":
                        with self.subTest(mxfp4=mxfp4, gated=gated, compute=compute, weights=weights):
                            have = made.stored_experts(compute=compute, weights=weights)
                            np.testing.assert_array_equal(have(made.x, expert, weight), want)

    def test_numbers_alone_are_those_of_an_object_without_scales(self):
        made = Made(mxfp4=True)
        expert, weight = made.routing()
        want = sw.Experts(made.numbers13, made.numbers2)(made.x, expert, weight)
        have = made.stored_experts(weights="stored", compute="f32")
        np.testing.assert_array_equal(have(made.x, expert, weight), want)

    def test_biases_and_interleaved_blocks_go_with_them_and_the_arrays_may_go(self):
        made, draw = Made(mxfp4=True), np.random.default_rng(5)
        expert, weight = made.routing()
        b13, b2 = (draw.standard_normal(shape).astype(np.float32) for shape in ((E, 2 * I), (E, H)))
        want = sw.Experts(made.numbers13, made.numbers2, b13=b13, b2=b2)(made.x, expert, weight)

        def interleaved(array):
            return np.ascontiguousarray(np.stack([array[:, :I], array[:, I:]], 2).reshape(array.shape))
        blocks = interleaved(made.w13).reshape(E, 2 * I, H // 32, 16)
        scales = interleaved(made.w13_scales)
        experts = made.stored_experts(w13=blocks, w13_scales=scales, b13=interleaved(b13), b2=b2,
                                      w13_layout="interleaved", weights="stored", compute="f32")
        for array in blocks, scales, made.w2, made.w2_scales:
            array[...] = 0
        np.testing.assert_array_equal(experts(made.x, expert, weight), want)

    def test_soft_moe_takes_them(self):
        made = Made(mxfp4=True)
        phi = np.random.default_rng(3).standard_normal((E, H)).astype(np.float32)
        want = sw.soft_moe(made.x, phi, made.numbers13, made.numbers2)
        have = sw.soft_moe(made.x, phi, made.stored_experts(weights="stored", compute="f32"))
        np.testing.assert_array_equal(have, want)
        with self.assertRaisesRegex(SwitchyardError, "bfloat16 is no type of a ndarray"):
            sw.soft_moe(made.x, phi, made.stored_experts())

    def test_an_experts_numbers_come_back(self):
        for mxfp4 in False, True:
            made = Made(mxfp4)
            experts = made.stored_experts(weights="stored", compute="f32")
            w13, w2 = np.zeros((2 * I, H), np.float32), np.zeros((H, I), np.float32)
            experts.read_expert(2, w13=w13, w2=w2)
            np.testing.assert_array_equal(w13, made.numbers13[2])
            np.testing.assert_array_equal(w2, made.numbers2[2])

    def test_what_does_not_fit_is_named(self):
        made, made4 = Made(mxfp4=False), Made(mxfp4=True)
        spoilt = made.w13.copy()
        spoilt[3, I + 2, 7] = 127
        for words, of, options in (
                ("w13_scales and w2_scales must both be given", made, {"w13_scales": None}),
                ("w13 is float32 and has scales", made, {"w13": made.numbers13}),
                ("trainable=True does not go with w13_scales", made, {"trainable": True}),
                ("w13_scales: dimension 1 is 1, want 2", made, {"w13_scales": made.w13_scales[:, :1].copy()}),
                ("w13: dimension 2 is 79, want 80", made4, {"w13": made4.w13[:, :, :79].copy()}),
                ("w13 of expert 3: row 2 of up, column 7 is NaN", made, {"w13": spoilt, "weights": "stored"}),
                ("weights='int8' is none of", made, {"weights": "int8"}),
                ("mxfp4 weights of a source that stores e4m3 ones", made, {"weights": "mxfp4"}),
                ("compute='f64' is none of", made, {"compute": "f64"}),
                ("compute type of experts", made, {"compute": "fp8"})):
            with self.subTest(words), self.assertRaises(SwitchyardError) as caught:
                of.stored_experts(**options)
            self.assertIn(words, str(caught.exception))
        for options in {"weights": "stored"}, {"compute": "bf16"}:
            with self.assertRaisesRegex(SwitchyardError, "goes with w13_scales and w2_scales"):
                sw.Experts(made.numbers13, made.numbers2, **options)

    @unittest.skipUnless(hasattr(torch, "float8_e4m3fn"), "torch has no float8_e4m3fn")
    def test_torchs_tensors_are_taken_and_have_no_gradient(self):
        made = Made(mxfp4=False)
        expert, weight = made.routing()
        want = made.stored_experts()(made.x, expert, weight)
        experts = made.stored_experts(w13=torch.from_numpy(made.w13).view(torch.float8_e4m3fn),
                                      w2=torch.from_numpy(made.w2).view(torch.float8_e4m3fn),
                                      weights="stored")
        x = torch.from_numpy(made.x)
        have = experts(x, torch.from_numpy(expert), torch.from_numpy(weight))
        np.testing.assert_array_equal(have.numpy(), want)
        rounded = experts(x.bfloat16(), torch.from_numpy(expert), torch.from_numpy(weight))
        np.testing.assert_array_equal(rounded.float().numpy(), have.bfloat16().float().numpy())
        with self.assertRaisesRegex(SwitchyardError, "x requires a gradient.* backward pass here: call"):
            experts(x.requires_grad_(), torch.from_numpy(expert), torch.from_numpy(weight))


@unittest.skipUnless(torch is not None and torch.cuda.is_available(), "torch sees no GPU")
class StoredExpertsOnAGpu(unittest.TestCase):
    def test_numbers_made_of_codes_have_the_bits_of_numbers_and_codes_are_near(self):
        for mxfp4 in False, True:
            made = Made(mxfp4)
            expert, weight = (torch.from_numpy(t).cuda() for t in made.routing())
            numbers = (torch.from_numpy(t).bfloat16().cuda() for t in (made.numbers13, made.numbers2))
            x = torch.from_numpy(made.x).cuda()
            want = sw.Experts(*numbers)(x, expert, weight)
            codes = {name: torch.from_numpy(getattr(made, name)).cuda()
                     for name in ("w13", "w2", "w13_scales", "w2_scales")}
            have = sw.Experts(**codes)(x, expert, weight)
            self.assertTrue(torch.equal(have, want), mxfp4)
            kept = sw.Experts(**codes, weights="stored")
            for tensor in codes.values():
                tensor.zero_()  # they were copied
            have = kept(x, expert, weight)
            self.assertLess(furthest(have, want)[0], 0.02, mxfp4)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = kept(x, expert, weight)
            graph.replay()
            self.assertTrue(torch.equal(replayed, have), mxfp4)
            kept.check()

    def test_what_a_gpu_does_not_take_is_named(self):
        made = Made(mxfp4=True)
        w13 = torch.from_numpy(made.w13).cuda()
        for words, options in (("they compute with bf16, not f32", {"weights": "stored", "compute": "f32"}),
                               ("q8 weights on cuda", {"weights": "q8"})):
            with self.assertRaisesRegex(SwitchyardError, words):
                made.stored_experts(w13=w13, **options)


if __name__ == "__main__":
    unittest.main()
