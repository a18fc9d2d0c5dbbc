"""Mixture-of-Experts models of transformers (5.0 or newer), run by Switchyard.

    model = AutoModelForCausalLM.from_pretrained(path)
    print(switchyard.transformers.accelerate(model))     # in place; .undo(), or `with`, ends it

    model = switchyard.transformers.from_pretrained(path)  # experts straight from the file

or, once this module is imported, transformers' own way to choose:

    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="switchyard")

Inference only: a call that would need gradients is an error.
"""

from ._accelerate import Accelerated, accelerate, release, report
from ._implementation import register
from ._loading import from_pretrained

register()

__all__ = ["Accelerated", "accelerate", "from_pretrained", "release", "report"]
