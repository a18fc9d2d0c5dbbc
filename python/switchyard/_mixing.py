"""Soft-MoE: tokens are mixed into the experts' slots and back. docs/routers.md."""

import functools
import sys
from ctypes import byref

from . import _autograd
from ._arguments import converted, rows
from ._errors import invalid
from ._native import Handle, choose, initialised, native
from ._stages import Experts, experts_in_place
from ._structs import Gradients, SoftMoeConfig
from ._tensors import (article, empty_like, is_capturing, is_torch, on_gpu, pointer, require_tensor,
                       stream_of, views)


def soft_moe(x, phi, w13, w2=None, slots=None, group=None, scale=1.0, normalize=True, causal=False,
             activation="silu", b13=None, b2=None, alpha=None, limit=None, num_threads=None,
             recompute="none", weights=False):
    """Soft-MoE (Puigcerver et al. 2023, arXiv:2308.00951): y of the shape and type of x [T,H]
    or [B,S,H], for phi [E*slots,H] or [E,slots,H], a row a slot, and the experts' weights as experts()
    takes them; or w13 is an Experts object, which keeps them placed. Groups of `group` neighbouring
    tokens are mixed, by default all of a sequence: S tokens of [B,S,H], or T. The logits are `scale`
    times the tokens by phi, both divided by their lengths unless normalize=False. causal=True: tokens
    read the slots of the group before theirs in the sequence, so that no output depends on a later
    token; those of the first group are 0.

    torch has gradients of x, phi, scale (a number, or a tensor of one), w13, w2, b13 and b2;
    recompute as of a Layer. weights=True: returns (y, dispatch, combine) with the weights of both
    ways [T,E*slots], which have no gradient.

    On a GPU, where all tensors then lie, a call only enqueues, as one of experts() does, and a graph may
    hold it once a call with as many tokens has come before; but for a scale that is a tensor there, whose
    number is read at every call, which waits. A logit that is not finite is raised by a later call on
    the same weights, or by check() of an Experts object."""
    tokens = rows("x", x)
    if isinstance(w13, Experts):
        if any(t is not None for t in (w2, b13, b2)):
            raise invalid("w13 is an Experts object, and w2, b13 or b2 is given too: it has its own")
        num_experts, place, w13 = w13.num_experts, lambda *_, kept=w13: kept, None
    else:
        require_tensor("w13", w13, "[E, 2I, H]")
        require_tensor("w2", w2, "[E, H, I]")
        num_experts = w2.shape[0]
        place = functools.partial(_placed, activation=activation, alpha=alpha, limit=limit,
                                  num_threads=num_threads)
    phi = _slot_rows(phi, tokens.shape[1])
    config = initialised(SoftMoeConfig, "soft_moe_config")
    config.slots = phi.shape[0] // max(num_experts, 1) if slots is None else slots
    config.sequence = x.shape[1] if len(x.shape) == 3 else 0
    config.group = 0 if group is None else group
    config.normalize, config.causal = int(bool(normalize)), int(bool(causal))
    config.scale = _number("scale", scale)
    call = _Call(config, weights, recompute, place)
    if _autograd.wants_gradient(x, phi, w13, w2, b13, b2, scale):
        for name, tensor in (("x", x), ("phi", phi), ("w13", w13), ("w2", w2)):
            if tensor is not None and not is_torch(tensor):
                raise invalid(f"{name} is {article(tensor)}, and gradients want a tensor of torch: give "
                              "one, or call under torch.no_grad()")
        out = _function().apply(call, tokens, phi, scale, w13, w2, b13, b2)
    else:
        tokens, phi, *rest = _detached(tokens, phi, w13, w2, b13, b2)
        out = call.run(place(*rest), tokens, phi)
    y = out[0] if len(x.shape) == 2 else out[0].reshape(x.shape)
    return (y, *out[1:]) if weights else y


def _placed(w13, w2, b13, b2, activation, alpha, limit, num_threads):
    in_place = experts_in_place(w13, w2, b13, b2, activation, alpha, limit)
    return in_place or Experts(w13, w2, activation, b13, b2, alpha, limit, num_threads)


def _number(name, value):
    try:
        return float(*_detached(value))
    except (TypeError, ValueError, RuntimeError):
        raise invalid(f"{name} is {article(value)}, want a number or a tensor of one") from None


