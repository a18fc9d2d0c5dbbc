"""Auxiliary losses of a router, as scalars that torch differentiates. docs/metrics.md has sources.

Each takes `a`, what a router said and decided: sw.Router's result, a Routed, or any object with
logits [T,E], topk_expert [T,K] (-1 unused), and, where it has them, counts [E] before any is dropped
and probs [T,E], which sum to 1 for each token (without them: softmax of the logits). The choice is a
constant: counts pass no gradient. Sums are in the logits' type, at least in f32.
"""

import functools
import math
import sys

from ._errors import integer, invalid
from ._stages import route

SCOPES = ("batch", "sequence", "global")
SHARES = ("assignments", "tokens", "first-choice")


class Routed:
    """A routing by logits [T,E], for example those of `y, logits = layer(x, logits=True)`, of any type
    of torch. The options are the layer's: top_k, score, selection_bias, groups, ... as of
    sw.route(), so that the same experts are counted that worked. Or give topk_expert [T,K]."""

    def __init__(self, logits, top_k=None, score="softmax", topk_expert=None, **options):
        logits = _at_least_f32(logits).reshape(-1, logits.shape[-1])
        if topk_expert is None:
            if top_k is None:
                raise invalid("Routed is given neither top_k nor topk_expert: want one of them")
            topk_expert, _ = route(logits.detach().float().contiguous(), top_k, score, **options)
        self.logits = logits
        self.topk_expert = topk_expert.reshape(logits.shape[0], -1)
        self.top_k = self.topk_expert.shape[1]
        self._sigmoid = score == "sigmoid"

    @functools.cached_property
    def probs(self):
        """[T,E] softmax of the logits; of the score "sigmoid" the sigmoids by their sum."""
        if not self._sigmoid:
            return self.logits.softmax(-1)
        # Their logarithms, so that none underflows.
        return _torch().nn.functional.logsigmoid(self.logits).softmax(-1)

    @functools.cached_property
    def counts(self):
        """[E] assignments of each expert."""
        return _count(self.topk_expert, self.logits.shape[1])


def load_balance(a, scope="batch", share="assignments", sequence_length=None, global_counts=None):
    """E sum_e f_e P_e, P_e the mean over the tokens of a.probs: 1 where all is even, for every K
    (Fedus et al. 2021, arXiv:2101.03961, section 2.2).

    share: f_e is n_e / sum of n ("assignments"), K times that ("tokens": Mixtral, OLMoE and Qwen of
    transformers), or of first choices ("first-choice": GShard). Of Router("moe++") zero-computation experts
    count tau times (arXiv:2410.07348, section 3.3). scope: over the "batch"; each "sequence"
    of sequence_length tokens, and the mean of these; or "global", with global_counts [E] that were
    summed over ranks and accumulation steps (arXiv:2501.11873)."""
    f, p = _shares(a, scope, share, sequence_length, global_counts)
    others, tau = getattr(a, "zero_computation", 0), getattr(a, "tau", 0)
    if others > 0 and tau > 0:
        f = _torch().cat((f[:, :-others], tau * f[:, -others:]), -1)
    return p.shape[1] * (f * p).sum(-1).mean()


def z(a):
    """mean_t (logsumexp of the logits)^2 (ST-MoE, arXiv:2202.08906, equation 5)."""
    return _at_least_f32(_of(a, "logits")).logsumexp(-1).square().mean()


def importance(a, of="scores"):
    """CV^2 of I [E] = sum over the tokens of a.probs (of="scores": V-MoE, arXiv:2106.05974), or of the
    weights a.topk_weight (of="weights": Shazeer et al. 2017, arXiv:1701.06538, section 4)."""
    if of == "scores":
        return _cv_squared(_probs(a).sum(0))
    if of != "weights":
        raise invalid(f'of={of!r}, want "scores" or "weights"')
    weight, expert = _at_least_f32(_of(a, "topk_weight")), _of(a, "topk_expert").long()
    num_experts = _of(a, "logits").shape[1]
    sums = weight.new_zeros(num_experts + 1)  # the last is of unused places
    return _cv_squared(sums.index_add(0, expert.reshape(-1) % (num_experts + 1),
                                      weight.reshape(-1))[:num_experts])


