"""PERFT's adapters: numbers of numpy, gradients by torch's own derivatives, bad input."""

import json
import os
import unittest

import numpy as np

import switchyard as sw
from rank_threads import on_threads

try:
    import torch
except ImportError:
    torch = None

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "perft_golden.json")


def cases(array):
    """(name, case, adapters' arguments, arguments of the call) of the golden values."""
    with open(DATA, encoding="utf-8") as file:
        document = json.load(file)
    for name, case in document.items():
        given, adapters, rank = case["given"], case["adapters"], case["rank"]
        tokens, hidden = case["tokens"], case["hidden"]
        shapes = {"x": (tokens, hidden), "base": (tokens, hidden), "a": (adapters, rank, hidden),
                  "b": (adapters, hidden, rank), "gate": (adapters, hidden),
                  "weight": (tokens, case.get("top_k", 1))}
        values = {key: array(np.array(value, np.float32).reshape(shapes[key]))
                  for key, value in given.items()}
        make = {"kind": case["kind"], "a": values["a"], "b": values["b"], "alpha": case["alpha"],
                "activation": case.get("activation", "identity")}
        if case["kind"] == "routed":
            make.update(gate=values["gate"], top_k=case["top_k"], renormalize=case["renormalize"])
        call = {"x": values["x"], "base": values["base"]}
        if case["kind"] == "embedded":
            expert = np.array(case["expert"], np.int32).reshape(shapes["weight"])
            call.update(expert=expert if torch is None or not torch.is_tensor(values["x"])
                        else torch.tensor(expert), weight=values["weight"])
        yield name, case, values, make, call


class Numbers(unittest.TestCase):
    def test_arrays_of_numpy_give_the_numbers_of_the_definition(self):
        for name, case, _, make, call in cases(lambda values: values):
            with self.subTest(name):
                perft = sw.Perft(**make)
                y = perft(**call)
                np.testing.assert_allclose(y.reshape(-1), case["y"], rtol=1e-5, atol=1e-5)
                del call["base"]
                np.testing.assert_allclose(perft(**call).reshape(-1),
                                           np.array(case["y"]) - case["given"]["base"], rtol=1e-4,
                                           atol=2e-5)


    def test_a_sequence_has_the_numbers_of_its_tokens_and_statistics_count_them(self):
        rng = np.random.default_rng(3)
        a, b = rng.normal(size=(3, 4, 8)).astype("f4"), rng.normal(size=(3, 8, 4)).astype("f4")
        gate, x = rng.normal(size=(3, 8)).astype("f4"), rng.normal(size=(2, 5, 8)).astype("f4")
        perft = sw.Perft("routed", a, b, gate=gate, top_k=2)
        y = perft(x, base=x)
        np.testing.assert_array_equal(y.reshape(10, 8), perft(x.reshape(10, 8), base=x.reshape(10, 8)))
        stats = perft.stats()
        self.assertEqual(sum(stats["counts"]), 20)
        self.assertGreater(stats["effective_experts"], 1)
        gate[:], a[:] = 0, 0  # what does not train has copies
        np.testing.assert_array_equal(perft(x, base=x), y)

    def test_routings_of_any_width_meet_embedded_adapters(self):
        rng = np.random.default_rng(4)
        a, b = rng.normal(size=(3, 4, 8)).astype("f4"), rng.normal(size=(3, 8, 4)).astype("f4")
        x = rng.normal(size=(5, 8)).astype("f4")
        perft = sw.Perft("embedded", a, b, alpha=4)
        for k in (1, 3):
            expert = np.stack([rng.permutation(3)[:k] for _ in range(5)]).astype("i4")
            weight = rng.normal(size=(5, k)).astype("f4")
            want = sum(weight[:, i:i + 1] * np.einsum("thr,tr->th", b[expert[:, i]], np.einsum(
                "trh,th->tr", a[expert[:, i]], x)) for i in range(k))
            np.testing.assert_allclose(perft(x, expert=expert, weight=weight), want, atol=2e-5)


