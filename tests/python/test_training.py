"""A model with a trainable Layer in it trains: optimisers, several forwards, checkpointing, autocast, and
errors where a gradient would be wrong."""

import json
import unittest
from pathlib import Path

import numpy as np

import switchyard as sw

try:
    import torch
    from torch.utils.checkpoint import checkpoint

    import plain_layer
    from test_gradients import E, H, K, Case, double, made_up
except ImportError:
    torch, Case, H = None, unittest.TestCase, 24

from near import furthest

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "training_golden.npz"
GOLDEN_TOLERANCE = 1e-5


class Model(torch.nn.Module if torch is not None else object):
    """Two blocks with a norm, in which the Mixture-of-Experts layer is ours, or plain torch."""

    def __init__(self, ours, dtype=None, **options):
        super().__init__()
        self.blocks = torch.nn.ModuleList()
        self.layers = []
        for seed in range(2):
            block = torch.nn.Module()
            block.norm = torch.nn.LayerNorm(H)
            block.mix = torch.nn.Linear(H, H)
            torch.manual_seed(seed)
            torch.nn.init.normal_(block.mix.weight, std=H**-0.5)
            torch.nn.init.zeros_(block.mix.bias)
            block.moe = torch.nn.ParameterDict(made_up(biases=True, shared=True, seed=seed))
            self.blocks.append(block)
            self.layers.append(sw.Layer(**dict(block.moe.items()), top_k=K, trainable=True, **options)
                               if ours else self.plain(block))

    @staticmethod
    def plain(block):
        return lambda x: plain_layer.layer(x, dict(block.moe.items()), K)

    def forward(self, x):
        for block, layer in zip(self.blocks, self.layers):
            x = x + layer(block.norm(block.mix(x)))
        return x


def tokens(*shape, seed=1):
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(seed))


@unittest.skipIf(torch is None, "no torch")
class Training(Case):
    def losses(self, model, steps=20, **options):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, **options)
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            x, target = tokens(2, 8, seed=step), tokens(2, 8, seed=100 + step)
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            found.append(float(loss))
        return found

    def test_twenty_steps_of_adamw_have_the_losses_of_plain_torch(self):
        want = self.losses(Model(False))
        self.assertLess(min(want[-5:]), want[0])
        for options in ({}, {"recompute": "activation_input"}):
            for got, loss in zip(self.losses(Model(True, **options)), want):
                self.assertLess(abs(got - loss) / loss, 1e-5)
        for loop in ({"foreach": True}, {"fused": True}):
            try:
                got = self.losses(Model(True), **loop)
            except (RuntimeError, TypeError):  # this torch has none for a CPU
                continue
            self.assertLess(abs(got[-1] - want[-1]) / want[-1], 1e-5)

    def gradients(self, model, run=None):
        x = tokens(3, 5).requires_grad_()
        (run or model)(x).square().sum().backward()
        return [x.grad, *(t.grad for t in model.parameters())]

    def expect_equal(self, got, want):
        for a, b in zip(got, want):
            self.assertTrue(torch.equal(a, b))

    def test_checkpointing_gives_the_same_bits(self):
        want = self.gradients(Model(True))
        for reentrant in (True, False):
            model = Model(True)

            def run(x, model=model, reentrant=reentrant):
                for block, layer in zip(model.blocks, model.layers):
                    x = x + checkpoint(lambda t, b=block, l=layer: l(b.norm(b.mix(t))), x,
                                       use_reentrant=reentrant)
                return x

            self.expect_equal(self.gradients(model, run), want)

    def test_checkpointing_keeps_nothing_between_forward_and_backward(self):
        layer = Model(True).layers[0]
        x = tokens(6).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False)
        self.assertEqual(len(layer._pool._free), 1)  # the forward's state serves others already
        y.sum().backward()
        self.assertEqual(len(layer._pool._free), 1)

    def test_several_forwards_before_a_backward_have_states_of_their_own(self):
        p = made_up()
        layer = sw.Layer(**p, top_k=K, trainable=True)
        inputs = [tokens(4, seed=s).requires_grad_() for s in range(3)]
        others = double(p)
        doubled = [x.detach().double().requires_grad_() for x in inputs]
        losses = [layer(x).square().sum() for x in inputs]
        for loss in reversed(losses):
            loss.backward()
        sum(plain_layer.layer(x, others, K).square().sum() for x in doubled).backward()
        for x, want in zip(inputs, doubled):
            self.expect_near(x.grad, want.grad, 1e-5, "x")
        for name, t in p.items():
            self.expect_near(t.grad, others[name].grad, 1e-5, name)
        del losses, loss
        self.assertEqual(len(layer._pool._free), 3)
        layer(inputs[0]).sum().backward()
        self.assertEqual(len(layer._pool._free), 3)  # one of them again

    def test_without_gradients_nothing_is_saved(self):
        layer = sw.Layer(**made_up(), top_k=K, trainable=True)
        with torch.no_grad():
            want = layer(tokens(4))
        with torch.inference_mode():
            self.assertTrue(torch.equal(layer(tokens(4)), want))
        self.assertEqual(layer._pool._free, [])
        y = layer(tokens(4))
        self.assertTrue(y.requires_grad and torch.equal(y.detach(), want))

    def test_autocast_trains_in_the_types_of_the_parameters(self):
        torch.manual_seed(0)
        p, mix = made_up(), torch.nn.Linear(H, H)
        # All experts of each token: rounding cannot choose others.
        layer, leaves = sw.Layer(**p, top_k=E, trainable=True), [*p.values(), *mix.parameters()]

        def gradients():
            x = tokens(3, 5).requires_grad_()
            y = layer(mix(x))
            y.float().square().sum().backward()
            found = [x.grad, *(t.grad for t in leaves)]
            for t in leaves:
                t.grad = None
            return y.dtype, found

        _, want = gradients()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dtype, got = gradients()
        self.assertEqual(dtype, torch.bfloat16)  # as its tokens, the product of mix
        for a, b in zip(got, want):
            self.assertEqual(a.dtype, torch.float32)
            self.expect_near(a, b, 5e-2, "a gradient")

    def test_state_dicts_are_loaded_in_place(self):
        first, second = Model(True), Model(True)
        self.losses(first, 2)
        second.load_state_dict(first.state_dict())
        x = tokens(4)
        self.assertTrue(torch.equal(first(x), second(x)))

    def test_writes_that_torch_does_not_count_want_a_reload(self):
        p = made_up()
        layer, x = sw.Layer(**p, top_k=K, trainable=True), tokens(4)
        before = layer(x).detach()
        p["w2"].data.mul_(2)
        layer.reload_experts()
        self.expect_near(layer(x).detach(), 2 * before, 1e-6, "y")


