"""Routers with parameters beside a gate: networks against torch's own logits, constant experts and gating
residuals of MoE++ against numpy's numbers (tests/data/moe_plus_plus_golden.py); forward and back."""

import json
import os
import unittest

import numpy as np

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "moe_plus_plus_golden.json")
E, K, H, I, T = 6, 2, 24, 16, 20


@unittest.skipUnless(torch, "torch is not installed")
class Networks(unittest.TestCase):
    def setUp(self):
        g = torch.Generator().manual_seed(2)
        self.x = torch.randn(T, H, generator=g, requires_grad=True)
        self.parameters = [torch.nn.Parameter(torch.randn(*shape, generator=g) * 0.3)
                           for shape in ((E, H), (E, 2 * I, H), (E, H, I))]

    def refuse(self, words, call, *args, **kwargs):
        with self.assertRaisesRegex((sw.SwitchyardError, RuntimeError), words):
            call(*args, **kwargs)

    def test_a_network_makes_logits_by_parameters_of_its_own(self):
        _, w13, w2 = self.parameters
        normalize, gelu, width = torch.nn.functional.normalize, torch.nn.functional.gelu, 9
        matrix = width * H

        def cosine(gate, p):
            z = normalize(self.x @ p[:-1].reshape(width, H).T, dim=-1)
            return z @ (p[-1].exp().clamp(max=100) * normalize(gate, dim=-1)).T

        def hidden(p):
            return gelu(self.x @ p[:matrix].reshape(width, H).T + p[matrix:matrix + width])

        def mlp(gate, p):
            return hidden(p) @ gate.T

        def hadamard(gate, p):
            w, b = p[matrix + width:-H].reshape(H, width), p[-H:]
            return (self.x * (hidden(p) @ w.T + b)) @ gate.T

        for make, columns, size in ((cosine, width, matrix + 1), (mlp, width, matrix + width),
                                    (hadamard, H, 2 * matrix + width + H)):
            name = make.__name__
            with self.subTest(name):
                gate = torch.nn.Parameter(torch.randn(E, columns) * 0.3)
                p = torch.nn.Parameter(torch.randn(size) * 0.3)
                bias = torch.nn.Parameter(torch.randn(E) * 0.3)
                r = sw.Router("top-k", num_experts=E, top_k=K, network=name, width=width)
                layer = sw.Layer(gate, w13, w2, router=r, router_network=p, router_bias=bias,
                                 trainable=True)
                y = layer(self.x)
                logits = make(gate, p) + bias
                want = sw.experts(self.x, w13, w2,
                                  assignment=sw.Router("top-k", num_experts=E, top_k=K)(logits))
                torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
                leaves = (self.x, gate, p, bias, w13, w2)
                for got, expected in zip(torch.autograd.grad((y ** 2).sum(), leaves),
                                         torch.autograd.grad((want ** 2).sum(), leaves)):
                    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
                arrays = [t.detach().numpy() for t in (gate, w13, w2, p, bias, self.x)]
                copied = sw.Layer(*arrays[:3], router=r, router_network=arrays[3],
                                  router_bias=arrays[4])
                torch.testing.assert_close(torch.from_numpy(copied(arrays[5])), y.detach())
                self.refuse(f"router has network={name}", r, logits)
                self.refuse("router_network has 0 values", sw.Layer, gate, w13, w2, router=r)
        self.refuse("router_network", sw.Layer, self.parameters[0], w13, w2, K, router_network=p)


def cases():
    """(name, case, its parameters by name, a router for each layer)"""
    with open(DATA, encoding="utf-8") as file:
        document = json.load(file)
    for name, case in document.items():
        count, experts, hidden, inner = (case[key] for key in ("layers", "experts", "hidden", "inner"))
        every = experts + case["constant"] + case["copy"] + case["zero"]
        shapes = {"x": (case["tokens"], hidden), "gate": (count, every, hidden),
                  "constants": (count, case["constant"], 3, hidden), "w13": (count, experts, 2 * inner, hidden),
                  "w2": (count, experts, hidden, inner), "residual": (every, every)}
        given = {key: np.array(values, np.float32).reshape(shapes[key]) for key, values in case["given"].items()}
        routers = [sw.Router("moe++", num_experts=experts, residual=i > 0,
                             **{key: case[key] for key in ("top_k", "zero", "copy", "constant", "tau", "renormalize")})
                   for i in range(count)]
        yield name, case, given, routers


def options_of(case, trainable):
    options = {"trainable": trainable}
    if case["balance"] and trainable:
        options["losses"] = {"balance": case["balance"]}
    if case["capacity"]:
        options["capacity_factor"] = case["capacity"]
    return options


class Case(unittest.TestCase):
    def refuse(self, words, call, *args, **kwargs):
        with self.assertRaisesRegex(sw.SwitchyardError, words):
            call(*args, **kwargs)


