"""The router of a block as arguments of a Layer, proved on the router itself."""

import torch

from .. import _stages


def find(block, num_experts):
    """The module that scores tokens, or None: [E,H] weights under one of the usual names."""
    for name in ("gate", "router"):
        router = getattr(block, name, None)
        weight = getattr(router, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.dim() == 2 and (
                weight.shape[0] == num_experts):
            return router
    return None


def rule_of(block, router, num_experts):
    """The arguments of a Layer that route as `router` does, or None: of all rules that its
    attributes leave open, the one that gives the same experts and weights on random tokens."""
    weight = router.weight
    bias = _first(None, "e_score_correction_bias", router, block)
    added = _first(None, "bias", router)
    if not weight.is_contiguous():
        return None
    arguments = parameters(weight, added, bias)
    tokens = random_tokens(64, weight)
    try:
        found = router(tokens)
    except (TypeError, RuntimeError, ValueError):
        return None  # it wants more than tokens
    if not (isinstance(found, tuple) and len(found) == 3):
        return None
    logits, weights, ids = found
    if logits.shape != (64, num_experts) or ids.is_floating_point() or weights.shape != ids.shape:
        return None
    top_k = ids.shape[1]
    for rule in _rules(block, router):
        if _agrees(logits, ids, weights, top_k, bias, rule):
            return {**arguments, "top_k": top_k, **rule}
    return None


def parameters(weight, bias, selection_bias):
    """The arguments of a Layer that uses these where they lie, or, if biases are not f32, copies:
    then a call after a write to them does not go through it."""
    biases = {"router_bias": _detached(bias), "selection_bias": _detached(selection_bias)}
    in_place = all(b is None or b.dtype == torch.float32 for b in biases.values())
    return {"gate": weight.detach(), **biases, "router_in_place": in_place}


def _rules(block, router):
    """What the attributes leave open; groups may be given and not used."""
    renormalize = _first(None, "norm_topk_prob", router, block)
    scale = float(_first(1.0, "routed_scaling_factor", router, block))
    groups = int(_first(None, "num_group", router, block) or _first(1, "n_group", router, block))
    top_groups = int(_first(1, "topk_group", router, block))
    grouped = [(groups, top_groups, "top2sum"), (groups, top_groups, "max")] if groups > 1 else []
    for score in ("softmax", "sigmoid"):
        for again in (True, False) if renormalize is None else (bool(renormalize),):
            for used, top, group_score in (*grouped, (1, 1, "max")):
                yield {"score": score, "renormalize": again, "scale": scale, "groups": used,
                       "top_groups": top, "group_score": group_score}


def _agrees(logits, ids, weights, top_k, bias, rule):
    try:
        ours, our_weights = _stages.route(logits.float().cpu().contiguous(), top_k,
                                          selection_bias=None if bias is None
                                          else bias.detach().cpu(), **rule)
    except _stages.SwitchyardError:
        return False
    ids, weights, ours, logits = ids.cpu().long(), weights.float().cpu(), ours.long(), logits.cpu()
    order, our_order = ids.argsort(dim=1), ours.argsort(dim=1)
    same = (ids.gather(1, order) == ours.gather(1, our_order)).all(dim=1)
    # Of experts with the same logit, which 16-bit ones often have, either may be chosen.
    tied = (logits.gather(1, ids).sort(dim=1).values
            == logits.gather(1, ours).sort(dim=1).values).all(dim=1)
    if not bool((same | tied).all()) or int(same.sum()) < len(same) // 2:
        return False
    tolerance = 1e-5 if logits.dtype == torch.float32 else 1e-2
    return torch.allclose(weights.gather(1, order)[same], our_weights.gather(1, our_order)[same],
                          rtol=tolerance, atol=tolerance * 1e-2)


def random_tokens(count, like):
    """[count, H] for a router's weight [E, H], the same at every call."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(count, like.shape[1], generator=generator, device="cpu")
    return tokens.to(device=like.device, dtype=like.dtype)


def _first(default, name, *modules):
    for module in modules:
        if getattr(module, name, None) is not None:
            return getattr(module, name)
    return default


def _detached(tensor):
    return None if tensor is None else tensor.detach()
