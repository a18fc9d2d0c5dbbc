"""Gradients and losses of blocks of transformers, as tools/peers/train_check.py has written them: a
trainable Layer on their weights has the same."""

import json
import unittest
from pathlib import Path

import numpy as np

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

from near import furthest

FILE = Path(__file__).resolve().parents[1] / "data" / "training_golden.npz"
TOLERANCE = 1e-5


@unittest.skipIf(torch is None, "no torch")
class Golden(unittest.TestCase):
    def expect_near(self, got, want, what):
        error, place = furthest(got, torch.from_numpy(want))
        self.assertLessEqual(error, TOLERANCE, f"{what} at {place}")

    def test_gradients_and_twenty_steps_of_adamw_are_those_of_transformers(self):
        with np.load(FILE) as stored:
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
            self.assertLessEqual(abs(found[-1] - want), TOLERANCE * want)
        self.assertLess(found[-1], 0.9 * found[0])


if __name__ == "__main__":
    unittest.main()
