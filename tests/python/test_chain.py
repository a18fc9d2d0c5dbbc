"""Chain-of-Experts: the definition in numpy, its gradients by torch's own derivatives, bad input."""

import unittest

import numpy as np

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

C, T, E, K, H, I = 3, 10, 5, 2, 12, 8


def weights(seed):
    """x, gates, w13 and w2; small, so that three iterations stay small."""
    random = np.random.default_rng(seed)
    return [(random.standard_normal(shape) * size).astype(np.float32)
            for shape, size in (((T, H), 1), ((C, E, H), 1), ((E, 2 * I, H), 0.3), ((E, H, I), 0.3))]


def by_definition(x, gates, w13, w2, inner, outer):
    now = x.astype(np.float64)
    for gate in gates.astype(np.float64):
        y = np.zeros_like(now)
        for t, row in enumerate(now):
            logits = gate @ row
            chosen = sorted(range(E), key=lambda e: (-logits[e], e))[:K]
            shares = np.exp(logits[chosen] - logits[chosen].max())
            for e, weight in zip(chosen, shares / shares.sum()):
                g, up = np.split(w13[e] @ row, 2)
                y[t] += weight * (w2[e] @ (g / (1 + np.exp(-g)) * up))
        now = y + now if inner else y
    return now + x if outer else now


class Numbers(unittest.TestCase):
    def test_a_chain_is_its_definition_with_each_residual(self):
        x, gates, w13, w2 = weights(1)
        for inner in (True, False):
            for outer in (True, False):
                chain = sw.Chain(gates, w13, w2, top_k=K, inner_residual=inner,
                                 outer_residual=outer)
                want = by_definition(x, gates, w13, w2, inner, outer)
                np.testing.assert_allclose(chain(x), want, rtol=1e-4, atol=1e-5)
                np.testing.assert_array_equal(chain(x.reshape(2, 5, H)),
                                              chain(x).reshape(2, 5, H))

    def test_one_iteration_without_residuals_is_the_layer(self):
        x, gates, w13, w2 = weights(2)
        chain = sw.Chain(gates[:1], w13, w2, top_k=K, inner_residual=False)
        layer = sw.Layer(gates[0], w13, w2, top_k=K)
        np.testing.assert_allclose(chain(x), layer(x), rtol=1e-5, atol=1e-6)


    def test_the_layer_of_the_router_chain_gives_the_same(self):
        x, gates, w13, w2 = weights(5)
        for inner in (True, False):
            for outer in (True, False):
                router = sw.Router("chain", num_experts=E, top_k=K, iterations=C, inner_residual=inner,
                                   outer_residual=outer)
                layer = sw.Layer(gates.reshape(C * E, H), w13, w2, router=router)
                chain = sw.Chain(gates, w13, w2, top_k=K, inner_residual=inner, outer_residual=outer)
                np.testing.assert_allclose(layer(x), chain(x), rtol=1e-4, atol=1e-5)


