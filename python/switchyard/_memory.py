"""The library's memory as tensors of the caller's framework: views and copies."""

import ctypes
import math
import sys

from ._tensors import is_cupy, is_numpy, on_gpu


class _DeviceArray:
    """Memory on a GPU, as every framework there takes it."""

    _TYPES = {"f32": "<f4", "f16": "<f2", "bf16": "<i2", "fp8": "|u1", "i32": "<i4", "i64": "<i8"}

    def __init__(self, address, shape, dtype):
        self.__cuda_array_interface__ = {"shape": tuple(shape), "typestr": self._TYPES[dtype],
                                         "data": (address, False), "version": 2}


def _wrap_device(address, shape, dtype, like):
    empty = 0 in shape
    if is_cupy(like):
        cupy = sys.modules["cupy"]
        if empty:
            return cupy.empty(shape, _DeviceArray._TYPES[dtype])
        return cupy.asarray(_DeviceArray(address, shape, dtype))
    torch = sys.modules["torch"]
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
             "i32": torch.int32, "i64": torch.int64,
             "fp8": getattr(torch, "float8_e4m3fn", torch.uint8)}
    if empty:
        return torch.empty(shape, dtype=kinds[dtype], device=like.device)
    tensor = torch.as_tensor(_DeviceArray(address, shape, dtype), device=like.device)
    return tensor.view(kinds[dtype]) if dtype in ("bf16", "fp8") else tensor


def wrap(address, shape, dtype, like):
    """A view of the library's memory, on the CPU or a GPU as `like` is, in the framework of `like`.

    numpy and cupy get bf16 as the int16 that has its bits, and cupy fp8 as uint8.
    """
    if on_gpu(like):
        return _wrap_device(address, shape, dtype, like)
    import numpy

    kinds = {"f32": numpy.float32, "i32": numpy.int32, "i64": numpy.int64, "f16": numpy.float16,
             "bf16": numpy.int16}
    size = 1
    for extent in shape:
        size *= extent
    if size == 0:
        array = numpy.empty(shape, dtype=kinds[dtype])
    else:
        count = size * numpy.dtype(kinds[dtype]).itemsize
        buffer = (ctypes.c_uint8 * count).from_address(address)
        array = numpy.frombuffer(buffer, dtype=kinds[dtype]).reshape(shape)
    if is_numpy(like):
        return array
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


class _OnGpu:
    """Numbers at an address of a GPU, as torch takes them."""

    def __init__(self, address, shape, kind):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<" + kind, "strides": None,
                                         "data": (address, False), "version": 3}


def copy_of(address, shape, device, kind="f4"):
    """A copy of what the library keeps on a layer's device: f32, f64 ("f8") or i64 ("i8")."""
    torch = sys.modules["torch"]
    dtype = {"f4": torch.float32, "f8": torch.float64, "i8": torch.int64}[kind]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_OnGpu(address, shape, kind), device=device).clone()
    memory = (ctypes.c_char * (math.prod(shape) * int(kind[1]))).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape).clone()
