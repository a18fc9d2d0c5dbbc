"""from_pretrained(): experts go from the file to where they are computed with, past torch."""

import copy
import os
import re
import threading
from unittest import mock

import torch

from .._layer import Layer
from .._native import SwitchyardError
from . import _arrays, _block, _forms
from ._accelerate import Replaced, accelerate, install, release
from ._held import HeldExperts

_lock = threading.Lock()


def from_pretrained(path, model_class=None, device="cpu", weights="exact", threads=None, **options):
    """A model with its Mixture-of-Experts blocks run by Switchyard: as model_class.from_pretrained(
    path, **options) (None: AutoModelForCausalLM) and then accelerate(), but the experts' weights are
    read from the checkpoint straight into their place, so that they are in memory once at all times.

    device   "cpu" or "cuda[:N]", of the whole model.
    weights  "exact", or on a CPU "q8".

    What Switchyard cannot read is loaded by transformers and then given to accelerate(). report(model)
    says what became of each block.
    """
    import transformers

    if weights not in ("exact", "q8"):
        raise SwitchyardError("invalid argument", f"weights={weights!r} is none of exact, q8")
    model_class = model_class or transformers.AutoModelForCausalLM
    threads = torch.get_num_threads() if threads is None else threads
    folder = _folder_of(path, options)
    if torch.device(device).type != "cpu":
        options["device_map"] = {"": device}
    done = []

    def load(model, *arguments, **named):
        """In place of transformers' own step: the model is made, and nothing of it loaded."""
        taken = _take_all(model, folder, device, weights, threads, done)
        try:
            result = original(model, *arguments, **named)
        finally:
            for module, parameters in taken:
                module._parameters.update(parameters)
        return result

    with _lock:
        original = transformers.PreTrainedModel._load_pretrained_model
        with mock.patch.object(transformers.PreTrainedModel, "_load_pretrained_model",
                               staticmethod(load)):
            model = model_class.from_pretrained(path, **options)
    return _finish(model, done, device, weights, threads)


def _folder_of(path, options):
    """Where the checkpoint's files are."""
    if os.path.isdir(path):
        return os.fspath(path)
    from huggingface_hub import snapshot_download

    names = ("revision", "token", "cache_dir", "local_files_only")
    return snapshot_download(path, allow_patterns=["*.safetensors", "*.json"],
                             **{name: options[name] for name in names if name in options})


def _take_all(model, folder, device, weights, threads, done):
    """Reads the experts of each block that Switchyard can, and takes the module's parameters away so
    that transformers loads nothing for them. Returns them with their modules."""
    taken, layers = [], []
    for name, module in model.named_modules():
        index = re.search(r"\.(\d+)\.", name)
        form = _forms.of(module)
        if form is None or form.has_router_only or index is None:
            continue
        try:
            _arrays.check(module, form)
            layer = Layer.from_checkpoint(
                folder, int(index.group(1)), device=device, compute=module.down_proj.dtype,
                num_threads=threads, weights=weights, shared=False)
        except (_arrays.NotTaken, SwitchyardError):
            continue  # transformers loads it, and accelerate() says what became of it
        held = HeldExperts.of_layer(module, form, layer, weights)
        names = _arrays.parameter_names(form)
        parameters = {part: module._parameters.pop(part) for part in names}
        for parameter in parameters.values():
            parameter._is_hf_initialized = True
        taken.append((module, parameters))
        done.append((name, module, held))
        layers.append(index.group(1))
    if taken:  # or transformers would list what the file has of them as unexpected
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            rf"\.({'|'.join(layers)})\..*experts\."}
    return taken


def _finish(model, done, device, weights, threads):
    modules = dict(model.named_modules())
    replaced = []
    for name, module, held in done:
        place = name.rpartition(".")[0]
        block = modules[place]
        if not _is_read_right(module, held):
            release(model)
            raise SwitchyardError("bad file", f"{name}: Switchyard's experts do not compute what "
                                              f"{type(module).__name__} does")
        router = held.form.router(block)
        held.add_hooks()
        extent = install(module, block, held, router)
        replaced.append(Replaced(place, type(block).__name__, extent, held.num_bytes))
    result = accelerate(model, device, weights, threads)
    names = {block.name for block in replaced}
    result.kept = [block for block in result.kept if block.name not in names]
    result.replaced = replaced + result.replaced
    return model


@torch.no_grad()
def _is_read_right(module, held):
    """As _block.are_proved(), by a module of the few experts that a token needs."""
    few = copy.copy(module)
    few.__dict__ = dict(module.__dict__, _parameters={}, num_experts=min(
        held.num_experts, max(2, held.layer.top_k)))
    experts = [held.read(expert) for expert in range(few.num_experts)]
    for name in _arrays.parameter_names(held.form):
        few._parameters[name] = torch.nn.Parameter(torch.stack([e[name] for e in experts]),
                                                   requires_grad=False)
    return _block.are_proved(few, held, held.layer.top_k, few.num_experts)
