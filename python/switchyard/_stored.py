"""Experts that are given as codes with scales (e4m3, MXFP4)."""

import sys

from ._arguments import as_f32, gate_then_up
from ._errors import SwitchyardError, invalid
from ._tensors import dtype_name, is_torch, on_host, require_tensor

_CODES = ("uint8", "float8_e4m3fn")
_POWERS = ("uint8", "float8_e8m0fnu")  # scales of MXFP4
_FACTORS = ("float32", "float64", "bfloat16", "float16")  # of e4m3


def codes_a_byte(scales):
    """2 of MXFP4, whose scales are bytes; else 1."""
    return 2 if scales is not None and dtype_name(scales.dtype) in _POWERS else 1


def stored_weights(w13, w2, w13_scales, w2_scales, w13_layout, transposed, trainable):
    """The four in host memory, scales in the order of sy_layer_arrays; w13 is still in its own."""
    if w13_scales is None or w2_scales is None:
        raise invalid("w13_scales and w2_scales must both be given, or neither")
    if trainable:
        raise SwitchyardError("unsupported", "trainable=True does not go with w13_scales: codes have no gradient")
    if transposed:
        raise invalid("transposed=True does not go with w13_scales: scales belong to rows along the sum")
    mxfp4 = codes_a_byte(w13_scales) == 2
    if w13_layout == "interleaved" and not mxfp4:
        raise invalid("w13_layout='interleaved' does not go with scales of 128 rows: want all gate rows, then "
                      "all up rows")
    w13, w2 = (_codes(name, on_host(t), mxfp4) for name, t in (("w13", w13), ("w2", w2)))
    scales = [_scales(name, on_host(t), mxfp4)
              for name, t in (("w13_scales", w13_scales), ("w2_scales", w2_scales))]
    if w13_layout == "interleaved":
        scales[0] = gate_then_up(scales[0])
    return w13, w2, *scales


def _codes(name, tensor, mxfp4):
    """[E, rows, bytes]; blocks [E, rows, cols/32, 16], as gpt-oss stores them, without their last cut."""
    shape = getattr(tensor, "shape", ())
    if mxfp4 and len(shape) == 4:
        tensor = tensor.reshape(shape[0], shape[1], -1)
    require_tensor(name, tensor, "[E, rows, bytes of codes]")
    if dtype_name(tensor.dtype) not in _CODES:
        raise invalid(f"{name} is {dtype_name(tensor.dtype)} and has scales: want uint8 or float8_e4m3fn")
    return _as_bytes(tensor)


def _scales(name, tensor, mxfp4):
    require_tensor(name, tensor, "[E, rows of blocks, blocks]")
    if dtype_name(tensor.dtype) not in (_POWERS if mxfp4 else _FACTORS):
        raise invalid(f"{name} is {dtype_name(tensor.dtype)}: want both scales as floats (e4m3), or both as bytes "
                      "(MXFP4)")
    return _as_bytes(tensor) if mxfp4 else as_f32(name, tensor)


def _as_bytes(tensor):
    if is_torch(tensor):
        return tensor.detach().view(sys.modules["torch"].uint8)
    return tensor
