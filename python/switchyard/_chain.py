"""Chain-of-Experts: one layer's experts in several iterations. docs/routers.md."""

import sys

from ._arguments import converted
from ._errors import invalid
from ._router import Router
from ._stages import Experts
from ._tensors import is_torch, require_tensor


class Chain:
    """Chain-of-Experts (Wang et al. 2025, arXiv:2506.18945): C iterations over the same experts, each
    with a gate of its own:
        x_c = MoE_c(x_(c-1)) + x_(c-1),  y = x_C [+ x_0 with outer_residual=True]
    without the inner x_(c-1) where inner_residual=False. gates [C,E,H]; w13, w2, b13, b2 and the other
    options as of Experts. `router` is a name of `switchyard routers` that chooses by logits, or a
    Router; with a name, top_k is K of one iteration: a chain of C with K/C each does the experts' work
    of one pass of K.

    trainable=True: torch has gradients of x, gates, and of the experts' weights, over all iterations.
    On a CPU."""

    def __init__(self, gates, w13, w2, top_k=None, router="top-k", inner_residual=True,
                 outer_residual=False, **options):
        require_tensor("gates", gates, "[C, E, H]")
        require_tensor("w2", w2, "[E, H, I]")
        if gates.shape[0] < 1 or tuple(gates.shape[1:]) != tuple(w2.shape[:2]):
            raise invalid(f"gates is {list(gates.shape)}, want [C, {w2.shape[0]}, {w2.shape[1]}]")
        self.gates = gates
        self.inner_residual, self.outer_residual = bool(inner_residual), bool(outer_residual)
        if isinstance(router, str):
            router = Router(router, num_experts=w2.shape[0], top_k=top_k)
        elif top_k is not None:
            raise invalid(f"top_k={top_k} is given beside a Router, which has its own")
        if router.num_experts != w2.shape[0] or not router.has_logits:
            raise invalid(f"the router {router.spelling} is of {router.num_experts} experts"
                          + ("" if router.has_logits else " and has no logits")
                          + f", want one that chooses among {w2.shape[0]} by logits")
        self.router = router
        self.experts = Experts(w13, w2, **options)

    def __call__(self, x, step=0, training=True):
        """y of the shape and type of x [T,H] or [B,S,H]. step and training as of a Router: iteration c
        draws as layer c."""
        if len(getattr(x, "shape", ())) not in (2, 3) or x.shape[-1] != self.gates.shape[2]:
            raise invalid(f"x is {list(getattr(x, 'shape', ()))}, want [T, {self.gates.shape[2]}] or "
                          f"[B, S, {self.gates.shape[2]}]")
        first = now = x.reshape(-1, x.shape[-1])
        for c in range(self.gates.shape[0]):
            a = self.router(self._logits(now, c), step=step, training=training, layer=c)
            y = self.experts(now, a.topk_expert, a.topk_weight)
            now = y + now if self.inner_residual else y
        return (now + first if self.outer_residual else now).reshape(x.shape)

    def _logits(self, x, c):
        """[T,E] in f32."""
        gate = self.gates[c]
        if is_torch(x):
            torch = sys.modules["torch"]
            return x.float() @ torch.as_tensor(gate).float().T
        return converted(x, "float32") @ converted(gate, "float32").T
