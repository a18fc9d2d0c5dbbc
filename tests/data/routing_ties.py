#!/usr/bin/env python3
"""Golden values with ties: routing_ties.json, computed from the definitions with nothing of the
library's. Equal scores, equal groups, equal weights, both zeros.

usage: routing_ties.py [--check]     write the file, or fail if it is not what would be written
"""

import json
import math
import os
import sys

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "routing_ties.json")

# Whole numbers, so that what is equal here is equal in fp32, and what is not is far apart.
E, K = 8, 3
LOGITS = [
    [1, 1, 1, 1, 1, 1, 1, 1],
    [0, 2, 2, 0, 2, 2, 0, 2],
    [-0.0, 0, 0, -0.0, -0.0, 0, 0, -0.0],
    [3, -1, 3, -1, 0, 2, 0, 2],
    [-4, -4, 5, 5, 5, -4, -4, 5],
    [0, 0, 0, 1, 1, 0, 0, 0],
    [2, 1, 0, 3, 3, 0, 1, 2],
    [-1, -1, -1, -1, -1, -1, -1, -1],
    [0, 1, 0, 1, 2, -1, 2, -1],
]
# Alike within a group: s + b is equal for experts of equal logit and bias, and for no others.
BIAS = [0.25, 0.25, 0, 0, 0.25, 0.25, 0, 0]


def softmax(values):
    exponentials = [math.exp(v - max(values)) for v in values]
    return [e / sum(exponentials) for e in exponentials]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def best(scores, count, allowed):
    """The `count` largest, the lower index first among equals."""
    return sorted(allowed, key=lambda i: (-scores[i], i))[:count]


def mixed(logits, taken, chosen):
    """The share of `chosen` among those left whose logit is within 2% of its own."""
    best = logits[chosen]
    near = [x for e, x in enumerate(logits) if e not in taken
            and (best == x or (best - x) / max(abs(x), best) <= 0.02)]
    return 1 / sum(math.exp(x - best) for x in near)


def route(logits, score, renormalize, top_k, groups, top_groups, group_score, scale, bias):
    """Experts and weights of one token."""
    plain = [sigmoid(x) for x in logits] if score == "sigmoid" else softmax(logits)
    selection = logits if score in ("topk-softmax", "sparse-mixer") else plain
    if bias:
        selection = [s + b for s, b in zip(selection, bias)]
    width = len(logits) // groups
    of_group = []
    for g in range(groups):
        two = sorted(selection[g * width:(g + 1) * width], reverse=True)[:2]
        of_group.append(two[0] if group_score == "max" else sum(two))
    chosen_groups = best(of_group, top_groups, range(groups))
    chosen = best(selection, top_k, [e for e in range(len(logits)) if e // width in chosen_groups])
    if score == "topk-softmax" or (score == "softmax" and renormalize):
        weights = softmax([logits[e] for e in chosen])
    else:
        weights = ([mixed(logits, chosen[:k], e) for k, e in enumerate(chosen)]
                   if score == "sparse-mixer" else [plain[e] for e in chosen])
        if renormalize:
            weights = [w / sum(weights) for w in weights]
    return chosen, [scale * w for w in weights]


def drop(expert, weight, capacity, policy):
    """1 where the assignment is kept: each expert takes `capacity`, in the policy's order."""
    order = {
        "token": lambda t, k: (t, k),
        "choice": lambda t, k: (k, t),
        "probs": lambda t, k: (-weight[t][k], t, k),
        "bpr": lambda t, k: (k, -max(weight[t]), t),
    }[policy]
    kept = [[0] * len(row) for row in expert]
    taken = {}
    places = [(t, k) for t, row in enumerate(expert) for k in range(len(row))]
    for t, k in sorted(places, key=lambda place: order(*place)):
        e = expert[t][k]
        taken[e] = taken.get(e, 0) + 1
        kept[t][k] = int(taken[e] <= capacity)
    return kept


def routers():
    for score in "softmax", "topk-softmax", "sigmoid":
        for renormalize in (True, False):
            if score == "topk-softmax" and not renormalize:
                continue
            for groups, top_groups, group_score in ((1, 1, "max"), (4, 2, "max"), (4, 2, "top2sum"),
                                                    (2, 1, "top2sum")):
                for bias in ([], BIAS):
                    if bias and score != "sigmoid":
                        continue
                    yield score, renormalize, groups, top_groups, group_score, bias
    for renormalize in True, False:
        yield "sparse-mixer", renormalize, 1, 1, "max", []


def document():
    result = {"source": "tests/data/routing_ties.py", "logits": {"ties": LOGITS}, "routers": [],
              "drops": []}
    for score, renormalize, groups, top_groups, group_score, bias in routers():
        rows = [route(logits, score, renormalize, K, groups, top_groups, group_score, 1.5, bias)
                for logits in LOGITS]
        result["routers"].append({
            "name": f"{score} renormalize={renormalize} groups={groups} {group_score} "
                    f"bias={bool(bias)}",
            "logits": "ties", "score": score, "renormalize": renormalize, "top_k": K,
            "groups": groups, "top_groups": top_groups, "group_score": group_score, "scale": 1.5,
            "selection_bias": bias, "expert": [row[0] for row in rows],
            "weight": [row[1] for row in rows]})
    # Weights of eighths: equal ones within an expert, within a token, and between tokens' largest.
    expert = [[t % 3, (t + 1) % 3 if t % 2 else 3] for t in range(12)]
    weight = [[(5 + t % 2) / 8, (3 + t % 4 // 2) / 8] for t in range(12)]
    for policy in "token", "choice", "probs", "bpr":
        for capacity in 1, 2, 3, 4, 5:
            result["drops"].append({
                "name": f"{policy} C={capacity}", "policy": policy, "capacity": capacity,
                "num_experts": 4, "expert": expert, "weight": weight,
                "kept": drop(expert, weight, capacity, policy)})
    return result


def same(a, b):
    """Equal but for what exp() rounds differently elsewhere."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def main():
    text = json.dumps(document(), separators=(",", ":")) + "\n"
    if sys.argv[1:] == ["--check"]:
        with open(FILE, encoding="utf-8") as file:
            if not same(json.load(file), json.loads(text)):
                sys.exit(f"{FILE} is not what this script writes")
        return
    with open(FILE, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