@unittest.skipIf(torch is None, "no torch")
class Gradients(unittest.TestCase):
    def test_gradients_of_torch_are_those_of_the_definition(self):
        for name, case, values, make, call in cases(lambda v: torch.tensor(v, requires_grad=True)):
            with self.subTest(name):
                y = sw.Perft(**make, trainable=True)(**call)
                y.backward(torch.tensor(case["dy"]).reshape(y.shape))
                for key, want in case["gradients"].items():
                    np.testing.assert_allclose(values[key].grad.reshape(-1).numpy(), want, rtol=1e-4,
                                               atol=1e-4, err_msg=key)

    def test_an_optimizer_lowers_the_loss_and_the_layer_stays_as_it_is(self):
        torch.manual_seed(5)
        w13, w2, gate = torch.randn(4, 12, 8) / 3, torch.randn(4, 8, 6) / 3, torch.randn(4, 8)
        layer = sw.Layer(gate, w13, w2, top_k=2)
        x, target = torch.randn(32, 8), torch.randn(32, 8)
        a = (torch.randn(3, 4, 8) / 3).requires_grad_()
        b = torch.zeros(3, 8, 4, requires_grad=True)
        own = torch.randn(3, 8, requires_grad=True)
        perft = sw.Perft("routed", a, b, gate=own, top_k=2, trainable=True, losses={"balance": 0.01})
        base = layer(x)
        optimizer = torch.optim.Adam([a, b, own], 0.02)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (perft(x, base) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        self.assertLess(losses[-1], 0.8 * losses[0])
        self.assertTrue(torch.equal(layer(x), base))
        self.assertGreater(perft.losses()["balance"].item(), 0)


    def test_over_ranks_gradients_are_those_of_all_tokens(self):
        torch.manual_seed(6)
        values = [torch.randn(3, 4, 8), torch.randn(3, 8, 4), torch.randn(3, 8)]
        x, dy = torch.randn(6, 8), torch.randn(6, 8)

        def gradients(rows, comm=None):
            a, b, gate = (v.clone().requires_grad_() for v in values)
            perft = sw.Perft("routed", a, b, gate=gate, top_k=2, trainable=True, comm=comm)
            perft(x[rows]).backward(dy[rows])
            return a.grad, b.grad, gate.grad

        want = gradients(slice(0, 6))
        found = on_threads(lambda rank, comm: gradients(slice(3 * rank, 3 * rank + 3), comm), 2)
        for mine, other, one in zip(*found, want):
            self.assertTrue(torch.equal(mine, other))
            torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5)

    def test_numbers_written_past_torch_count_once_read_again(self):
        a = torch.randn(1, 4, 8, requires_grad=True)
        b = torch.randn(1, 8, 4, requires_grad=True)
        perft, x = sw.Perft("shared", a, b, trainable=True), torch.randn(5, 8)
        base = torch.randn(5, 8, dtype=torch.bfloat16)
        b.data.zero_()
        perft.reload()
        y = perft(x, base=base)
        self.assertTrue(torch.equal(y, base))
        y.sum().backward(retain_graph=True)
        self.assertTrue(bool((a.grad == 0).all()) and bool((b.grad != 0).any()))
        with self.assertRaisesRegex(sw.SwitchyardError, "used by a backward already"):
            y.sum().backward()


