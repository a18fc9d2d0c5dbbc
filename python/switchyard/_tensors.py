"""Tensors of torch, numpy, cupy and any framework with DLPack as descriptions for the C
interface."""

import ctypes
import functools
import struct
import sys

from ._errors import SwitchyardError, invalid
from ._native import choose
from ._structs import Tensor

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

CPU = 1
CUDA = 2

# DLPack's code and bits, by the frameworks' names.
_TYPES = {"float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bfloat16": (4, 16),
          "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64),
          "uint8": (1, 8), "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64),
          "bool": (6, 8), "complex64": (5, 64), "complex128": (5, 128)}


def _name_of(dtype):
    return str(getattr(dtype, "name", dtype)).rsplit(".", maxsplit=1)[-1].strip("<>'")


@functools.cache
def dtype_name(dtype):
    """"float32" of torch.float32 or numpy's dtype."""
    return _name_of(dtype)


def dtype_code(name, value):
    """sy_dtype of "f32", "bf16", "f16", "fp8", or of a framework's dtype."""
    text = value if isinstance(value, str) else _name_of(value)
    text = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "half": "f16",
            "float8_e4m3fn": "fp8"}.get(text, text)
    return choose(name, text, "sy_dtype")


def is_torch(tensor):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def is_numpy(tensor):
    return type(tensor).__module__ == "numpy" and hasattr(tensor, "__array_interface__")


def is_cupy(tensor):
    return type(tensor).__module__.startswith("cupy")


@functools.lru_cache(maxsize=4096)
def _behind_address(name_of_type, device_type, device_id, shape, strides):
    """What follows the address in a Tensor, and the arrays to which it points."""
    if name_of_type not in _TYPES:
        return None
    code, bits = _TYPES[name_of_type]
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    steps = None if strides is None else (ctypes.c_int64 * max(len(strides), 1))(*strides)
    return (struct.pack("=iiiBBHQQQ", device_type, device_id, len(shape), code, bits, 1,
                        ctypes.addressof(sizes), 0 if steps is None else ctypes.addressof(steps),
                        0), sizes, steps)


@functools.lru_cache(maxsize=4096)
def _behind_address_of_torch(dtype, device, shape, strides):
    kinds = {"cpu": CPU, "cuda": CUDA}
    if device.type not in kinds:
        return None
    return _behind_address(dtype_name(dtype), kinds[device.type], device.index or 0, tuple(shape),
                           strides)


@functools.lru_cache(maxsize=4096)
def behind_address_of_rows(dtype, device, shape):
    """Of a torch tensor [T, H] or [B, S, H] without gaps as [T, H]; None of others."""
    if len(shape) not in (2, 3):
        return None
    return _behind_address_of_torch(dtype, device, (shape[:-1].numel(), shape[-1]), None)


def _describe_torch(name, tensor):
    try:
        address = tensor.data_ptr()
        strides = None if tensor.is_contiguous() else tensor.stride()
    except RuntimeError as error:  # sparse ones, those of a tracer
        raise invalid(f"{name}: {error}") from None
    behind = _behind_address_of_torch(tensor.dtype, tensor.device, tensor.shape, strides)
    if behind is None:
        where = tensor.device.type
        raise invalid(f"{name} lies on {where}, want cpu or cuda" if where not in ("cpu", "cuda")
                      else f"{name} is {dtype_name(tensor.dtype)}, which is not taken")
    return address.to_bytes(8, "little") + behind[0], behind


