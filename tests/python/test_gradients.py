"""Gradients of a trainable Layer, of Experts and of experts() are those of plain torch."""

import unittest

import switchyard as sw

try:
    import torch

    import plain_layer
except ImportError:
    torch = None

from near import furthest

E, K, H, I = 6, 2, 24, 16
ROUTERS = ({}, {"renormalize": False}, {"score": "topk-softmax"}, {"score": "sigmoid"},
           {"score": "sigmoid", "renormalize": False, "scale": 2.5})


def made_up(gated=True, biases=False, shared=False, router_bias=False, dtype=None, seed=0):
    """Parameters by Layer's names."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, width=None, kind=dtype):
        t = torch.randn(*shape, generator=g) / (width or shape[-1]) ** 0.5
        return torch.nn.Parameter(t.to(kind) if kind else t)

    rows = (2 if gated else 1) * I
    p = {"gate": normal(E, H), "w13": normal(E, rows, H), "w2": normal(E, H, I)}
    if biases:
        p.update(b13=normal(E, rows, kind=None), b2=normal(E, H, kind=None))
    if router_bias:
        p["router_bias"] = normal(E, kind=None)
    if shared:
        p.update(shared_w13=normal(2 * rows, H), shared_w2=normal(H, 2 * I),
                 shared_gate=normal(1, H, kind=None))
    return p


def double(parameters):
    """The same values in f64, by themselves."""
    return {name: t.detach().double().requires_grad_() for name, t in parameters.items()}


class Case(unittest.TestCase):
    def refuse(self, words, call, *args, **kwargs):
        with self.assertRaisesRegex((sw.SwitchyardError, RuntimeError), words) as caught:
            call(*args, **kwargs)
        return caught.exception

    def expect_near(self, got, want, tolerance, what):
        self.assertIsNotNone(got, what)
        self.assertEqual(tuple(got.shape), tuple(want.shape), what)
        error, place = furthest(got, want)
        self.assertLessEqual(error, tolerance, f"{what} at {place}")

    def expect_same(self, y, want, leaves, others, tolerance=1e-5):
        """Results, and the gradients of (name, tensor) in both."""
        self.expect_near(y, want, tolerance, "y")
        g = torch.Generator().manual_seed(9)
        dy = torch.randn(y.shape, generator=g)
        y.backward(dy.to(y.dtype))
        want.backward(dy.to(y.dtype).to(want.dtype))
        for name, tensor in leaves.items():
            if others[name].grad is None:
                self.assertIsNone(tensor.grad, name)
                continue
            self.expect_near(tensor.grad, others[name].grad, tolerance, name)
            self.assertEqual(tensor.grad.dtype, tensor.dtype)


@unittest.skipIf(torch is None, "no torch")
class Layers(Case):
    def tokens(self, *shape, seed=5, dtype=None):
        return torch.randn(*shape, H, generator=torch.Generator().manual_seed(seed)).to(
            dtype or torch.float32)

    def check(self, p, top_k=K, shape=(11,), recompute="none", options=None, tolerance=1e-5,
              activation="silu", dtype=None, **router):
        layer = sw.Layer(**p, top_k=top_k, trainable=True, recompute=recompute, activation=activation,
                         **router, **(options or {}))
        x = self.tokens(*shape, dtype=dtype).requires_grad_()
        others = double(p)
        others["x"] = x.detach().double().requires_grad_()
        want = plain_layer.layer(others["x"], others, top_k, activation=activation, **router)
        for t in p.values():
            t.grad = None
        self.expect_same(layer(x), want, {"x": x, **p}, others, tolerance)

    def test_every_router_gives_the_gradients_of_plain_torch(self):
        for router in ROUTERS:
            for top_k in (1, 2, E):
                with self.subTest(router=router, top_k=top_k):
                    self.check(made_up(), top_k, **router)

    def test_biases_shared_experts_and_their_gate_have_gradients(self):
        for activation in ("silu", "gelu_tanh"):
            for gated in (True, False):
                with self.subTest(activation=activation, gated=gated):
                    self.check(made_up(gated, True, True, True), activation=activation)
        self.check(made_up(biases=True, router_bias=True), activation="clamped_swiglu")
        p = made_up(shared=True)
        del p["shared_gate"]
        self.check(p)

    def test_identity_experts_and_weights_on_inputs_have_gradients(self):
        for rule in ({}, {"score": "sigmoid", "renormalize": False}):
            for identity, on_input, shared in ((2, False, False), (3, False, True), (0, True, True),
                                               (2, True, False)):
                top_k = 1 if on_input else 3
                p, x = made_up(shared=shared), self.tokens(17).requires_grad_()
                p["gate"] = torch.nn.Parameter(torch.cat([p["gate"], p["gate"][:identity].flip(1)]))
                layer = sw.Layer(**p, top_k=top_k, trainable=True, identity_experts=identity,
                                 weight_on_input=on_input, **rule)
                others = double({**p, "x": x})
                expert, weight = plain_layer.route(others["x"] @ others["gate"].T, top_k, **rule)
                returned = (weight * (expert >= E)).sum(-1, keepdim=True) * others["x"]
                routing = torch.where(expert < E, expert, -1), weight
                tokens = others["x"]
                if on_input:
                    tokens, routing = tokens * weight, (routing[0], torch.ones_like(weight))
                want = plain_layer.layer(tokens, others, top_k, routing) + returned
                if shared and on_input:  # which takes the token as it is
                    none = torch.full_like(expert, -1), weight
                    want = (want - plain_layer.layer(tokens, others, top_k, none)
                            + plain_layer.layer(others["x"], others, top_k, none))
                with self.subTest(rule=rule, identity=identity, on_input=on_input):
                    self.expect_same(layer(x), want, {"x": x, **p}, others)

    def test_losses_of_the_logits_reach_router_and_tokens(self):
        for router in ROUTERS:
            for shape in ((11,), (2, 3)):
                p = made_up(router_bias=True)
                layer = sw.Layer(**p, top_k=K, trainable=True, **router)
                x = self.tokens(*shape).requires_grad_()
                others = double({**p, "x": x})
                y, logits = layer(x, logits=True)
                exact = others["x"] @ others["gate"].T + others["router_bias"]
                want = plain_layer.layer(others["x"], others, K, **router)
                self.expect_near(logits, exact, 1e-5, "logits")
                self.assertEqual(tuple(logits.shape), (*shape, E))

                def loss(y, logits):
                    z = logits.logsumexp(-1).square().mean()
                    return y.sin().sum() + z + logits.softmax(-1).mean(0).square().sum()

                loss(y, logits).backward()
                loss(want, exact).backward()
                for name, tensor in {"x": x, **p}.items():
                    self.expect_near(tensor.grad, others[name].grad, 1e-5, f"{name} {router}")

    def test_logits_without_gradients_and_where_there_are_none(self):
        p = made_up()
        layer = sw.Layer(**p, top_k=K, trainable=True)
        x = self.tokens(5)
        with torch.no_grad():
            y, logits = layer(x, logits=True)
            self.assertTrue(torch.equal(y, layer(x)))
            self.expect_near(logits, x @ p["gate"].T, 1e-5, "logits")
            empty = layer(x[:0], logits=True)
        self.assertEqual([tuple(t.shape) for t in empty], [(0, H), (0, E)])
        routing = torch.zeros(5, K, dtype=torch.int64), torch.ones(5, K)
        self.refuse("a routing too", layer, x, *routing, logits=True)
        frozen = sw.Layer(**{name: t.detach() for name, t in p.items()}, top_k=K)
        self.refuse("wants a layer with trainable=True", frozen, x, logits=True)

    def test_tokens_of_three_dimensions_and_one_or_no_token(self):
        for shape in ((2, 3), (1,), (40,)):
            self.check(made_up(), shape=shape)
        p = made_up()
        x = self.tokens(0).requires_grad_()
        sw.Layer(**p, top_k=K, trainable=True)(x).sum().backward()
        self.assertEqual(x.grad.shape, (0, H))
        for name, t in p.items():
            self.assertEqual(float(t.grad.abs().sum()), 0.0, name)

    def test_layouts_threads_and_recomputation_give_the_same_bits(self):
        def gradients(**options):
            p = made_up(biases=True, shared=True)
            x = self.tokens(50).requires_grad_()
            y = sw.Layer(**p, top_k=K, trainable=True, **options)(x)
            y.square().sum().backward()
            return [y.detach(), x.grad, *(t.grad for t in p.values())]

        want = gradients()
        for options in ({"recompute": "activation_input"}, {"num_threads": 1}, {"num_threads": 3},
                        {"layout": "padded"}, {"layout": "aligned", "alignment": 8}):
            with self.subTest(options):
                for a, b in zip(gradients(**options), want):
                    self.assertTrue(torch.equal(a, b))

    def test_sixteen_bits_are_within_rounding(self):
        for dtype in (torch.bfloat16, torch.float16):
            with self.subTest(dtype):
                tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
                self.check(made_up(dtype=dtype), dtype=dtype, tolerance=tolerance)
                # f32 parameters and tokens, computed with in 16 bits: gradients stay f32.
                self.check(made_up(biases=True), options={"compute": dtype}, tolerance=tolerance)

    def test_parameters_of_other_types_are_followed(self):
        p = made_up(biases=True, shared=True, router_bias=True)
        for name in ("b13", "b2", "shared_gate", "router_bias"):
            p[name] = torch.nn.Parameter(p[name].detach().bfloat16())
        p["gate"] = torch.nn.Parameter(p["gate"].detach().double())
        self.check(p, tolerance=5e-3)
        layer, x = sw.Layer(**p, top_k=K, trainable=True), self.tokens(7)
        with torch.no_grad():
            for t in p.values():
                t.mul_(0.5)
            want = plain_layer.layer(x.double(), double(p), K)
            self.expect_near(layer(x), want, 1e-5, "y")

    def test_a_given_routing_has_gradients_of_its_weights_and_none_of_the_router(self):
        p, others = made_up(), None
        layer = sw.Layer(**p, top_k=3, trainable=True)
        for kind in (torch.float32, torch.float64, torch.bfloat16):
            x = self.tokens(2, 4).requires_grad_()
            g = torch.Generator().manual_seed(3)
            expert = torch.rand(2, 4, E, generator=g).argsort(-1)[..., :3]
            expert[0, 1, 2] = -1
            weight = torch.rand(2, 4, 3, generator=g).to(kind).requires_grad_()
            for t in p.values():
                t.grad = None
            others = double(p)
            others.update(x=x.detach().double().requires_grad_(),
                          weight=weight.detach().double().requires_grad_())
            want = plain_layer.layer(others["x"], others, 3, (expert, others["weight"]))
            self.expect_same(layer(x, expert, weight), want, {"x": x, "weight": weight, **p}, others,
                             1e-5 if kind != torch.bfloat16 else 4e-3)
            self.assertEqual(float(weight.grad[0, 1, 2]), 0.0)
            self.assertIsNone(p["gate"].grad)

    def test_only_what_is_wanted_is_computed(self):
        p = made_up()
        p["w13"].requires_grad_(False)
        p["gate"].requires_grad_(False)
        layer = sw.Layer(**p, top_k=K, trainable=True)
        layer(self.tokens(5)).sum().backward()
        self.assertTrue(p["w13"].grad is None and p["gate"].grad is None)
        self.assertGreater(float(p["w2"].grad.abs().sum()), 0)
        for t in p.values():
            t.requires_grad_(False)
        self.assertFalse(layer(self.tokens(5)).requires_grad)


@unittest.skipIf(torch is None, "no torch")
class ExpertsAlone(Case):
    def inputs(self, dtype=None, biases=True):
        p = made_up(biases=biases, dtype=dtype)
        del p["gate"]
        g = torch.Generator().manual_seed(4)
        expert = torch.randint(-1, E, (9, 3), generator=g)  # the same expert twice is taken
        leaves = {"x": torch.randn(9, H, generator=g).to(dtype or torch.float32).requires_grad_(),
                  "weight": torch.rand(9, 3, generator=g).requires_grad_(), **p}
        return expert, leaves

    def want(self, leaves, expert, activation="silu"):
        others = double(leaves)
        return others, plain_layer.experts(others["x"], others["w13"], others["w2"], expert,
                                           others["weight"], activation, others.get("b13"),
                                           others.get("b2"))

    def test_experts_of_the_moment_have_the_gradients_of_plain_torch(self):
        for dtype, tolerance in ((None, 1e-5), (torch.bfloat16, 2e-2)):
            for biases in (True, False):
                expert, leaves = self.inputs(dtype, biases)
                others, want = self.want(leaves, expert, "gelu")
                y = sw.experts(**leaves, expert=expert, activation="gelu")
                self.expect_same(y, want, leaves, others, tolerance)

    def test_experts_that_are_kept_follow_their_tensors(self):
        for recompute in ("none", "activation_input"):
            expert, leaves = self.inputs()
            x, weight = leaves["x"], leaves["weight"]
            p = {name: t for name, t in leaves.items() if name not in ("x", "weight")}
            experts = sw.Experts(**p, trainable=True, recompute=recompute)
            for _ in range(2):
                others, want = self.want(leaves, expert)
                for t in leaves.values():
                    t.grad = None
                self.expect_same(experts(x, expert, weight), want, leaves, others)
                with torch.no_grad():
                    for t in p.values():
                        t.mul_(0.5)
                    self.expect_near(experts(x, expert, weight), self.want(leaves, expert)[1], 1e-5, "y")

    def test_weights_stored_in_another_way_have_gradients_where_they_are(self):
        expert, leaves = self.inputs()

        def interleave(t):
            return torch.stack([t[:, :I], t[:, I:]], 2).flatten(1, 2)

        given = {"x": leaves["x"], "weight": leaves["weight"],
                 "w13": interleave(leaves["w13"].detach()).transpose(1, 2).contiguous().requires_grad_(),
                 "w2": leaves["w2"].detach().transpose(1, 2).contiguous().requires_grad_(),
                 "b13": interleave(leaves["b13"].detach()).bfloat16().requires_grad_(),
                 "b2": leaves["b2"]}
        leaves["b13"].data.copy_(leaves["b13"].data.bfloat16().float())
        others, want = self.want(leaves, expert)
        y = sw.experts(**given, expert=expert, w13_layout="interleaved", transposed=True)
        self.expect_near(y, want, 1e-5, "y")
        y.sum().backward()
        want.sum().backward()
        self.expect_near(given["w13"].grad.transpose(1, 2), interleave(others["w13"].grad), 1e-5, "w13")
        self.expect_near(given["w2"].grad.transpose(1, 2), others["w2"].grad, 1e-5, "w2")
        self.expect_near(given["b13"].grad, interleave(others["b13"].grad), 4e-3, "b13")


if __name__ == "__main__":
    unittest.main()
