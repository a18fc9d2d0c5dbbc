"""accelerate(): the Mixture-of-Experts blocks of a loaded model become Switchyard's."""

import dataclasses

import torch

from .._native import SwitchyardError
from . import _arrays, _block, _forms
from ._held import HeldExperts


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A block that Switchyard runs."""

    name: str        # in model.named_modules()
    kind: str        # the class of transformers
    extent: str      # "block": router and experts in one call; "experts": after the model's router
    num_bytes: int   # of the experts' weights


@dataclasses.dataclass(frozen=True)
class Kept:
    """A block that stays with transformers."""

    name: str
    kind: str
    reason: str


class Accelerated:
    """What accelerate() did: `replaced`, `kept`, and undo(), which the end of a `with` calls too."""

    def __init__(self, model):
        self.model = model
        self.replaced = []
        self.kept = []

    def undo(self):
        """The model is as it was: its parameters hold the same values again."""
        release(self.model)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.undo()

    def __str__(self):
        total = len(self.replaced) + len(self.kept)
        megabytes = sum(block.num_bytes for block in self.replaced) / 1e6
        lines = [f"Switchyard runs {len(self.replaced)} of {total} Mixture-of-Experts blocks; their "
                 f"experts have {megabytes:.0f} MB, held once"]
        lines += [f"  {b.name}: {b.kind}, {b.extent}, {b.num_bytes / 1e6:.1f} MB"
                  for b in self.replaced]
        lines += [f"  {b.name}: {b.kind} stays with transformers: {b.reason}" for b in self.kept]
        return "\n".join(lines)


def accelerate(model, device=None, weights="exact", threads=None):
    """Replaces the forward of a model's Mixture-of-Experts blocks, in place, and returns an
    Accelerated that says what it did and can undo it.

    A block is taken only as far as it was proved on random tokens: whole (router and experts in one
    call) where its router is one that Switchyard has, else its experts behind the model's own
    router; what is neither stays as it was, with the reason. Shared experts stay torch's modules.

    device   where the blocks run; None: where their weights lie. They are moved there.
    weights  "exact", or on a CPU "q8": 8 bits with a scale for every 32 of them.
    threads  on a CPU; None: as many as torch has.

    On a CPU the experts' weights are placed anew, block by block, and torch's memory of them is given
    back: never more than one block's are there twice. state_dict() and save_pretrained() read them
    back (with "q8": what they stand for).
    """
    if not isinstance(model, torch.nn.Module):
        raise SwitchyardError("invalid argument",
                              f"model is a {type(model).__name__}, want a torch.nn.Module")
    if weights not in ("exact", "q8"):
        raise SwitchyardError("invalid argument", f"weights={weights!r} is none of exact, q8")
    threads = torch.get_num_threads() if threads is None else threads
    done = Accelerated(model)
    modules = dict(model.named_modules())
    try:
        for name, module in modules.items():
            place = name.rpartition(".")[0]
            block = modules[place]
            form = _forms.of(module)
            if form is None:
                if _arrays.are_experts(module) and place not in (b.name for b in done.kept):
                    done.kept.append(Kept(
                        place, type(block).__name__,
                        f"{type(module).__name__} is none of the experts whose implementation "
                        "transformers lets others choose"))
                continue
            try:
                extent, num_bytes = _take(module, form, block, device, weights, threads)
            except (_arrays.NotTaken, SwitchyardError) as reason:
                if getattr(reason, "code", "unsupported") != "unsupported":
                    raise
                done.kept.append(Kept(place, type(block).__name__, str(reason)))
            else:
                done.replaced.append(Replaced(place, type(block).__name__, extent, num_bytes))
    except BaseException:
        release(model)
        raise
    model._switchyard_report = done
    return done


def report(model):
    """The Accelerated of a model that accelerate() or from_pretrained() has changed; else None."""
    return model.__dict__.get("_switchyard_report")


def release(model):
    """Ends what accelerate(), or experts_implementation="switchyard", did to a model's modules."""
    model.__dict__.pop("_switchyard_report", None)
    for module in model.modules():
        mine = module.__dict__.pop("_switchyard", None)
        if mine is None:
            continue
        module.__dict__.pop("forward", None)
        if isinstance(mine, HeldExperts):
            mine.let_go()


def _take(module, form, block, device, weights, threads):
    """Returns the extent and the bytes of the experts."""
    if "_switchyard" in module.__dict__:
        raise _arrays.NotTaken("Switchyard runs it already")
    _arrays.check(module, form)
    if device is not None:
        module.to(device)
    held, router = _held_whole(module, form, block, weights, threads)
    if held is None:
        if form.has_router_only:
            raise _arrays.NotTaken("its router, or its experts, are none that Switchyard has")
        held = HeldExperts(module, form, threads, weights)
        if not _block.are_proved(module, held, min(2, held.num_experts)):
            raise _arrays.NotTaken("Switchyard's experts do not compute the same")

    extent = install(module, block, held, router)
    held.hold()
    return extent, held.num_bytes


def install(module, block, held, router):
    """Puts `held` in the place of a module's forward, and of its block's where `router` is one that
    held.layer has. Returns the extent."""

    def forward(*arguments, **named):
        return held(*held.form.arguments(*arguments, **named))

    module._switchyard, module.forward = held, forward
    if router is not None and not block.training:
        fast = _block.FastBlock(block, held, router)
        if _block.is_proved(block, fast):
            block._switchyard, block.forward = fast, fast.forward
            return "block"
    return "experts"


@torch.no_grad()
def _held_whole(module, form, block, weights, threads):
    """The module's weights in a Layer with the block's router, and the router; or None twice."""
    router = form.router(block)
    if router is None:
        return None, None
    rule = form.rule(block, router)
    if rule is None:
        return None, None
    held = HeldExperts(module, form, threads, weights, rule)
    return (held, router) if _block.are_proved(module, held, rule["top_k"]) else (None, None)