def _slot_rows(phi, hidden):
    """[E*slots, H] of that, or of [E, slots, H]."""
    shape = getattr(phi, "shape", None)
    if shape is None or isinstance(phi, (list, str)):
        raise invalid(f"phi is {article(phi)}, want a tensor [E * slots, H] or [E, slots, H]")
    if len(shape) not in (2, 3) or shape[-1] != hidden:
        raise invalid(f"phi is {list(shape)}, want [E * slots, {hidden}] or [E, slots, {hidden}]")
    return rows("phi", phi)


_free = {}  # by recompute: what runs on a CPU have saved, and backwards used up


def _free_of(experts, recompute):
    """On a GPU those of the experts, whose calls follow each other there."""
    free = experts.free_mixings if experts.on_gpu else _free
    return free.setdefault(recompute, [])


class _Call:
    """One call of soft_moe(), whatever the framework."""

    def __init__(self, config, weights, recompute, place):
        self._config, self._weights, self.place = config, weights, place
        self.recompute = choose("recompute", recompute, "sy_recompute")

    def run(self, experts, tokens, phi, saved=None):
        """y [T, H] in the type of the tokens, and both weights if wanted."""
        return experts.ordered(tokens, lambda: self._run(experts, tokens, phi, saved))

    def _run(self, experts, tokens, phi, saved):
        y = empty_like(tokens, tokens.shape)
        pairs = (tokens.shape[0], phi.shape[0])
        both = [empty_like(tokens, pairs, "f32") for _ in range(2)] if self._weights else [None] * 2
        x = converted(tokens, experts.dtype)
        v = views(x=x, phi=phi, y=y, dispatch=both[0], combine=both[1])
        native.soft_moe_run(experts.pointer, byref(self._config),
                            *(pointer(view) for view in v.values()),
                            None if saved is None else saved.pointer, stream_of(tokens))
        return (y, *both) if self._weights else (y,)

    def take(self, experts):
        free = _free_of(experts, self.recompute)
        try:
            return free.pop()
        except IndexError:  # all are in use
            saved = Handle("soft_moe_saved_free")
            native.soft_moe_saved_create(self.recompute, saved.out())
            return saved

    def put_back(self, experts, saved, captured):
        """One that a graph uses stays the graph's, as long as the experts."""
        key = "in graphs" if captured else self.recompute
        _free_of(experts, key).append(saved)


@functools.cache
def _function():
    torch = sys.modules["torch"]

    class SoftMoeBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call, tokens, phi, scale, w13, w2, b13, b2):
            ctx.call, ctx.experts = call, call.place(*_detached(w13, w2, b13, b2))
            ctx.saved = call.take(ctx.experts)
            out = call.run(ctx.experts, *_detached(tokens, phi), ctx.saved)
            ctx.save_for_backward(phi, scale if is_torch(scale) else None, w13, w2, b13, b2)
            ctx.mark_non_differentiable(*out[1:])
            return out

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy, *_):
            if ctx.saved is None:
                raise invalid("this forward's saved state was used by a backward already: one forward "
                              "has one backward, also with retain_graph=True; run the forward again")
            saved, ctx.saved = ctx.saved, None
            phi, scale, *weights = ctx.saved_tensors
            _, wants_x, wants_phi, wants_scale, *wants = ctx.needs_input_grad
            dy = dy.detach().contiguous()
            out = {"tokens": torch.empty_like(dy) if wants_x else None,
                   "phi": torch.empty_like(phi) if wants_phi else None}
            for name, like, wanted in zip(("w13", "w2", "b13", "b2"), weights, wants):
                kind = torch.float32 if name[0] == "b" and wanted else None
                out[name] = torch.empty_like(like, dtype=kind) if wanted else None
            dscale = torch.empty(1, dtype=torch.float32, device=dy.device) if wants_scale else None
            v = views(dy=dy, values=phi.detach(), **out)
            struct = Gradients(**{name: pointer(v[name]) for name in out if name != "phi"})
            ctx.experts.ordered(dy, lambda: native.soft_moe_backward(
                ctx.experts.pointer, saved.pointer, pointer(v["values"]), pointer(v["dy"]),
                byref(struct), pointer(v["phi"]), None if dscale is None else dscale.data_ptr(),
                stream_of(dy)))
            ctx.call.put_back(ctx.experts, saved, on_gpu(dy) and is_capturing(dy))
            of_scale = dscale.to(scale).reshape(scale.shape) if wants_scale else None
            of_weights = [g if g is None else g.to(like.dtype)
                          for g, like in zip((out[n] for n in ("w13", "w2", "b13", "b2")), weights)]
            return (None, out["tokens"], out["phi"], of_scale, *of_weights)

    return SoftMoeBackward


def _detached(*tensors):
    return [t.detach() if is_torch(t) else t for t in tensors]
