"""A layer's own auxiliary losses, and statistics of its routing."""

import ctypes
import math
import sys
from ctypes import byref

from ._errors import invalid
from ._memory import copy_of
from ._native import choose, initialised, native
from ._structs import LossConfig, RoutingStats

VALUES = ("balance", "z", "importance", "device", "communication", "entropy", "total")
_OPTIONS = (*VALUES[:-1], "scope", "share", "sequence_length", "devices", "devices_per_token")


def config_of(losses, trainable):
    """The struct for losses={...}, or None where there are none."""
    if losses is None:
        return None
    if not isinstance(losses, dict):
        raise invalid(f"losses={losses!r} is no dict of coefficients")
    if not trainable:
        raise invalid("losses want a layer with trainable=True")
    for name in losses:
        if name not in _OPTIONS:
            raise invalid(f"losses have no {name!r}: want some of {', '.join(_OPTIONS)}")
    config = initialised(LossConfig, "loss_config")
    words = {"scope": "sy_loss_scope", "share": "sy_balance_share"}
    for name, value in losses.items():
        setattr(config, name, choose(name, value, words[name]) if name in words else value)
    return config


def values_of(saved, num_experts, device):
    """[7] f64 and [E] i64, of losses and counts before any is dropped, copies where the layer is; None
    where the forward has no losses."""
    address = native.saved_losses(saved.pointer)
    if not address:
        return None
    groups = ctypes.c_int64()
    counts = native.saved_counts(saved.pointer, byref(groups))
    counts = copy_of(counts, (groups.value, num_experts), device, "i8").sum(0)
    return copy_of(address, (len(VALUES),), device, "f8"), counts


def counts_for(loss_counts, config, num_experts):
    """[E] i64 for a backward, or None where losses do not go by counts of others."""
    if config is None or config.scope != choose("scope", "global", "sy_loss_scope"):
        return None
    torch = sys.modules["torch"]
    if not isinstance(loss_counts, torch.Tensor) or loss_counts.shape != (num_experts,):
        raise invalid(f"losses of the scope 'global' want layer.loss_counts as a tensor [{num_experts}], the "
                      "sums of layer.counts() over ranks and steps, before the backward")
    return loss_counts.detach().long().contiguous()


def stats_of(layer, num_experts, top_k, call=None):
    """Of the handle's last forward, as a dict of numbers and lists; what there is not is left out.
    @param call  native.layer_stats, or another with its arguments."""
    counts, by_choice = (ctypes.c_int64 * num_experts)(), (ctypes.c_double * top_k)()
    found = RoutingStats(counts=counts, dropped_by_choice=by_choice)
    (call or native.layer_stats)(layer, byref(found))
    values = {name: getattr(found, name) for name, kind in RoutingStats._fields_
              if kind in (ctypes.c_double, ctypes.c_int64)}
    stats = {name: value for name, value in values.items() if not math.isnan(value)}
    stats["counts"] = list(counts)
    if "dropped_assignments" in stats:
        stats["dropped_by_choice"] = list(by_choice)
    return stats
