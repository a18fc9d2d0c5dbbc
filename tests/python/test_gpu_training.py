"""Gradients on CUDA tensors are those of plain torch, on torch's streams and from its graphs. Skipped
without torch and a GPU."""

import unittest

import switchyard as sw

from test_gradients import Case, E, H, I, K, ROUTERS, double, made_up

try:
    import torch

    import plain_layer
except ImportError:
    torch = None

GPU = torch is not None and torch.cuda.is_available()
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def on_gpu(parameters):
    return {name: torch.nn.Parameter(t.detach().cuda()) for name, t in parameters.items()}


def tokens(count=40, seed=5, dtype=None):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, H, generator=g).to(dtype or torch.float32).cuda()


def trainable(p, **options):
    return sw.Layer(**p, **{"top_k": K, "trainable": True, "device": "cuda", **options})


@unittest.skipUnless(GPU, "no torch with a GPU")
class Layers(Case):
    def expect_same(self, y, want, leaves, others, tolerance):
        self.expect_near(y, want, tolerance, "y")
        g = torch.Generator().manual_seed(9)
        dy = torch.randn(y.shape, generator=g).to(y.dtype).cuda()
        y.backward(dy)
        want.backward(dy.to(want.dtype))
        for name, tensor in leaves.items():
            self.expect_near(tensor.grad, others[name].grad, tolerance, name)
            self.assertEqual(tensor.grad.dtype, tensor.dtype)
            self.assertEqual(tensor.grad.device, tensor.device)

    def check(self, p, count=40, dtype=None, top_k=K, options=None, **router):
        layer = trainable(p, top_k=top_k, **router, **(options or {}))
        x = tokens(count, dtype=dtype).requires_grad_()
        others = double(p)
        others["x"] = x.detach().double().requires_grad_()
        want = plain_layer.layer(others["x"], others, top_k, **router)
        bound = BOUNDS[str(dtype or torch.float32)[6:]]
        self.expect_same(layer(x), want, {"x": x, **p}, others, bound)

    def test_every_router_gives_the_gradients_of_plain_torch(self):
        for router in ROUTERS:
            for top_k in (1, 2, E):
                with self.subTest(router=router, top_k=top_k):
                    self.check(on_gpu(made_up()), top_k=top_k, **router)

    def test_chains_and_networks_have_the_gradients_of_a_cpu(self):
        g = torch.Generator().manual_seed(3)
        features = {"cosine": (16, 16 * H + 1), "mlp": (16, 16 * H + 16),
                    "hadamard": (H, 2 * 16 * H + 16 + H)}
        cases = [("chain", {"iterations": 2, "top_k": K}, 2 * E, H, None)]
        cases += [("top-k", {"top_k": K, "network": name, "width": 16}, E, cols, size)
                  for name, (cols, size) in features.items()]
        for name, options, rows, cols, size in cases:
            with self.subTest(router=name, **options):
                values = {"gate": torch.randn(rows, cols, generator=g) / H ** 0.5,
                          "w13": torch.randn(E, 2 * I, H, generator=g) / H ** 0.5,
                          "w2": torch.randn(E, H, I, generator=g) / I ** 0.5}
                if size:
                    values["router_network"] = torch.randn(size, generator=g) / 5
                x, dy = torch.randn(2, 40, H, generator=g)
                found = {}
                for device in ("cpu", "cuda"):
                    p = {n: torch.nn.Parameter(t.clone().to(device)) for n, t in values.items()}
                    on_it = {"device": "cuda"} if device == "cuda" else {}
                    layer = sw.Layer(**p, router=sw.Router(name, num_experts=E, **options),
                                     trainable=True, **on_it)
                    p["x"] = x.clone().to(device).requires_grad_()
                    y = layer(p["x"])
                    y.backward(dy.to(device))
                    found[device] = {"y": y.detach(), **{n: t.grad for n, t in p.items()}}
                for n, want in found["cpu"].items():
                    # Neither is in double.
                    self.expect_near(found["cuda"][n].cpu(), want, 5 * BOUNDS["float32"], n)

    def test_biases_shared_experts_and_their_gate_have_gradients(self):
        for gated in (True, False):
            self.check(on_gpu(made_up(gated, True, True, True)))

    def test_every_type_and_recomputation(self):
        for dtype in (torch.bfloat16, torch.float16):
            for recompute in ("none", "activation_input"):
                with self.subTest(dtype=dtype, recompute=recompute):
                    p = on_gpu(made_up(dtype=dtype))
                    # One routing for both: a choice may not hang on rounding.
                    layer = trainable(p, recompute=recompute)
                    x = tokens(dtype=dtype).requires_grad_()
                    others = double(p)
                    others["x"] = x.detach().double().requires_grad_()
                    routing = plain_layer.route(torch.randn(40, E, device="cuda"), K)
                    expert, weight = routing[0].int(), routing[1].detach().requires_grad_()
                    others["weight"] = weight.detach().double().requires_grad_()
                    want = plain_layer.layer(others["x"], others, K,
                                             (expert.long(), others["weight"]))
                    leaves = {"x": x, "weight": weight, "w13": p["w13"], "w2": p["w2"]}
                    self.expect_same(layer(x, expert, weight), want, leaves, others,
                                     BOUNDS[str(dtype)[6:]])

    def test_losses_of_the_logits_reach_router_and_tokens(self):
        p = on_gpu(made_up(router_bias=True))
        layer = trainable(p)
        x = tokens().requires_grad_()
        others = double({**p, "x": x})
        y, logits = layer(x, logits=True)
        exact = others["x"] @ others["gate"].T + others["router_bias"]
        want = plain_layer.layer(others["x"], others, K)
        (y.square().sum() + logits.logsumexp(-1).square().sum()).backward()
        (want.square().sum() + exact.logsumexp(-1).square().sum()).backward()
        for name, t in {"x": x, **p}.items():
            self.expect_near(t.grad, others[name].grad, 1e-5, name)

    def test_one_token_and_none(self):
        self.check(on_gpu(made_up()), count=1)
        p = on_gpu(made_up())
        x = tokens(0).requires_grad_()
        trainable(p)(x).sum().backward()
        self.assertEqual(tuple(x.grad.shape), (0, H))
        self.assertEqual(float(p["w13"].grad.abs().sum()), 0)

    def test_weights_that_an_optimizer_changes_count_from_the_next_call_on(self):
        p = on_gpu(made_up())
        layer = trainable(p)
        optimizer = torch.optim.AdamW(p.values(), lr=1e-2)
        for step in range(5):
            x = tokens(seed=step)
            others = double(p)
            want = plain_layer.layer(x.double(), others, K)
            y = layer(x)
            self.expect_near(y, want, 1e-5, f"step {step}")
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()

    def test_forward_and_backward_in_a_graph_replay_with_other_tokens(self):
        p = on_gpu(made_up(dtype=torch.bfloat16))
        layer = trainable(p, max_tokens=40)
        x = tokens(dtype=torch.bfloat16).requires_grad_()
        dy = tokens(seed=8, dtype=torch.bfloat16)
        leaves = [x, *p.values()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                torch.autograd.grad(layer(x), leaves, dy)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = torch.autograd.grad(layer(x), leaves, dy)
        for seed in range(3):
            with torch.no_grad():
                x.copy_(tokens(seed=20 + seed, dtype=torch.bfloat16))
                dy.copy_(tokens(seed=30 + seed, dtype=torch.bfloat16))
            graph.replay()
            replayed = [t.clone() for t in found]
            want = torch.autograd.grad(layer(x), leaves, dy)
            for got, eager in zip(replayed, want):
                self.assertTrue(torch.equal(got, eager))

    def test_two_forwards_before_their_backwards_and_another_stream(self):
        p = on_gpu(made_up())
        layer = trainable(p)
        x, z = tokens(40).requires_grad_(), tokens(9, seed=3).requires_grad_()
        alone = [torch.autograd.grad(layer(t).square().sum(), t)[0] for t in (x, z)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first, second = layer(x), layer(z)
            (first.square().sum() + second.square().sum()).backward()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(x.grad, alone[0]))
        self.assertTrue(torch.equal(z.grad, alone[1]))

    def test_a_parameter_elsewhere_is_refused_by_name(self):
        p = on_gpu(made_up())
        self.refuse("w2 lies on cpu, want cuda:0", trainable, {**p, "w2": p["w2"].detach().cpu()})
        self.refuse("gate lies on cuda:0, want cpu", trainable, p, device="cpu")

    @unittest.skipUnless(torch is not None and hasattr(torch, "compile") and
                         hasattr(getattr(torch, "library", None), "register_fake"), "an older torch")
    def test_compiled_gradients_are_those_of_the_call(self):
        p = on_gpu(made_up())
        layer = trainable(p)
        x = tokens().requires_grad_()
        want = torch.autograd.grad(layer(x).square().sum(), [x, *p.values()])
        compiled = torch.compile(lambda t: layer(t).square().sum(), fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(x), [x, *p.values()])
        for got, eager in zip(found, want):
            self.expect_near(got, eager, 1e-6, "compiled")


@unittest.skipUnless(GPU, "no torch with a GPU")
class ExpertsAlone(Case):
    def call(self, run, dtype=torch.float32):
        p = on_gpu(made_up(biases=True, dtype=dtype))
        x = tokens(dtype=dtype).requires_grad_()
        expert, weight = plain_layer.route(torch.randn(40, E, device="cuda"), K)
        weight = weight.detach().requires_grad_()
        others = double({**p, "x": x, "weight": weight})
        want = plain_layer.experts(others["x"], others["w13"], others["w2"], expert,
                                   others["weight"], b13=others["b13"], b2=others["b2"])
        y = run(p, x, expert.int(), weight)
        self.expect_near(y, want, BOUNDS[str(dtype)[6:]], "y")
        y.square().sum().backward()
        want.square().sum().backward()
        for name, t in {"x": x, "weight": weight, **p}.items():
            if name != "gate":
                self.expect_near(t.grad, others[name].grad, 2 * BOUNDS[str(dtype)[6:]], name)

    def test_experts_and_the_call_have_the_gradients_of_plain_torch(self):
        for dtype in (torch.float32, torch.bfloat16):
            self.call(lambda p, *call: sw.Experts(p["w13"], p["w2"], b13=p["b13"], b2=p["b2"],
                                                  trainable=True)(*call), dtype)
            self.call(lambda p, x, expert, weight: sw.experts(x, p["w13"], p["w2"], expert, weight,
                                                              b13=p["b13"], b2=p["b2"]), dtype)

    def test_weights_that_were_computed_from_others_have_gradients(self):
        w13 = torch.randn(E, 2 * I, H, device="cuda", requires_grad=True)
        w2 = torch.randn(E, H, I, device="cuda", requires_grad=True)
        expert, weight = plain_layer.route(torch.randn(40, E, device="cuda"), K)
        x = tokens()
        for _ in range(3):
            found = torch.autograd.grad(
                sw.experts(x, w13 * 0.5, w2 * 2, expert.int(), weight).sum(), (w13, w2))
            want = torch.autograd.grad(
                plain_layer.experts(x.double(), w13.double() * 0.5, w2.double() * 2, expert,
                                    weight.double()).sum(), (w13, w2))
            for got, expected in zip(found, want):
                self.expect_near(got, expected, 1e-5, "gradient")


@unittest.skipUnless(GPU, "no torch with a GPU")
class SoftMoe(Case):
    P = 4

    def leaves(self, dtype=torch.float32 if torch else None, seed=3):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g)
        made = {"x": draw(2, 24, H), "phi": draw(E * self.P, H), "w13": draw(E, 2 * I, H) / H ** 0.5,
                "w2": draw(E, H, I), "b13": draw(E, 2 * I), "b2": draw(E, H)}
        made = {n: t if n[0] == "b" else t.to(dtype) for n, t in made.items()}
        made["scale"] = torch.tensor(1.7)
        on_cpu = {n: t.float().clone().requires_grad_() for n, t in made.items()}
        return {n: t.cuda().requires_grad_() for n, t in made.items()}, on_cpu

    def test_outputs_and_gradients_are_those_of_a_cpu(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for options in ({}, {"group": 8, "causal": True}, {"group": 12, "normalize": False},
                            {"recompute": "activation_input"}):
                with self.subTest(dtype=dtype, **options):
                    ours, on_cpu = self.leaves(dtype)
                    have = sw.soft_moe(**ours, slots=self.P, weights=True, **options)
                    want = sw.soft_moe(**on_cpu, slots=self.P, weights=True, **options)
                    bound = (5 if dtype == torch.float32 else 2) * BOUNDS[str(dtype)[6:]]
                    for name, got, wanted in zip(("y", "dispatch", "combine"), have, want):
                        self.expect_near(got, wanted, bound, name)
                    dy = torch.randn(2, 24, H).to(dtype)
                    have[0].backward(dy.cuda())
                    want[0].backward(dy.float())
                    for name, tensor in ours.items():
                        # A sum of many signs.
                        loose = 10 if name == "scale" else 1
                        self.expect_near(tensor.grad, on_cpu[name].grad, loose * bound, name)
                        self.assertEqual(tensor.grad.dtype, tensor.dtype)
                        self.assertEqual(tensor.grad.device, tensor.device)

    def test_forward_and_backward_in_a_graph_replay_with_other_tokens(self):
        ours, _ = self.leaves(torch.bfloat16)
        ours["scale"] = 1.7
        leaves = [t for t in ours.values() if torch.is_tensor(t)]
        dy = torch.randn(2, 24, H).bfloat16().cuda()
        call = lambda: torch.autograd.grad(sw.soft_moe(**ours, slots=self.P, group=12), leaves, dy)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
        for seed in range(3):
            with torch.no_grad():
                ours["x"].copy_(self.leaves(torch.bfloat16, seed=20 + seed)[0]["x"])
            graph.replay()
            replayed = [t.clone() for t in found]
            for got, eager in zip(replayed, call()):
                self.assertTrue(torch.equal(got, eager))

    def test_kept_experts_and_a_logit_that_is_not_finite(self):
        ours, on_cpu = self.leaves()
        weights = [ours[n].detach() for n in ("w13", "w2")]
        kept = sw.Experts(weights[0], weights[1])
        with torch.no_grad():
            y = sw.soft_moe(ours["x"], ours["phi"], kept)
            want = sw.soft_moe(on_cpu["x"], on_cpu["phi"], on_cpu["w13"], on_cpu["w2"])
            self.expect_near(y, want, 1e-5, "y")
            ours["x"][1, 3, 2] = float("nan")
            sw.soft_moe(ours["x"], ours["phi"], kept)
            self.refuse("the logit of token 27 and slot 0 is not finite", kept.check)
            kept.check()

    def test_tensors_elsewhere_are_refused(self):
        ours, on_cpu = self.leaves()
        with torch.no_grad():
            self.refuse("phi", sw.soft_moe, **{**ours, "phi": on_cpu["phi"]})


if __name__ == "__main__":
    unittest.main()
