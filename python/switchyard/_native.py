"""The C interface (include/switchyard/switchyard.h) by ctypes: signatures, errors, handles."""

import ctypes
import functools
import os
import re
import sys
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

from ._errors import SwitchyardError, invalid
from ._structs import (Bucketed, CheckpointRecipe, ExpertConfig, ExpertParallelConfig, Flat,
                       Gradients, LayerArrays, LayerOptions, LossConfig, PerftConfig, Received,
                       RouteRequest, RouterConfig, RoutingStats, SoftMoeConfig, StoredExperts,
                       UniqueId)

_TENSOR = c_void_p  # of a Tensor, or bytes that lie as one
_HANDLE = c_void_p

# name: (result, arguments); a result of None is a status that is checked.
_SIGNATURES = {
    "sy_version": (c_char_p, []),
    "sy_last_error": (c_char_p, []),
    "sy_status_name": (c_char_p, [c_int32]),
    "sy_enumerator_name": (c_char_p, [c_char_p, c_int32]),
    "sy_router_config_init": ("void", [POINTER(RouterConfig), c_size_t]),
    "sy_route": (None, [POINTER(RouterConfig)] + 4 * [_TENSOR] + [c_void_p]),
    "sy_router_columns": (None, [POINTER(RouterConfig), POINTER(c_int32), POINTER(c_int32)]),
    "sy_router_num_experts": (None, [POINTER(RouterConfig), POINTER(c_int32)]),
    "sy_router_num_logits": (None, [POINTER(RouterConfig), POINTER(c_int32)]),
    "sy_balanced_hash_table": (None, [POINTER(c_int64), c_int64, c_int32, c_int32, _TENSOR]),
    "sy_route_request_init": ("void", [POINTER(RouteRequest), c_size_t]),
    "sy_route_with": (None, [POINTER(RouterConfig), POINTER(RouteRequest)] + 3 * [_TENSOR]),
    "sy_route_backward": (None, [POINTER(RouterConfig), POINTER(RouteRequest)] + 4 * [_TENSOR]),
    "sy_update_selection_bias": (None, [POINTER(c_int64), _TENSOR, c_double, c_int32, _HANDLE]),
    "sy_update_thresholds": (None, [_TENSOR, c_int32, c_double, _TENSOR, _HANDLE]),
    "sy_noise_backward": (None, [POINTER(RouterConfig), POINTER(RouteRequest)] + 2 * [_TENSOR]),
    "sy_route_check": (None, [c_int32, c_void_p]),
    "sy_expert_config_init": ("void", [POINTER(ExpertConfig), c_size_t]),
    "sy_experts_create": (None, [POINTER(ExpertConfig)] + 4 * [_TENSOR]
                          + [c_int32, POINTER(_HANDLE)]),
    "sy_experts_create_stored": (None, [POINTER(ExpertConfig), POINTER(StoredExperts),
                                        POINTER(_HANDLE)]),
    "sy_experts_free": ("void", [_HANDLE]),
    "sy_experts_run": (None, [_HANDLE] + 4 * [_TENSOR] + [c_void_p]),
    "sy_experts_check": (None, [_HANDLE]),
    "sy_experts_read_expert": (None, [_HANDLE, c_int32] + 4 * [_TENSOR]),
    "sy_scratch_create": (None, [c_int32, POINTER(_HANDLE)]),
    "sy_scratch_free": ("void", [_HANDLE]),
    "sy_saved_create": (None, [c_int32, POINTER(_HANDLE)]),
    "sy_saved_free": ("void", [_HANDLE]),
    "sy_saved_ready": (c_int32, [_HANDLE]),
    "sy_saved_bytes": (c_int64, [_HANDLE]),
    "sy_saved_logits": (c_void_p, [_HANDLE]),
    "sy_saved_losses": (c_void_p, [_HANDLE]),
    "sy_saved_counts": (c_void_p, [_HANDLE, POINTER(c_int64)]),
    "sy_loss_config_init": ("void", [POINTER(LossConfig), c_size_t]),
    "sy_experts_run_saved": (None, [_HANDLE] + 4 * [_TENSOR] + [_HANDLE, c_void_p]),
    "sy_experts_backward": (None, [_HANDLE, _HANDLE, _TENSOR, POINTER(Gradients), c_void_p]),
    "sy_soft_moe_config_init": ("void", [POINTER(SoftMoeConfig), c_size_t]),
    "sy_soft_moe_saved_create": (None, [c_int32, POINTER(_HANDLE)]),
    "sy_soft_moe_saved_free": ("void", [_HANDLE]),
    "sy_soft_moe_saved_bytes": (c_int64, [_HANDLE]),
    "sy_soft_moe_run": (None, [_HANDLE, POINTER(SoftMoeConfig)] + 5 * [_TENSOR] + [_HANDLE, c_void_p]),
    "sy_soft_moe_backward": (None, [_HANDLE, _HANDLE, _TENSOR, _TENSOR, POINTER(Gradients), _TENSOR,
                                    c_void_p, c_void_p]),
    "sy_perft_config_init": ("void", [POINTER(PerftConfig), c_size_t]),
    "sy_perft_create": (None, [POINTER(PerftConfig)] + 3 * [_TENSOR] + [_HANDLE, POINTER(_HANDLE)]),
    "sy_perft_free": ("void", [_HANDLE]),
    "sy_perft_forward": (None, [_HANDLE] + 4 * [_TENSOR] + [POINTER(RouteRequest), _TENSOR, _HANDLE,
                                                            c_void_p]),
    "sy_perft_backward": (None, [_HANDLE, _HANDLE, _TENSOR, _TENSOR, POINTER(Gradients), c_void_p]),
    "sy_perft_reload": (None, [_HANDLE]),
    "sy_perft_check": (None, [_HANDLE]),
    "sy_perft_stats": (None, [_HANDLE, POINTER(RoutingStats)]),
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
    "sy_layer_forward_saved": (None, [_HANDLE] + 4 * [_TENSOR] + [_HANDLE, c_void_p]),
    "sy_layer_forward_with": (None, [_HANDLE, _TENSOR, POINTER(RouteRequest), _TENSOR, _HANDLE,
                                     c_void_p]),
    "sy_layer_backward": (None, [_HANDLE, _HANDLE, _TENSOR, POINTER(Gradients), c_void_p]),
    "sy_layer_reload_experts": (None, [_HANDLE]),
    "sy_layer_check": (None, [_HANDLE]),
    "sy_layer_stats": (None, [_HANDLE, POINTER(RoutingStats)]),
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
            try:
                function = getattr(library, name)
            except AttributeError:
                raise SwitchyardError("unsupported", f"{path} lacks {name}: install library and Python "
                                      "package of one version") from None
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
            try:
                status = function(*arguments)
            except ctypes.ArgumentError as error:
                raise invalid(f"{name}: {error}") from None
            if status != 0:
                message = self._library.sy_last_error().decode()
                raise SwitchyardError(self._library.sy_status_name(status).decode(), message)

        self.__dict__[name] = checked
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

    _num_inside = 0
    _is_done = False
    _within = None
    pointer = None

    def __init__(self, free, within=None):
        self._free = getattr(native, free)  # by the time it is called, modules may be gone
        self.pointer = c_void_p()
        self._within = within
        if within is not None:
            within._num_inside += 1

    def out(self):
        return byref(self.pointer)

    def __del__(self, is_finalizing=sys.is_finalizing):
        self._is_done = True
        if self._num_inside > 0 or is_finalizing():  # the end of the process frees everything
            return
        pointer, self.pointer = self.pointer, None
        if pointer:
            self._free(pointer)
        within, self._within = self._within, None
        if within is not None:
            within._num_inside -= 1
            if within._is_done:
                within.__del__()
