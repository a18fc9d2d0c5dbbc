"""Gradients through torch.autograd: what a forward saves for its backward, and who owns it.

A forward's state lies in the library, in a Saved. Autograd, checkpointing and torch.compile keep
tensors only, so a tensor of one number stands for it: what shares that tensor's memory keeps the state,
and when nobody does any more, it goes back to be used by another forward.
"""

import ctypes
import functools
import importlib
import itertools
import sys
import weakref

from ._errors import SwitchyardError, invalid, no_backward
from ._memory import copy_of
from ._native import Handle, choose, native
from ._recycled import Recycled
from ._structs import Gradients
from ._tensors import describe, is_capturing, is_torch, pointer, stream_of, views

# In the order in which operators take them.
PARAMETERS = ("gate", "router_bias", "w13", "w2", "b13", "b2", "shared_w13", "shared_w2",
              "shared_gate", "noise_gate", "router_network", "constant_experts", "gating_residual")
# Behind them, of a call, where its router takes them.
CALLS = ("previous_logits",)
ROUTERS = ("gate", "noise_gate", "router_bias", "router_network", "gating_residual", *CALLS)


class Saved(Handle):
    """The state of a forward, and where the gradients of its backward may lie."""

    def __init__(self, memory):
        super().__init__("saved_free")
        self.memory_of_gradients = memory


class Pool:
    """States of forwards that are not yet, or no longer, waiting for their backward."""

    def __init__(self, recompute):
        self._recompute = choose("recompute", recompute, "sy_recompute")
        self._memory = Recycled()
        self._free = []
        self._in_graphs = []  # whose memory a graph uses as long as it likes

    def take(self):
        try:
            return self._free.pop()
        except IndexError:  # all are in use
            saved = Saved(self._memory)
            native.saved_create(self._recompute, saved.out())
            return saved

    def put_back(self, saved, captured):
        (self._in_graphs if captured else self._free).append(saved)


_numbers = itertools.count(1)
_waiting = weakref.WeakValueDictionary()


class _Waiting(ctypes.c_int64 * 1):
    """The memory of the tensor that stands for a saved forward."""

    def __del__(self):
        self.pool.put_back(self.saved, self.captured)


def tensor_for(saved, pool, used, backward, y):
    """A tensor that keeps `saved`, and its backward(saved, dy, weight, parameters, wants).
    @param used  The Parameters that the forward has used.
    @param y     The forward's result."""
    memory = _Waiting(next(_numbers))
    memory.captured = y.is_cuda and is_capturing(y)
    memory.saved, memory.pool, memory.backward = saved, pool, backward
    memory.used, memory.versions = used, used.versions()
    _waiting[memory[0]] = memory
    return sys.modules["torch"].frombuffer(memory, dtype=sys.modules["torch"].int64)


def gradients(token, dy, weight, parameters, wants, **losses):
    """[x, weight, *PARAMETERS], and those of CALLS that are among `parameters`: gradients where wanted,
    else None. @param losses  dlogits, or none."""
    memory = _waiting.get(int(token))
    if memory is None:
        raise invalid("what the forward saved for this backward is gone: a hook has copied the tensor "
                      "that stands for it")
    if not native.saved_ready(memory.saved.pointer):
        raise invalid("this forward's saved state was used by a backward already: one forward has one "
                      "backward, also with retain_graph=True; run the forward again")
    memory.used.require(memory.versions)
    return memory.backward(memory.saved, dy, weight, dict(zip(PARAMETERS + CALLS, parameters)), wants,
                           **losses)


def available(weight, wants):
    """Of `wants`, for x, weight and PARAMETERS, what there is: with a given routing none of the
    router's."""
    names = ("x", "weight", *PARAMETERS, *CALLS)
    return [bool(wish and (weight is None or name not in ROUTERS))
            for name, wish in zip(names, wants)]


def wants_gradient(*tensors):
    """Whether torch would want a gradient of any of these."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled() and any(
        is_torch(t) and t.requires_grad for t in tensors)


def check_call(x, weight, out):
    """Of a call of which torch wants gradients."""
    if out is not None:
        raise invalid("out= is given, and torch wants gradients: a result that has them is a new tensor; "
                      "leave out= away, or call under torch.no_grad()")
    for name, tensor in (("x", x), ("weight", weight)):
        if not is_torch(tensor) and not (name == "weight" and tensor is None):
            raise invalid(f"{name} is a {type(tensor).__name__}, and gradients want a tensor of torch: "
                          "give one, or call under torch.no_grad()")


def check_in_place(w13_layout, transposed, option="trainable=True"):
    if transposed or w13_layout != "gate-up":
        raise SwitchyardError("unsupported", f"{option} uses weights in place: want w13 [E, 2I, H] "
                                             "and w2 [E, H, I] with w13_layout='gate-up'")


def run_with_logits(target, x, parameters):
    """target.save_with_logits(...) as a node of autograd's graph: the result, and the logits."""
    return _function_with_logits().apply(target, x, *parameters)