def load(a, clean=None, deviation=None, top_k=None):
    """CV^2 of the smooth load of a noisy top-k router: load_e = sum_t of the probability that e is among
    the K best of t if its noise alone is drawn anew, Phi((clean - threshold) / deviation), threshold
    the (K+1)-th largest of a.logits, which have their noise, where e's is above it, else the K-th
    (Shazeer et al. 2017, appendix A). clean and deviation [T,E] (or a number) of the noise: here, or
    as a.clean and a.deviation. Gradients reach them, and the logits through the thresholds."""
    noisy = _at_least_f32(_of(a, "logits"))
    clean = _of(a, "clean") if clean is None else clean
    deviation = _of(a, "deviation") if deviation is None else deviation
    top_k = integer("top_k", _of(a, "topk_expert").shape[1] if top_k is None else top_k)
    if not 1 <= top_k < noisy.shape[1]:
        raise invalid(f"top_k={top_k} of the load's estimator, want 1 to {noisy.shape[1] - 1}: the "
                      "threshold is the next expert's")
    best = noisy.topk(top_k + 1, dim=-1).values
    last_in, first_out = best[:, top_k - 1:top_k], best[:, top_k:]
    distance = (clean - _torch().where(noisy > first_out, first_out, last_in)) / deviation
    return _cv_squared((0.5 * (1 + _torch().erf(distance / math.sqrt(2)))).sum(0))


def device(a, devices, scope="batch", share="assignments", sequence_length=None,
           global_counts=None):
    """D sum_d (sum of f_e of d) (sum of P_e of d), d one of D `devices` with E/D neighbouring experts
    each: 1 where all is even (DeepSeek-V2, arXiv:2405.04434, section 2.1.3). The rest as of
    load_balance()."""
    f, p = _shares(a, scope, share, sequence_length, global_counts)
    devices = _devices(devices, p.shape[1])
    f, p = (x.reshape(len(x), devices, -1).sum(-1) for x in (f, p))
    return devices * (f * p).sum(-1).mean()


def communication(a, devices, devices_per_token, sequence_length=None):
    """sum_d (D/M times the share of tokens with an expert on d) (sum of P_e of d), M devices_per_token
    (DeepSeek-V2, likewise). With sequence_length the mean over sequences."""
    probs, expert = _probs(a), _of(a, "topk_expert").long()
    devices = _devices(devices, probs.shape[1])
    per_device = probs.shape[1] // devices
    sent = _torch().stack([((expert >= d * per_device) & (expert < (d + 1) * per_device)).any(-1)
                           for d in range(devices)], -1).to(probs.dtype)
    sent, p = (_by_sequence(x, sequence_length).mean(1) for x in (sent, probs))
    p = p.reshape(len(p), devices, per_device).sum(-1)
    return devices / devices_per_token * (sent * p).sum(-1).mean()


def entropy(a):
    """mean_t of -sum_e p ln p of a.probs, in nats (dynamic routing, arXiv:2403.07652, section 3.3)."""
    return _torch().special.entr(_probs(a)).sum(-1).mean()


def l1(a, top_k=None):
    """E sum_e f_e mean_t relu(l_te), f_e = n_e / (T top_k): the penalty of a ReLU router, whose
    coefficient next_l1_coefficient() steers (ReMoE, arXiv:2412.14711, section 3.3). Without top_k f is 1/E:
    the plain L1 norm."""
    weight = _at_least_f32(_of(a, "logits")).relu()
    if top_k is None:
        return weight.sum(-1).mean()
    f = (weight.detach() > 0).to(weight.dtype).mean(0) / top_k
    return weight.shape[1] * (f * weight.mean(0)).sum()


