"""Soft-MoE: numbers of numpy, gradients by torch's own derivatives of the definition, bad input."""

import json
import os
import unittest

import numpy as np

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "soft_moe_golden.json")
E, P, H, I = 3, 2, 16, 12


def arrays_of(case):
    """x, phi, w13 and w2 in f32."""
    given, experts, hidden = case["given"], case["experts"], case["hidden"]
    shapes = {"x": (case["tokens"], hidden), "phi": (experts * case["slots"], hidden),
              "w13": (experts, 2 * case["inner"], hidden), "w2": (experts, hidden, case["inner"])}
    return {name: np.array(given[name], np.float32).reshape(shape)
            for name, shape in shapes.items()}


class Case(unittest.TestCase):
    def refuse(self, words, call, *args, **kwargs):
        with self.assertRaisesRegex(sw.SwitchyardError, words):
            call(*args, **kwargs)


class Numbers(Case):
    def test_arrays_of_numpy_give_the_numbers_of_the_definition(self):
        with open(DATA, encoding="utf-8") as file:
            document = json.load(file)
        for name, case in document.items():
            with self.subTest(name):
                arrays = arrays_of(case)
                if "sequence" in case:  # sequences are a dimension here
                    arrays["x"] = arrays["x"].reshape(-1, case["sequence"], case["hidden"])
                y = sw.soft_moe(**arrays, slots=case["slots"], group=case.get("group"),
                                scale=case["given"]["scale"][0],
                                normalize=case.get("normalize", True),
                                causal=case.get("causal", False))
                self.assertEqual(y.shape, arrays["x"].shape)
                np.testing.assert_allclose(y.reshape(-1), case["y"], rtol=1e-5, atol=1e-5)

    def test_weights_of_both_ways_sum_to_one_and_kept_experts_give_the_same(self):
        random = np.random.default_rng(1)
        x, phi, w13, w2 = (random.standard_normal(shape).astype(np.float32)
                           for shape in ((8, H), (E, P, H), (E, 2 * I, H), (E, H, I)))
        y, dispatch, combine = sw.soft_moe(x, phi, w13, w2, group=4, weights=True)
        np.testing.assert_allclose(dispatch.reshape(2, 4, E * P).sum(1), 1, rtol=1e-6)
        np.testing.assert_allclose(combine.sum(1), 1, rtol=1e-6)
        kept = sw.Experts(w13, w2)
        np.testing.assert_array_equal(sw.soft_moe(x, phi, kept, group=4), y)