@unittest.skipIf(torch is None, "no torch")
class Refused(Case):
    def setUp(self):
        self.p = made_up()
        self.layer = sw.Layer(**self.p, top_k=K, trainable=True)
        self.x = tokens(4).requires_grad_()

    def test_a_second_backward_is_an_error(self):
        y = self.layer(self.x).sum()
        y.backward(retain_graph=True)
        self.refuse("used by a backward already.*run the forward again", y.backward)
        y = self.layer(self.x).sum()
        y.backward()
        self.refuse("second time", y.backward)

    def test_a_gradient_of_another_shape_is_an_error_and_nan_passes_through(self):
        y = self.layer(self.x)
        self.refuse("shape", y.backward, torch.ones(3, H))
        dy = torch.ones(4, H)
        dy[1, 2] = float("nan")
        y.backward(dy)
        self.assertTrue(bool(self.x.grad[1].isnan().any()))
        self.assertFalse(bool(self.x.grad[[0, 2, 3]].isnan().any()))
        self.assertTrue(bool(self.p["w2"].grad.isnan().any()))

    def test_states_that_a_hook_has_copied_are_an_error(self):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = self.layer(self.x)
        self.refuse("a hook has copied the tensor", y.sum().backward)

    def test_a_gradient_of_a_gradient_is_an_error(self):
        dx, = torch.autograd.grad(self.layer(self.x).square().sum(), self.x, create_graph=True)
        self.refuse("once_differentiable", dx.sum().backward)

    def test_parameters_that_change_before_the_backward_are_an_error(self):
        for name in self.p:
            y = self.layer(self.x).sum()
            with torch.no_grad():
                self.p[name].mul_(1.5)
            self.refuse("modified by an inplace operation", y.backward)
        y = self.layer(self.x).sum()
        for t in self.p.values():
            t.grad = torch.ones_like(t)
        try:  # where torch counts no writes
            torch.optim.AdamW(self.p.values(), fused=True).step()
        except (RuntimeError, TypeError):
            pass  # this torch has none for a CPU
        else:
            self.refuse("changed between this forward and its backward|inplace", y.backward)
        y = self.layer(self.x).sum()
        self.layer.reload_experts()
        self.refuse("reloaded", y.backward)

    def test_parameters_that_move_or_are_none_of_torch_are_an_error(self):
        self.p["w13"].data = self.p["w13"].data.clone()
        self.refuse("no longer lies where it did", self.layer, self.x)
        p = made_up()
        self.refuse("w2 is a ndarray.*tensors of torch", sw.Layer, p["gate"], p["w13"],
                    p["w2"].detach().numpy(), K, trainable=True)
        with torch.inference_mode():
            p["w2"] = p["w2"].clone()
        self.refuse("w2 was made in torch.inference_mode", sw.Layer, **p, top_k=K, trainable=True)
        p = made_up()
        wide = torch.cat([p["w13"], p["w13"]], 2)[..., :H]
        self.refuse("w13: stride .* leaves a gap", sw.Layer, p["gate"], wide, p["w2"], K, trainable=True)

    def test_what_does_not_train_says_so(self):
        p = made_up()
        frozen = sw.Layer(**p, top_k=K)
        error = self.refuse("gate requires a gradient.*trainable=True", frozen, self.x.detach())
        self.assertEqual(error.code, "unsupported")
        self.refuse("x requires a gradient.*trainable=True", frozen, self.x)
        with torch.no_grad():
            frozen(self.x)
        for options, words in (({"w13_layout": "interleaved"}, "in place"),
                               ({"transposed": True}, "in place"), ({"comm": 3}, "Communicator"),
                               ({"weights": "q8"}, "exact"), ({"device": "cuda"}, "cuda"),
                               ({"recompute": "all"}, "'all' is none of none, activation_input"),
                               ({"selection_bias": torch.zeros(E).requires_grad_()}, "only chooses")):
            self.refuse(words, sw.Layer, **p, top_k=K, trainable=True, **options)
        self.refuse("out= is given", self.layer, self.x, out=torch.empty(4, H))
        self.refuse("x is a ndarray", self.layer, self.x.detach().numpy())
        self.refuse("weight is a ndarray", self.layer, self.x, torch.zeros(4, K).int(),
                    torch.ones(4, K).numpy())
        experts = sw.Experts(p["w13"], p["w2"])
        routing = torch.zeros(4, K, dtype=torch.int64), torch.ones(4, K)
        self.refuse("w13 requires a gradient.*trainable=True", experts, self.x.detach(), *routing)
        self.refuse("do not go|does not go|in place", sw.Experts, p["w13"], p["w2"], trainable=True,
                    transposed=True)

    def test_ranks_do_not_train(self):
        ranks = sw.Communicator.threads(2)
        self.refuse("ranks", sw.Layer, **self.p, top_k=K, trainable=True, comm=ranks[0], max_tokens=8)


