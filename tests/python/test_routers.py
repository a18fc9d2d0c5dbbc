"""Routers by name: numbers of numpy, gradients by torch's own derivatives, layers, and bad input."""

import json
import os
import unittest

import numpy as np

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "routers_golden.json")
E, K, H, I, T = 6, 2, 24, 16, 20


def golden():
    with open(DATA, encoding="utf-8") as file:
        return json.load(file)


def router_of(entry):
    name, _, options = entry["router"].partition(":")
    options = dict(option.split("=") for option in options.split(",") if option)
    options = {key.replace("-", "_"): value for key, value in options.items()}
    if "top_k" in options:
        options["top_k"] = int(options["top_k"])
    return sw.Router(name, num_experts=entry["experts"], seed=entry["request"]["seed"], **options)


def call_of(entry, tensor=None):
    request = entry["request"]
    call = {key: request[key] for key in ("step", "layer", "first_token", "training")}
    if "noise_logits" in entry:
        noise_logits = np.array(entry["noise_logits"], np.float32)
        call["noise_logits"] = noise_logits if tensor is None else tensor(noise_logits)
    if "selection_bias" in entry:
        call["selection_bias"] = np.array(entry["selection_bias"], np.float32)
    return call


class Case(unittest.TestCase):
    def refuse(self, words, call, *args, **kwargs):
        with self.assertRaisesRegex((sw.SwitchyardError, RuntimeError), words):
            call(*args, **kwargs)


class Numbers(Case):
    def test_every_rule_gives_the_numbers_of_numpy_for_arrays_of_numpy(self):
        document = golden()
        for entry in document["rules"]:
            with self.subTest(entry["router"]):
                logits = np.array(document["logits"][entry["logits"]], np.float32)
                before = logits.copy()
                a = router_of(entry)(logits, **call_of(entry))
                want = np.array(entry["expert"], np.int32)
                np.testing.assert_array_equal(a.topk_expert, want)
                np.testing.assert_allclose(a.topk_weight, entry["weight"], rtol=2e-6, atol=2e-6)
                np.testing.assert_array_equal(logits, before)  # noise is on a copy
                np.testing.assert_array_equal(
                    a.counts, np.bincount(want[want >= 0], minlength=entry["experts"]))

    def test_plan_order_is_by_expert_then_token(self):
        document = golden()
        for entry in document["rules"]:
            with self.subTest(entry["router"]):
                logits = np.array(document["logits"][entry["logits"]], np.float32)
                a = router_of(entry)(logits, **call_of(entry))
                pairs = [(e, t) for t, row in enumerate(entry["expert"]) for e in row if e >= 0]
                self.assertEqual(list(zip(a.expert.tolist(), a.token.tolist())), sorted(pairs))
                weight = {(e, t): w for t, (ids, row) in enumerate(zip(entry["expert"], entry["weight"]))
                          for e, w in zip(ids, row)}
                np.testing.assert_allclose(a.weight, [weight[pair] for pair in sorted(pairs)], rtol=3e-6,
                                           atol=3e-6)
                self.assertEqual(a.expert_begin[-1], len(pairs))
                np.testing.assert_array_equal(np.diff(a.expert_begin), a.counts)

    def test_rules_without_logits_go_by_ids_and_places(self):
        for entry in golden()["by_place"]:
            with self.subTest(entry["router"]):
                r = router_of(entry)
                self.assertFalse(r.has_logits)
                ids = np.array(entry["token_ids"], np.int64) if entry["token_ids"] else None
                shape = (entry["tokens"], entry["experts"])
                logits = None if ids is not None else np.zeros(shape, np.float32)
                a = r(logits, token_ids=ids, **call_of(entry))
                np.testing.assert_array_equal(a.topk_expert, entry["expert"])
                self.refuse("no logits", lambda: a.probs)


    def test_a_hash_router_balances_by_frequencies(self):
        frequencies = [50, 20, 10, 8, 6, 4, 1, 1]
        for given in (frequencies, np.array(frequencies)):
            r = sw.Router("hash", num_experts=4, frequencies=given)
            a = r(None, token_ids=np.arange(8))
            self.assertEqual(a.expert.tolist(), [0, 1, 2, 2, 2, 3, 3, 3])
            self.assertEqual(a.token.tolist(), [0, 1, 2, 5, 6, 3, 4, 7])
        twice = sw.Router("hash", 4, top_k=2, frequencies=[9, 7, 5, 3])(None, token_ids=np.array([3, 1]))
        self.assertEqual(twice.topk_expert.tolist(), [[0, 1], [2, 3]])
        self.refuse(r"token_ids\[0\] is 8, want 0 to 7", r, None, token_ids=np.array([8]))
        self.refuse(r"frequency\[1\]=-2 is negative", sw.Router, "hash", 4, frequencies=[1, -2])
        self.refuse("the router is not hash", sw.Router, "uniform", 4, top_k=1, frequencies=[1, 2])


