"""Tensors of any framework with DLPack (torch, numpy, cupy) as descriptions for the C interface."""

import ctypes
import sys

from ._native import SwitchyardError, Tensor, choose

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

CPU = 1
CUDA = 2



def dtype_code(name, value):
    """sy_dtype of "f32", "bf16", "f16", "fp8", or of a framework's dtype."""
    text = str(value).rsplit(".", maxsplit=1)[-1].strip("<>'")
    text = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "half": "f16",
            "float8_e4m3fn": "fp8"}.get(text, text)
    return choose(name, text, "sy_dtype")


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
        # The library works on the stream that it is given: the producer need not wait for another.
        options = {"stream": -1} if on_gpu(tensor) else {}
        try:
            self._capsule = tensor.__dlpack__(**options)
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


def views_in_place(**tensors):
    """As views(), of tensors that are used after the call: a copy would not do."""
    for name, tensor in tensors.items():
        if tensor is not None and _is_numpy(tensor) and not tensor.flags.writeable:
            raise SwitchyardError("invalid argument",
                                  f"{name} is read-only: numpy gives only a copy of it")
    return views(**tensors)


def pointer(view):
    return None if view is None else view.pointer


def _is_numpy(tensor):
    return type(tensor).__module__ == "numpy"


def _is_cupy(tensor):
    return type(tensor).__module__.startswith("cupy")


def on_gpu(tensor):
    return _is_cupy(tensor) or bool(getattr(tensor, "is_cuda", False))


def on_host(tensor):
    """`tensor`, or a copy of it in host memory."""
    if tensor is None or not on_gpu(tensor):
        return tensor
    return tensor.get() if _is_cupy(tensor) else tensor.detach().cpu()


def is_capturing(tensor):
    """Whether the current stream of the tensor's framework is captured in a graph."""
    if _is_cupy(tensor):
        return sys.modules["cupy"].cuda.get_current_stream().is_capturing()
    with sys.modules["torch"].cuda.device(tensor.device):
        return sys.modules["torch"].cuda.is_current_stream_capturing()


def is_torch_cuda(tensor):
    """Whether torch's streams order the work on `tensor`."""
    return "torch" in sys.modules and bool(getattr(tensor, "is_cuda", False))


def device_of(value):
    """(device type, number or None) of None, "cpu", "cuda", "cuda:1", or a framework's device."""
    if value is None:
        return 0, None
    kind, _, number = str(value).partition(":")
    if kind not in ("cpu", "cuda") or not (number == "" or number.isdigit()):
        raise SwitchyardError("invalid argument", f"device={value!r} is neither cpu nor cuda[:N]")
    if kind == "cpu":
        return CPU, None
    return CUDA, int(number) if number else None


def current_device():
    """The number of the current CUDA device of torch or cupy; 0 where neither is there."""
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.current_device()
    if "cupy" in sys.modules:
        return sys.modules["cupy"].cuda.Device().id
    return 0


def current_stream(device):
    """The current CUDA stream of torch or cupy on a GPU, as an integer; None where neither is
    there."""
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.current_stream(device).cuda_stream
    if "cupy" in sys.modules:
        with sys.modules["cupy"].cuda.Device(device):
            return sys.modules["cupy"].cuda.get_current_stream().ptr
    return None


def empty_like(tensor, shape, dtype=None):
    """A new tensor of the framework and device of `tensor`; dtype "f32", "i32" or as `tensor`."""
    if _is_numpy(tensor) or _is_cupy(tensor):
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


def threads_of_cpu(num_threads):
    """What the C interface takes: None is torch's number where torch is imported, else one."""
    if num_threads is not None:
        return num_threads
    torch = sys.modules.get("torch")
    if not hasattr(torch, "get_num_threads"):
        return 1
    torch.get_num_threads()  # torch tells OpenMP its number when it is first asked
    return 0  # as OpenMP has it: torch's


def address_of(tensor):
    """Where a tensor's data lie."""
    return place_of(tensor)[0]


def place_of(tensor):
    """Address, device, type, sizes and strides: all that tells two tensors' memory apart."""
    view = View("tensor", tensor)
    t = view.pointer.contents
    strides = tuple(t.strides[:t.ndim]) if t.strides else None
    return ((t.data or 0) + t.byte_offset, t.device_type, t.device_id, t.type_code, t.type_bits,
            tuple(t.shape[:t.ndim]), strides)


def stream_of(tensor):
    """The current CUDA stream of the tensor's framework, as an integer; None on the CPU."""
    if "torch" in sys.modules and type(tensor).__module__.startswith("torch"):
        if tensor.is_cuda:
            return sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream
    elif _is_cupy(tensor):
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    return None


class _DeviceArray:
    """Memory on a GPU, as every framework there takes it."""

    _TYPES = {"f32": "<f4", "f16": "<f2", "bf16": "<i2", "fp8": "|u1", "i32": "<i4", "i64": "<i8"}

    def __init__(self, address, shape, dtype):
        self.__cuda_array_interface__ = {"shape": tuple(shape), "typestr": self._TYPES[dtype],
                                         "data": (address, False), "version": 2}


def _wrap_device(address, shape, dtype, like):
    empty = 0 in shape
    if _is_cupy(like):
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
    if _is_numpy(like):
        return array
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor
