"""Statistics of a routing, by torch, where its tensors lie: on a GPU nothing waits for the host until a
value is read. docs/metrics.md has formulas. Entropies and information are in nats.

`a` is as of sw.losses: any object with topk_expert [T,K] (-1 unused) and, where they are asked for,
logits [T,E], probs, counts [E] before any is dropped, topk_weight [T,K].
"""

import math

from ._errors import integer, invalid
from .losses import _at_least_f32, _count, _of, _probs, _torch


def load(counts):
    """Of counts [E]: cv, population deviation / mean; cv_floor, what uniform random routing has on
    average, sqrt((E-1)/N); max_over_mean, min_over_mean; kl, that of the shares to uniform ones;
    entropy, that of the shares / ln E; effective_experts, exp of that of the shares; gini;
    dead_experts, those without any. Without any assignment all are 0 but dead_experts."""
    torch = _torch()
    n = torch.as_tensor(counts).double()
    size, total = len(n), n.sum()
    mean = total / size
    share = n / total
    entropy = torch.special.entr(share).sum()
    found = {"cv": n.var(unbiased=False).sqrt() / mean, "cv_floor": ((size - 1) / total).sqrt(),
             "max_over_mean": n.max() / mean, "min_over_mean": n.min() / mean,
             "kl": (math.log(size) - entropy).clamp(min=0),
             "entropy": entropy / math.log(size) if size > 1 else entropy + 1,
             "effective_experts": entropy.exp(),
             "gini": (n[:, None] - n[None, :]).abs().sum() / (2 * size * total)}
    found = {name: value.nan_to_num(nan=0.0, posinf=0.0) for name, value in found.items()}
    return found | {"dead_experts": (n == 0).sum()}


def rank_imbalance(counts, ranks):
    """max / mean over `ranks` ranks, of which r has the experts from r*E//ranks to (r+1)*E//ranks: what
    sets the time of a step over ranks. 0 without any assignment."""
    n, ranks = _torch().as_tensor(counts).double(), integer("ranks", ranks)
    if ranks < 1 or ranks > len(n):
        raise invalid(f"ranks={ranks} of {len(n)} experts, want 1 to {len(n)}")
    ends = [r * len(n) // ranks for r in range(ranks + 1)]
    of_ranks = _torch().stack([n[begin:end].sum() for begin, end in zip(ends, ends[1:])])
    return (of_ranks.max() / of_ranks.mean()).nan_to_num(nan=0.0)


def entropies(a):
    """Three that differ: router, the mean over tokens of a.probs' (0 to ln E); weights, the mean of that
    of the chosen weights by their sum (0 to ln K); marginal, that of the mean of a.probs (0 to ln E).
    information = marginal - router >= 0: of token and expert under the router, large where it is sure
    and balanced."""
    entr = _torch().special.entr
    probs = _probs(a).double()
    router, marginal = entr(probs).sum(-1).mean(), entr(probs.mean(0)).sum()
    found = {"router": router, "marginal": marginal, "information": marginal - router}
    weight = getattr(a, "topk_weight", None)
    if weight is not None:
        weight = _used_weight(a)
        share = weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)
        found["weights"] = entr(share).sum(-1).mean()
    return found


def drops(a, kept):
    """Of kept [T,K], what a capacity has left: assignments, the share that is gone; tokens, the share
    with none left; mass, the share of the weights, where there is a.topk_weight; by_choice [K], the
    shares of first, second, ... choices."""
    used = _of(a, "topk_expert") >= 0
    kept = kept.bool() & used
    used, left = used.double(), kept.double()
    gone = used - left
    found = {"assignments": gone.sum() / used.sum().clamp(min=1),
             "tokens": ((left.sum(-1) == 0) & (used.sum(-1) > 0)).double().mean(),
             "by_choice": gone.sum(0) / used.sum(0).clamp(min=1)}
    if getattr(a, "topk_weight", None) is not None:
        weight = _used_weight(a)
        found["mass"] = 1 - (weight * left).sum() / weight.sum()
    return found


def padding_waste(rows_used, rows_computed):
    """The share of computed rows that are padding: 1 - used / (E C)."""
    return 1 - rows_used / rows_computed


