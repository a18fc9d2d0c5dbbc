"""What a layer may be made of: checked, and in the library's words."""

import os
from ctypes import pointer
from inspect import signature

from . import _autograd
from ._arguments import as_f32
from ._errors import SwitchyardError, invalid
from ._native import choose, initialised, names_of
from ._ranks import communicator_of
from ._scratch import handle_of
from ._structs import LayerOptions
from ._tensors import CUDA, current_device, device_of, dtype_code, dtype_name, threads_of_cpu


def layer_options(device="cpu", compute=None, layout="compact", alignment=1, capacity_factor=None,
                  drop_policy="token", combine_wire="f32", batch_invariant=False,
                  rank_invariant=False, max_tokens=0, num_threads=None, dispatch_wire=None,
                  device_engine="auto", weights="exact", shared=True, wire=None, router=None,
                  losses=None, scratch=None, **unknown):
    """The struct of a layer's options."""
    for name in unknown:
        known = [word for word in signature(layer_options).parameters if word not in ("wire", "unknown")]
        raise TypeError(f"a layer has no option {name!r}: want one of {', '.join(known)}")
    options = initialised(LayerOptions, "layer_options")
    options.device_type, number = device_of("cpu" if device is None else device)
    if options.device_type == CUDA:
        options.device_id = current_device() if number is None else number
    options.compute = -1 if compute is None else dtype_code("compute", compute)
    options.layout = choose("layout", layout, "sy_layout")
    options.alignment = alignment
    options.capacity_factor = capacity_factor or 0.0
    options.drop_policy = choose("drop_policy", drop_policy, "sy_drop_policy")
    # wire: the old name.
    options.combine_wire = dtype_code("combine_wire", combine_wire if wire is None else wire)
    options.dispatch_wire = (
        -1 if dispatch_wire is None else dtype_code("dispatch_wire", dispatch_wire))
    options.batch_invariant = int(bool(batch_invariant))
    options.rank_invariant = int(bool(rank_invariant))
    options.max_tokens = max_tokens
    options.num_threads = threads_of_cpu(num_threads)
    options.weights = choose("weights", weights, "sy_weight_format")
    options.leave_out_shared = int(not bool(shared))
    options.device_engine = choose("device_engine", device_engine, "sy_device_engine")
    if router is not None:
        router.fill(options)
    if losses is not None:
        options.losses = pointer(losses)
    options.scratch = handle_of(scratch)
    return options


def check_in_place(comm, w13_layout, transposed, options):
    communicator_of(comm)
    for wrong, what in ((gpu_of(options.get("device")) is None, "device='cpu'"),
                        (comm is not None and comm.size > 1, "ranks"),
                        (options.get("weights", "exact") != "exact", "weights that are not exact")):
        if wrong:
            raise SwitchyardError("unsupported", f"experts_in_place=True does not go with {what}")
    _autograd.check_in_place(w13_layout, transposed, "experts_in_place=True")


def check_trainable(comm, w13_layout, transposed, selection_bias, options):
    """What a trainable layer cannot be, so far, is an error."""
    communicator_of(comm)
    for wrong, what in ((comm is not None and comm.size > 1, "ranks"),
                        (options.get("weights", "exact") != "exact", "weights that are not exact")):
        if wrong:
            raise SwitchyardError("unsupported", f"trainable=True does not go with {what}, so far")
    _autograd.check_in_place(w13_layout, transposed)
    if getattr(selection_bias, "requires_grad", False):
        raise invalid("selection_bias requires a gradient, and there is none: it only chooses; give "
                      "selection_bias.detach()")


def gpu_of(device):
    """The number of the GPU that an option names, or None."""
    kind, number = device_of("cpu" if device is None else device)
    if kind != CUDA:
        return None
    return current_device() if number is None else number


def compute_of(compute, w13):
    """torch's name for the type that a layer computes with."""
    name = dtype_name(w13.dtype) if compute is None else names_of("sy_dtype")[
        dtype_code("compute", compute)]
    return {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}.get(name, name)


def gate_of(name, gate):
    """f32, bf16 and f16 as they are."""
    return as_f32(name, gate) if gate is not None and str(gate.dtype).endswith("float64") else gate


def shared_gate_of(gate):
    """[H] of [H] or [1, H], in f32."""
    if gate is None:
        return None
    gate = as_f32("shared_gate", gate)
    return gate.reshape(-1) if len(gate.shape) == 2 and gate.shape[0] == 1 else gate


def path_of(name, value):
    try:
        return os.fsencode(value)
    except TypeError:
        raise invalid(f"{name}={value!r} is no path") from None
