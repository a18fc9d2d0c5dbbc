"""Tensors of any framework with DLPack (torch, numpy, cupy) as descriptions for the C interface."""

import ctypes
import sys

from ._native import SwitchyardError, Tensor

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

CPU = 1
CUDA = 2

_CODES = {"f32": 0, "bf16": 1, "f16": 2, "fp8": 3}


def dtype_code(name, value):
    """sy_dtype of "f32", "bf16", "f16", "fp8", or of a framework's dtype."""
    text = str(value).rsplit(".", maxsplit=1)[-1].strip("<>'")
    text = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "half": "f16",
            "float8_e4m3fn": "fp8"}.get(text, text)
    if text not in _CODES:
        raise SwitchyardError("invalid argument",
                              f"{name}={value!r} is none of f32, bf16, f16, fp8")
    return _CODES[text]


class View:
    """A tensor's description, and what keeps it alive. `pointer` is what the C interface takes."""

    def __init__(self, name, tensor):
        if getattr(tensor, "requires_grad", False):
            tensor = tensor.detach()
        if not hasattr(tensor, "__dlpack__"):
            raise SwitchyardError("invalid argument",
                                  f"{name} is a {type(tensor).__name__}, which has no DLPack")
        if _is_numpy(tensor) and not tensor.flags.writeable:
            tensor = tensor.copy()  # numpy exports no read-only array
        try:
            self._capsule = tensor.__dlpack__()
        except (RuntimeError, BufferError, TypeError, ValueError) as error:
            raise SwitchyardError("invalid argument", f"{name}: {error}") from None
        self._tensor = tensor
        # A DLManagedTensor begins with its DLTensor.
        address = _get_pointer(self._capsule, b"dltensor")
        self.pointer = ctypes.cast(address, ctypes.POINTER(Tensor))

    @property
    def device(self):
        return self.pointer.contents.device_type


def views(**tensors):
    """name -> View, None staying None."""
    return {name: None if t is None else View(name, t) for name, t in tensors.items()}


def pointer(view):
    return None if view is None else view.pointer


def _is_numpy(tensor):
    return type(tensor).__module__ == "numpy"


def empty_like(tensor, shape, dtype=None):
    """A new tensor of the framework and device of `tensor`; dtype "f32", "i32" or as `tensor`."""
    if _is_numpy(tensor) or type(tensor).__module__.startswith("cupy"):
        module = sys.modules[type(tensor).__module__.split(".", maxsplit=1)[0]]
        kind = {"f32": "float32", "i32": "int32", None: tensor.dtype}[dtype]
        return module.empty(shape, dtype=kind)
    torch = sys.modules["torch"]
    kind = {"f32": torch.float32, "i32": torch.int32, None: tensor.dtype}[dtype]
    return torch.empty(shape, dtype=kind, device=tensor.device)


def full_like(tensor, value):
    """[1] i32 of the framework and device of `tensor`."""
    out = empty_like(tensor, (1,), "i32")
    out[0] = value
    return out


def address_of(tensor):
    """Where a CPU tensor's data lie."""
    view = View("tensor", tensor)
    contents = view.pointer.contents
    return (contents.data or 0) + contents.byte_offset


def stream_of(tensor):
    """The current CUDA stream of the tensor's framework, as an integer; None on the CPU."""
    if "torch" in sys.modules and type(tensor).__module__.startswith("torch"):
        if tensor.is_cuda:
            return sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream
    elif type(tensor).__module__.startswith("cupy"):
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    return None


def wrap(address, shape, dtype, like):
    """A view of the library's CPU memory in the framework of `like`."""
    import numpy

    kinds = {"f32": numpy.float32, "i32": numpy.int32, "f16": numpy.float16, "bf16": numpy.int16}
    size = 1
    for extent in shape:
        size *= extent
    if size == 0:
        array = numpy.empty(shape, dtype=kinds[dtype])
    else:
        count = size * numpy.dtype(kinds[dtype]).itemsize
        buffer = (ctypes.c_uint8 * count).from_address(address)
        array = numpy.frombuffer(buffer, dtype=kinds[dtype]).reshape(shape)
    if _is_numpy(like):
        return array
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor
