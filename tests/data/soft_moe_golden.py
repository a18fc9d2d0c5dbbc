#!/usr/bin/env python3
"""Golden values of Soft-MoE: soft_moe_golden.json, computed from the definition in numpy, in double,
with nothing of the library's. Gradients of sum(y * dy) are complex steps, so that no derivative is
written down here.

usage: soft_moe_golden.py [--check]     write the file, or fail if it is not what would be written
"""

import os

import numpy as np

from golden_file import write_or_check

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "soft_moe_golden.json")
EPSILON, STEP = 1e-6, 1e-30

CASES = {
    "normalised": dict(tokens=10, experts=3, slots=2),
    "plain logits": dict(tokens=6, experts=2, slots=3, normalize=False),
    "groups": dict(tokens=12, experts=2, slots=1, group=4),
    "one token a group": dict(tokens=3, experts=2, slots=2, group=1),
    "causal": dict(tokens=12, experts=2, slots=2, group=2, sequence=6, causal=True),
    "causal plain logits": dict(tokens=8, experts=2, slots=1, group=4, causal=True,
                                normalize=False),
}


def unit(rows):
    return rows / np.sqrt((rows * rows).sum(axis=1, keepdims=True) + EPSILON)


def softmax(values, axis):
    """Of complex numbers too."""
    exponentials = np.exp(values - values.real.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)


def expert(x, w13, w2):
    gate, up = np.split(x @ w13.T, 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up) @ w2.T


def soft_moe(case, x, phi, scale, w13, w2):
    tokens, experts, slots = case["tokens"], case["experts"], case["slots"]
    sequence = case.get("sequence") or tokens
    group = case.get("group") or sequence
    normal = unit if case.get("normalize", True) else lambda rows: rows
    logits = scale * (normal(x) @ normal(phi).T)
    y = np.zeros_like(x)
    for first in range(0, tokens, group):
        source = first
        if case.get("causal"):
            if first % sequence == 0:
                continue
            source = first - group
        made_of, read_by = slice(source, source + group), slice(first, first + group)
        inputs = softmax(logits[made_of], 0).T @ x[made_of]
        outputs = np.concatenate([expert(inputs[e * slots:(e + 1) * slots], w13[e], w2[e])
                                  for e in range(experts)])
        y[read_by] = softmax(logits[read_by], 1) @ outputs
    return y


def golden(case, random):
    hidden, inner, experts = 4, 3, case["experts"]
    # Numbers that f32 holds exactly.
    draw = lambda *shape: np.round(random.standard_normal(shape) * 64) / 64
    given = {"x": draw(case["tokens"], hidden), "phi": draw(experts * case["slots"], hidden),
             "scale": np.array(1.5), "w13": draw(experts, 2 * inner, hidden),
             "w2": draw(experts, hidden, inner)}
    dy = draw(case["tokens"], hidden)
    gradients = {}
    for name, values in given.items():
        gradient = np.zeros(values.size)
        for i in range(values.size):
            moved = {key: value.astype(complex) for key, value in given.items()}
            flat = moved[name].reshape(-1)
            flat[i] += 1j * STEP
            moved[name] = flat.reshape(values.shape)
            gradient[i] = (soft_moe(case, **moved) * dy).sum().imag / STEP
        gradients[name] = gradient.tolist()
    y = soft_moe(case, **given)
    return {**case, "hidden": hidden, "inner": inner, "dy": dy.reshape(-1).tolist(),
            "given": {name: values.reshape(-1).tolist() for name, values in given.items()},
            "y": y.reshape(-1).tolist(), "gradients": gradients}


def main():
    random = np.random.default_rng(2308)
    write_or_check(FILE, {name: golden(case, random) for name, case in CASES.items()})


if __name__ == "__main__":
    main()
