"""torch.compile takes calls on Layer and Experts as operators of its graph, with fullgraph=True."""

import importlib.util
import shutil
import unittest

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

REGISTRY = getattr(torch, "library", None)  # of operators
HAS_OPERATORS = hasattr(REGISTRY, "register_fake")  # from 2.4 on
COMPILERS = [*(["inductor"] if shutil.which("c++") else []), "aot_eager"]
E, K, H, I = 4, 2, 32, 16


@unittest.skipUnless(HAS_OPERATORS, "torch is older than 2.4, or not there")
class Compiled(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        g = torch.Generator().manual_seed(0)
        self.gate = torch.randn(E, H, generator=g)
        self.w13 = torch.randn(E, 2 * I, H, generator=g) / H**0.5
        self.w2 = torch.randn(E, H, I, generator=g) / I**0.5
        self.layer = sw.Layer(self.gate, self.w13, self.w2, K)
        self.experts = sw.Experts(self.w13, self.w2)
        self.x = torch.randn(5, H, generator=g)
        self.expert = torch.randint(0, E, (5, K), generator=g)
        self.weight = torch.rand(5, K, generator=g)

    def expect_same(self, function, *args):
        """In one graph without a break, and the values of the call by itself."""
        for backend in COMPILERS:
            with self.subTest(backend):
                torch._dynamo.reset()
                compiled = torch.compile(function, fullgraph=True, backend=backend)
                torch.testing.assert_close(compiled(*args), function(*args))

    @torch.no_grad() if torch is not None else lambda f: f
    def test_layers_and_experts_are_operators_of_one_graph(self):
        self.expect_same(lambda x: self.layer(x * 2) + 1, self.x)
        self.expect_same(lambda x, e, w: self.layer(x, e, w) + x, self.x, self.expert, self.weight)
        self.expect_same(lambda x, e, w: self.experts(x, e, w) * 2, self.x, self.expert, self.weight)
        self.expect_same(lambda x: self.layer(x.transpose(0, 1)), torch.randn(3, 2, H))

    def test_layers_and_experts_train_in_one_graph(self):
        p = {name: torch.nn.Parameter(t) for name, t in (("gate", self.gate), ("w13", self.w13),
                                                         ("w2", self.w2))}
        layer = sw.Layer(**p, top_k=K, trainable=True)
        kept = sw.Experts(p["w13"], p["w2"], trainable=True)
        x, weight = self.x.requires_grad_(), self.weight.requires_grad_()
        leaves = [*p.values(), x, weight]

        def through_layer(x, _):
            return (layer(x * 2) + x).square().sum()

        def through_a_routing(x, weight):
            return (layer(x, self.expert, weight) + x).square().sum()

        def through_experts(x, weight):
            return (kept(x, self.expert, weight) * 2).square().sum()

        def through_weights(x, weight):
            y = sw.experts(x, p["w13"] * 2, p["w2"], self.expert, weight, activation="gelu")
            return y.square().sum()

        def through_other_layouts(x, weight):
            return sw.experts(x, p["w13"].transpose(1, 2), p["w2"].transpose(1, 2), self.expert, weight,
                              transposed=True).square().sum()

        def gradients(function):
            for t in leaves:
                t.grad = None
            loss = function(x, weight)
            loss.backward()
            return [loss.detach(), *(None if t.grad is None else t.grad for t in leaves)]

        for function in (through_layer, through_a_routing, through_experts, through_weights,
                         through_other_layouts):
            want = gradients(function)
            for backend in COMPILERS:
                with self.subTest(function=function.__name__, backend=backend):
                    torch._dynamo.reset()
                    compiled = torch.compile(function, fullgraph=True, backend=backend)
                    for a, b in zip(gradients(compiled), want):
                        self.assertEqual(a is None, b is None)
                        if a is not None:
                            torch.testing.assert_close(a, b)

    def test_a_graph_whose_gradients_would_be_lost_is_an_error(self):
        compiled = torch.compile(lambda x: self.layer(x) + 1, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(self.x), self.layer(self.x) + 1)
        self.w2.requires_grad_()  # of which the layer has a copy
        with self.assertRaisesRegex(Exception, "w2 requires a gradient"):
            compiled(self.x)

    def test_a_layer_that_trains_runs_without_gradients_in_a_graph(self):
        p = [torch.nn.Parameter(t.clone()) for t in (self.gate, self.w13, self.w2)]
        layer = sw.Layer(*p, K, trainable=True)
        compiled = torch.compile(lambda x: layer(x), fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            self.assertTrue(torch.equal(compiled(self.x), self.layer(self.x)))
            p[2].mul_(2)
            torch.testing.assert_close(compiled(self.x), 2 * self.layer(self.x))
        self.assertEqual(layer._pool._free, [])

    @torch.no_grad() if torch is not None else lambda f: f
    def test_a_module_runs_with_other_sizes_and_other_layers(self):
        class Block(torch.nn.Module):
            def __init__(self, layers):
                super().__init__()
                self.first = torch.nn.Linear(H, H)
                self.layers = layers

            def forward(self, x):
                for layer in self.layers:
                    x = x + layer(torch.relu(self.first(x)))
                return x

        block = Block([self.layer, sw.Layer(self.gate.flip(0), self.w13, self.w2, K)])
        compiled = torch.compile(block, fullgraph=True)
        for shape in ((2, 3, H), (4, 7, H), (1, 9, H)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), block(x))

    @torch.no_grad() if torch is not None else lambda f: f
    def test_an_output_that_is_given_is_written(self):
        def function(x, expert, weight, out, out_of_experts):
            self.layer(x * 2, out=out)
            self.experts(x, expert, weight, out=out_of_experts)
            return out + out_of_experts

        for backend in COMPILERS:
            torch._dynamo.reset()
            out, out_of_experts = torch.zeros(5, H), torch.zeros(5, H)
            y = torch.compile(function, fullgraph=True, backend=backend)(
                self.x, self.expert, self.weight, out, out_of_experts)
            torch.testing.assert_close(out, self.layer(self.x * 2))
            torch.testing.assert_close(out_of_experts,
                                       self.experts(self.x, self.expert, self.weight))
            torch.testing.assert_close(y, out + out_of_experts)

    @torch.inference_mode() if torch is not None else lambda f: f
    def test_errors_are_those_of_the_call(self):
        compiled = torch.compile(lambda x, e, w: self.layer(x, e, w), fullgraph=True,
                                 backend="aot_eager")
        compiled(self.x, self.expert, self.weight)
        wrong = self.expert.clone()
        wrong[1, 0] = 9
        with self.assertRaisesRegex(sw.SwitchyardError, r"expert\[1, 0\] is 9"):
            compiled(self.x, wrong, self.weight)

    def test_a_gradient_that_would_be_lost_is_an_error(self):
        wants = self.x.clone().requires_grad_()
        with self.assertRaisesRegex(sw.SwitchyardError, "x requires a gradient"):
            torch.compile(lambda x: self.layer(x) + 1, backend="aot_eager")(wants)
        with self.assertRaisesRegex(Exception, "x requires a gradient"):
            torch.compile(lambda x: self.layer(x) + 1, fullgraph=True, backend="aot_eager")(wants)

    @unittest.skipIf(importlib.util.find_spec("transformers") is None, "transformers is not there")
    @torch.no_grad() if torch is not None else lambda f: f
    def test_an_accelerated_model_of_transformers_is_one_graph(self):
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        from switchyard.transformers import accelerate

        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
            num_experts=8, num_experts_per_tok=2, max_position_embeddings=64)).eval()
        ids = torch.randint(0, 64, (2, 7))
        want = model(ids).logits
        accelerate(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids).logits, want)

    def test_the_operators_hold_for_torchs_own_checks(self):
        with torch.no_grad():
            x = self.x
            for name, args in (
                    ("layer", (x, None, None, self.layer._number)),
                    ("layer", (x, self.expert.int(), self.weight, self.layer._number)),
                    ("layer_into", (x, None, None, torch.empty_like(x), self.layer._number)),
                    ("experts", (x, self.expert.int(), self.weight, self.experts._number))):
                REGISTRY.opcheck(
                    getattr(torch.ops.switchyard, name).default, args,
                    test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


if __name__ == "__main__":
    unittest.main()
