"""Experts that are given as codes with scales (e4m3, MXFP4)."""

import sys
from ctypes import byref

from ._arguments import as_f32, expert_weights, gate_then_up
from ._errors import SwitchyardError, invalid
from ._native import choose, native
from ._structs import StoredExperts
from ._tensors import (CPU, CUDA, dtype_code, dtype_name, is_torch, on_gpu, on_host, pointer, require_tensor,
                       views)

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


class StoredWeights:
    """What an Experts object is given as codes: in host memory, for a CPU or the GPU where w13 lies."""

    def __init__(self, w13, w2, b13, b2, w13_scales, w2_scales, weights, compute, w13_layout, transposed,
                 trainable):
        gpu = on_gpu(w13)
        self._device = _number_of_gpu(w13) if gpu else None
        w13, w2, w13_scales, w2_scales = stored_weights(w13, w2, w13_scales, w2_scales, w13_layout,
                                                        transposed, trainable)
        w13, w2, b13, b2 = expert_weights(w13, w2, on_host(b13), on_host(b2), w13_layout, False)
        self.w13, self.w2 = w13, w2
        self.codes_a_byte = codes_a_byte(w13_scales)
        self._views = views(w13=w13, w2=w2, b13=b13, b2=b2, w13_scales=w13_scales, w2_scales=w2_scales)
        self._weights = choose("weights", weights, "sy_weight_format")
        self._compute = dtype_code("compute", "bf16" if compute is None else compute)
        self.dtype = {0: "float32", 1: "bfloat16", 2: "float16"}.get(self._compute)
        self.rounds_rows = not gpu  # the library does, on a CPU

    def place(self, config, num_threads, out):
        stored = StoredExperts(weights=self._weights, compute=self._compute, device_type=CPU,
                               num_threads=num_threads,
                               **{name: pointer(view) for name, view in self._views.items()})
        if self._device is not None:
            stored.device_type, stored.device_id = CUDA, self._device
        native.experts_create_stored(byref(config), byref(stored), out)
        self.w13 = self.w2 = self._views = None  # the library has copies


def _number_of_gpu(tensor):
    return tensor.device.index if is_torch(tensor) else tensor.device.id


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
