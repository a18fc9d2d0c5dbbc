"""PERFT: LoRA experts that learn beside a frozen layer. docs/routers.md."""

import sys

from ._errors import SwitchyardError, invalid
from ._layer import Layer
from ._stages import Experts
from ._tensors import is_torch, on_gpu, require_tensor

_KINDS = ("routed", "embedded", "dense", "shared")


class Perft:
    """PERFT's adapters (Liu et al. 2024, arXiv:2411.08212, section 3): what D_j(x) = alpha / r B_j
    act(A_j x) adds to the output of a layer that stays as it is, for a [M,r,H] and b [M,H,r]. By kind
        "routed"    sum of g_j D_j(x) over the top_k of a router of their own: gate [M,H], weights of a
                    softmax over all M, with renormalize=True over the chosen
        "embedded"  sum of w_e D_e(x) over each token's experts: by the layer's own routing, M = E
        "dense"     sum of D_j(x) over all
        "shared"    D_0(x): dense with M = 1
    trainable=True: a, b and gate are torch tensors, and torch has gradients of them, of x, and, embedded,
    of weight. losses, num_threads and recompute as of a Layer. On a CPU.

    y = frozen(x) + perft(x); or perft(x, base), which adds in the type of base."""

    def __init__(self, kind, a, b, gate=None, alpha=None, top_k=1, renormalize=False,
                 activation="identity", trainable=False, num_threads=None, losses=None,
                 recompute="none"):
        if kind not in _KINDS:
            raise invalid(f"kind={kind!r} is none of {', '.join(_KINDS)}")
        require_tensor("a", a, "[M, r, H]")
        require_tensor("b", b, "[M, H, r]")
        adapters, rank, hidden = a.shape
        if tuple(b.shape) != (adapters, hidden, rank):
            raise invalid(f"b is {list(b.shape)}, want {[adapters, hidden, rank]} beside a")
        if any(t is not None and on_gpu(t) for t in (a, b, gate)):
            raise SwitchyardError("unsupported", "PERFT's adapters have no kernel on CUDA: want tensors "
                                  "on a CPU")
        if kind == "shared" and adapters != 1:
            raise invalid(f"a has {adapters} adapters, and kind='shared' has one: want that, or 'dense'")
        if (gate is None) == (kind == "routed"):
            raise invalid("kind='routed' wants a gate [M, H]" if gate is None
                          else f"a gate is given, and kind={kind!r} has no router of its own")
        if kind != "routed" and losses is not None:
            raise invalid(f"losses are given, and kind={kind!r} has no router of its own")
        self.kind, self.num_adapters, self.hidden = kind, adapters, hidden
        self.scale = (2 * rank if alpha is None else alpha) / rank
        options = {"activation": activation, "trainable": trainable, "num_threads": num_threads,
                   "recompute": recompute}
        if kind == "routed":
            self._adapters = Layer(gate, a, b, top_k=top_k, renormalize=renormalize, losses=losses,
                                   **options)
        else:
            self._adapters = Experts(a, b, **options)

    def __call__(self, x, base=None, expert=None, weight=None):
        """What the adapters add for x [T,H] or [B,S,H], of its shape and type; with `base`, the frozen
        layer's output, the sum of both. Embedded: expert and weight [T,K] as Layer takes them, the
        layer's routing, -1 where it has dropped."""
        if self.kind != "embedded" and (expert is not None or weight is not None):
            raise invalid(f"a routing is given, and kind={self.kind!r} takes none")
        if self.kind == "embedded" and (expert is None or weight is None):
            raise invalid("kind='embedded' wants expert and weight: the layer's routing")
        if self.kind == "routed":
            y = self._adapters(x)
        else:
            if self.kind != "embedded":
                expert, weight = self._all(x)
            y = self._adapters(x, expert, weight)
        y = self.scale * y
        return y if base is None else base + y

    def losses(self):
        """As Layer.losses(), of the adapters' router."""
        if self.kind != "routed":
            raise invalid(f"kind={self.kind!r} has no router of its own")
        return self._adapters.losses()

    def _all(self, x):
        """Every adapter for each token, with the weight 1."""
        if len(getattr(x, "shape", ())) not in (2, 3):
            raise invalid(f"x is {list(getattr(x, 'shape', ()))}, want [T, H] or [B, S, H]")
        library = sys.modules["torch" if is_torch(x) else "numpy"]
        shape = (*x.shape[:-1], self.num_adapters)
        expert = library.arange(self.num_adapters, dtype=library.int32)
        return library.broadcast_to(expert, shape), library.ones(shape, dtype=library.float32)
