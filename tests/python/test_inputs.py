"""What a user passes is taken, or refused by name: tokens, ids, weights and outputs of all shapes and
types, experts' weights as checkpoints store them, gradients."""

import unittest

import numpy as np

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

T, E, K, H, I = 6, 5, 2, 24, 8


def normal(*shape, seed):
    g = np.random.default_rng(seed)
    return (g.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


class Case(unittest.TestCase):
    def setUp(self):
        self.x = normal(T, H, seed=1) * 4
        self.gate = normal(E, H, seed=2)
        self.w13 = normal(E, 2 * I, H, seed=3)
        self.w2 = normal(E, H, I, seed=4)
        self.layer = sw.Layer(self.gate, self.w13, self.w2, K)
        self.experts = sw.Experts(self.w13, self.w2)
        self.expert, self.weight = sw.route(self.x @ self.gate.T, K)
        self.want = self.layer(self.x)

    def refuse(self, words, call, *args, **kwargs):
        with self.assertRaisesRegex(sw.SwitchyardError, words) as caught:
            call(*args, **kwargs)
        return caught.exception


class Numpy(Case):
    def test_experts_in_place_are_for_a_gpu(self):
        error = self.refuse("experts_in_place=True does not go with device='cpu'", sw.Layer,
                            self.gate, self.w13, self.w2, K, experts_in_place=True)
        self.assertEqual(error.code, "unsupported")

    def test_a_scratch_is_one_and_of_a_gpu(self):
        for device in "cpu", None:
            self.refuse(f"device={device!r} of a scratch: want a GPU", sw.Scratch, device)
        self.refuse("device='gpu' is neither cpu nor cuda", sw.Scratch, "gpu")
        self.refuse("scratch=7 is no switchyard.Scratch", sw.Layer, self.gate, self.w13, self.w2, K, scratch=7)
        self.refuse("scratch='cuda' is no switchyard.Scratch", sw.Layer, self.gate, self.w13, self.w2, K,
                    scratch="cuda")

    def test_tokens_of_two_or_three_dimensions_give_results_of_their_shape(self):
        x, expert, weight = (a.reshape(2, 3, -1) for a in (self.x, self.expert, self.weight))
        for y in (self.layer(x), self.layer(x, expert, weight), self.experts(x, expert, weight),
                  self.layer(x, self.expert, self.weight)):
            self.assertEqual(y.shape, (2, 3, H))
            np.testing.assert_allclose(y.reshape(T, H), self.want, rtol=1e-5, atol=1e-6)
        for wrong in (self.x[0], self.x[:, :-1], self.x.reshape(1, 2, 3, H)):
            self.refuse(r"x is \[.*\], want \[T, 24\] or \[B, S, 24\]", self.layer, wrong)
        self.refuse(r"expert is \[3, 2\], want \[6, K\]", self.layer, self.x, self.expert[:3],
                    self.weight)

    def feed_forward(self, e, x):
        gate, up = np.split(self.w13[e].astype(np.float64) @ x, 2)
        return self.w2[e].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up)

    def test_identity_experts_return_their_input(self):
        gate = normal(E + 2, H, seed=5)
        layer = sw.Layer(gate, self.w13, self.w2, K, identity_experts=2)
        expert, weight = sw.route(self.x @ gate.T, K)
        expert[0], expert[1, 1] = [E, E + 1], E
        want = [sum(w * (x if e >= E else self.feed_forward(e, x.astype(np.float64)))
                    for e, w in zip(ids, ws))
                for x, ids, ws in zip(self.x, expert, weight)]
        np.testing.assert_allclose(layer(self.x, expert, weight), want, rtol=1e-4, atol=1e-5)
        self.assertEqual(layer.num_experts, E + 2)
        layer(self.x)
        self.assertEqual(len(layer.stats()["counts"]), E + 2)
        self.refuse("the router has 7 experts, the layer 5", sw.Layer, gate, self.w13, self.w2, K)

    def test_an_option_that_there_is_not_is_named_with_those_that_there_are(self):
        for call in (lambda: sw.Layer(self.gate, self.w13, self.w2, K, max_token=4),
                     lambda: sw.Layer.from_checkpoint("nowhere", max_token=4)):
            with self.assertRaisesRegex(TypeError, "a layer has no option 'max_token': want one of "
                                                   "device, .*max_tokens"):
                call()

    def test_a_weight_on_the_input_multiplies_the_token(self):
        rule = {"score": "sigmoid", "renormalize": False}
        layer = sw.Layer(self.gate, self.w13, self.w2, 1, weight_on_input=True, **rule)
        expert, weight = sw.route(self.x @ self.gate.T, 1, **rule)
        want = [self.feed_forward(e, float(w) * x.astype(np.float64))
                for x, (e,), (w,) in zip(self.x, expert, weight)]
        np.testing.assert_allclose(layer(self.x), want, rtol=1e-4, atol=1e-5)
        self.refuse("weight_on_input with top_k=2: a token has one input", sw.Layer, self.gate,
                    self.w13, self.w2, 2, weight_on_input=True)

    def test_strided_rows_give_the_same_bits(self):
        wide = np.zeros((T, 2 * H), np.float32)
        wide[:, :H] = self.x
        backwards = self.x[::-1].copy()
        columns = np.asfortranarray(self.x)
        for x in (wide[:, :H], backwards[::-1], columns):
            np.testing.assert_array_equal(self.layer(x), self.want)
            np.testing.assert_array_equal(self.layer(x, np.asfortranarray(self.expert), self.weight),
                                          self.layer(self.x, self.expert, self.weight))

    def test_ids_and_weights_of_any_type_are_taken(self):
        want = self.layer(self.x, self.expert, self.weight)
        for kind in (np.int64, np.int16, np.int8, np.uint8):
            np.testing.assert_array_equal(
                self.layer(self.x, self.expert.astype(kind), self.weight), want)
        half = self.weight.astype(np.float16)
        np.testing.assert_array_equal(self.layer(self.x, self.expert, half),
                                      self.layer(self.x, self.expert, half.astype(np.float32)))
        np.testing.assert_array_equal(
            self.layer(self.x, self.expert, self.weight.astype(np.float64)), want)
        self.refuse("expert is float32, want ids", self.layer, self.x, self.weight, self.weight)
        self.refuse("weight is int32, want floating", self.layer, self.x, self.expert, self.expert)

    def test_an_id_that_is_no_expert_is_named_and_does_not_wrap_around(self):
        for wrong in (E, -2, 2**32, 2**32 + 1, -2**40):
            ids = self.expert.astype(np.int64)
            ids[3, 1] = wrong
            words = rf"expert\[3, 1\] is {wrong}, want -1 \(unused\) or less than {E}"
            self.refuse(words, self.layer, self.x, ids, self.weight)
            self.refuse(words, self.experts, self.x, ids, self.weight)
            if abs(wrong) < 2**31:
                self.refuse(words, self.layer, self.x, ids.astype(np.int32), self.weight)
        ids[3, 1] = -1
        self.assertTrue(np.isfinite(self.layer(self.x, ids, self.weight)).all())

    def test_an_output_is_written_or_refused_by_what_is_wrong_with_it(self):
        out = np.full((T, H), np.nan, np.float32)
        self.assertIs(self.layer(self.x, out=out), out)
        np.testing.assert_array_equal(out, self.want)
        self.assertIs(self.experts(self.x, self.expert, self.weight, out=out), out)
        narrow = np.zeros((T, H), np.float16)
        np.testing.assert_array_equal(self.layer(self.x, out=narrow), self.want.astype(np.float16))
        frozen = np.zeros((T, H), np.float32)
        frozen.flags.writeable = False
        for wrong, words in ((frozen, "out is read-only"), (out[:-1], r"out is \[5, 24\], want"),
                             (np.zeros((T, H)), "out is float64"), (np.zeros((T, H), int), "out is int64"),
                             (np.zeros((T, 2 * H), np.float32)[:, ::2], "out has gaps"),
                             ([1.0], "out is a list, want what x is, a ndarray")):
            self.refuse(words, self.layer, self.x, out=wrong)
        for shift in (0, H):
            memory = np.concatenate([self.x.ravel(), np.zeros(H, np.float32)])
            x = memory[:T * H].reshape(T, H)
            self.refuse("out overlaps", self.layer, x,
                        out=memory[shift:shift + T * H].reshape(T, H))
            self.refuse("y overlaps x", self.experts, x, self.expert, self.weight,
                        out=memory[shift:shift + T * H].reshape(T, H))

    def test_tokens_that_cannot_be_written_to_are_read_where_they_lie(self):
        self.x.flags.writeable = False
        np.testing.assert_array_equal(self.layer(self.x), self.want)

    def test_tokens_of_another_type_than_the_weights_are_converted(self):
        half = self.x.astype(np.float16)
        for y in (self.layer(half), self.experts(half, self.expert, self.weight)):
            self.assertEqual(y.dtype, np.float16)
        np.testing.assert_array_equal(self.experts(half, self.expert, self.weight),
                                      self.experts(half.astype(np.float32), self.expert, self.weight)
                                      .astype(np.float16))
        self.refuse("tokens is f64; f32, f16, bf16", self.layer, self.x.astype(np.float64))

    def test_gate_and_biases_of_any_float_type_are_taken(self):
        bias = normal(E, seed=5)
        want = sw.Layer(self.gate, self.w13, self.w2, K, router_bias=bias)(self.x)
        got = sw.Layer(self.gate.astype(np.float64), self.w13, self.w2, K,
                       router_bias=bias.astype(np.float64))(self.x)
        np.testing.assert_array_equal(got, want)
        self.refuse("gate is f64", sw.Layer, self.gate.astype(np.float64), self.w13, self.w2, K,
                    router_in_place=True)

    def test_weights_as_gpt_oss_stores_them_give_the_same_bits(self):
        b13, b2 = normal(E, 2 * I, seed=6), normal(E, H, seed=7)
        options = {"activation": "clamped_swiglu", "alpha": 1.702, "limit": 7.0}
        layer = sw.Layer(self.gate, self.w13, self.w2, K, b13=b13, b2=b2, **options)
        experts = sw.Experts(self.w13, self.w2, b13=b13, b2=b2, **options)
        mixed13, mixed_bias = np.empty_like(self.w13), np.empty_like(b13)
        for mixed, plain in ((mixed13, self.w13), (mixed_bias, b13)):
            mixed[:, 0::2], mixed[:, 1::2] = plain[:, :I], plain[:, I:]
        turned = {"w13_layout": "interleaved", "transposed": True, "b13": mixed_bias, "b2": b2}
        stored = mixed13.transpose(0, 2, 1).copy(), self.w2.transpose(0, 2, 1).copy()
        np.testing.assert_array_equal(
            sw.Layer(self.gate, *stored, K, **turned, **options)(self.x), layer(self.x))
        want = experts(self.x, self.expert, self.weight)
        np.testing.assert_array_equal(
            sw.Experts(*stored, **turned, **options)(self.x, self.expert, self.weight), want)
        np.testing.assert_array_equal(
            sw.experts(self.x, *stored, self.expert, self.weight, **turned, **options), want)
        only = sw.Layer(self.gate, self.w13.transpose(0, 2, 1).copy(), stored[1], K, transposed=True)
        np.testing.assert_array_equal(only(self.x), self.want)
        self.refuse("w13_layout='gpt' is none of gate-up, interleaved", sw.Experts, *stored,
                    w13_layout="gpt")

    def test_wrong_kinds_of_arguments_are_named(self):
        arrays = (self.gate, self.w13, self.w2)
        for words, call, args, kwargs in (
                ("x is None", self.layer, (None,), {}),
                ("x is a list", self.layer, ([[1.0]],), {}),
                ("x is a str", self.layer, ("tokens",), {}),
                ("tokens is i64", self.layer, (np.zeros((2, H), np.int64),), {}),
                ("expert and weight must both", self.layer, (self.x, self.expert), {}),
                ("expert and weight must both", self.experts, (self.x, None, None), {}),
                ("weight is a list", self.experts, (self.x, self.expert, [1.0]), {}),
                ("gate is None", sw.Layer, (None, *arrays[1:], K), {}),
                ("gate is a list", sw.Layer, ([1.0], *arrays[1:], K), {}),
                ("w13 is None", sw.Experts, (None, self.w2), {}),
                (r"w2 is \[24, 8\]", sw.Experts, (self.w13, self.w2[0]), {}),
                ("b13 is a list", sw.Experts, (self.w13, self.w2), {"b13": [1.0], "b2": [1.0]}),
                ("b13 is int64", sw.Experts, (self.w13, self.w2), {"b13": np.zeros((E, 2 * I), int)}),
                ("top_k='2' is no integer", sw.Layer, (*arrays, "2"), {}),
                ("top_k=None is no integer", sw.Layer, (*arrays, None), {}),
                ("top_k=4294967298 is not in", sw.Layer, (*arrays, 2**32 + 2), {}),
                ("num_threads=1.5 is no integer", sw.Layer, (*arrays, K), {"num_threads": 1.5}),
                ("num_threads='a' is no integer", sw.Experts, arrays[1:], {"num_threads": "a"}),
                ("scale='big' is no number", sw.Layer, (*arrays, K), {"scale": "big"}),
                ("alpha='big' is no number", sw.Experts, arrays[1:], {"alpha": "big"}),
                ("comm='me' is no Communicator", sw.Layer, (*arrays, K), {"comm": "me"}),
                ("comm is None", sw.ExpertParallel, (None, E, K, H, T), {}),
                ("logits is None", sw.route, (None, K), {}),
                ("top_k='2' is no integer", sw.route, (self.x, "2"), {}),
                ("path=None is no path", sw.Layer.from_checkpoint, (None,), {}),
                ("layer='a' is no integer", sw.Layer.from_checkpoint, ("/none",), {"layer": "a"}),
                ("family=None is no path", sw.make_checkpoint, ("/none", None, 8, 8, 2, 1), {}),
                ("device=7 is neither", sw.Layer, (*arrays, K), {"device": 7}),
                ("compute=7|compute='7'", sw.Layer, (*arrays, K), {"compute": 7})):
            with self.subTest(words):
                self.refuse(words, call, *args, **kwargs)


