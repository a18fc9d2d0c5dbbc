#!/usr/bin/env python3
"""Golden values of the routers by name: routers_golden.json, computed from the definitions in numpy,
in double, with nothing of the library's. Gradients are complex steps through the weights of the
choice that was made, so that no derivative is written down here.

usage: routers_golden.py [--check]     write the file, or fail if it is not what would be written
"""

import json
import math
import os
import sys

import numpy as np

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "routers_golden.json")
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def philox(counter, key):
    """Philox4x32-10 as its authors have it."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK32, (a >> 32) ^ c[3] ^ k[1], a & MASK32]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


# The published vectors of the generator: Random123, kat_vectors.
assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
assert philox([MASK32] * 4, [MASK32] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]

PURPOSES = {"jitter": 0, "logits": 1, "second": 2, "keep": 3, "uniform": 4, "shares": 5}


class Draws:
    def __init__(self, request, purpose):
        step, seed = request["step"], request["seed"]
        words = philox([step & MASK32, step >> 32, request["layer"], PURPOSES[purpose]],
                       [seed & MASK32, seed >> 32])
        self.key, self.first = words[:2], request["first_token"]

    def words(self, token, block):
        token = (self.first + token) & MASK64
        return philox([block, token & MASK32, token >> 32, 0], self.key)

    def unit(self, token, index):
        return (self.words(token, index // 4)[index % 4] >> 8) / 2**24


def normal(a, b, which):
    radius = math.sqrt(-2 * math.log(((a >> 8) + 1) / 2**24))
    return radius * (math.sin if which else math.cos)(2 * math.pi * (b >> 8) / 2**24)


def normals(draws, shape):
    out = np.zeros(shape)
    for t in range(shape[0]):
        for e in range(shape[1]):
            words = draws.words(t, e // 4)
            pair = e % 4 // 2 * 2
            out[t, e] = normal(words[pair], words[pair + 1], e % 2)
    return out


def softmax(row):
    """Of complex numbers too."""
    exponentials = np.exp(row - np.max(row.real))
    return exponentials / exponentials.sum()


def sigmoid(row):
    return 1 / (1 + np.exp(-row))


def best(scores, count):
    """The `count` largest, the lower index first among equals."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


# Each rule: the experts of every token, and the weights of a token's experts from its logits.

def top_k(logits, request, k, score="softmax", renormalize=True, scale=1):
    def weights(row, chosen, token):
        if score == "sigmoid":
            w = sigmoid(row)[chosen]
        else:
            w = softmax(row)[chosen]
        return scale * (w / w.sum() if renormalize else w)
    return [best(row, k) for row in logits], weights


def gshard(logits, request, second="random", threshold=0.5, sampled=False):
    gumbel, keep = Draws(request, "second"), Draws(request, "keep")
    training = request["training"]
    chosen, pairs = [], []
    for t, row in enumerate(logits):
        first = best(row, 1)[0]
        scores = np.array(row, dtype=float)
        if sampled and training:
            scores += [-math.log(-math.log(gumbel.unit(t, e) + 2**-25)) for e in range(len(row))]
        scores[first] = -np.inf
        other = best(scores, 1)[0]
        weight = softmax(np.array([row[first], row[other]]))[1]
        there = True
        if second == "threshold":
            there = weight > threshold
        if second == "random" and training:
            there = weight / threshold > keep.unit(t, 0)
        pairs.append([first, other])
        chosen.append([first, other if there else -1])

    def weights(row, picks, token):
        w = softmax(row[pairs[token]])
        return np.where(np.array(picks) < 0, 0, w)
    return chosen, weights


def adamoe(logits, request, k, nulls):
    experts = logits.shape[1] - nulls
    chosen = [[e for e in best(row, k) if e < experts] for row in logits]

    def weights(row, picks, token):
        w = softmax(row)[[e for e in picks if e >= 0]]
        return np.concatenate([w / w.sum(), np.zeros(k - len(w))])
    return [row + [-1] * (k - len(row)) for row in chosen], weights


def raw(row, chosen, token):
    return softmax(row)[chosen]


def top_p(logits, request, threshold=0.4):
    chosen = []
    for row in logits:
        p = softmax(row)
        order = best(row, len(row))
        count = 1
        while count < len(row) and (threshold >= 1 or p[order[:count]].sum() <= threshold):
            count += 1
        chosen.append(order[:count])
    return chosen, raw


