"""experts_implementation="switchyard", transformers' own way to choose who computes experts."""

import threading

import torch

from .._native import SwitchyardError
from . import _arrays, _forms
from ._held import HeldExperts

_lock = threading.Lock()


def register():
    """Adds "switchyard" to what from_pretrained(experts_implementation=...) takes."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError("switchyard.transformers needs transformers 5.0 or newer") from error
    ALL_EXPERTS_FUNCTIONS.register("switchyard", experts_forward)


def experts_forward(module, hidden_states, *routing, **named):
    """The forward of an experts module. Its weights become Switchyard's at the first call; release()
    gives them back."""
    held = module.__dict__.get("_switchyard")
    if held is None:
        held = _take(module)
    return held(hidden_states, *_forms.ids_and_weights(*routing, **named))


def _take(module):
    if _arrays.is_compiling():
        raise SwitchyardError("unsupported", "weights become Switchyard's at the first call, which "
                              "torch.compile cannot hold: call the model once before, or accelerate() it")
    with _lock:
        held = module.__dict__.get("_switchyard")
        if held is None:
            try:
                form = _forms.of(module)
                _arrays.check(module, form)
                held = HeldExperts(module, form, torch.get_num_threads(), "exact")
            except _arrays.NotTaken as reason:
                raise SwitchyardError("unsupported", f"{type(module).__name__}: {reason}; choose "
                                                     "another experts_implementation") from None
            held.hold()
            module._switchyard = held
    return held