@functools.cache
def _function_with_logits():
    torch = sys.modules["torch"]

    class SwitchyardWithLogitsBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, target, x, *parameters):
            y, logits, token = target.save_with_logits(x)
            ctx.save_for_backward(token, *parameters)
            return y, logits

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy, dlogits):
            token, *parameters = ctx.saved_tensors
            _, x, *rest = ctx.needs_input_grad
            dx, _, *others = gradients(token, dy, None, parameters, (x, False, *rest),
                                       dlogits=dlogits)
            return (None, dx, *others)

    return SwitchyardWithLogitsBackward


def logits_of(saved, shape, device):
    """A copy of what a layer's forward has saved of its router."""
    return copy_of(native.saved_logits(saved.pointer), shape, device)


def in_order(**parameters):
    """As PARAMETERS names them, None where there is none."""
    return tuple(parameters.get(name) for name in PARAMETERS)


def run(target, x, expert, weight, parameters):
    """target.save(...) as a node of autograd's graph."""
    return _function().apply(target, x, expert, weight, *parameters)


@functools.cache
def _function():
    torch = sys.modules["torch"]

    class SwitchyardBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, target, x, expert, weight, *parameters):
            y, token = target.save(x, expert, weight)
            # The parameters as well: torch then tells of one that has changed before the backward.
            ctx.save_for_backward(token, weight, *parameters)
            return y

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            token, weight, *parameters = ctx.saved_tensors
            _, x, _, w, *rest = ctx.needs_input_grad
            dx, dweight, *others = gradients(token, dy, weight, parameters, (x, w, *rest))
            return (None, dx, None, dweight, *others)

    return SwitchyardBackward


def _memory_for(saved, like, kept, device, shape=None):
    """Memory for a gradient of the tensor `like`: in its own type where the library writes that.
    @param shape  Of a gradient that is as large as a call; else it is that of a parameter, whose memory
                  is used again."""
    torch = sys.modules["torch"]
    dtype = like.dtype if like.dtype in kept else torch.float32
    if shape is None:
        return saved.memory_of_gradients.empty(like.shape, dtype, device)
    return torch.empty(shape, dtype=dtype, device=device)


def run_backward(call, saved, dy, weight, parameters, wants, compute, hidden, dlogits=None,
                 loss_scale=1.0, loss_counts=None):
    """Memory for the gradients that are wanted, the library's call, and the gradients.
    @param call     of the library, with a saved forward, dy, a struct of gradients and a stream,
                    behind dy as a tensor.
    @param compute  torch's name for the compute type.
    @param dlogits  Of auxiliary losses, by tokens.
    @param loss_scale  Of the gradient of the layer's own losses; loss_counts [E] i64 for those by the
                       counts of others."""
    torch = sys.modules["torch"]
    floats = (torch.float32, torch.bfloat16, torch.float16)
    kept = {"tokens": floats, "gate": floats, "w13": (torch.float32, getattr(torch, compute))}
    kept["noise_gate"] = floats
    kept["w2"] = kept["shared_w13"] = kept["shared_w2"] = kept["w13"]
    of = {"tokens": dy, "weight": weight, **parameters}
    rows = dy.detach().contiguous().reshape(-1, hidden)
    if rows.data_ptr() % 16 != 0:  # a part of another tensor
        rows = rows.clone()
    out = {}
    for (name, like), wanted in zip(of.items(), wants):
        if not wanted:
            continue
        shape = None
        if name == "tokens":
            shape = rows.shape
        elif name in ("weight", "previous_logits"):
            shape = (rows.shape[0], like.shape[-1])
        elif name == "shared_gate":
            shape = (hidden,)
        out[name] = _memory_for(saved, like, kept.get(name, ()), rows.device, shape)
    if dlogits is not None:
        dlogits = dlogits.detach().float().contiguous().reshape(rows.shape[0], dlogits.shape[-1])
    if loss_counts is not None:
        loss_counts = loss_counts.to(rows.device)
    v = views(**out, dlogits=dlogits, loss_counts=loss_counts)
    struct = Gradients(loss_scale=loss_scale, **{name: pointer(view) for name, view in v.items()})
    given, kept_of_dy = describe("dy", rows)
    call(rows, saved.pointer, given, ctypes.byref(struct), stream_of(rows))
    return [out[name].reshape(like.shape).to(like.device, like.dtype) if name in out else None
            for name, like in of.items()]


class Copied:
    """Tensors of which an object that does not train has copies: torch may want gradients of them."""

    def __init__(self, **tensors):
        # One that was computed from others is not kept by anybody, but those others are.
        self._tensors = [(name, None if t.grad_fn is not None else weakref.ref(t))
                         for name, t in tensors.items() if is_torch(t)]

    def refuse(self, otherwise):
        """An error where torch wants a gradient now. @param otherwise  As of forward_only()."""
        if not self._tensors or not sys.modules["torch"].is_grad_enabled():
            return
        for name, found in self._tensors:
            tensor = None if found is None else found()
            if found is None or (tensor is not None and tensor.requires_grad):
                raise no_backward(name, otherwise)