@unittest.skipUnless(torch is not None and torch.cuda.is_available(), "no GPU")
class OnAGpu(unittest.TestCase):
    KINDS = {"routed": (3, 5), "embedded": (4, 8), "dense": (3, 3), "shared": (1, 17)}

    def made(self, kind, device, **options):
        """Adapters, the arguments of a call, and all tensors that have gradients, of which x is last."""
        generator = torch.Generator().manual_seed(8)
        adapters, rank = self.KINDS[kind]

        def draw(*shape):
            return (torch.randn(*shape, generator=generator) / 2).to(device).requires_grad_()

        tensors = [draw(adapters, rank, 24), draw(adapters, 24, rank)]
        call = {}
        if kind == "routed":
            tensors.append(draw(adapters, 24))
            options.update(gate=tensors[2], top_k=2)
        if kind == "embedded":
            tensors.append(draw(13, 2))
            expert = torch.randint(-1, adapters, (13, 2), generator=generator, dtype=torch.int32)
            call.update(expert=expert.to(device), weight=tensors[2])
        tensors.append(draw(13, 24))
        perft = sw.Perft(kind, *tensors[:2], trainable=True, **options)
        return perft, {"x": tensors[-1], **call}, tensors

    def test_numbers_and_gradients_are_those_of_a_cpu(self):
        for kind in self.KINDS:
            for recompute in ("none", "activation_input"):
                with self.subTest(kind, recompute=recompute):
                    results = []
                    for device in ("cpu", "cuda"):
                        perft, call, tensors = self.made(kind, device, recompute=recompute)
                        y = perft(**call)
                        with torch.no_grad():
                            alone = perft(**call, base=call["x"])
                        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(device))
                        perft.check()
                        results.append([t.cpu() for t in (y.detach(), alone - call["x"].detach(),
                                                          *(t.grad for t in tensors))])
                    for cpu, gpu in zip(*results):
                        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=2e-5)

    def test_an_optimizer_s_step_counts_at_once(self):
        for kind in self.KINDS:
            with self.subTest(kind):
                found = []
                for device in ("cpu", "cuda"):
                    perft, call, tensors = self.made(kind, device)
                    optimizer = torch.optim.SGD(tensors[:2], 0.1)
                    for _ in range(3):
                        optimizer.zero_grad()
                        perft(**call).square().mean().backward()
                        optimizer.step()
                    with torch.no_grad():
                        found.append(perft(**call).cpu())
                torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-5)

    def test_products_of_bf16_have_parameters_of_f32(self):
        perft, call, tensors = self.made("dense", "cuda", compute="bf16")
        exact = self.made("dense", "cuda")[0](**call)
        y = perft(**call)
        self.assertLess((y - exact).abs().max().item(), 0.05 * exact.abs().max().item())
        y.sum().backward()
        self.assertEqual(tensors[0].grad.dtype, torch.float32)

    def test_a_row_that_is_no_multiple_of_16_bytes_is_named(self):
        a, b = torch.ones(1, 4, 10, device="cuda"), torch.ones(1, 10, 4, device="cuda")
        with self.assertRaisesRegex(sw.SwitchyardError, "hidden=10 in f32"):
            sw.Perft("shared", a, b)


class BadInput(unittest.TestCase):
    def test_what_does_not_fit_is_named(self):
        a, b = np.ones((2, 3, 8), np.float32), np.ones((2, 8, 3), np.float32)
        gate, x = np.ones((2, 8), np.float32), np.ones((5, 8), np.float32)

        def refuse(words, *args, **options):
            with self.assertRaisesRegex(sw.SwitchyardError, words):
                sw.Perft(*args, **options)

        refuse("kind='wide' is none of routed", "wide", a, b)
        refuse(r"b is \[2, 8, 2\], want \[2, 8, 3\]", "dense", a, b[:, :, :2])
        refuse("wants a gate", "routed", a, b)
        refuse("a gate is given", "dense", a, b, gate=gate)
        refuse("has one: want that, or 'dense'", "shared", a, b)
        refuse("losses are given", "dense", a, b, losses={"balance": 0.1})
        refuse("activation='tanh' is none of", "dense", a, b, activation="tanh")
        with self.assertRaisesRegex(sw.SwitchyardError, r"base is \[4, 8\], want \[5, 8\]"):
            sw.Perft("dense", a, b)(x, base=x[:4])
        with self.assertRaisesRegex(sw.SwitchyardError, "have copied a and b"):
            sw.Perft("dense", a, b).reload()
        with self.assertRaisesRegex(sw.SwitchyardError, "is no Communicator"):
            sw.Perft("dense", a, b, comm=2)
        with self.assertRaisesRegex(sw.SwitchyardError, "wants expert and weight"):
            sw.Perft("embedded", a, b)(x)
        with self.assertRaisesRegex(sw.SwitchyardError, "takes none"):
            sw.Perft("dense", a, b)(x, expert=np.zeros((5, 1), np.int32))
        with self.assertRaisesRegex(sw.SwitchyardError, "of adapters beside a layer"):
            sw.Router("perft", num_experts=2)


if __name__ == "__main__":
    unittest.main()
