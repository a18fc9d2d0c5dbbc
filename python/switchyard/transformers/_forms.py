"""What differs between the blocks that are taken: how the experts' tensors lie, what their module is
called with, who routes, and what a block returns. One class a form; most blocks have that of
transformers' own interface, a family that has none is a class here."""

import torch

from . import _router
from ._arrays import NotTaken

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def of(module):
    """The form of an experts module, or None: it computes in a way of its own."""
    if all(hasattr(module, flag) for flag in _FLAGS) and hasattr(module, "down_proj"):
        return Interface(module)
    own = _OWN.get(type(module).__name__)
    return None if own is None or getattr(module, "down_proj", None) is None else own(module)


def ids_and_weights(*routing, **named):
    """Of a call of an experts module, whose arguments have several names and orders."""
    first, second = (*routing, *named.values())
    return (second, first) if first.is_floating_point() else (first, second)


class Interface:
    """Experts that transformers lets others compute (`experts_implementation`), called with tokens,
    ids and weights, and the block that they stand in."""

    has_router_only = False  # experts are also taken behind a router that Switchyard lacks

    def __init__(self, module):
        self.has_gate, self.has_bias = module.has_gate, module.has_bias
        self.is_transposed, self.is_concatenated = module.is_transposed, module.is_concatenated
        self.num_experts = self.num_choices = module.down_proj.shape[0]

    def router(self, block):
        """The module that scores tokens, or None."""
        return _router.find(block, self.num_experts)

    def gate(self, router):
        """Its weights [choices, H]."""
        return router.weight

    def rule(self, block, router):
        """The arguments of a Layer that route as it does, or None."""
        return _router.rule_of(block, router, self.num_experts)

    def chosen(self, router, tokens):
        """The ids [T, K] that the router gives tokens."""
        return router(tokens)[2]

    def arguments(self, hidden_states, *routing, **named):
        """Tokens, ids and weights of a call of the module."""
        return hidden_states, *ids_and_weights(*routing, **named)

    def call_of(self, tokens, ids, weights):
        """The inverse of arguments()."""
        return tokens, ids, weights

    def result(self, router, hidden_states, out):
        """What the block returns for its tokens, where it makes `out` of them."""
        return out

    def out_of(self, result):
        """The inverse of result(), or None where that is none of this form."""
        return result if isinstance(result, torch.Tensor) else None


class _Own(Interface):
    """Of families without the interface: taken with their router or not at all."""

    has_router_only = True
    has_gate, has_bias, is_concatenated = True, False, True

    def __init__(self, module):
        self.num_experts = self.num_choices = module.down_proj.shape[0]


class Llama4(_Own):
    """Llama4TextMoe: the sigmoid of the largest logit multiplies the token before its expert takes
    it. The module gets every expert's tokens, [E*T, H], those that are not its own times 0; the block
    returns [T, H] and the logits."""

    is_transposed = True

    def router(self, block):
        return getattr(block, "router", None)

    def rule(self, block, router):
        if router.top_k != 1:
            raise NotTaken(f"its router gives a token {router.top_k} experts, each with an input of "
                           "its own")
        return {**_router.parameters(router.weight, None, None), "top_k": 1, "score": "sigmoid",
                "renormalize": False, "weight_on_input": True}

    def chosen(self, router, tokens):
        return router(tokens)[1].topk(1, dim=1).indices

    def arguments(self, hidden_states):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids = torch.arange(self.num_experts, dtype=torch.int32, device=rows.device)
        ids = ids.repeat_interleave(rows.shape[0] // self.num_experts)
        ids = torch.where((rows != 0).any(dim=1), ids, -1)  # of a row of zeros it makes zeros
        return rows, ids[:, None], torch.ones_like(ids, dtype=torch.float32)[:, None]

    def call_of(self, tokens, ids, weights):
        own = torch.zeros(self.num_experts, *tokens.shape, dtype=tokens.dtype, device=tokens.device)
        each = torch.arange(len(tokens), device=tokens.device)
        own[ids[:, 0], each] = tokens * weights
        return (own.reshape(-1, tokens.shape[1]),)

    def result(self, router, hidden_states, out):
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        return out.reshape(tokens.shape), torch.nn.functional.linear(tokens, router.weight)

    def out_of(self, result):
        return result[0] if isinstance(result, tuple) and len(result) == 2 else None


class LongcatFlash(_Own):
    """LongcatFlashMoE: the last of the router's experts return their input. gate_up_proj has rows
    for them, too, which nobody multiplies."""

    is_transposed = False

    def __init__(self, module):
        super().__init__(module)
        self.num_choices = module.total_experts

    def router(self, block):
        router = getattr(block, "router", None)
        return router if hasattr(router, "classifier") else None

    def gate(self, router):
        return router.classifier.weight

    def rule(self, block, router):
        scores = router.classifier
        return {**_router.parameters(scores.weight, scores.bias, router.e_score_correction_bias),
                "top_k": router.top_k, "score": "softmax", "renormalize": False,
                "scale": float(router.routed_scaling_factor),
                "identity_experts": self.num_choices - self.num_experts}

    def chosen(self, router, tokens):
        return router(tokens)[1]


_OWN = {"Llama4TextExperts": Llama4, "LongcatFlashExperts": LongcatFlash}