_in_training = weakref.WeakSet()


@functools.cache
def _watch_optimizers():
    module = importlib.import_module("torch.optim.optimizer")
    if not hasattr(module, "register_optimizer_step_post_hook"):
        return  # this torch has no fused optimizers on a CPU: each write is counted

    def hook(optimizer, *_):
        ids = {id(t) for group in optimizer.param_groups for t in group["params"]}
        for parameters in list(_in_training):
            parameters.optimized(ids)

    module.register_optimizer_step_post_hook(hook)


class Given:
    """In the place of Parameters, of weights that a call is given and that are used where they lie:
    torch tells of one that has changed before the backward."""

    def versions(self):
        return None

    def require(self, versions):
        pass


class Parameters:
    """The tensors of the caller that a trainable object computes with: where they lie, or, where the
    library takes another type, as copies that follow them. By name, in the order of PARAMETERS."""

    _IN_PLACE = {"gate": ("float32", "bfloat16", "float16"),
                 "noise_gate": ("float32", "bfloat16", "float16"), "router_bias": ("float32",),
                 "router_network": ("float32",), "constant_experts": ("float32",),
                 "gating_residual": ("float32",),
                 "b13": ("float32",), "b2": ("float32",), "shared_gate": ("float32",)}
    # The library keeps these in a form of its own.
    _PACKED = {"w13", "w2", "b13", "b2", "shared_w13", "shared_w2"}

    def __init__(self, gpu=None, compute=None, **tensors):
        """@param gpu      Number of the GPU that they lie on; None: they lie on a CPU.
        @param compute  torch's name for the compute type, on a GPU."""
        self._gpu, self._compute = gpu, compute
        self._tensors = {name: tensors.get(name) for name in PARAMETERS}
        self.used = {name: self._use(name, tensor) for name, tensor in self._tensors.items()}
        self._addresses = self._places()
        self._steps = dict.fromkeys(PARAMETERS, 0)
        self._versions = self.versions()
        _in_training.add(self)
        _watch_optimizers()

    def versions(self):
        """By name, what changes with every write to a tensor."""
        return {name: (tensor._version, self._steps[name])
                for name, tensor in self._tensors.items() if tensor is not None}

    def optimized(self, ids):
        """An optimizer has made a step with the tensors of these ids, which torch does not count as a
        write where it is fused."""
        for name, tensor in self._tensors.items():
            self._steps[name] += id(tensor) in ids

    def _places(self):
        return [None if t is None else t.data_ptr() for t in self._tensors.values()]

    def _use(self, name, tensor):
        if tensor is None:
            return None
        if not is_torch(tensor):
            raise invalid(f"{name} is a {type(tensor).__name__}, and trainable=True wants tensors of "
                          "torch")
        place = "cpu" if self._gpu is None else f"cuda:{self._gpu}"
        if str(tensor.device) != place:
            raise invalid(f"{name} lies on {tensor.device}, want {place}: trainable=True uses tensors in "
                          "place")
        if tensor.is_inference():
            raise invalid(f"{name} was made in torch.inference_mode(), where torch counts no changes: "
                          "make it outside, or clone it")
        values = tensor.detach()
        if name == "shared_gate" and values.ndim == 2 and values.shape[0] == 1:
            values = values.reshape(-1)
        types = self._IN_PLACE.get(name)
        if name == "gate" and self._gpu is not None:
            types = ("float32", self._compute)
        if types is not None and not (
                values.is_contiguous() and str(values.dtype)[6:] in types):
            if not values.dtype.is_floating_point:
                raise invalid(f"{name} is {str(values.dtype)[6:]}, want floating-point numbers")
            values = values.to(sys.modules["torch"].float32, copy=True).contiguous()
        return values

    @property
    def tensors(self):
        """The caller's, None where there is none."""
        return tuple(self._tensors.values())

    def follow(self):
        """Whether a tensor of the experts was written to, by torch's count, since this was last
        asked."""
        if self._places() != self._addresses:
            raise invalid("a parameter no longer lies where it did when this was made: trainable=True uses "
                          "tensors in place, and assigning .data or module.to() moves them; make "
                          "another one")
        versions = self.versions()
        if versions == self._versions:
            return False
        changed = {name for name in PARAMETERS if versions.get(name) != self._versions.get(name)}
        self.copy_anew()
        self._versions = versions
        return self._gpu is None and bool(changed & self._PACKED)

    def require(self, versions):
        """An error where a tensor was written to since it had these versions."""
        now = self.versions()
        changed = ", ".join(name for name in versions if now[name] != versions[name])
        if changed:
            raise invalid(f"{changed} changed between this forward and its backward: go back first, then "
                          "let the optimizer make its step")

    def copy_anew(self):
        """Copies get the values that their tensors now have."""
        for name, tensor in self._tensors.items():
            used = self.used[name]
            if used is not None and used.data_ptr() != tensor.data_ptr():
                used.copy_(tensor.detach().reshape(used.shape))
