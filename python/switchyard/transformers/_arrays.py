"""What an experts module of transformers holds, in the layout that Switchyard takes."""

import torch

# By the class of the module's act_fn, as transformers' ACT2FN makes them, or the function's name.
_ACTIVATIONS = {"SiLU": "silu", "silu": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELU": "gelu",
                "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh", "ReLU": "relu",
                "ReLUSquaredActivation": "relu2"}


# Before torch 2.1 there was nothing to compile with.
is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


class NotTaken(Exception):
    """Why a module stays with transformers."""


def are_experts(module):
    """Whether a module is of experts, by the name of its class as transformers gives them all."""
    return type(module).__name__.endswith("Experts") and any(True for _ in module.parameters())


def parameter_names(form):
    """Of the two products' weights, then of their biases if there are any."""
    first = "gate_up_proj" if form.has_gate else "up_proj"
    names = [first, "down_proj"]
    return names + ([first + "_bias", "down_proj_bias"] if form.has_bias else [])


def check(module, form):
    """Raises NotTaken for what is no plain set of experts."""
    if getattr(module, "has_post_expert_norm", False):
        raise NotTaken("a norm follows each expert")
    if getattr(module, "_is_expert_parallel", False):
        raise NotTaken("transformers has distributed its experts over ranks")
    for name in parameter_names(form):
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
    name = getattr(act, "__name__", type(act).__name__)
    if name not in _ACTIVATIONS or getattr(act, "approximate", "none") not in ("none", None):
        raise NotTaken(f"its activation is {name}")
    return {"activation": _ACTIVATIONS[name]}


def is_plain(form):
    """Whether weights are [E,2I,H], gate rows before up rows, and [E,H,I] as they are."""
    return not form.is_transposed and (form.is_concatenated or not form.has_gate)


def to_arrays(form, first, second):
    """gate_up_proj and down_proj as w13 [E,2I,H] (or [E,I,H]) and w2 [E,H,I]: views where the module
    has them so. Also of one expert, without E, and of biases, where `second` is None."""
    if form.is_transposed and second is not None:
        first, second = first.transpose(-1, -2), second.transpose(-1, -2)
    if form.has_gate and not form.is_concatenated:
        rows = -2 if second is not None else -1
        first = torch.cat([_every_second(first, rows, 0), _every_second(first, rows, 1)], dim=rows)
    return first, second


def from_arrays(form, w13, w2, *biases):
    """The inverse of to_arrays(), of one expert, and of its biases if there are any."""
    if form.has_gate and not form.is_concatenated:
        w13 = torch.stack(w13.chunk(2, dim=-2), dim=-2).flatten(-3, -2)
        biases = [torch.stack(biases[0].chunk(2), dim=-1).flatten(), *biases[1:]] if biases else []
    if form.is_transposed:
        w13, w2 = w13.transpose(-1, -2), w2.transpose(-1, -2)
    return [w13, w2, *biases]


def _every_second(tensor, dim, first):
    index = torch.arange(first, tensor.shape[dim], 2, device=tensor.device)
    return tensor.index_select(dim, index)