@unittest.skipUnless(torch, "torch is not installed")
class Gradients(Case):
    def test_weights_and_probabilities_have_the_gradients_of_numpy_and_torch(self):
        document = golden()
        for entry in document["rules"]:
            with self.subTest(entry["router"]):
                logits = torch.tensor(document["logits"][entry["logits"]], requires_grad=True)
                call = call_of(entry, lambda x: torch.tensor(x, requires_grad=True))
                a = router_of(entry)(logits, **call)
                (a.topk_weight * torch.tensor(entry["dweight"])).sum().backward(retain_graph=True)
                torch.testing.assert_close(logits.grad, torch.tensor(entry["dlogits"]), rtol=2e-5,
                                           atol=2e-6)
                if "noise_logits" in call:
                    torch.testing.assert_close(call["noise_logits"].grad,
                                               torch.tensor(entry["dnoise_logits"]), rtol=2e-5, atol=2e-6)
                noisy = torch.tensor(entry.get("noisy", document["logits"][entry["logits"]]),
                                     requires_grad=True)
                scores = noisy.softmax(-1)
                if "sigmoid" in entry["router"]:
                    scores = noisy.sigmoid() / noisy.sigmoid().sum(-1, keepdim=True)
                want = torch.autograd.grad((scores ** 2).sum(), noisy)[0]
                found = torch.autograd.grad((a.probs ** 2).sum(), logits)[0]
                torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-6)

    def test_losses_take_what_a_router_gives(self):
        logits = torch.randn(T, E, generator=torch.Generator().manual_seed(5), requires_grad=True)
        for name in ("top-k", "switch", "gshard", "v-moe", "expert-choice", "top-p", "relu"):
            a = sw.Router(name, num_experts=E)(logits, step=1)
            loss = sw.losses.load_balance(a) + sw.losses.z(a) + sw.losses.importance(a, of="weights")
            self.assertGreater(float(torch.autograd.grad(loss, logits)[0].abs().sum()), 1e-3, name)
        a = sw.Router("v-moe", num_experts=E, top_k=K, noise=0.5)(logits, step=1)
        load = torch.autograd.grad(sw.losses.load(a), logits)[0]
        self.assertGreater(float(load.abs().sum()), 1e-3)
        self.assertEqual((a.deviation, a.clean is logits), (0.5, True))
        size = torch.randn(T, E, generator=torch.Generator().manual_seed(6), requires_grad=True)
        a = sw.Router("noisy-top-k", num_experts=E, top_k=K)(logits, step=1, noise_logits=size)
        for grad in torch.autograd.grad(sw.losses.load(a), (logits, size)):
            self.assertGreater(float(grad.abs().sum()), 1e-3)
        a = sw.Router("top-k", num_experts=E, top_k=K, score="sigmoid")(logits)
        shares = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        torch.testing.assert_close(a.probs, shares)
        again = sw.Router("top-k", num_experts=E, top_k=K, score="sigmoid")(logits.detach().numpy())
        np.testing.assert_allclose(again.probs, shares.detach(), rtol=1e-5)

    def test_null_experts_balance_as_one(self):
        null = 3
        logits = torch.randn(T, E + null, generator=torch.Generator().manual_seed(7),
                             requires_grad=True)
        a = sw.Router("adamoe", num_experts=E, top_k=4, null_experts=null)(logits)
        picks = logits.topk(4, dim=-1).indices
        counts = picks.reshape(-1).bincount(minlength=E + null).float()
        self.assertTrue(torch.equal(a.counts, counts[:E].long()))
        counts[E:] = counts[E:].mean()
        want = (E + null) * (counts / (4 * T) * logits.softmax(-1).mean(0)).sum()
        torch.testing.assert_close(sw.losses.load_balance(a), want)
        torch.testing.assert_close(sw.losses.load_balance(a, scope="sequence", sequence_length=T), want)
        self.refuse("first-choice.*null experts", sw.losses.load_balance, a, share="first-choice")

    def test_experts_of_an_assignment_learn_and_so_does_the_router(self):
        g = torch.Generator().manual_seed(1)
        x, w13, w2 = (torch.randn(*shape, generator=g).mul(0.3).requires_grad_()
                      for shape in ((T, H), (E, 2 * I, H), (E, H, I)))
        for name, options in (("top-p", {"threshold": 0.7}), ("relu", {}),
                              ("expert-choice", {"top_k": K, "capacity_factor": 1.5, "group": T // 2})):
            with self.subTest(name):
                logits = torch.randn(T, E, generator=g, requires_grad=True)
                a = sw.Router(name, num_experts=E, **options)(logits)
                y = sw.experts(x, w13, w2, assignment=a)
                gate, up = torch.einsum("th,eih->tei", x, w13).chunk(2, -1)
                rows = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, w2)
                chosen = torch.zeros(T, E).index_put((a.token, a.expert.long()), torch.ones(len(a.token)))
                scores = logits.relu() if name == "relu" else logits.softmax(-1)
                want = torch.einsum("teh,te->th", rows, scores * chosen)
                torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
                leaves = (x, w13, w2, logits)
                for got, expected in zip(torch.autograd.grad((y ** 3).sum(), leaves),
                                         torch.autograd.grad((want ** 3).sum(), leaves)):
                    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@unittest.skipUnless(torch, "torch is not installed")
class Layers(Case):
    def setUp(self):
        g = torch.Generator().manual_seed(2)
        self.x = torch.randn(T, H, generator=g, requires_grad=True)
        self.parameters = [torch.nn.Parameter(torch.randn(*shape, generator=g) * 0.3)
                           for shape in ((E, H), (E, 2 * I, H), (E, H, I))]

    def test_a_layer_routes_as_its_router_does_forward_and_back(self):
        gate, w13, w2 = self.parameters
        for name, options in (("gshard", {"sampled": True}), ("v-moe", {"top_k": K, "noise": 1}),
                              ("expert-choice", {"top_k": K}), ("top-p", {}), ("relu", {})):
            with self.subTest(name):
                r = sw.Router(name, num_experts=E, seed=7, **options)
                layer = sw.Layer(gate, w13, w2, router=r, trainable=True)
                y = layer(self.x, step=3)
                a = r(self.x @ gate.T, step=3)
                want = sw.experts(self.x, w13, w2, assignment=a)
                torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
                leaves = (self.x, gate, w13, w2)
                for got, expected in zip(torch.autograd.grad((y ** 2).sum(), leaves),
                                         torch.autograd.grad((want ** 2).sum(), leaves)):
                    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
                if name != "gshard":
                    continue
                with torch.no_grad():  # draws nothing, unless it is told to
                    self.assertFalse(torch.equal(layer(self.x, step=3), y))
                    self.assertTrue(torch.equal(layer(self.x, step=3, training=True), y))

    def test_learned_noise_is_a_parameter_of_the_layer(self):
        gate, w13, w2 = self.parameters
        noise_gate = torch.nn.Parameter(torch.randn(E, H) * 0.3)
        r = sw.Router("noisy-top-k", num_experts=E, top_k=K, seed=7, floor=0.1)
        layer = sw.Layer(gate, w13, w2, router=r, noise_gate=noise_gate, trainable=True)
        y = layer(self.x, step=3)
        a = r(self.x @ gate.T, step=3, noise_logits=self.x @ noise_gate.T)
        want = sw.experts(self.x, w13, w2, assignment=a)
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
        leaves = (self.x, gate, noise_gate, w13, w2)
        for got, expected in zip(torch.autograd.grad((y ** 2).sum(), leaves),
                                 torch.autograd.grad((want ** 2).sum(), leaves)):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(layer(self.x), sw.experts(
                self.x, w13, w2, assignment=r(self.x @ gate.T, training=False)))
        self.refuse("noise_gate has 0 values", sw.Layer, gate, w13, w2, router=r)
        self.refuse("noise_gate has 144 values, want 0", sw.Layer, gate, w13, w2, K,
                    noise_gate=noise_gate)
        self.refuse("noise_logits is None, want a tensor", r, self.x @ gate.T)
        self.refuse("noise of the router relu is not learned", sw.Router("relu", E), self.x @ gate.T,
                    noise_logits=self.x @ gate.T)

    def test_null_experts_have_rows_of_the_gate_and_no_weights(self):
        _, w13, w2 = self.parameters
        gate = torch.nn.Parameter(torch.randn(E + 4, H) * 0.3)
        r = sw.Router("adamoe", num_experts=E, top_k=3, null_experts=4)
        layer = sw.Layer(gate, w13, w2, router=r, trainable=True)
        y, logits = layer(self.x, logits=True)
        self.assertEqual((layer.num_experts, tuple(logits.shape)), (E, (T, E + 4)))
        a = r(self.x @ gate.T)
        self.assertTrue(bool((a.topk_expert < 0).any() and (a.topk_expert >= 0).any()))
        want = sw.experts(self.x, w13, w2, assignment=a)
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
        leaves = (self.x, gate, w13, w2)
        loss = lambda y, l: (y ** 2).sum() + l.logsumexp(-1).square().mean()  # noqa: E731
        for got, expected in zip(torch.autograd.grad(loss(y, logits), leaves),
                                 torch.autograd.grad(loss(want, a.logits), leaves)):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        self.refuse("gate: dimension 0 is 6, want 10", sw.Layer, torch.ones(E, H), w13, w2, router=r)

    def test_jitter_is_drawn_anew_every_step_and_on_the_routers_input_alone(self):
        gate, w13, w2 = self.parameters
        layer = sw.Layer(gate, w13, w2, router=sw.Router("switch", E, jitter=0.5), trainable=True)
        y, logits = layer(self.x, step=1, logits=True)
        ratio = logits / (self.x @ gate.T)
        self.assertGreater(float((ratio - 1).abs().median()), 0.05)
        expert = logits.argmax(-1, keepdim=True)
        want = sw.experts(self.x, w13, w2, expert, logits.softmax(-1).gather(-1, expert))
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
        self.assertFalse(torch.equal(layer(self.x, step=2), y))

    def test_a_hash_layer_goes_by_token_ids(self):
        gate, w13, w2 = (p.detach() for p in self.parameters)
        r = sw.Router("hash", E, top_k=K)
        layer = sw.Layer(gate, w13, w2, router=r)
        ids = torch.arange(T).reshape(2, T // 2) % 7
        x = self.x.detach().reshape(2, T // 2, H)
        y = layer(x, token_ids=ids)
        want = sw.experts(x.reshape(T, H), w13, w2, assignment=r(None, token_ids=ids.reshape(-1)))
        torch.testing.assert_close(y.reshape(T, H), want)
        balanced = sw.Router("hash", E, top_k=K, frequencies=range(7))
        y = sw.Layer(gate, w13, w2, router=balanced)(x, token_ids=ids)
        want = sw.experts(x.reshape(T, H), w13, w2,
                          assignment=balanced(None, token_ids=ids.reshape(-1)))
        torch.testing.assert_close(y.reshape(T, H), want)
        self.refuse("hash.*token_ids", layer, x)
        self.refuse(r"token_ids is \[10\], want \[20\]", layer, x, token_ids=ids[0])

    def test_what_does_not_go_together_is_named(self):
        gate, w13, w2 = (p.detach() for p in self.parameters)
        r = sw.Router("relu", E)
        self.refuse("top_k=2 and router are both given", sw.Layer, gate, w13, w2, K, router=r)
        self.refuse("top_k=None is no integer: want one, or a router", sw.Layer, gate, w13, w2)
        self.refuse("capacity_factor=1.5 with the router relu", sw.Layer, gate, w13, w2, router=r,
                    capacity_factor=1.5)
        self.refuse("training are a router's, and the layer has none",
                    sw.Layer(gate, w13, w2, K), self.x.detach(), training=True)
        a = r(torch.ones(T, E))
        self.refuse("assignment is given, and expert", sw.experts, self.x, w13, w2, a.topk_expert,
                    a.topk_weight, assignment=a)
        trained = sw.Layer(*self.parameters, router=sw.Router("uniform", E, top_k=K), trainable=True)
        self.refuse("uniform has no logits", lambda: trained(self.x).sum().backward())


class SelectionBias(Case):
    def test_it_moves_by_the_sign_of_what_is_missing(self):
        bias = np.zeros(4, np.float32)
        sw.update_selection_bias(bias, np.array([4, 0, 2, 2]), rate=0.25)
        self.assertEqual(bias.tolist(), [-0.25, 0.25, 0, 0])
        sw.update_selection_bias(bias, np.array([9, 1, 1, 1]), rate=0.5,
                                 centered=True)
        self.assertEqual(bias.tolist(), [-1, 0.5, 0.25, 0.25])
        self.refuse(r"counts is \[3\], want \[4\]", sw.update_selection_bias, bias, np.array([1, 2, 3]))
        self.refuse("rate=-1", sw.update_selection_bias, bias, np.array([1, 2, 3, 4]), rate=-1.0)
        self.refuse("float64|f64", sw.update_selection_bias, np.zeros(2), np.array([1, 2]))

    @unittest.skipUnless(torch, "torch is not installed")
    def test_a_layer_sees_it_from_the_next_call_on(self):
        g = torch.Generator().manual_seed(3)
        gate, w13, w2 = (torch.randn(*shape, generator=g) for shape in ((E, H), (E, 2 * I, H), (E, H, I)))
        x, bias = torch.randn(T, H, generator=g), torch.zeros(E)
        layer = sw.Layer(gate, w13, w2, 1, score="sigmoid", selection_bias=bias, router_in_place=True)
        before = layer(x)
        expert, _ = sw.route(x @ gate.T, 1, "sigmoid", selection_bias=bias)
        sw.update_selection_bias(bias, expert.reshape(-1).long().bincount(minlength=E), rate=0.5)
        after, weight = sw.route(x @ gate.T, 1, "sigmoid", selection_bias=bias)
        self.assertFalse(torch.equal(after, expert))
        self.assertFalse(torch.equal(layer(x), before))
        torch.testing.assert_close(layer(x), sw.experts(x, w13, w2, after, weight))


class Thresholds(Case):
    def test_after_one_step_without_memory_they_are_those_of_expert_choice(self):
        logits = np.random.default_rng(1).standard_normal((T, E)).astype(np.float32)
        bias = np.full(E, -1 / E, np.float32)
        plain = sw.Router("expert-threshold", E)(logits)
        np.testing.assert_array_equal(plain.topk_expert, sw.Router("expert-threshold", E)(
            logits, selection_bias=bias).topk_expert)
        sw.update_thresholds(bias, logits, top_k=3, momentum=0.0)
        a = sw.Router("expert-threshold", E)(logits, selection_bias=bias)
        b = sw.Router("expert-choice", E, top_k=3)(logits)
        np.testing.assert_array_equal(a.topk_expert, b.topk_expert)
        np.testing.assert_array_equal(a.counts, T * 3 // E)
        np.testing.assert_array_equal(a.topk_weight, b.topk_weight)
        before = bias.copy()
        sw.update_thresholds(bias, logits, top_k=1, momentum=1.0)
        np.testing.assert_array_equal(bias, before)
        self.refuse("top_k=7 is not in 1 to 6", sw.update_thresholds, bias, logits, 7)
        self.refuse("router relu has none", sw.Router("relu", E), logits, selection_bias=bias)

    @unittest.skipUnless(torch, "torch is not installed")
    def test_a_layer_takes_them_as_its_selection_bias(self):
        g = torch.Generator().manual_seed(4)
        gate, w13, w2 = (torch.randn(*shape, generator=g) for shape in ((E, H), (E, 2 * I, H), (E, H, I)))
        x, bias = torch.randn(T, H, generator=g), torch.full((E,), -0.3)
        r = sw.Router("expert-threshold", E)
        layer = sw.Layer(gate, w13, w2, router=r, selection_bias=bias, router_in_place=True)
        for _ in range(2):
            want = sw.experts(x, w13, w2, assignment=r(x @ gate.T, selection_bias=bias))
            torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)
            sw.update_thresholds(bias, x @ gate.T, top_k=K, momentum=0.5)


class Options(Case):
    def test_an_option_that_is_not_there_is_told_those_that_are(self):
        self.refuse("'topk' is not one of: top-k, switch", sw.Router, "topk", 8)
        self.refuse("router hash has no option 'k'; its options: top-k, salt", sw.Router, "hash", 8, k=2)
        self.refuse("router relu has no option 'top-k'", sw.Router, "relu", 8, top_k=2)
        self.refuse("threshold='1.5'", sw.Router, "top-p", 8, threshold=1.5)
        self.refuse("top_k=9 exceeds num_experts=8", sw.Router, "uniform", 8, top_k=9)
        self.refuse(r"logits is \[4, 7\], want \[T, 8\]", sw.Router("relu", 8),
                    np.zeros((4, 7), np.float32))
        self.refuse("chooses by them", sw.Router("relu", 8), None)
        self.assertEqual(sw.Router("expert-choice", 8, top_k=2, capacity_factor=2.0).columns, 8)
        self.assertEqual(sw.Router("gshard", 8, sampled=True).spelling, "gshard:sampled=yes")


class Reroute(unittest.TestCase):
    def test_tokens_take_the_next_best_expert_with_room(self):
        random = np.random.default_rng(1)
        gate, w13, w2, x = (random.standard_normal(shape).astype(np.float32)
                            for shape in ((6, 8), (6, 8, 8), (6, 8, 4), (24, 8)))
        stats = {}
        for policy in "token", "reroute":
            layer = sw.Layer(gate, w13, w2, top_k=1, capacity_factor=1.0, drop_policy=policy)
            layer(x)
            stats[policy] = layer.stats()
        self.assertGreater(stats["token"]["dropped_assignments"], 0.1)
        self.assertEqual(stats["reroute"]["dropped_assignments"], 0)
        self.assertEqual(list(stats["reroute"]["counts"]), [4] * 6)
        with self.assertRaisesRegex(sw.SwitchyardError, "reroute with the router gshard"):
            sw.Layer(gate, w13, w2, router=sw.Router("gshard", num_experts=6), capacity_factor=1.0,
                     drop_policy="reroute")
        layer = sw.Layer(gate, w13, w2, top_k=1, capacity_factor=1.0, drop_policy="reroute")
        with self.assertRaisesRegex(sw.SwitchyardError, "a routing is given, and drop_policy=reroute"):
            layer(x, np.zeros((24, 1), np.int32), np.ones((24, 1), np.float32))


if __name__ == "__main__":
    unittest.main()