@unittest.skipIf(torch is None, "no torch")
class Gradients(unittest.TestCase):
    def test_the_layer_of_the_router_chain_has_the_gradients_of_the_chain(self):
        x, gates, w13, w2 = (torch.tensor(t, requires_grad=True) for t in weights(6))
        rows = gates.detach().reshape(C * E, H).requires_grad_()
        layer = sw.Layer(rows, w13, w2, trainable=True,
                         router=sw.Router("chain", num_experts=E, top_k=K, iterations=C))
        chain = sw.Chain(gates, w13, w2, top_k=K, trainable=True)
        dy = torch.randn(T, H)
        have = torch.autograd.grad(layer(x), (x, rows, w13, w2), dy)
        want = torch.autograd.grad(chain(x), (x, gates, w13, w2), dy)
        for gradient, wanted in zip(have, want):
            torch.testing.assert_close(gradient.reshape(wanted.shape), wanted, rtol=1e-3, atol=1e-4)

    def test_losses_are_those_of_each_iteration(self):
        x, gates, w13, w2 = (torch.tensor(t, requires_grad=True) for t in weights(6))
        rows = gates.detach().reshape(C * E, H).requires_grad_()
        options = {"trainable": True, "router": sw.Router("chain", num_experts=E, top_k=K, iterations=C)}
        layer = sw.Layer(rows, w13, w2, losses={"balance": 0.5, "z": 0.25}, **options)
        plain = sw.Layer(rows, w13, w2, **options)
        now, counts, balance, z = x, torch.zeros(E, dtype=torch.int64), 0, 0
        for c in range(C):
            logits = now @ rows[c * E:(c + 1) * E].T
            chosen = logits.topk(K).indices
            share = torch.bincount(chosen.flatten(), minlength=E) / (T * K)
            balance = balance + E * (share * logits.softmax(-1).mean(0)).sum()
            z = z + logits.logsumexp(-1).square().mean()
            counts += torch.bincount(chosen.flatten(), minlength=E)
            gate, up = torch.einsum("th,tkih->tki", now, w13[chosen]).chunk(2, -1)
            y = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gate) * up, w2[chosen])
            now = now + (y * logits.gather(-1, chosen).softmax(-1)[..., None]).sum(1)
        dy = torch.randn(T, H)
        y = layer(x)
        torch.testing.assert_close(y, plain(x))
        have = torch.autograd.grad(y, (x, rows, w13, w2), dy)
        want = torch.autograd.grad((now * dy).sum() + 0.5 * balance + 0.25 * z, (x, rows, w13, w2))
        without = torch.autograd.grad(plain(x), rows, dy)[0]
        self.assertGreater((have[1] - without).abs().max(), 1e-3)
        for gradient, wanted in zip(have, want):
            torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4)
        losses = layer.losses()
        for name, wanted in (("balance", balance), ("z", z), ("total", 0.5 * balance + 0.25 * z)):
            torch.testing.assert_close(losses[name], wanted.detach().double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.counts(), counts)

    def test_gradients_are_sums_over_all_iterations(self):
        x, gates, w13, w2 = (torch.tensor(t, requires_grad=True) for t in weights(3))
        chain = sw.Chain(gates, w13, w2, top_k=K, trainable=True)
        dy = torch.randn(T, H)
        now = x
        for c in range(C):
            logits = now @ gates[c].T
            share, chosen = logits.topk(K)
            gate, up = torch.einsum("th,tkih->tki", now, w13[chosen]).chunk(2, -1)
            y = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gate) * up, w2[chosen])
            now = now + (y * share.softmax(-1)[..., None]).sum(1)
        have = chain(x)
        torch.testing.assert_close(have, now, rtol=1e-4, atol=1e-5)
        tensors = (x, gates, w13, w2)
        for gradient, wanted in zip(torch.autograd.grad(have, tensors, dy),
                                    torch.autograd.grad(now, tensors, dy)):
            torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4)


class BadInput(unittest.TestCase):
    def test_what_does_not_fit_is_named(self):
        x, gates, w13, w2 = weights(4)

        def refuse(words, *args, **options):
            with self.assertRaisesRegex(sw.SwitchyardError, words):
                sw.Chain(*args, **options)(x)

        refuse(r"gates is \[3, 4, 12\], want \[C, 5, 12\]", gates[:, 1:], w13, w2, top_k=K)
        refuse(r"gates is \[5, 12\], want \[C, E, H\]", gates[0], w13, w2, top_k=K)
        refuse("hash .*has no logits", gates, w13, w2, router="hash")
        refuse("top_k=2 is given beside a Router", gates, w13, w2, top_k=2,
               router=sw.Router("switch", num_experts=E))
        refuse("top_k=6", gates, w13, w2, top_k=6)
        router = sw.Router("chain", num_experts=E, top_k=K, iterations=C)
        with self.assertRaisesRegex(sw.SwitchyardError, "gate: dimension 0 is 5, want 15"):
            sw.Layer(gates[0], w13, w2, router=router)
        layer = sw.Layer(gates.reshape(C * E, H), w13, w2, router=router)
        with self.assertRaisesRegex(sw.SwitchyardError, "a routing is given, but the router chain"):
            layer(x, np.zeros((T, K), np.int32), np.zeros((T, K), np.float32))
        x = x[:, 1:]
        refuse(r"x is \[10, 11\], want \[T, 12\]", gates, w13, w2, top_k=K)


if __name__ == "__main__":
    unittest.main()