def relu(logits, request):
    return [[e for e in range(len(row)) if row[e] > 0] for row in logits], \
        lambda row, chosen, token: row[chosen]


def expert_choice(logits, request, k, capacity_factor=1, group=0):
    tokens, experts = logits.shape
    group = group or tokens
    take = min(group, max(1, math.floor(capacity_factor * group * k / experts + 1e-9)))
    p = np.array([softmax(row) for row in logits])
    taken = np.zeros(p.shape, dtype=bool)
    for first in range(0, tokens, group):
        for e in range(experts):
            for t in best(p[first:first + group, e], take):
                taken[first + t, e] = True
    return [[e for e in range(experts) if taken[t, e]] for t in range(tokens)], raw


def expert_threshold(logits, request, bias=None):
    experts = logits.shape[1]
    bias = np.full(experts, -1 / experts) if bias is None else np.array(bias)
    return [[e for e in range(experts) if softmax(row)[e] + bias[e] > 0] for row in logits], raw


def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def hashed(ids, experts, k, salt=0):
    out = []
    for token in ids:
        chosen, j = [], 0
        while len(chosen) < k:
            e = splitmix64(((token << 8 | j) ^ (salt << 40)) & MASK64) % experts if j < 256 else j - 256
            j += 1
            if e not in chosen:
                chosen.append(e)
        out.append(chosen)
    return out


