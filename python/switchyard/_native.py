"""The C interface (include/switchyard/switchyard.h) by ctypes: structures, signatures, errors."""

import ctypes
import functools
import os
import re
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_double, c_float, c_int32, c_int64
from ctypes import c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from pathlib import Path


class SwitchyardError(RuntimeError):
    """What went wrong: `code` is the status' name ("invalid argument", "timeout", ...)."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Tensor(Structure):
    """sy_tensor, which lies in memory as DLPack's DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("type_code", c_uint8),
        ("type_bits", c_uint8),
        ("type_lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Sized(Structure):
    """A struct that begins with its own size, as all but sy_tensor and sy_unique_id do: a library of
    another version can tell which fields there are."""

    _fields_ = [("struct_size", c_size_t)]

    def __init__(self, *values, **named):
        super().__init__(*values, **named)
        self.struct_size = ctypes.sizeof(self)


class RouterConfig(Sized):
    _fields_ = [
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("score", c_int32),
        ("renormalize", c_int32),
        ("scale", c_float),
        ("groups", c_int32),
        ("top_groups", c_int32),
        ("group_score", c_int32),
    ]


class ExpertConfig(Sized):
    _fields_ = [
        ("num_experts", c_int32),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("gated", c_int32),
        ("activation", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
    ]


class ExpertParallelConfig(Sized):
    _fields_ = [
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("hidden", c_int64),
        ("max_tokens", c_int64),
        ("dtype", c_int32),
        ("dispatch_wire", c_int32),
        ("combine_wire", c_int32),
        ("rank_invariant", c_int32),
        ("max_recv_rows", c_int64),
        ("capacity_factor", c_double),
        ("drop_policy", c_int32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("mode", c_int32),
        ("ctas", c_int32),
        ("device_engine", c_int32),
    ]


class Received(Sized):
    _fields_ = [
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("num_assignments", c_int64),
        ("num_local_experts", c_int32),
        ("expert_begin", c_void_p),
        ("row_x", c_void_p),
        ("row_weight", c_void_p),
        ("dropped_rows", c_int64),
        ("x_dtype", c_int32),
        ("num_scales", c_int64),
        ("scale", c_void_p),
        ("rows_received", c_void_p),
        ("rows_dropped", c_void_p),
        ("number", c_uint64),
    ]


class UniqueId(Structure):
    _fields_ = [("bytes", c_char * 64)]


class Flat(Sized):
    _fields_ = [
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("meta", c_void_p),
        ("rows_received", c_void_p),
    ]


class Bucketed(Sized):
    _fields_ = [
        ("expert_num_tokens", c_void_p),
        ("expert_x", c_void_p),
        ("expert_meta", c_void_p),
        ("num_local_experts", c_int32),
        ("capacity", c_int64),
    ]


class LayerOptions(Sized):
    _fields_ = [
        ("device_type", c_int32),
        ("compute", c_int32),
        ("layout", c_int32),
        ("alignment", c_int32),
        ("capacity_factor", c_double),
        ("drop_policy", c_int32),
        ("combine_wire", c_int32),
        ("batch_invariant", c_int32),
        ("rank_invariant", c_int32),
        ("max_tokens", c_int64),
        ("num_threads", c_int32),
        ("device_id", c_int32),
        ("dispatch_wire", c_int32),
        ("device_engine", c_int32),
        ("weights", c_int32),
        ("leave_out_shared", c_int32),
    ]


class LayerArrays(Sized):
    _fields_ = [
        ("router", POINTER(RouterConfig)),
        ("experts", POINTER(ExpertConfig)),
        ("gate", POINTER(Tensor)),
        ("router_bias", POINTER(Tensor)),
        ("selection_bias", POINTER(Tensor)),
        ("w13", POINTER(Tensor)),
        ("w2", POINTER(Tensor)),
        ("b13", POINTER(Tensor)),
        ("b2", POINTER(Tensor)),
        ("router_in_place", c_int32),
        ("shared_w13", POINTER(Tensor)),
        ("shared_w2", POINTER(Tensor)),
        ("shared_gate", POINTER(Tensor)),
    ]


class CheckpointRecipe(Sized):
    _fields_ = [
        ("family", c_char_p),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("shared_experts", c_int32),
        ("groups", c_int32),
        ("top_groups", c_int32),
        ("num_layers", c_int32),
        ("dtype", c_int32),
        ("seed", c_uint64),
        ("shards", c_int32),
    ]


_TENSOR = POINTER(Tensor)
_HANDLE = c_void_p

# name: (result, arguments); a result of None is a status that is checked.
_SIGNATURES = {
    "sy_version": (c_char_p, []),
    "sy_last_error": (c_char_p, []),
    "sy_status_name": (c_char_p, [c_int32]),
    "sy_enumerator_name": (c_char_p, [c_char_p, c_int32]),
    "sy_router_config_init": ("void", [POINTER(RouterConfig), c_size_t]),
    "sy_route": (None, [POINTER(RouterConfig)] + 4 * [_TENSOR] + [c_void_p]),
    "sy_route_check": (None, [c_int32, c_void_p]),
    "sy_expert_config_init": ("void", [POINTER(ExpertConfig), c_size_t]),
    "sy_experts_create": (None, [POINTER(ExpertConfig)] + 4 * [_TENSOR]
                          + [c_int32, POINTER(_HANDLE)]),
    "sy_experts_free": ("void", [_HANDLE]),
    "sy_experts_run": (None, [_HANDLE] + 4 * [_TENSOR] + [c_void_p]),
    "sy_experts_check": (None, [_HANDLE]),
    "sy_experts_read_expert": (None, [_HANDLE, c_int32] + 4 * [_TENSOR]),
    "sy_communicator_from_environment": (None, [POINTER(_HANDLE)]),
    "sy_communicator_threads": (None, [c_int32, POINTER(_HANDLE)]),
    "sy_unique_id_make": (None, [POINTER(UniqueId)]),
    "sy_unique_id_by_file": (None, [c_char_p, c_int32, POINTER(UniqueId)]),
    "sy_communicator_create": (None, [c_int32, c_int32, POINTER(UniqueId), POINTER(_HANDLE)]),
    "sy_communicator_free": ("void", [_HANDLE]),
    "sy_communicator_rank": (c_int32, [_HANDLE]),
    "sy_communicator_size": (c_int32, [_HANDLE]),
    "sy_communicator_set_timeout": (None, [_HANDLE, c_int64]),
    "sy_communicator_recover": (None, [_HANDLE]),
    "sy_ep_config_init": ("void", [POINTER(ExpertParallelConfig), c_size_t]),
    "sy_ep_create": (None, [_HANDLE, POINTER(ExpertParallelConfig), POINTER(_HANDLE)]),
    "sy_ep_free": ("void", [_HANDLE]),
    "sy_ep_dispatch": (None, [_HANDLE] + 3 * [_TENSOR] + [POINTER(Received), c_void_p]),
    "sy_ep_check": (None, [_HANDLE]),
    "sy_ep_check_received": (None, [_HANDLE, POINTER(Received)]),
    "sy_ep_combine": (None, [_HANDLE, _TENSOR, _TENSOR, c_void_p]),
    "sy_ep_dispatch_flat": (None, [_HANDLE] + 3 * [_TENSOR] + [POINTER(Flat), c_void_p]),
    "sy_ep_combine_flat": (None, [_HANDLE] + 3 * [_TENSOR] + [c_void_p]),
    "sy_ep_dispatch_bucketed": (None, [_HANDLE] + 3 * [_TENSOR]
                                + [c_int64, POINTER(Bucketed), c_void_p]),
    "sy_ep_combine_bucketed": (None, [_HANDLE] + 3 * [_TENSOR] + [c_void_p]),
    "sy_layer_options_init": ("void", [POINTER(LayerOptions), c_size_t]),
    "sy_layer_from_checkpoint": (None, [c_char_p, c_int32, POINTER(LayerOptions), _HANDLE,
                                        POINTER(_HANDLE)]),
    "sy_layer_from_arrays": (None, [POINTER(LayerArrays), POINTER(LayerOptions), _HANDLE,
                                    POINTER(_HANDLE)]),
    "sy_layer_free": ("void", [_HANDLE]),
    "sy_layer_hidden": (c_int64, [_HANDLE]),
    "sy_layer_top_k": (c_int32, [_HANDLE]),
    "sy_layer_num_experts": (c_int32, [_HANDLE]),
    "sy_layer_forward": (None, [_HANDLE] + 4 * [_TENSOR] + [c_void_p]),
    "sy_layer_check": (None, [_HANDLE]),
    "sy_layer_read_expert": (None, [_HANDLE, c_int32] + 4 * [_TENSOR]),
    "sy_checkpoint_recipe_init": ("void", [POINTER(CheckpointRecipe), c_size_t]),
    "sy_make_checkpoint": (None, [POINTER(CheckpointRecipe), c_char_p]),
}


def _own_version():
    """The version of this package: of the sources that it lies among, else of the installation."""
    header = Path(__file__).resolve().parents[2] / "include" / "switchyard" / "switchyard.h"
    if header.is_file():
        return ".".join(re.findall(r"#define SY_VERSION_[A-Z]+ (\d+)", header.read_text()))
    from importlib import metadata

    try:
        return metadata.version("switchyard")
    except metadata.PackageNotFoundError:
        return None


def _find():
    """SWITCHYARD_LIBRARY, else the library beside this package, else the system's."""
    named = os.environ.get("SWITCHYARD_LIBRARY")
    if named:
        return named
    beside = Path(__file__).with_name("libswitchyard.so")
    return str(beside) if beside.exists() else "libswitchyard.so"


class _Native:
    """Calls by name; statuses become SwitchyardError. The library is opened at the first call."""

    def __init__(self):
        self._library = None

    def _open(self):
        path = _find()
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise SwitchyardError(
                "unsupported",
                f"cannot open {path}: {error}; SWITCHYARD_LIBRARY may name libswitchyard.so") from None
        library.sy_version.restype = c_char_p
        self._compare_versions(path, library.sy_version().decode())
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = {None: c_int32, "void": None}.get(result, result)
        self._library = library

    @staticmethod
    def _compare_versions(path, theirs, ours=None):
        """Structs and calls may differ from one minor version to the next."""
        ours = ours or _own_version()
        if ours is not None and ours.split(".")[:2] != theirs.split(".")[:2]:
            raise SwitchyardError(
                "unsupported", f"{path} is version {theirs}, the Python package {ours}: install both "
                               "of one version, or name another library in SWITCHYARD_LIBRARY")

    def __getattr__(self, name):
        if self._library is None:
            self._open()
        function = getattr(self._library, "sy_" + name)
        if _SIGNATURES["sy_" + name][0] is not None:
            return function

        def checked(*arguments):
            status = function(*arguments)
            if status != 0:
                message = self._library.sy_last_error().decode()
                raise SwitchyardError(self._library.sy_status_name(status).decode(), message)

        return checked


native = _Native()


def initialised(kind, name):
    """A struct of the C interface with its defaults: sy_<name>_init."""
    struct = kind()
    getattr(native, name + "_init")(byref(struct), ctypes.sizeof(struct))
    return struct


@functools.cache
def names_of(enumeration):
    """The words for the values 0, 1, ... of an enumeration of the C interface."""
    words = []
    while True:
        word = native.enumerator_name(enumeration.encode(), len(words))
        if word is None:
            return tuple(words)
        words.append(word.decode())


def choose(name, value, enumeration):
    """The value of an enumeration's word, or an error that lists them."""
    words = names_of(enumeration)
    if value not in words:
        raise SwitchyardError("invalid argument", f"{name}={value!r} is none of {', '.join(words)}")
    return words.index(value)


class Handle:
    """An opaque handle of the C interface, freed with its owner, and not before those made within
    it: what is collected in a cycle is finalised in any order."""

    def __init__(self, free, within=None):
        self.pointer = c_void_p()
        self._free = free
        self._within = within
        self._num_inside = 0
        self._is_done = False
        if within is not None:
            within._num_inside += 1

    def out(self):
        return byref(self.pointer)

    def __del__(self):
        self._is_done = True
        if self._num_inside > 0:
            return
        if self.pointer:
            getattr(native, self._free)(self.pointer)
            self.pointer = c_void_p()
        within, self._within = self._within, None
        if within is not None:
            within._num_inside -= 1
            if within._is_done:
                within.__del__()