def next_l1_coefficient(coefficient, a, top_k, factor=1.2):
    """The coefficient of l1() for the next step: times `factor` where more than top_k experts work for
    a token on average, else divided by it (ReMoE, likewise; it begins at 1e-8)."""
    active = float((_of(a, "logits").detach() > 0).sum(-1).double().mean())
    return coefficient * factor if active > top_k else coefficient / factor


def _torch():
    return sys.modules["torch"]


def _of(a, name):
    value = getattr(a, name, None)
    if value is None:
        raise invalid(f"this loss wants a.{name}, which the {type(a).__name__} has not")
    return value


def _at_least_f32(x):
    return x if x.dtype in (_torch().float32, _torch().float64) else x.float()


def _probs(a):
    probs = getattr(a, "probs", None)
    return _at_least_f32(_of(a, "logits")).softmax(-1) if probs is None else _at_least_f32(probs)


def _count(expert, num_experts):
    used = expert.detach().reshape(-1).long()
    return used[used >= 0].bincount(minlength=num_experts)


def _by_sequence(x, length):
    """[S, length, ...] of [T, ...]."""
    if length is None:
        return x[None]
    length = integer("sequence_length", length)
    if length < 1 or len(x) % length != 0:
        raise invalid(f"{len(x)} tokens are no multiple of sequence_length={length}")
    return x.reshape(-1, length, *x.shape[1:])


def _devices(devices, num_experts):
    devices = integer("devices", devices)
    if devices < 1 or num_experts % devices != 0:
        raise invalid(f"devices={devices} do not divide {num_experts} experts")
    return devices


def _shares(a, scope, share, sequence_length, global_counts):
    """f and P, each [S, E]."""
    if scope not in SCOPES:
        raise invalid(f"scope={scope!r}, want one of {', '.join(SCOPES)}")
    if share not in SHARES:
        raise invalid(f"share={share!r}, want one of {', '.join(SHARES)}")
    for name, given, wanted in (("sequence_length", sequence_length, "sequence"),
                                ("global_counts", global_counts, "global")):
        if (given is not None) != (scope == wanted):
            raise invalid(f"scope={scope!r} {'with' if given is not None else 'without'} {name}, which "
                          f"goes with scope={wanted!r}")
    probs = _by_sequence(_probs(a), sequence_length)
    num_experts = probs.shape[2] - getattr(a, "null_experts", 0)
    if scope == "global" or (scope == "batch" and share != "first-choice"):
        counts = global_counts if scope == "global" else getattr(a, "counts", None)
        if counts is None:
            counts = _count(_of(a, "topk_expert"), num_experts)
        counts = _torch().as_tensor(counts, device=probs.device)[None]
    else:
        expert = _by_sequence(_of(a, "topk_expert"), sequence_length)
        if share == "first-choice":
            expert = expert[:, :, :1]
        counts = _torch().stack([_count(ids, num_experts) for ids in expert])
    counts = _with_nulls(a, counts.to(probs.dtype), share)
    f = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    if share == "tokens":
        expert = _by_sequence(_of(a, "topk_expert"), sequence_length)
        f = f * (expert >= 0).sum((1, 2))[:, None] / expert.shape[1]
    return f, probs.mean(1)


def _with_nulls(a, counts, share):
    """[S, E + N] of counts [S, E]: what the experts were not picked for fell on null experts, and each of
    these N counts as their mean (AdaMoE, arXiv:2406.13233, section 3)."""
    nulls = getattr(a, "null_experts", 0)
    if nulls == 0:
        return counts
    if share != "assignments":
        raise invalid(f"share={share!r} with null experts: want \"assignments\"")
    picks = _of(a, "topk_expert").numel() / len(counts)
    mean = (picks - counts.sum(-1, keepdim=True)) / nulls
    return _torch().cat((counts, mean.expand(-1, nulls)), -1)


def _cv_squared(x):
    """var / (mean^2 + 1e-10), var that of all."""
    return x.var(unbiased=False) / (x.mean().square() + 1e-10)
