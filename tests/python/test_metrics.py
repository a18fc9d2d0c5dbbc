"""Statistics of a routing beside plain numpy that is written from their formulas, and golden values."""

import math
import types
import unittest

import numpy as np

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

EXPERT = np.array([[3, 2], [0, 1], [1, 3], [0, 1], [0, 3], [3, 2]])


def entropy(p):
    p = p[p > 0]
    return -(p * np.log(p)).sum()


def made_up(tokens=40, experts=6, top_k=3, seed=1):
    random = np.random.default_rng(seed)
    logits = random.normal(size=(tokens, experts))
    expert = np.array([random.permutation(experts)[:top_k] for _ in range(tokens)])
    weight = random.random((tokens, top_k))
    return types.SimpleNamespace(logits=torch.as_tensor(logits), topk_expert=torch.as_tensor(expert),
                                 topk_weight=torch.as_tensor(weight))


@unittest.skipIf(torch is None, "no torch")
class Metrics(unittest.TestCase):
    def near(self, have, want, delta=1e-9):
        self.assertAlmostEqual(float(have), float(want), delta=delta)

    def test_golden_values_of_an_independent_oracle_hold(self):
        found = sw.metrics.load(torch.tensor([3, 3, 2, 4]))
        for name, want in (("cv", 0.235702), ("max_over_mean", 1.333333), ("min_over_mean", 0.666667),
                           ("kl", 0.028317), ("entropy", 0.979574), ("gini", 0.125), ("dead_experts", 0)):
            self.near(found[name], want, 5e-7)
        mi = sw.metrics.information(torch.arange(6) % 2, torch.as_tensor(EXPERT), permutations=0)
        self.near(mi["plug_in"], 0.071921, 5e-7)
        self.near(mi["bias"], 0.125)

    def test_the_floor_of_cv_is_what_uniform_random_routing_has(self):
        random = np.random.default_rng(3)
        found = [sw.metrics.load(torch.as_tensor(np.bincount(random.integers(0, 16, 800), minlength=16)))
                 for _ in range(300)]
        mean_square = np.mean([float(f["cv"]) ** 2 for f in found])
        self.near(math.sqrt(mean_square), float(found[0]["cv_floor"]), 0.006)

    def test_one_expert_that_has_all_is_one_effective_expert(self):
        found = sw.metrics.load(torch.tensor([0, 12, 0, 0]))
        for name, want in (("effective_experts", 1), ("dead_experts", 3), ("max_over_mean", 4),
                           ("kl", math.log(4)), ("entropy", 0)):
            self.near(found[name], want)
        self.near(sw.metrics.rank_imbalance(torch.tensor([3, 1, 0, 4]), 2), 1)
        self.near(sw.metrics.rank_imbalance(torch.tensor([3, 5, 0, 0]), 2), 2)
        self.near(sw.metrics.rank_imbalance(torch.tensor([6, 8, 2, 9, 7]), 2), 1.125)  # of 2 and 3 experts

    def test_without_any_assignment_there_is_no_nan(self):
        found = sw.metrics.load(torch.zeros(3, dtype=torch.long))
        self.assertEqual({name: float(value) for name, value in found.items() if float(value) != 0},
                         {"dead_experts": 3})
        self.near(sw.metrics.rank_imbalance(torch.zeros(4), 2), 0)

    def test_entropies_agree_with_numpy(self):
        a = made_up()
        found = sw.metrics.entropies(a)
        p = np.exp(a.logits.numpy())
        p /= p.sum(-1, keepdims=True)
        w = a.topk_weight.numpy()
        w = w / w.sum(-1, keepdims=True)
        self.near(found["router"], np.mean([entropy(row) for row in p]))
        self.near(found["marginal"], entropy(p.mean(0)))
        self.near(found["weights"], np.mean([entropy(row) for row in w]))
        self.assertGreater(float(found["information"]), 0)

    def test_drops_are_counted_by_assignments_tokens_mass_and_choice(self):
        a = made_up(tokens=4, top_k=2)
        a.topk_expert[3, 1] = -1
        a.topk_weight = torch.tensor([[1.0, 1], [2, 1], [1, 1], [3, 9]])
        found = sw.metrics.drops(a, torch.tensor([[1, 0], [0, 0], [1, 1], [1, 1]]))
        self.near(found["assignments"], 3 / 7)
        self.near(found["tokens"], 1 / 4)
        self.near(found["mass"], 4 / 10)
        self.assertEqual([round(float(x), 6) for x in found["by_choice"]], [0.25, 0.666667])
        self.near(sw.metrics.padding_waste(30, 40), 0.25)
        a.topk_expert[:, 1] = -1  # no second choice is none that is gone
        self.near(sw.metrics.drops(a, torch.ones(4, 2))["by_choice"][1], 0)

    def test_coactivation_and_churn_agree_with_counting(self):
        a = made_up()
        found = sw.metrics.coactivation(a, 7)  # the last one has no tokens
        sets = [set(row) for row in a.topk_expert.tolist()]
        for i in range(7):
            mine = [s for s in sets if i in s]
            for j in range(7):
                self.near(found[i, j], sum(j in s for s in mine) / max(len(mine), 1))
        before, after = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 4], [3, 2]])
        self.near(sw.metrics.churn(before, after), 1 / 4)
        self.near(sw.metrics.churn(before, before), 0)

    def test_information_tells_a_router_of_types_from_chance(self):
        random = np.random.default_rng(5)
        kinds = torch.as_tensor(random.integers(0, 4, 400))
        chance = torch.as_tensor(random.integers(0, 4, (400, 1)))
        sure = sw.metrics.information(kinds, kinds[:, None])
        self.near(sure["normalised"], 1)
        self.assertLess(sure["p"], 0.02)
        none = sw.metrics.information(kinds, chance)
        self.assertGreater(none["p"], 0.02)
        self.assertLess(abs(none["corrected"]), 0.02)
        self.near(none["null_mean"], none["bias"], 0.006)

    def test_a_routings_statistics_are_one_dict_of_what_can_be_read_later(self):
        a = made_up()
        found = sw.metrics.routing(a, kept=torch.ones(40, 3), ranks=2)
        self.assertTrue(all(isinstance(value, torch.Tensor) for value in found.values()))
        self.near(found["dropped_assignments"], 0)
        counts = np.bincount(a.topk_expert.numpy().reshape(-1), minlength=6)
        self.near(found["cv"], counts.std() / counts.mean())
        self.near(found["rank_imbalance"], max(counts[:3].sum(), counts[3:].sum()) / 60)

    def test_what_does_not_fit_is_refused_by_name(self):
        for call, words in (
                (lambda: sw.metrics.rank_imbalance(torch.ones(6), 7), "ranks=7 of 6 experts"),
                (lambda: sw.metrics.churn(torch.ones(2, 2), torch.ones(2, 3)), "one shape"),
                (lambda: sw.metrics.information(torch.zeros(2), -torch.ones(2, 1)), "no token")):
            with self.assertRaisesRegex(sw.SwitchyardError, words):
                call()


if __name__ == "__main__":
    unittest.main()