@unittest.skipIf(torch is None, "no torch")
class Golden(unittest.TestCase):
    """Gradients and losses of blocks of transformers, as tools/peers/train_check.py has written them: a
    trainable Layer on their weights has the same."""

    def expect_near(self, got, want, what):
        error, place = furthest(got, torch.from_numpy(want))
        self.assertLessEqual(error, GOLDEN_TOLERANCE, f"{what} at {place}")

    def test_gradients_and_twenty_steps_of_adamw_are_those_of_transformers(self):
        with np.load(GOLDEN) as stored:
            golden = dict(stored)
        versions = json.loads(str(golden.pop("versions")))
        self.assertIn("transformers", versions)
        names = sorted({key.split(".")[0] for key in golden})
        self.assertEqual(names, ["mixtral", "olmoe"])
        for name in names:
            with self.subTest(name):
                self.check({key.split(".")[1]: value for key, value in golden.items()
                            if key.startswith(name + ".")})

    def check(self, golden):
        p = {key: torch.nn.Parameter(torch.from_numpy(golden[key])) for key in ("gate", "w13", "w2")}
        layer = sw.Layer(**p, top_k=int(golden["top_k"]), renormalize=bool(golden["renormalize"]),
                         trainable=True)
        x = torch.from_numpy(golden["x"]).requires_grad_()
        target = torch.from_numpy(golden["target"])
        y = layer(x)
        self.expect_near(y, golden["y"], "y")
        (y - target).square().mean().backward()
        for key, tensor in {"x": x, **p}.items():
            self.expect_near(tensor.grad, golden["d_" + key], key)
        x.requires_grad_(False)
        optimizer = torch.optim.AdamW(p.values(), lr=3e-3)
        found = []
        for want in golden["losses"]:
            loss = (layer(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
            self.assertLessEqual(abs(found[-1] - want), GOLDEN_TOLERANCE * want)
        self.assertLess(found[-1], 0.9 * found[0])


if __name__ == "__main__":
    unittest.main()
