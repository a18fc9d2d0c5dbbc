"""What an experts module of transformers holds, in the layout that Switchyard takes."""

import torch

# By the class of the module's act_fn; all are what transformers' ACT2FN makes.
_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELU": "gelu",
                "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh", "ReLU": "relu",
                "ReLUSquaredActivation": "relu2"}
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


# Before torch 2.1 there was nothing to compile with.
is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


class NotTaken(Exception):
    """Why a module stays with transformers."""


def is_experts(module):
    """Whether a module is one of those that transformers lets choose an experts_implementation."""
    return all(hasattr(module, flag) for flag in _FLAGS) and hasattr(module, "down_proj")


def are_other_experts(module):
    """Whether a module is of experts, by the name of its class as transformers gives them all, but
    not one of those: it computes in a way of its own."""
    return type(module).__name__.endswith("Experts") and not is_experts(module) and any(
        True for _ in module.parameters())


def parameter_names(module):
    """Of the two products' weights, then of their biases if there are any."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names = [first, "down_proj"]
    return names + ([first + "_bias", "down_proj_bias"] if module.has_bias else [])


def check(module):
    """Raises NotTaken for what is no plain set of experts."""
    if getattr(module, "has_post_expert_norm", False):
        raise NotTaken("a norm follows each expert")
    if getattr(module, "_is_expert_parallel", False):
        raise NotTaken("transformers has distributed its experts over ranks")
    for name in parameter_names(module):
        weight = getattr(module, name, None)
        if not isinstance(weight, torch.nn.Parameter):
            raise NotTaken(f"{name} is a {type(weight).__name__}, no plain parameter")
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotTaken(f"{name} is {weight.dtype}")
    if getattr(module, "down_proj").dim() != 3:
        raise NotTaken(f"down_proj has {module.down_proj.dim()} dimensions, want 3")


def activation(module):
    """The options activation, alpha and limit of a Switchyard object, or NotTaken."""
    if getattr(module, "alpha", None) is not None and getattr(module, "limit", None) is not None:
        return {"activation": "clamped_swiglu", "alpha": float(module.alpha),
                "limit": float(module.limit)}
    act = getattr(module, "act_fn", None)
    name = type(act).__name__
    if name not in _ACTIVATIONS or getattr(act, "approximate", "none") not in ("none", None):
        raise NotTaken(f"its activation is {name}")
    return {"activation": _ACTIVATIONS[name]}


def is_plain(module):
    """Whether the module's weights are [E,2I,H], gate rows before up rows, and [E,H,I] as they
    are."""
    return not module.is_transposed and (module.is_concatenated or not module.has_gate)


def to_arrays(module, first, second):
    """gate_up_proj and down_proj as w13 [E,2I,H] (or [E,I,H]) and w2 [E,H,I]: views where the module
    has them so. Also of one expert, without E, and of biases, where `second` is None."""
    if module.is_transposed and second is not None:
        first, second = first.transpose(-1, -2), second.transpose(-1, -2)
    if module.has_gate and not module.is_concatenated:
        rows = -2 if second is not None else -1
        first = torch.cat([_every_second(first, rows, 0), _every_second(first, rows, 1)], dim=rows)
    return first, second


def from_arrays(module, w13, w2, *biases):
    """The inverse of to_arrays(), of one expert, and of its biases if there are any."""
    if module.has_gate and not module.is_concatenated:
        w13 = torch.stack(w13.chunk(2, dim=-2), dim=-2).flatten(-3, -2)
        biases = [torch.stack(biases[0].chunk(2), dim=-1).flatten(), *biases[1:]] if biases else []
    if module.is_transposed:
        w13, w2 = w13.transpose(-1, -2), w2.transpose(-1, -2)
    return [w13, w2, *biases]


def _every_second(tensor, dim, first):
    index = torch.arange(first, tensor.shape[dim], 2, device=tensor.device)
    return tensor.index_select(dim, index)
