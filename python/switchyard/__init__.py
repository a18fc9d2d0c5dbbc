"""Switchyard: the Mixture-of-Experts layer for tensors of any framework with DLPack.

Pure Python over the C interface of libswitchyard.so. SWITCHYARD_LIBRARY names the library where it
does not lie beside this package.
"""

from . import losses, metrics
from ._chain import Chain
from ._checkpoint import make_checkpoint
from ._expert_parallel import Dispatched, ExpertParallel, FlatDispatched
from ._layer import Layer
from ._errors import SwitchyardError
from ._mixing import soft_moe
from ._perft import Perft
from ._ranks import Communicator
from ._router import Assignment, Router, update_selection_bias, update_thresholds
from ._scratch import Scratch
from ._stages import Experts, experts, route, route_check

__all__ = [
    "Assignment",
    "Chain",
    "Communicator",
    "Dispatched",
    "ExpertParallel",
    "Experts",
    "FlatDispatched",
    "Layer",
    "Perft",
    "Router",
    "Scratch",
    "SwitchyardError",
    "experts",
    "losses",
    "make_checkpoint",
    "metrics",
    "route",
    "route_check",
    "soft_moe",
    "update_selection_bias",
    "update_thresholds",
]