def uniform(tokens, experts, k, request):
    draws, out = Draws(request, "uniform"), []
    for t in range(tokens):
        left, chosen = list(range(experts)), []
        for i in range(k):
            word = draws.words(t, i // 4)[i % 4]
            chosen.append(left.pop(word * len(left) >> 32))
        out.append(sorted(chosen))
    return out


def apportion(shares, tokens, k):
    """Largest remainders, none more than `tokens`."""
    counts = {}
    while True:
        left = tokens * (k - len(counts))
        rest = [e for e in range(len(shares)) if e not in counts]
        total = sum(shares[e] for e in rest)
        wanted = {e: left * (shares[e] / total if total > 0 else 1 / len(rest)) for e in rest}
        full = [e for e in rest if wanted[e] > tokens]
        if not full:
            break
        counts.update({e: tokens for e in full})
    floors = {e: math.floor(w) for e, w in wanted.items()}
    for e in sorted(rest, key=lambda e: (floors[e] - wanted[e], e))[:left - sum(floors.values())]:
        floors[e] += 1
    counts.update(floors)
    return [counts[e] for e in range(len(shares))]


def dealt(shares, tokens, k, request):
    order = [e for e, n in enumerate(apportion(shares, tokens, k)) for _ in range(n)]
    words = Draws(request, "uniform").words(0, 0)
    offset, factor = words[0] % tokens, words[1] % tokens
    while math.gcd(factor, tokens) != 1:
        factor = (factor + 1) % tokens
    return [[order[(factor * t + offset) % tokens + i * tokens] for i in range(k)]
            for t in range(tokens)]


def gradient(logits, chosen, weights, dweight):
    """Complex steps."""
    out = np.zeros(logits.shape)
    for t, row in enumerate(logits):
        used = [i for i, e in enumerate(chosen[t]) if e >= 0]
        for e in range(len(row)):
            stepped = row.astype(complex)
            stepped[e] += 1e-30j
            w = weights(stepped, chosen[t], t)
            out[t, e] = sum(w[i].imag * dweight[t][i] for i in used) / 1e-30
    return out


SMALL = np.array([[((17 * t + 29 * e + 13 * t * e) % 23 - 11) / 8 for e in range(4)] for t in range(6)])
LARGE = np.array([[(splitmix64(1000 * t + e) >> 40) / 2**22 - 2 for e in range(10)] for t in range(24)])
LOGITS = {"small": SMALL, "large": LARGE}
REST = {"seed": 0, "step": 0, "layer": 0, "first_token": 0, "training": False}
TRAINS = {"seed": 0x123456789ABCDEF, "step": 5 << 30, "layer": 3, "first_token": 100, "training": True}

# (spelling, logits, request, rule, its arguments, noise on logits)
RULES = [
    ("top-k:top-k=2", "small", REST, top_k, {"k": 2}, 0),
    ("top-k:top-k=2,score=sigmoid,scale=2.5", "small", REST, top_k,
     {"k": 2, "score": "sigmoid", "scale": 2.5}, 0),
    ("top-k:top-k=3,renormalize=no", "large", REST, top_k, {"k": 3, "renormalize": False}, 0),
    ("switch", "small", REST, top_k, {"k": 1, "renormalize": False}, 0),
    ("gshard", "small", REST, gshard, {}, 0),
    ("gshard", "large", TRAINS, gshard, {}, 0),
    ("gshard:second=all,sampled=yes", "large", TRAINS, gshard, {"second": "all", "sampled": True}, 0),
    ("gshard:second=threshold,threshold=0.3", "large", REST, gshard,
     {"second": "threshold", "threshold": 0.3}, 0),
    ("gshard:threshold=0.25,sampled=yes", "large", TRAINS, gshard,
     {"threshold": 0.25, "sampled": True}, 0),
    ("noisy-top-k:top-k=2", "large", REST, top_k, {"k": 2}, 0),
    ("noisy-top-k:top-k=2", "large", TRAINS, top_k, {"k": 2}, 0.01),
    ("noisy-top-k:top-k=3,floor=0.5", "small", TRAINS, top_k, {"k": 3}, 0.5),
    ("v-moe:top-k=2", "large", REST, top_k, {"k": 2, "renormalize": False}, 0),
    ("v-moe:top-k=2", "large", TRAINS, top_k, {"k": 2, "renormalize": False}, 0.1),
    ("v-moe:top-k=2,noise=1", "large", TRAINS, top_k, {"k": 2, "renormalize": False}, 1),
    ("adamoe:top-k=2,null-experts=1", "small", REST, adamoe, {"k": 2, "nulls": 1}, 0),
    ("adamoe:top-k=4,null-experts=4", "large", REST, adamoe, {"k": 4, "nulls": 4}, 0),
    ("adamoe:top-k=3,null-experts=7", "large", REST, adamoe, {"k": 3, "nulls": 7}, 0),
    ("expert-choice:top-k=2", "small", REST, expert_choice, {"k": 2}, 0),
    ("expert-choice:top-k=2,capacity-factor=2,group=8", "large", REST, expert_choice,
     {"k": 2, "capacity_factor": 2, "group": 8}, 0),
    ("expert-choice:top-k=1,group=3", "large", REST, expert_choice, {"k": 1, "group": 3}, 0),
    ("expert-choice:top-k=4,capacity_factor=100", "small", REST, expert_choice,
     {"k": 4, "capacity_factor": 100}, 0),
    ("expert-threshold", "small", REST, expert_threshold, {}, 0),
    ("expert-threshold", "large", REST, expert_threshold,
     {"bias": [-0.25, -0.125, -0.0625, 0, -0.5, -0.1875, -1, -0.375, 0.125, -0.03125]}, 0),
    ("top-p", "small", REST, top_p, {}, 0),
    ("top-p:threshold=0.7", "small", REST, top_p, {"threshold": 0.7}, 0),
    ("top-p:threshold=0.9", "large", REST, top_p, {"threshold": 0.9}, 0),
    ("top-p:threshold=1", "large", REST, top_p, {"threshold": 1}, 0),
    ("relu", "small", REST, relu, {}, 0),
    ("relu", "large", REST, relu, {}, 0),
]


def by_place():
    """(spelling, experts, tokens, request, token ids, experts of each token)."""
    ids = [0, 1, 2, 3, 4, 5, 50256, 7, 7, 2**31 - 1]
    zipf = [(e + 1.0) ** -1.5 for e in range(7)]
    hot = [0.5] + [0.5 / 7] * 7
    return [
        ("hash:top-k=2", 4, 6, REST, list(range(6)), hashed(range(6), 4, 2)),
        ("hash:top-k=3,salt=9", 16, 10, REST, ids, hashed(ids, 16, 3, 9)),
        ("hash:top-k=5", 5, 10, REST, ids, hashed(ids, 5, 5)),
        ("uniform:top-k=3", 10, 12, TRAINS, [], uniform(12, 10, 3, TRAINS)),
        ("uniform:top-k=6", 6, 4, REST, [], uniform(4, 6, 6, REST)),
        ("round-robin:top-k=3", 5, 7, TRAINS, [],
         [[((100 + t) * 3 + i) % 5 for i in range(3)] for t in range(7)]),
        ("zipf:top-k=2,s=1.5", 7, 30, TRAINS, [], dealt(zipf, 30, 2, TRAINS)),
        ("hot:top-k=2,share=0.5", 8, 20, TRAINS, [], dealt(hot, 20, 2, TRAINS)),
        ("hot:top-k=2,share=1", 8, 20, REST, [], dealt([1.0] + [0.0] * 7, 20, 2, REST)),
        ("hot:top-k=1,share=1", 8, 3, REST, [], dealt([1.0] + [0.0] * 7, 3, 1, REST)),
    ]


def rows_of(chosen, columns, fill):
    return [list(row) + [fill] * (columns - len(row)) for row in chosen]


def noise_logits_for(shape):
    """Of learned noise: small, negative, and so large that exp of them is none of fp32."""
    return np.array([[((5 * t + 3 * e + t * e) % 13 - 6) / 4 + (98 if (t + e) % 29 == 28 else 0)
                      for e in range(shape[1])] for t in range(shape[0])])


def learned_noise(logits, request, noise_logits, floor):
    size = np.log1p(np.exp(noise_logits)) + floor
    return logits + size * normals(Draws(request, "logits"), logits.shape)


def rule_entry(spelling, name, request, rule, arguments, noise):
    logits = LOGITS[name]
    tokens, experts = logits.shape
    entry = {"router": spelling, "logits": name, "request": request,
             "experts": experts - arguments.get("nulls", 0)}
    if "bias" in arguments:
        entry["selection_bias"] = arguments["bias"]
    if noise and spelling.startswith("noisy-top-k"):
        noise_logits = noise_logits_for(logits.shape)
        logits = learned_noise(LOGITS[name], request, noise_logits, noise)
        entry["noise_logits"] = noise_logits.tolist()
        entry["noisy"] = logits.tolist()
    elif noise:
        logits = logits + noise * normals(Draws(request, "logits"), logits.shape)
        entry["noisy"] = logits.tolist()
    chosen, weights = rule(logits, request, **arguments)
    variable = spelling.split(":")[0] in ("expert-choice", "expert-threshold", "top-p", "relu")
    columns = experts if variable else len(chosen[0])
    dweight = [[((7 * t + 5 * i + t * i) % 17 - 8) / 4 for i in range(columns)] for t in range(tokens)]
    entry["expert"] = rows_of(chosen, columns, -1)
    entry["weight"] = rows_of([[float(w) for w in weights(row, chosen[t], t)]
                               for t, row in enumerate(logits)], columns, 0.0)
    entry["dweight"] = dweight
    dlogits = gradient(logits, chosen, weights, dweight)
    entry["dlogits"] = dlogits.tolist()
    if "noise_logits" in entry:
        stepped = learned_noise(LOGITS[name], request, noise_logits + 1e-30j, noise)
        entry["dnoise_logits"] = (dlogits * stepped.imag / 1e-30).tolist()
    return entry


def document():
    jitter = Draws(TRAINS, "jitter")
    return {
        "source": "computed in numpy, in double, from the definitions of the routers",
        "logits": {name: logits.tolist() for name, logits in LOGITS.items()},
        "rules": [rule_entry(*case) for case in RULES],
        "by_place": [{"router": spelling, "experts": experts, "tokens": tokens, "request": request,
                      "token_ids": list(ids), "expert": chosen}
                     for spelling, experts, tokens, request, ids, chosen in by_place()],
        "jitter": {"size": 0.25, "request": TRAINS,
                   "factor": [[1 + 0.25 * (2 * jitter.unit(t, h) - 1) for h in range(7)]
                              for t in range(3)]},
    }


def main():
    text = json.dumps(document(), separators=(",", ":")).replace('{"router"', '\n{"router"') + "\n"
    if sys.argv[1:] == ["--check"]:
        with open(FILE, encoding="utf-8") as file:
            have, want = json.load(file), json.loads(text)
        # Functions of another library's may differ in the last bit.
        assert len(str(have)) > 0 and have.keys() == want.keys()
        for a, b in zip(have["rules"], want["rules"]):
            assert a["router"] == b["router"] and a["expert"] == b["expert"], a["router"]
            assert np.allclose(a["weight"], b["weight"], rtol=1e-12, atol=1e-15), a["router"]
            for name in ("dlogits", "dnoise_logits"):
                assert np.allclose(a.get(name, 0), b.get(name, 0), rtol=1e-10, atol=1e-13), a["router"]
        assert have["by_place"] == want["by_place"]
        return
    with open(FILE, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