@unittest.skipIf(torch is None, "torch is not installed")
class Torch(Case):
    def setUp(self):
        super().setUp()
        self.tx, self.texpert, self.tweight = (torch.from_numpy(a) for a in
                                               (self.x, self.expert, self.weight))

    def test_tokens_ids_and_weights_of_all_shapes_and_types(self):
        want = self.layer(self.tx, self.texpert, self.tweight)
        for y in (self.layer(self.tx.reshape(3, 2, H), self.texpert.long().reshape(3, 2, K),
                             self.tweight.double().reshape(3, 2, K)),
                  self.layer(torch.cat([self.tx, self.tx], 1)[:, :H], self.texpert.T.contiguous().T,
                             self.tweight)):
            self.assertTrue(torch.equal(y.reshape(T, H), want))
        weight = self.tweight.bfloat16()
        y = self.experts(self.tx.bfloat16(), self.texpert, weight)
        self.assertEqual(y.dtype, torch.bfloat16)
        self.assertTrue(torch.equal(y, self.experts(self.tx.bfloat16().float(), self.texpert,
                                                    weight.float()).bfloat16()))
        ids = self.texpert.long()
        ids[1, 0] = 2**33
        self.refuse(rf"expert\[1, 0\] is {2**33}", self.layer, self.tx, ids, self.tweight)
        out = torch.empty(3, 2, H)
        self.assertIs(self.layer(self.tx.reshape(3, 2, H), out=out), out)
        self.assertTrue(torch.equal(out.reshape(T, H), self.layer(self.tx)))
        self.refuse("out is float64", self.layer, self.tx, out=torch.empty(T, H).double())
        self.refuse("out is a ndarray, want what x is", self.layer, self.tx, out=self.x.copy())

    def test_16_bit_weights_shared_experts_and_gates_are_taken_as_modules_have_them(self):
        w13, w2, gate = (torch.from_numpy(a).bfloat16() for a in (self.w13, self.w2, self.gate))
        s13, s2 = w13[0].clone(), w2[0].clone()
        row = torch.from_numpy(normal(1, H, seed=9)).bfloat16()  # of a Linear(H, 1)
        layer = sw.Layer(gate, w13, w2, K, shared_w13=s13, shared_w2=s2, shared_gate=row)
        same = sw.Layer(gate.double(), w13, w2, K, shared_w13=s13, shared_w2=s2,
                        shared_gate=row[0].float())
        x = self.tx.bfloat16()
        self.assertTrue(torch.equal(layer(x), same(x)))
        self.assertFalse(torch.equal(layer(x), sw.Layer(gate, w13, w2, K)(x)))
        self.refuse("shared_w13 is f32, want bf16", sw.Layer, gate, w13, w2, K,
                    shared_w13=s13.float(), shared_w2=s2)
        bias = torch.zeros(E, 2 * I).bfloat16(), torch.zeros(E, H).bfloat16()
        self.assertTrue(torch.equal(sw.Layer(gate, w13, w2, K, b13=bias[0], b2=bias[1])(x),
                                    sw.Layer(gate, w13, w2, K)(x)))

    def test_a_gradient_that_would_be_lost_is_an_error(self):
        wants = self.tx.clone().requires_grad_()
        weight = self.tweight.clone().requires_grad_()
        w13, w2 = torch.from_numpy(self.w13).requires_grad_(), torch.from_numpy(self.w2)
        logits = (self.tx @ torch.from_numpy(self.gate).T).requires_grad_()
        ep = sw.ExpertParallel(sw.Communicator.threads(1)[0], E, K, H, T, dtype="f32")
        calls = (("x", lambda: self.layer(wants)), ("x", lambda: self.layer(wants * 2)),
                 ("weight", lambda: self.layer(self.tx, self.texpert, weight)),
                 ("out", lambda: self.layer(self.tx, out=torch.empty(T, H).requires_grad_())),
                 ("x", lambda: self.experts(wants, self.texpert, self.tweight)),
                 ("w13", lambda: sw.Experts(w13, w2)(self.tx, self.texpert, self.tweight)),
                 ("logits", lambda: sw.route(logits, K)),
                 ("x", lambda: ep.dispatch(wants, self.texpert, self.tweight)))
        for name, call in calls:
            error = self.refuse(f"^{name} requires a gradient.*no_grad.*inference_mode", call)
            self.assertEqual(error.code, "unsupported")
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                for name, call in calls:
                    call()

    def test_copies_of_weights_that_train_are_an_error_while_those_are_there(self):
        want = torch.from_numpy(self.want)
        for in_place in (False, True):
            gate, w13, w2 = (torch.nn.Parameter(torch.from_numpy(a)) for a in
                             (self.gate, self.w13, self.w2))
            layer = sw.Layer(gate, w13, w2, K, router_in_place=in_place)
            self.refuse("gate requires a gradient.*trainable=True", layer, self.tx)
            gate.requires_grad_(False)
            self.refuse("w13 requires a gradient", layer, self.tx)
            with torch.no_grad():
                self.assertTrue(torch.equal(layer(self.tx), want))
            del w13, w2
            self.assertTrue(torch.equal(layer(self.tx), want))
        computed = torch.nn.Parameter(torch.from_numpy(self.w13)) * 1
        layer = sw.Layer(self.gate, computed, self.w2, K)
        del computed
        self.refuse("w13 requires a gradient", layer, self.tx)

    def test_inference_mode_and_autocast_change_nothing(self):
        want = self.layer(self.tx)
        with torch.inference_mode():
            x = self.tx.clone()
            y = self.layer(x)
            self.assertTrue(torch.equal(y, want))
            self.assertTrue(torch.equal(self.layer(y), self.layer(want)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(self.tx)
            self.assertTrue(y.dtype == torch.float32 and torch.equal(y, want))

    def test_calls_that_serving_repeats_are_those_of_all_others(self):
        run_plain = self.layer._run_plain
        for dtype in torch.float32, torch.bfloat16, torch.float16:
            for shape in (T, H), (2, T // 2, H), (1, 1, H), (0, H), (2, 0, H):
                x = self.tx.repeat(1, 1)[:shape[0] if len(shape) == 2 else shape[0] * shape[1]]
                x = x.reshape(shape).to(dtype)
                want = self.layer(x)  # torch may want gradients: not the short way
                self.assertIsNone(run_plain(x))
                for mode in torch.no_grad, torch.inference_mode:
                    with mode():
                        y = run_plain(x)
                        self.assertEqual((y.dtype, y.shape), (dtype, x.shape))
                        self.assertTrue(torch.equal(y, want))
                        self.assertTrue(torch.equal(self.layer(x), want))

    def test_what_is_not_plain_goes_the_longer_way_and_is_refused_by_name(self):
        class Other(torch.Tensor):
            pass

        run_plain = self.layer._run_plain
        with torch.no_grad():
            for x in (self.x, self.tx[:, ::2].contiguous(), self.tx.T, self.tx[0], self.tx.reshape(1, 2, 3, H),
                      self.tx.as_subclass(Other), torch.empty(T, H, device="meta"), None):
                self.assertIsNone(run_plain(x))
            gaps = torch.cat([self.tx, self.tx], 1)[:, :H]
            self.assertIsNone(run_plain(gaps))
            self.assertTrue(torch.equal(self.layer(gaps), run_plain(self.tx)))
            self.refuse(r"x is \[6, 12\], want \[T, 24\]", self.layer, self.tx[:, ::2])
            self.refuse("tokens is f64", self.layer, self.tx.double())
            self.refuse("lies on meta", self.layer, torch.empty(T, H, device="meta"))
            self.refuse("token_ids and training are a router's", self.layer, self.tx, training=True)
            router = sw.Layer(self.gate, self.w13, self.w2, router=sw.Router("top-k", num_experts=E, top_k=K))
            trainable = sw.Layer(*(torch.from_numpy(a) for a in (self.gate, self.w13, self.w2)), K, trainable=True)
            self.assertEqual([layer._is_plain for layer in (self.layer, router, trainable)], [True, False, False])

    def test_tensors_that_are_no_memory_here_are_refused(self):
        self.refuse("x lies on meta, want cpu or cuda|x: ", self.layer, self.tx.to("meta"))
        self.refuse("x: |x is ", self.layer, self.tx.to_sparse())
        self.refuse("tokens is c64", self.layer, self.tx.to(torch.complex64))


if __name__ == "__main__":
    unittest.main()
