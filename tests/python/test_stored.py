"""Experts given as codes with scales, against the numbers that these mean by numpy's arithmetic."""

import unittest

import numpy as np

try:
    import torch
except ImportError:
    torch = None

import switchyard as sw
from switchyard import SwitchyardError

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


if __name__ == "__main__":
    unittest.main()
