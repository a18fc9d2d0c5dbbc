"""Auxiliary losses: values beside plain numpy that is written from their formulas, gradients by torch's
own check in double, and what does not fit together."""

import math
import types
import unittest

import numpy as np

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

T, E, K = 12, 6, 2
LOGITS = np.array([[((17 * t + 29 * e + 13 * t * e) % 23 - 11) / 8 for e in range(4)] for t in range(6)])
EXPERT = np.array([[3, 2], [0, 1], [1, 3], [0, 1], [0, 3], [3, 2]])


def softmax(x):
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def log_sum_exp(x):
    return np.log(np.exp(x).sum(-1))


def cv_squared(x):
    return x.var() / (x.mean() ** 2 + 1e-10)


def normal_below(x):
    return 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def made_up(seed=3):
    random = np.random.default_rng(seed)
    logits = random.normal(size=(T, E))
    expert = np.array([random.permutation(E)[:K] for _ in range(T)])
    return logits, expert


def routed(logits, expert, **more):
    return types.SimpleNamespace(logits=torch.as_tensor(logits), topk_expert=torch.as_tensor(expert),
                                 **more)


def counts_of(expert, num_experts=E):
    return np.bincount(expert[expert >= 0].reshape(-1), minlength=num_experts)


@unittest.skipIf(torch is None, "no torch")
class Losses(unittest.TestCase):
    def near(self, have, want):
        self.assertAlmostEqual(float(have), float(want), delta=1e-9 * max(1, abs(want)))

    def test_golden_values_of_an_independent_oracle_hold(self):
        a = routed(LOGITS, EXPERT)
        for value, want in ((sw.losses.load_balance(a), 1.032987),
                            (sw.losses.load_balance(a, share="tokens"), 2.065974),
                            (sw.losses.load_balance(a, share="first-choice"), 1.123946),
                            (sw.losses.z(a), 2.895639), (sw.losses.importance(a), 0.031762)):
            self.assertAlmostEqual(float(value), want, delta=5e-7)
        noise = np.array([[((t * 5 + e * 3) % 7 - 3) / 3 for e in range(4)] for t in range(6)])
        noisy = routed(LOGITS + 0.5 * noise, EXPERT, clean=torch.as_tensor(LOGITS), deviation=0.5)
        self.assertAlmostEqual(float(sw.losses.load(noisy)), 0.025525, delta=5e-7)

    def test_balance_is_one_where_all_is_even_for_every_k(self):
        for top_k in range(1, E + 1):
            expert = np.arange(T * top_k).reshape(T, top_k) % E
            a = routed(np.full((T, E), 0.5), expert)
            self.near(sw.losses.load_balance(a), 1)
            self.near(sw.losses.device(a, 3), 1)
            self.near(sw.losses.load_balance(a, scope="sequence", sequence_length=6), 1)
            self.near(sw.losses.load_balance(a, share="tokens"), top_k)

    def test_values_agree_with_numpy(self):
        logits, expert = made_up()
        a, p = routed(logits, expert), softmax(logits)
        f = counts_of(expert) / (T * K)
        self.near(sw.losses.load_balance(a), E * (f * p.mean(0)).sum())
        self.near(sw.losses.load_balance(a, "batch", "first-choice"),
                  E * (counts_of(expert[:, :1]) / T * p.mean(0)).sum())
        halves = [E * (counts_of(expert[s]) / (6 * K) * p[s].mean(0)).sum()
                  for s in (slice(0, 6), slice(6, 12))]
        self.near(sw.losses.load_balance(a, scope="sequence", sequence_length=6), np.mean(halves))
        total = np.arange(E) + 3
        self.near(sw.losses.load_balance(a, scope="global", global_counts=torch.as_tensor(total)),
                  E * (total / total.sum() * p.mean(0)).sum())
        self.near(sw.losses.z(a), (log_sum_exp(logits) ** 2).mean())
        self.near(sw.losses.importance(a), cv_squared(p.sum(0)))
        self.near(sw.losses.entropy(a), -(p * np.log(p)).sum(-1).mean())
        by_device = f.reshape(3, 2).sum(-1), p.mean(0).reshape(3, 2).sum(-1)
        self.near(sw.losses.device(a, 3), 3 * (by_device[0] * by_device[1]).sum())
        sent = np.array([[(ids // 2 == d).any() for d in range(3)] for ids in expert]).mean(0)
        self.near(sw.losses.communication(a, 3, 2), 3 / 2 * (sent * by_device[1]).sum())
        relu = np.maximum(logits, 0)
        self.near(sw.losses.l1(a), relu.sum(-1).mean())
        self.near(sw.losses.l1(a, top_k=2), E * ((relu > 0).mean(0) / 2 * relu.mean(0)).sum())

    def test_importance_of_weights_leaves_unused_places_out(self):
        logits, expert = made_up()
        expert[3, 1] = -1
        weight = np.random.default_rng(1).random((T, K))
        sums = np.zeros(E)
        for t, k in np.argwhere(expert >= 0):
            sums[expert[t, k]] += weight[t, k]
        a = routed(logits, expert, topk_weight=torch.as_tensor(weight))
        self.near(sw.losses.importance(a, of="weights"), cv_squared(sums))
        f = counts_of(expert) / (T * K - 1)
        self.near(sw.losses.load_balance(a), E * (f * softmax(logits).mean(0)).sum())

    def test_gradients_agree_with_differences_in_double(self):
        logits, expert = made_up()
        cases = [lambda a, kind=kind, options=options: getattr(sw.losses, kind)(a, **options)
                 for kind, options in (
                     ("load_balance", {}), ("load_balance", {"share": "first-choice"}),
                     ("load_balance", {"scope": "sequence", "sequence_length": 4}),
                     ("z", {}), ("importance", {}), ("entropy", {}), ("device", {"devices": 2}),
                     ("communication", {"devices": 3, "devices_per_token": 2}), ("l1", {}))]
        for loss in cases:
            for score in ("softmax", "sigmoid"):
                torch.autograd.gradcheck(
                    lambda x, loss=loss, score=score: loss(sw.losses.Routed(
                        x, score=score, topk_expert=torch.as_tensor(expert))),
                    torch.as_tensor(logits).requires_grad_())

    def test_the_gradient_of_the_load_reaches_logits_and_deviation(self):
        logits, expert = made_up()
        random = np.random.default_rng(8)
        noise = torch.as_tensor(random.normal(size=(T, E)))

        def load(clean, deviation):
            a = types.SimpleNamespace(logits=clean + noise * deviation, clean=clean,
                                      deviation=deviation, topk_expert=torch.as_tensor(expert))
            return sw.losses.load(a)

        inputs = (logits, 0.4 + 0.1 * random.random((T, E)))
        torch.autograd.gradcheck(load, tuple(torch.as_tensor(x).requires_grad_() for x in inputs))

    def test_a_routing_of_logits_counts_the_experts_that_a_layer_would_choose(self):
        logits = torch.randn(20, E, generator=torch.Generator().manual_seed(1))
        bias = torch.linspace(-1, 1, E)
        options = {"groups": 2, "top_groups": 1, "selection_bias": bias}
        a = sw.losses.Routed(logits.reshape(4, 5, E), top_k=K, score="sigmoid", **options)
        expert, _ = sw.route(logits, K, "sigmoid", **options)
        self.assertTrue(torch.equal(a.topk_expert, expert))
        self.assertEqual(a.counts.tolist(), counts_of(expert.numpy()).tolist())
        want = torch.sigmoid(logits)
        torch.testing.assert_close(a.probs, want / want.sum(-1, keepdim=True))

    def test_a_layer_learns_balance_from_its_logits(self):
        torch.manual_seed(2)
        gate = (0.1 * torch.randn(4, 8)).requires_grad_()
        w13, w2 = torch.randn(4, 8, 8), torch.randn(4, 8, 4)
        layer = sw.Layer(gate=gate, w13=w13, w2=w2, top_k=1, renormalize=False, trainable=True)
        x = torch.randn(64, 8) + 1  # one expert is everybody's
        optimizer = torch.optim.SGD([gate], lr=0.02)
        found = []
        for _ in range(30):
            optimizer.zero_grad()
            y, logits = layer(x, logits=True)
            loss = sw.losses.load_balance(sw.losses.Routed(logits, top_k=1))
            (0 * y.sum() + loss).backward()
            optimizer.step()
            found.append(float(loss.detach()))
        self.assertLess(max(found[-5:]), 1 + 0.5 * (found[0] - 1))

    def test_the_coefficient_of_l1_follows_the_number_of_experts_that_work(self):
        a = routed(np.array([[1.0, 2.0, -1.0], [1.0, -1.0, -1.0]]), np.zeros((2, 1), int))
        self.near(sw.losses.next_l1_coefficient(1.0, a, top_k=1), 1.2)
        self.near(sw.losses.next_l1_coefficient(1.0, a, top_k=2), 1 / 1.2)

    def test_what_does_not_fit_together_is_refused_by_name(self):
        a = routed(*made_up())
        for call, words in (
                (lambda: sw.losses.load_balance(a, scope="token"), "scope='token'"),
                (lambda: sw.losses.load_balance(a, share="half"), "share='half'"),
                (lambda: sw.losses.load_balance(a, scope="sequence"), "without sequence_length"),
                (lambda: sw.losses.load_balance(a, sequence_length=4), "with sequence_length"),
                (lambda: sw.losses.load_balance(a, scope="global"), "without global_counts"),
                (lambda: sw.losses.load_balance(a, scope="sequence", sequence_length=5),
                 "12 tokens are no multiple of sequence_length=5"),
                (lambda: sw.losses.device(a, 4), "devices=4 do not divide 6"),
                (lambda: sw.losses.importance(a, of="weights"), "a.topk_weight"),
                (lambda: sw.losses.load(a), "a.clean"),
                (lambda: sw.losses.load(a, a.logits, 1.0, top_k=E), "top_k=6"),
                (lambda: sw.losses.Routed(a.logits), "neither top_k nor topk_expert")):
            with self.assertRaisesRegex(sw.SwitchyardError, words):
                call()


if __name__ == "__main__":
    unittest.main()