class MoePlusPlus(Case):
    def test_layers_are_numpys_and_hand_their_logits_on(self):
        for name, case, given, routers in cases():
            with self.subTest(name):
                layers = [sw.Layer(*(given[key][i] for key in ("gate", "w13", "w2")), router=router,
                                   constant_experts=given["constants"][i],
                                   gating_residual=given["residual"] if i > 0 else None, **options_of(case, False))
                          for i, router in enumerate(routers)]
                for shape in ((case["tokens"], -1), (3, case["tokens"] // 3, -1)):
                    y = given["x"].reshape(*shape[:-1], case["hidden"])
                    last = {}
                    for layer, want in zip(layers, case["logits"]):
                        y, logits = layer(y, logits=True, **last)
                        last = {"previous_logits": logits}
                        self.assertEqual(logits.shape, (*shape[:-1], layer.num_experts))
                        np.testing.assert_allclose(logits.reshape(-1), want, rtol=1e-5, atol=1e-6)
                    if case["capacity"]:  # a rank's, not a sequence's
                        self.assertGreater(layers[0].stats()["dropped_assignments"], 0)
                    np.testing.assert_allclose(y.reshape(-1), case["y"], rtol=1e-5, atol=1e-6)
                if len(layers) == 1:
                    self.refuse("previous_logits are given, but the router has no", layers[0], given["x"],
                                previous_logits=logits.reshape(case["tokens"], -1))
                    continue
                self.refuse("request.previous_logits are missing", layers[1], given["x"])
                self.refuse("previous_logits", layers[1], given["x"],
                            previous_logits=np.zeros((case["tokens"], 2), np.float32))

    def test_parameters_that_do_not_fit_are_named(self):
        gate, w13, w2, constants = (np.zeros(shape, np.float32)
                                    for shape in ((6, 8), (2, 8, 8), (2, 8, 4), (2, 3, 8)))
        r = sw.Router("moe++", num_experts=2, top_k=1)
        self.refuse("constant_experts is missing: the router moe", sw.Layer, gate, w13, w2, router=r)
        self.refuse("constant_experts: dimension 1 is 2, want 3", sw.Layer, gate, w13, w2, router=r,
                    constant_experts=constants[:, :2].copy())
        self.refuse("gating_residual is given, but the router has none", sw.Layer, gate, w13, w2, router=r,
                    constant_experts=constants, gating_residual=np.zeros((6, 6), np.float32))
        self.refuse("identity_experts=1 with the router moe", sw.Layer, gate, w13, w2, router=r,
                    constant_experts=constants, identity_experts=1)
        self.refuse("zero=0, copy=0 and constant=0", sw.Router, "moe++", num_experts=4, zero=0, copy=0, constant=0)
        a = sw.Router("moe++", num_experts=2, top_k=1)(np.eye(6, dtype=np.float32))
        self.assertEqual(a.counts.tolist(), [1] * 6)
        self.refuse("the assignment is of the router moe", sw.experts, np.zeros((6, 8), np.float32), w13, w2,
                    assignment=a)


@unittest.skipIf(torch is None, "torch is not installed")
class Learning(Case):
    def test_a_layer_and_its_gradients_are_numpys(self):
        for name, case, given, routers in cases():
            with self.subTest(name):
                x = torch.tensor(given["x"]).requires_grad_()
                leaves = [("x", 0, x)]
                y, logits = x, None
                for i, router in enumerate(routers):
                    mine = {key: torch.nn.Parameter(torch.tensor(given[key][i]))
                            for key in ("gate", "constants", "w13", "w2")}
                    if i > 0:
                        mine["residual"] = torch.nn.Parameter(torch.tensor(given["residual"]))
                    leaves += [(key, 0 if key == "residual" else i, leaf) for key, leaf in mine.items()]
                    layer = sw.Layer(mine["gate"], mine["w13"], mine["w2"], router=router,
                                     constant_experts=mine["constants"], gating_residual=mine.get("residual"),
                                     **options_of(case, True))
                    y, logits = layer(y, logits=True, previous_logits=logits)
                    if case["balance"]:
                        self.assertAlmostEqual(float(layer.losses()["balance"]), case["balances"][i], 5)
                np.testing.assert_allclose(y.detach().reshape(-1), case["y"], rtol=1e-5, atol=1e-6)
                dy = torch.tensor(case["dy"]).reshape(y.shape)
                found = torch.autograd.grad((y * dy).sum(), [leaf for *_, leaf in leaves])
                for (key, index, like), gradient in zip(leaves, found):
                    want = np.array(case["gradients"][key]).reshape(-1, like.numel())[index]
                    np.testing.assert_allclose(gradient.reshape(-1), want, rtol=2e-5, atol=3e-6,
                                               err_msg=f"{key} {index}")

    def test_a_router_balances_by_tau(self):
        r = sw.Router("moe++", num_experts=4, top_k=2, zero=2, copy=0, constant=1, tau=0.5)
        self.assertEqual((r.num_experts, r.num_ids, r.num_logits, r.columns), (4, 7, 7, 2))
        logits = torch.randn(30, 7, generator=torch.Generator().manual_seed(3), requires_grad=True)
        a = r(logits)
        counts = logits.topk(2, dim=-1).indices.reshape(-1).bincount(minlength=7)
        self.assertTrue(torch.equal(a.counts, counts))
        eta = torch.tensor([1.0] * 4 + [0.5] * 3)
        want = 7 * (eta * counts / 60 * logits.softmax(-1).mean(0)).sum()
        torch.testing.assert_close(sw.losses.load_balance(a), want)
        alike = sw.Router("moe++", num_experts=4, top_k=2, zero=2, copy=0, constant=1, tau=0)(logits)
        torch.testing.assert_close(sw.losses.load_balance(alike),
                                   7 * (counts / 60 * logits.softmax(-1).mean(0)).sum())


if __name__ == "__main__":
    unittest.main()
