#!/usr/bin/env python3
"""Golden values of layers with zero-computation experts and gating residuals (MoE++, arXiv:2410.07348):
moe_plus_plus_golden.json, computed from the definition in numpy, in double, with nothing of the
library's. Each case is one layer, or two with the logits of the first added in the second. Gradients of
sum(y * dy) and of the layers' balance losses are complex steps with the choice held, so that no
derivative is written down here.

usage: moe_plus_plus_golden.py [--check]     write the file, or fail if it is not what would be written
"""

import math
import os

import numpy as np

from golden_file import write_or_check

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "moe_plus_plus_golden.json")
STEP = 1e-30
TOKENS, HIDDEN, INNER = 9, 8, 4

# Of all: experts E, and beside them constant, copy and zero ones, in this order of their ids.
CASES = {
    "all kinds": dict(layers=1, experts=3, constant=2, copy=1, zero=1, tau=0.75, top_k=2, renormalize=True,
                      balance=0.5, capacity=0),
    "constants alone, not renormalised": dict(layers=1, experts=2, constant=3, copy=0, zero=0, tau=0, top_k=3,
                                              renormalize=False, balance=0.25, capacity=0),
    "two layers": dict(layers=2, experts=3, constant=1, copy=1, zero=1, tau=0.5, top_k=3, renormalize=True,
                       balance=0.125, capacity=0),
    "full": dict(layers=1, experts=2, constant=2, copy=1, zero=1, tau=0.5, top_k=3, renormalize=True,
                 balance=0.25, capacity=0.5),
}


def softmax(z):
    e = np.exp(z - z.real.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def kept(case, expert):
    """The first picks of each expert in (token, k) order, as many as it has slots."""
    beside = case["constant"] + case["copy"] + case["zero"]
    shares = case["tau"] * case["experts"] + beside
    room = {}
    keep = np.ones(expert.shape, bool)
    for t, ids in enumerate(expert):
        for k, e in enumerate(ids):
            slots = case["capacity"] * (case["tau"] if e < case["experts"] else 1) * expert.size / shares
            room[e] = room.get(e, math.ceil(slots - 1e-9)) - 1
            keep[t, k] = room[e] >= 0
    return keep if case["capacity"] else np.ones(expert.shape, bool)


def layer(case, p, x, before):
    """y, logits and the balance loss."""
    logits = x @ p["gate"].T
    if before is not None:
        logits = logits + before @ p["residual"].T
    probs = softmax(logits)
    expert = np.argsort(-logits.real, axis=1, kind="stable")[:, :case["top_k"]]
    weight = np.take_along_axis(probs, expert, 1)
    if case["renormalize"]:
        weight = weight / weight.sum(axis=1, keepdims=True)
    keep = kept(case, expert)
    first_copy = case["experts"] + case["constant"]
    y = np.zeros(x.shape, np.result_type(x, weight))
    for t, ids in enumerate(expert):
        for k, e in enumerate(ids):
            if not keep[t, k]:
                continue
            if e < case["experts"]:
                gate, up = np.split(p["w13"][e] @ x[t], 2)
                out = p["w2"][e] @ (gate / (1 + np.exp(-gate)) * up)
            elif e < first_copy:
                w, v = p["constants"][e - case["experts"]][:2], p["constants"][e - case["experts"]][2]
                a = softmax(w @ x[t])
                out = a[0] * x[t] + a[1] * v
            else:
                out = x[t] if e < first_copy + case["copy"] else 0 * x[t]
            y[t] += weight[t, k] * out
    experts = probs.shape[1]
    f = np.bincount(expert.ravel(), minlength=experts) / expert.size
    eta = np.where(np.arange(experts) < case["experts"], 1, case["tau"] or 1)
    return y, logits, experts * (eta * f * probs.mean(axis=0)).sum(), expert, keep


def forward(case, p, x):
    before, balances, found = None, [], []
    for index in range(case["layers"]):
        mine = {name: values[index] for name, values in p.items() if name != "residual"}
        if index > 0:
            mine["residual"] = p["residual"]
        x, before, balance, expert, keep = layer(case, mine, x, before)
        balances.append(balance)
        found.append((before, expert, keep))
    return x, balances, found


def golden(case, random):
    experts, layers = case["experts"], case["layers"]
    everything = experts + case["constant"] + case["copy"] + case["zero"]
    # Numbers that f32 holds exactly.
    draw = lambda *shape: np.round(random.standard_normal(shape) * 64) / 64
    given = {"x": draw(TOKENS, HIDDEN), "gate": draw(layers, everything, HIDDEN) / 2,
             "constants": draw(layers, case["constant"], 3, HIDDEN),
             "w13": draw(layers, experts, 2 * INNER, HIDDEN) / 2, "w2": draw(layers, experts, HIDDEN, INNER) / 2}
    if layers > 1:
        given["residual"] = draw(everything, everything) / 2
    dy = draw(TOKENS, HIDDEN)

    def loss(values):
        p = {name: value for name, value in values.items() if name != "x"}
        y, balances, _ = forward(case, p, values["x"])
        return (y * dy).sum() + case["balance"] * sum(balances)

    gradients = {}
    for name, values in given.items():
        gradient = np.zeros(values.size)
        for i in range(gradient.size):
            moved = {key: value.astype(complex) for key, value in given.items()}
            flat = moved[name].reshape(-1)
            flat[i] += 1j * STEP
            moved[name] = flat.reshape(values.shape)
            gradient[i] = loss(moved).imag / STEP
        gradients[name] = gradient.tolist()
    y, balances, found = forward(case, {name: v for name, v in given.items() if name != "x"}, given["x"])
    chosen = np.concatenate([expert.ravel() for _, expert, _ in found])
    assert len(np.unique(chosen)) == everything, "an expert that nobody has chosen is not tested"
    if case["capacity"]:
        kinds = ["experts", "constant", "copy", "zero"]
        kind = np.repeat(kinds, [case[name] for name in kinds])
        for what in np.unique(kind):
            mine = np.concatenate([keep[kind[expert] == what] for _, expert, keep in found])
            assert mine.any() and not mine.all(), f"want kept and dropped picks of each kind, {what} has not both"
    return {**case, "tokens": TOKENS, "hidden": HIDDEN, "inner": INNER, "dy": dy.reshape(-1).tolist(),
            "given": {name: values.reshape(-1).tolist() for name, values in given.items()},
            "expert": [expert.reshape(-1).tolist() for _, expert, _ in found],
            "kept": [keep.reshape(-1).astype(int).tolist() for _, _, keep in found],
            "logits": [logits.reshape(-1).tolist() for logits, _, _ in found],
            "balances": [float(value) for value in balances],
            "y": y.reshape(-1).tolist(), "gradients": gradients}


def main():
    random = np.random.default_rng(6)
    write_or_check(FILE, {name: golden(case, random) for name, case in CASES.items()})


if __name__ == "__main__":
    main()