@unittest.skipIf(torch is None, "no torch")
class Gradients(Case):
    def setUp(self):
        torch.manual_seed(3)
        self.x = torch.randn(2, 12, H, requires_grad=True)
        self.phi = torch.randn(E * P, H, requires_grad=True)
        self.scale = torch.tensor(1.7, requires_grad=True)
        self.w13 = (torch.randn(E, 2 * I, H) / 4).requires_grad_()
        self.w2 = torch.randn(E, H, I, requires_grad=True)
        self.b13 = torch.randn(E, 2 * I, requires_grad=True)
        self.b2 = torch.randn(E, H, requires_grad=True)
        self.all = (self.x, self.phi, self.scale, self.w13, self.w2, self.b13, self.b2)

    def by_definition(self, group, causal, normalize):
        x, phi, scale, w13, w2, b13, b2 = self.all
        unit = (lambda t: t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt()) if normalize else (
            lambda t: t)
        groups = x.reshape(2, -1, group, H)
        logits = scale * (unit(groups) @ unit(phi).T)
        slots = logits.softmax(2).transpose(2, 3) @ groups  # [2, G, E * P, H]
        of_expert = slots.reshape(2, -1, E, P, H)
        gate, up = (torch.einsum("bgeph,eih->bgepi", of_expert, w13) + b13[:, None]).chunk(2, -1)
        outputs = torch.einsum("bgepi,ehi->bgeph", torch.nn.functional.silu(gate) * up, w2)
        outputs = (outputs + b2[:, None]).reshape(slots.shape)
        if causal:
            outputs = torch.cat((torch.zeros_like(outputs[:, :1]), outputs[:, :-1]), 1)
        return (logits.softmax(3) @ outputs).reshape(x.shape)

    def run_ours(self, group, causal, normalize, **options):
        x, phi, scale, w13, w2, b13, b2 = self.all
        return sw.soft_moe(x, phi, w13, w2, slots=P, group=group, scale=scale, causal=causal,
                           normalize=normalize, b13=b13, b2=b2, **options)

    def test_gradients_are_those_of_the_definition_in_torch(self):
        dy = torch.randn(2, 12, H)
        for group, causal, normalize, recompute in ((12, False, True, "none"),
                                                    (4, False, False, "activation_input"),
                                                    (3, True, True, "none")):
            with self.subTest(group=group, causal=causal, normalize=normalize):
                want = self.by_definition(group, causal, normalize)
                have = self.run_ours(group, causal, normalize, recompute=recompute)
                torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
                for gradient, wanted in zip(torch.autograd.grad(have, self.all, dy),
                                            torch.autograd.grad(want, self.all, dy)):
                    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=2e-4)

    def test_bf16_weights_take_tokens_of_f32_and_give_each_its_own_type(self):
        w13, w2 = (t.detach().bfloat16().requires_grad_() for t in (self.w13, self.w2))
        y = sw.soft_moe(self.x, self.phi, w13, w2)
        y.sum().backward()
        self.assertEqual([t.dtype for t in (y, self.x.grad, self.phi.grad, w13.grad, w2.grad)],
                         3 * [torch.float32] + 2 * [torch.bfloat16])

    def test_kept_experts_train_tokens_and_phi_alone(self):
        kept = sw.Experts(self.w13.detach(), self.w2.detach())
        sw.soft_moe(self.x, self.phi, kept).sum().backward()
        self.assertTrue(self.x.grad.abs().sum() > 0 and self.phi.grad.abs().sum() > 0)

    def test_one_forward_has_one_backward(self):
        y = self.run_ours(12, False, True)
        y.sum().backward(retain_graph=True)
        self.refuse("one forward has one backward", y.sum().backward)

    def test_parameters_that_change_before_the_backward_are_an_error(self):
        y = self.run_ours(12, False, True)
        with torch.no_grad():
            self.phi += 1
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()

    def test_causal_outputs_do_not_depend_on_later_tokens_and_others_do(self):
        for causal in (True, False):
            with torch.no_grad():
                before = self.run_ours(3, causal, True)
                self.x[:, 7:] += 1
                after = self.run_ours(3, causal, True)
            self.assertEqual(torch.equal(before[:, :7], after[:, :7]), causal)


class BadInput(Case):
    def setUp(self):
        self.x = np.ones((6, H), np.float32)
        self.phi = np.ones((E * P, H), np.float32)
        self.w13, self.w2 = np.ones((E, 2 * I, H), np.float32), np.ones((E, H, I), np.float32)

    def call(self, **options):
        given = {"x": self.x, "phi": self.phi, "w13": self.w13, "w2": self.w2, **options}
        return sw.soft_moe(**given)

    def test_what_does_not_fit_is_named(self):
        self.refuse("group=4 does not divide the 6 tokens", self.call, group=4)
        self.refuse("phi has 6 rows, want num_experts=3 times slots=4", self.call, slots=4)
        self.refuse(r"phi is \[6, 15\], want \[E \* slots, 16\]", self.call, phi=self.phi[:, 1:])
        self.refuse("phi is None", self.call, phi=None)
        self.refuse("scale is a str", self.call, scale="much")
        self.refuse("recompute='all' is none of", self.call, recompute="all")
        self.refuse("w2 is None", self.call, w2=None)
        self.refuse("it has its own", self.call, w13=sw.Experts(self.w13, self.w2))
        self.x[3, 2] = np.nan
        self.refuse("the logit of token 3 and slot 0 is nan", self.call)


if __name__ == "__main__":
    unittest.main()