def coactivation(a, num_experts):
    """[E,E] the share of the tokens of expert i that also go to j: N_ij / N_i, 1 on the diagonal (0 for
    an expert without tokens)."""
    expert = _of(a, "topk_expert").long()
    hit = _torch().zeros(len(expert), num_experts + 1, dtype=_torch().float64, device=expert.device)
    hit.scatter_(1, expert % (num_experts + 1), 1.0)
    both = hit[:, :num_experts].T @ hit[:, :num_experts]
    return both / both.diagonal().clamp(min=1)[:, None]


def churn(before, after):
    """1 - mean |A and B| / K of the experts [T,K] of the same tokens, for example at two checkpoints."""
    if before.shape != after.shape:
        raise invalid(f"routings are {list(before.shape)} and {list(after.shape)}: want one shape")
    same = (before[:, :, None] == after[:, None, :]) & (before >= 0)[:, :, None]
    used = (before >= 0).sum()
    return (used - same.any(-1).sum()) / used.clamp(min=1).double()


def information(types, expert, permutations=100, seed=0):
    """Mutual information of a token's type and its experts, types [T] of integers, expert [T,K]:
    plug_in; bias by Miller and Madow, (|joint| - |types| - |experts| + 1) / 2N; corrected, their
    difference; normalised, plug_in by the smaller entropy; and of as many permutations of the tokens,
    drawn from `seed`, null_mean and p, the share that have as much (one counts for the data itself). An untrained router is
    the other thing to compare with."""
    torch = _torch()
    types, expert = types.reshape(-1).cpu(), expert.reshape(len(types.reshape(-1)), -1).cpu()
    used = expert >= 0
    kinds, of_token = types.unique(return_inverse=True)
    ids, numbers = expert[used].unique(return_inverse=True)
    rows = used.nonzero()[:, 0]
    if len(rows) == 0:
        raise invalid("information of a routing in which no token has an expert")

    def joint_of(order):
        pairs = of_token[order][rows] * len(ids) + numbers
        return pairs.bincount(minlength=len(kinds) * len(ids)).reshape(len(kinds), -1).double()

    def plug_in(joint):
        p = joint / joint.sum()
        entr = torch.special.entr
        return entr(p.sum(0)).sum() + entr(p.sum(1)).sum() - entr(p).sum()

    joint = joint_of(torch.arange(len(types), device="cpu"))
    found = plug_in(joint)
    bias = ((joint > 0).sum() - (joint.sum(1) > 0).sum() - len(ids) + 1) / (2 * joint.sum())
    entropy = min(float(torch.special.entr(joint.sum(d) / joint.sum()).sum()) for d in (0, 1))
    generator = torch.Generator().manual_seed(seed)
    null = torch.stack([plug_in(joint_of(torch.randperm(len(types), generator=generator, device="cpu")))
                        for _ in range(permutations)]) if permutations else found.new_zeros(0)
    return {"plug_in": float(found), "bias": float(bias), "corrected": float(found - bias),
            "normalised": float(found) / entropy if entropy > 0 else 0.0,
            "null_mean": float(null.mean()) if permutations else math.nan,
            "p": (1 + int((null >= found - 1e-12).sum())) / (1 + permutations)}


def routing(a, kept=None, ranks=None):
    """load(), entropies() and, where they are asked for, drops() and rank_imbalance(), as one flat dict:
    what to log for a layer and step. Values are tensors: read them when it suits."""
    counts = getattr(a, "counts", None)
    if counts is None:
        counts = _count(_of(a, "topk_expert"), _of(a, "logits").shape[1])
    found = load(counts)
    if getattr(a, "probs", None) is not None or getattr(a, "logits", None) is not None:
        found |= {f"entropy_{name}": value for name, value in entropies(a).items()}
    if kept is not None:
        found |= {f"dropped_{name}": value for name, value in drops(a, kept).items()}
    if ranks is not None:
        found["rank_imbalance"] = rank_imbalance(counts, ranks)
    return found


def _used_weight(a):
    """[T,K] f64, 0 where unused."""
    weight = _at_least_f32(_of(a, "topk_weight")).detach().double()
    return weight * (_of(a, "topk_expert") >= 0)
