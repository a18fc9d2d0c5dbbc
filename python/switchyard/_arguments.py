"""What callers pass, as the C interface takes it: tokens of any shape, ids and weights of any type,
outputs that can be written, experts' weights as checkpoints store them."""

import sys

from ._errors import invalid, no_backward
from ._tensors import article, dtype_name, is_cupy, is_numpy, is_torch, on_gpu, require_tensor

_FLOATS = ("float32", "bfloat16", "float16")


def forward_only(name, tensor, otherwise=""):
    """Where there is no backward pass, a gradient would be lost without a word.
    @param otherwise  What gives gradients."""
    if getattr(tensor, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise no_backward(name, otherwise)


def _is_contiguous(tensor):
    if is_torch(tensor):
        return tensor.is_contiguous()
    flags = getattr(tensor, "flags", None)
    return flags is None or flags.c_contiguous


def _contiguous(name, tensor):
    try:
        if _is_contiguous(tensor):
            return tensor
        if is_torch(tensor):
            return tensor.contiguous()
    except RuntimeError as error:  # of a sparse one, of a tracer
        raise invalid(f"{name}: {error}") from None
    return sys.modules["cupy" if is_cupy(tensor) else "numpy"].ascontiguousarray(tensor)


def converted(tensor, dtype):
    """`tensor` in the type that frameworks call `dtype`; itself where it has it."""
    if dtype_name(tensor.dtype) == dtype:
        return tensor
    if is_torch(tensor):
        return tensor.detach().to(getattr(sys.modules["torch"], dtype))
    try:
        return tensor.astype(dtype)
    except TypeError as error:  # numpy has bfloat16 where ml_dtypes is imported
        raise invalid(f"{dtype} is no type of {article(tensor)}: want a tensor of torch") from error


def rows(name, tensor, width=None):
    """Tokens [T, H] or [B, S, H] as [T, H] without gaps: a copy only where there are any."""
    shape = getattr(tensor, "shape", None)
    if shape is None or isinstance(tensor, (list, str)):
        raise invalid(f"{name} is {article(tensor)}, want a tensor [T, H] or [B, S, H]")
    num_dimensions = len(shape)
    if num_dimensions not in (2, 3) or (width is not None and shape[-1] != width):
        h = "H" if width is None else width
        raise invalid(f"{name} is {list(shape)}, want [T, {h}] or [B, S, {h}]")
    tensor = _contiguous(name, tensor)
    return tensor if num_dimensions == 2 else tensor.reshape(shape[0] * shape[1], shape[2])


def _beside(tensor, x):
    """`tensor` on the device of `x`."""
    if is_torch(x) and is_torch(tensor) and tensor.device != x.device:
        return tensor.to(x.device)
    return tensor


def _flat(name, tensor, leading):
    """[T, K] of [T, K] or [B, S, K]. @param leading  Shape of the tokens but for H."""
    shape = getattr(tensor, "shape", None)
    if shape is None or isinstance(tensor, (list, str)):
        raise invalid(f"{name} is {article(tensor)}, want a tensor [T, K] or [B, S, K]")
    tokens = 1
    for size in leading:
        tokens *= size
    if len(shape) not in (2, 3) or tuple(shape[:-1]) not in (tuple(leading), (tokens,)):
        raise invalid(f"{name} is {list(shape)}, want {[*leading, 'K']}".replace("'", ""))
    return tensor if len(shape) == 2 else tensor.reshape(tokens, shape[2])


def ids(name, tensor, x, num_experts):
    """Ids [T, K] or [B, S, K] of any integer type as [T, K] i32 beside the tokens `x`."""
    tensor = _beside(_flat(name, tensor, x.shape[:-1]), x)
    kind = dtype_name(tensor.dtype)
    if kind != "int32":
        if kind not in ("int64", "int16", "int8", "uint8"):
            raise invalid(f"{name} is {kind}, want ids as int32 or int64")
        if kind == "int64":
            if on_gpu(tensor):  # what is out of range stays so, and is found there
                tensor = tensor.clip(-2, num_experts)
            else:
                _check_ids(name, tensor, num_experts)
        tensor = converted(tensor, "int32")
    return _contiguous(name, tensor)


def _check_ids(name, tensor, num_experts):
    wrong = (tensor < -1) | (tensor >= num_experts)
    if bool(wrong.any()):
        row, k = (int(index[0]) for index in
                  (wrong.nonzero(as_tuple=True) if is_torch(wrong) else wrong.nonzero()))
        raise invalid(f"{name}[{row}, {k}] is {int(tensor[row, k])}, want -1 (unused) or less than "
                      f"{num_experts}")


def routing_weights(name, tensor, x):
    """Weights [T, K] or [B, S, K] of any float type as [T, K] f32 beside the tokens `x`."""
    tensor = _beside(_flat(name, tensor, x.shape[:-1]), x)
    return _contiguous(name, as_f32(name, tensor))


def routing(expert, weight, x, num_experts):
    """Both as the C interface takes them, or None."""
    if expert is None and weight is None:
        return None, None
    if expert is None or weight is None:
        raise invalid("expert and weight must both be given, or neither")
    return ids("expert", expert, x, num_experts), routing_weights("weight", weight, x)


def as_f32(name, tensor):
    """A tensor of any float type in f32; None stays None."""
    if tensor is None:
        return None
    kind = dtype_name(getattr(tensor, "dtype", article(tensor)))
    if kind not in (*_FLOATS, "float64"):
        raise invalid(f"{name} is {kind}, want floating-point numbers")
    return converted(tensor, "float32")


def output(name, out, like, shape):
    """`out`, which the caller gave for a result of `shape` beside the tensor `like`, as rows."""
    forward_only(name, out)
    if type(out) is not type(like) and not (is_torch(out) and is_torch(like)):
        raise invalid(f"{name} is {article(out)}, want what x is, {article(like)}")
    if tuple(out.shape) != tuple(shape):
        raise invalid(f"{name} is {list(out.shape)}, want {list(shape)}")
    if dtype_name(out.dtype) not in _FLOATS:
        raise invalid(f"{name} is {dtype_name(out.dtype)}, want float32, bfloat16 or float16")
    if getattr(out, "device", None) != getattr(like, "device", None):
        raise invalid(f"{name} lies on {out.device}, x on {like.device}")
    if is_numpy(out) and not out.flags.writeable:
        raise invalid(f"{name} is read-only")
    if not _is_contiguous(out):
        raise invalid(f"{name} has gaps between its elements; want a row-major tensor without")
    return out.reshape(-1, shape[-1]) if len(shape) == 3 else out


_W13_LAYOUTS = ("gate-up", "interleaved")


def expert_weights(w13, w2, b13, b2, w13_layout, transposed):
    """The four as sy_experts_create wants them: themselves, or copies where they are stored in another
    way or type."""
    given = (t.detach() if is_torch(t) else t for t in (w13, w2, b13, b2))
    w13, w2, b13, b2 = stored_as_wanted(*given, w13_layout, transposed)
    return w13, w2, as_f32("b13", b13), as_f32("b2", b2)


def stored_as_wanted(w13, w2, b13, b2, w13_layout, transposed):
    """The four in the order of sy_experts_create; torch has gradients through it."""
    require_tensor("w13", w13, "[E, H, 2I]" if transposed else "[E, 2I, H]")
    require_tensor("w2", w2, "[E, I, H]" if transposed else "[E, H, I]")
    if w13_layout not in _W13_LAYOUTS:
        raise invalid(f"w13_layout={w13_layout!r} is none of {', '.join(_W13_LAYOUTS)}")
    if w13_layout == "interleaved":
        w13 = _contiguous("w13", gate_then_up(_transposed(w13) if transposed else w13))
        b13 = None if b13 is None else _contiguous("b13", gate_then_up(b13))
    elif transposed:
        w13 = _contiguous("w13", _transposed(w13))
    if transposed:
        w2 = _contiguous("w2", _transposed(w2))
    return w13, w2, b13, b2


def _transposed(tensor):
    if is_torch(tensor):
        return tensor.transpose(1, 2)
    return tensor.swapaxes(1, 2)


def gate_then_up(tensor):
    """Rows gate, up, gate, up, ... along dimension 1 as all of gate, then all of up."""
    halves = tensor[:, 0::2], tensor[:, 1::2]
    if is_torch(tensor):
        return sys.modules["torch"].cat(halves, 1)
    return sys.modules["cupy" if is_cupy(tensor) else "numpy"].concatenate(halves, 1)
