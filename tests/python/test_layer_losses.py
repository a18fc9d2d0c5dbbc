"""A layer's own losses beside sw.losses of its logits, and its statistics beside sw.metrics."""

import unittest

import numpy as np

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

E, K, H, I, T = 6, 2, 24, 16, 20
COEFFICIENTS = {"balance": 0.5, "z": 0.25, "importance": 0.125, "entropy": 0.25}


def weights(seed=0):
    random = np.random.default_rng(seed)
    shapes = {"gate": (E, H), "w13": (E, 2 * I, H), "w2": (E, H, I)}
    return {name: (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
            for name, shape in shapes.items()}


def tokens(seed=1):
    return np.random.default_rng(seed).standard_normal((T, H)).astype(np.float32)


class Case(unittest.TestCase):
    def refuse(self, words, call, *args, **kwargs):
        with self.assertRaisesRegex(sw.SwitchyardError, words):
            call(*args, **kwargs)


class Stats(Case):
    def test_are_those_of_numpy_for_arrays_of_numpy(self):
        layer = sw.Layer(**weights(), top_k=K, capacity_factor=0.75, layout="padded")
        x = tokens()
        self.refuse("no routing to tell of", layer.stats)
        layer(x)
        found = layer.stats()
        logits = x.astype(np.float64) @ weights()["gate"].astype(np.float64).T
        counts = np.bincount(np.argsort(-logits, axis=1)[:, :K].reshape(-1), minlength=E)
        self.assertEqual(found["counts"], counts.tolist())
        self.assertAlmostEqual(found["cv"], counts.std() / counts.mean())
        self.assertAlmostEqual(found["cv_floor"], np.sqrt((E - 1) / (T * K)))
        self.assertEqual(found["dead_experts"], int((counts == 0).sum()))
        capacity = 5  # 0.75 * T * K / E
        self.assertAlmostEqual(found["dropped_assignments"],
                               np.maximum(counts - capacity, 0).sum() / (T * K))
        self.assertEqual(len(found["dropped_by_choice"]), K)
        self.assertAlmostEqual(np.mean(found["dropped_by_choice"]), found["dropped_assignments"])
        self.assertAlmostEqual(found["padding_waste"],
                               1 - np.minimum(counts, capacity).sum() / (E * capacity))
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        self.assertAlmostEqual(found["entropy_router"], -(p * np.log(p)).sum(1).mean(), delta=1e-5)
        self.assertNotIn("rank_imbalance", found)
        layer(x, np.zeros((T, K), np.int32), np.ones((T, K), np.float32))
        self.refuse("routing was given", layer.stats)

    def test_of_a_router_without_capacity_have_no_drops(self):
        layer = sw.Layer(**weights(), router=sw.Router("expert-choice", num_experts=E, top_k=K))
        layer(tokens())
        found = layer.stats()
        self.assertEqual(len(set(found["counts"])), 1)
        self.assertEqual(found["cv"], 0)
        self.assertIn("entropy_marginal", found)
        self.assertFalse([name for name in found if name.startswith("dropped")])

    @unittest.skipIf(torch is None, "no torch")
    def test_have_the_names_and_values_of_sw_metrics(self):
        router = sw.Router("top-p", num_experts=E, threshold=0.6)
        layer = sw.Layer(**weights(), router=router)
        layer(tokens())
        logits = torch.as_tensor(tokens()) @ torch.as_tensor(weights()["gate"]).T
        want, found = sw.metrics.routing(router(logits)), layer.stats()
        self.assertEqual(set(found) - set(want), {"counts", "padding_waste"})
        self.assertEqual(set(want) - set(found), set())
        for name, value in want.items():
            self.assertAlmostEqual(found[name], float(value), delta=1e-5, msg=name)


@unittest.skipIf(torch is None, "no torch")
class Losses(Case):
    def made(self, router=None, **options):
        parameters = {name: torch.tensor(value, requires_grad=True) for name, value in weights().items()}
        layer = sw.Layer(**parameters, **({"top_k": K} if router is None else {"router": router}),
                         trainable=True, **options)
        return layer, parameters

    @staticmethod
    def by_hand(a, coefficients):
        terms = {"balance": sw.losses.load_balance(a), "z": sw.losses.z(a),
                 "importance": sw.losses.importance(a), "entropy": sw.losses.entropy(a)}
        return terms, sum(coefficients[name] * terms[name] for name in coefficients)

    def test_values_and_gradients_are_those_of_sw_losses_behind_every_router(self):
        for router in (None, sw.Router("relu", num_experts=E), sw.Router("top-p", num_experts=E),
                       sw.Router("gshard", num_experts=E), sw.Router("expert-choice", num_experts=E)):
            with self.subTest(router and router.name):
                x = torch.tensor(tokens(), requires_grad=True)
                layer, parameters = self.made(router, losses=COEFFICIENTS)
                (layer(x) ** 2).sum().backward()
                values = layer.losses()
                plain, others = self.made(router)
                x2 = torch.tensor(tokens(), requires_grad=True)
                y, logits = plain(x2, logits=True)
                a = router(logits, training=True) if router else sw.losses.Routed(logits, top_k=K)
                terms, total = self.by_hand(a, COEFFICIENTS)
                ((y ** 2).sum() + total).backward()
                for name, term in terms.items():
                    self.assertAlmostEqual(float(values[name]), float(term), delta=2e-5, msg=name)
                self.assertAlmostEqual(float(values["total"]), float(total), delta=2e-5)
                self.assertLess(float((x.grad - x2.grad).abs().max()), 2e-4)
                have, want = parameters["gate"].grad, others["gate"].grad
                self.assertLess(float((have - want).abs().max()), 2e-4)
                without, nothing = self.made(router)
                (without(torch.tensor(tokens())) ** 2).sum().backward()
                self.assertGreater(float((nothing["gate"].grad - want).abs().max()), 1e-3)

    def test_of_sequences_with_devices_and_a_scale(self):
        losses = {"device": 1, "scope": "sequence", "sequence_length": 5, "devices": 3}
        layer, parameters = self.made(losses=losses)
        x = torch.tensor(tokens())
        layer(x).sum().backward()
        logits = x @ torch.as_tensor(weights()["gate"]).T
        want = sw.losses.device(sw.losses.Routed(logits, top_k=K), 3, scope="sequence",
                                sequence_length=5)
        self.assertAlmostEqual(float(layer.losses()["device"]), float(want), delta=1e-6)
        gate = parameters["gate"]
        first, gate.grad = gate.grad, None
        layer.loss_scale = 1024.0
        (1024 * layer(x).sum()).backward()
        self.assertLess(float((gate.grad / 1024 - first).abs().max()), 1e-5)

    def test_global_ones_go_by_the_counts_of_all_accumulation_steps(self):
        layer, parameters = self.made(losses={"balance": 2, "scope": "global"})
        steps = [torch.tensor(tokens(seed)) for seed in (1, 2)]
        outputs, counts = [], []
        for x in steps:
            outputs.append(layer(x))
            counts.append(layer.counts())
        self.assertEqual([int(n.sum()) for n in counts], [T * K, T * K])
        layer.loss_counts = counts[0] + counts[1]
        for y in outputs:
            (y ** 2).sum().backward()
        plain, others = self.made()
        for x in steps:
            y, logits = plain(x, logits=True)
            a = sw.losses.Routed(logits, top_k=K)
            ((y ** 2).sum() + 2 * sw.losses.load_balance(
                a, scope="global", global_counts=layer.loss_counts)).backward()
        have, want = parameters["gate"].grad, others["gate"].grad
        self.assertLess(float((have - want).abs().max()), 2e-4)

    def test_what_does_not_fit_is_refused_by_name(self):
        self.refuse("want a layer with trainable=True", sw.Layer, **weights(), top_k=K,
                    losses={"z": 1})
        self.refuse("no 'balanced'.*balance, z", self.made, losses={"balanced": 1})
        self.refuse("losses=0.01 is no dict", self.made, losses=0.01)
        layer, _ = self.made(losses={"balance": 1, "scope": "global"})
        y = layer(torch.tensor(tokens()))
        self.refuse("want layer.loss_counts", y.sum().backward)
        self.refuse("scope='all' is none of batch", self.made, losses={"balance": 1, "scope": "all"})
        self.refuse("devices=4", self.made, losses={"device": 1, "devices": 4})
        self.refuse("hash has none", self.made, sw.Router("hash", num_experts=E), losses={"z": 1})
        layer, _ = self.made(losses={"balance": 1, "scope": "sequence", "sequence_length": 7})
        self.refuse("20 tokens are no multiple", layer, torch.tensor(tokens()))
        self.refuse("no values of losses", layer.losses)
        self.refuse("layer has no losses", self.made()[0].losses)


if __name__ == "__main__":
    unittest.main()
