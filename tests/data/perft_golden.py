#!/usr/bin/env python3
"""Golden values of PERFT's adapters: perft_golden.json, computed from the definition in numpy, in
double, with nothing of the library's. Gradients of sum(y * dy) are complex steps with the choice of
adapters held, so that no derivative is written down here.

usage: perft_golden.py [--check]     write the file, or fail if it is not what would be written
"""

import os

import numpy as np

from golden_file import write_or_check

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "perft_golden.json")
STEP = 1e-30

CASES = {
    "routed": dict(kind="routed", adapters=4, rank=3, alpha=6, top_k=2, renormalize=False),
    "routed, one, nonlinear": dict(kind="routed", adapters=3, rank=2, alpha=5, top_k=1,
                                   renormalize=False, activation="silu"),
    "routed, renormalised": dict(kind="routed", adapters=5, rank=4, alpha=4, top_k=3,
                                 renormalize=True),
    "embedded": dict(kind="embedded", adapters=4, rank=2, alpha=4, top_k=2),
    "embedded, nonlinear": dict(kind="embedded", adapters=3, rank=5, alpha=1, top_k=3,
                                activation="relu"),
    "dense": dict(kind="dense", adapters=3, rank=2, alpha=3, activation="relu"),
    "shared": dict(kind="shared", adapters=1, rank=4, alpha=8),
}
ACT = {"identity": lambda z: z, "silu": lambda z: z / (1 + np.exp(-z)),
       "relu": lambda z: np.where(z.real > 0, z, 0)}
TOKENS, HIDDEN = 5, 6


def choices(case, logits):
    """[T, K] ids in the order of choice, and their weights."""
    p = np.exp(logits - logits.real.max(axis=1, keepdims=True))
    order = np.argsort(-logits.real, axis=1, kind="stable")[:, :case["top_k"]]
    chosen = np.take_along_axis(p, order, 1)
    return order, chosen / (chosen if case["renormalize"] else p).sum(axis=1, keepdims=True)


def perft(case, x, base, a, b, gate=None, weight=None, expert=None):
    act = ACT[case.get("activation", "identity")]
    each = np.stack([act(x @ a_j.T) @ b_j.T for a_j, b_j in zip(a, b)])  # [M, T, H]
    y = base.astype(each.dtype)
    if case["kind"] == "routed":
        expert, weight = choices(case, x @ gate.T)
    if case["kind"] in ("dense", "shared"):
        expert = np.tile(np.arange(case["adapters"]), (len(x), 1))
        weight = np.ones(expert.shape)
    for t, ids in enumerate(expert):
        for k, j in enumerate(ids):
            if j >= 0:
                y[t] += case["alpha"] / case["rank"] * weight[t, k] * each[j, t]
    return y


def golden(case, random):
    adapters, rank = case["adapters"], case["rank"]
    # Numbers that f32 holds exactly.
    draw = lambda *shape: np.round(random.standard_normal(shape) * 64) / 64
    given = {"x": draw(TOKENS, HIDDEN), "base": draw(TOKENS, HIDDEN),
             "a": draw(adapters, rank, HIDDEN), "b": draw(adapters, HIDDEN, rank)}
    expert = None
    if case["kind"] == "routed":
        given["gate"] = draw(adapters, HIDDEN)
    if case["kind"] == "embedded":
        given["weight"] = draw(TOKENS, case["top_k"])
        expert = random.integers(-1, adapters, (TOKENS, case["top_k"]))
    dy = draw(TOKENS, HIDDEN)
    gradients = {}
    for name in [n for n in given if n != "base"]:
        gradient = np.zeros(given[name].size)
        for i in range(gradient.size):
            moved = {key: value.astype(complex) for key, value in given.items()}
            flat = moved[name].reshape(-1)
            flat[i] += 1j * STEP
            moved[name] = flat.reshape(given[name].shape)
            gradient[i] = (perft(case, **moved, expert=expert) * dy).sum().imag / STEP
        gradients[name] = gradient.tolist()
    y = perft(case, **given, expert=expert)
    flat = {name: values.reshape(-1).tolist() for name, values in given.items()}
    return {**case, "tokens": TOKENS, "hidden": HIDDEN, "dy": dy.reshape(-1).tolist(),
            "given": flat, "expert": [] if expert is None else expert.reshape(-1).tolist(),
            "y": y.reshape(-1).tolist(), "gradients": gradients}


def main():
    random = np.random.default_rng(2411)
    write_or_check(FILE, {name: golden(case, random) for name, case in CASES.items()})


if __name__ == "__main__":
    main()