def _describe_numpy(name, array):
    strides = None
    if not array.flags.c_contiguous:
        strides = tuple(step // max(array.itemsize, 1) for step in array.strides)
    behind = _behind_address(dtype_name(array.dtype), CPU, 0, array.shape, strides)
    if behind is None or not array.dtype.isnative:
        raise invalid(f"{name} is {array.dtype.str if behind else dtype_name(array.dtype)}, which is "
                      "not taken")
    return array.__array_interface__["data"][0].to_bytes(8, "little") + behind[0], behind


def _describe_dlpack(name, tensor):
    if not hasattr(tensor, "__dlpack__"):
        raise invalid(f"{name} is {article(tensor)}, want a tensor of torch or numpy, or one with "
                      "DLPack")
    # The library works on the stream that it is given: the producer need not wait for another.
    options = {"stream": -1} if on_gpu(tensor) else {}
    try:
        capsule = tensor.__dlpack__(**options)
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        raise invalid(f"{name}: {error}") from None
    # A DLManagedTensor begins with its DLTensor.
    address = _get_pointer(capsule, b"dltensor")
    return ctypes.string_at(address, ctypes.sizeof(Tensor)), (capsule, tensor)


def article(value):
    return "None" if value is None else f"a {type(value).__name__}"


def describe(name, tensor):
    """A tensor as the bytes of a Tensor, and what has to live as long as they are used, besides the
    tensor."""
    if is_torch(tensor):
        return _describe_torch(name, tensor)
    if is_numpy(tensor):
        return _describe_numpy(name, tensor)
    return _describe_dlpack(name, tensor)


def describe_optional(name, tensor):
    """As describe(); None for None."""
    return (None, None) if tensor is None else describe(name, tensor)


def new_like(name, tensor, described):
    """A tensor of the shape, type and place of `tensor`, whose description is `described`, and its
    own."""
    if is_torch(tensor):
        new = sys.modules["torch"].empty_like(tensor)
        return new, new.data_ptr().to_bytes(8, "little") + described[8:]
    new = empty_like(tensor, tensor.shape)
    return new, describe(name, new)[0]


class View:
    """A tensor's description, and what keeps it alive. `pointer` is what the C interface takes."""

    def __init__(self, name, tensor):
        description, self._kept = describe(name, tensor)
        self._tensor = tensor
        self.pointer = ctypes.pointer(Tensor.from_buffer_copy(description))


def views(**tensors):
    """name -> View, None staying None."""
    return {name: None if t is None else View(name, t) for name, t in tensors.items()}


def views_in_place(**tensors):
    """As views(), of tensors that are used after the call."""
    for name, tensor in tensors.items():
        if tensor is not None and is_numpy(tensor) and not tensor.flags.writeable:
            raise invalid(f"{name} is read-only: what is used in place is written to by others")
    return views(**tensors)


def pointer(view):
    return None if view is None else view.pointer


def require_tensor(name, value, shape):
    """That `value` has a shape of as many sizes as `shape`, "[E, H]", has."""
    have = getattr(value, "shape", None)
    if have is None or isinstance(value, (list, str)):
        raise invalid(f"{name} is {article(value)}, want a tensor {shape}")
    if len(have) != shape.count(",") + 1:
        raise invalid(f"{name} is {list(have)}, want {shape}")


def on_gpu(tensor):
    return is_cupy(tensor) or bool(getattr(tensor, "is_cuda", False))


def on_host(tensor):
    """`tensor`, or a copy of it in host memory."""
    if tensor is None or not on_gpu(tensor):
        return tensor
    return tensor.get() if is_cupy(tensor) else tensor.detach().cpu()


def is_capturing(tensor):
    """Whether the current stream of the tensor's framework is captured in a graph."""
    if is_cupy(tensor):
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
        cuda = sys.modules["torch"].cuda
        return cuda.current_device() if cuda.is_available() else 0
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
    if is_torch(tensor):
        torch = sys.modules["torch"]
        kind = {"f32": torch.float32, "i32": torch.int32, None: tensor.dtype}[dtype]
        return torch.empty(shape, dtype=kind, device=tensor.device)
    if not is_numpy(tensor) and not is_cupy(tensor):
        raise invalid(f"a result cannot be made for {article(tensor)}: want tensors of torch, numpy "
                      "or cupy")
    module = sys.modules[type(tensor).__module__.split(".", maxsplit=1)[0]]
    return module.empty(shape, {"f32": "float32", "i32": "int32", None: tensor.dtype}[dtype])


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


def stream_of_torch(tensor):
    """Of a tensor on a GPU."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without an object for the stream
    if raw is not None:
        return raw(tensor.device.index)
    return torch.cuda.current_stream(tensor.device).cuda_stream


def stream_of(tensor):
    """The current CUDA stream of the tensor's framework, as an integer; None on the CPU."""
    if is_torch(tensor):
        if tensor.is_cuda:
            return stream_of_torch(tensor)
    elif is_cupy(tensor):
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    return None
