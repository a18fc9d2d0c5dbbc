"""torch.compile: calls as operators of torch, which it puts into its graph without looking inside.

They are there from torch 2.4 on, once a Layer or an Experts object is made while torch is imported. An
operator knows its object by a number: an object is no argument of an operator."""

import itertools
import sys
import threading
import weakref

from . import _autograd

_numbers = itertools.count(1)
_objects = weakref.WeakValueDictionary()
_lock = threading.Lock()
_library = None


def _never():
    return False


# torch.compiler.is_compiling, once the operators are there.
is_compiling = _never


def number_of(target):
    """A number by which operators find `target`, for as long as it lives."""
    _register()
    number = next(_numbers)
    _objects[number] = target
    return number


def _register():
    global _library, is_compiling
    torch = sys.modules.get("torch")
    with _lock:
        registry = getattr(torch, "library", None)  # of operators
        if _library is not None or not hasattr(registry, "register_fake"):
            return
        _library = registry.Library("switchyard", "FRAGMENT")
        for name, schema, run, fake in _operators(torch):
            _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            _library.impl(name, run, "CompositeExplicitAutograd")
            registry.register_fake("switchyard::" + name, fake, lib=_library)
        for name, setup, backward in _derivatives(torch):
            registry.register_autograd("switchyard::" + name, backward, setup_context=setup,
                                     lib=_library)
        is_compiling = torch.compiler.is_compiling


def _operators(torch):
    """(name, schema, what it does, what it gives for tensors without values)."""

    def result(x, *_):
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def layer(x, expert, weight, number):
        return _objects[number].run(x, expert, weight, None)

    def into(x, expert, weight, out, number):
        _objects[number].run(x, expert, weight, out)

    def experts(x, expert, weight, number):
        return _objects[number].run(x, expert, weight)

    def train(x, expert, weight, *rest):  # a parameter each, which is here for its gradient; number
        return _objects[rest[-1]].save(x, expert, weight)

    def train_experts(*arguments):
        from ._stages import save_experts  # which imports this module

        return save_experts(*arguments)

    def saved(x, *_):
        return result(x), torch.empty(1, dtype=torch.int64, device="cpu")

    def backward(token, dy, weight, *rest):
        *parameters, wants = rest
        return tuple(torch.empty(0, device="cpu") if gradient is None else gradient for gradient in
                     _autograd.gradients(token, dy, weight, parameters, wants))

    def backward_fake(token, dy, weight, *rest):
        *parameters, wants = rest
        return tuple(result(like) if wanted else torch.empty(0, device="cpu")
                     for like, wanted in zip((dy, weight, *parameters), wants))

    parameters = ", ".join("Tensor? " + name for name in _autograd.PARAMETERS)
    gradients = ", ".join(["Tensor"] * (2 + len(_autograd.PARAMETERS)))
    return (("layer", "(Tensor x, Tensor? expert, Tensor? weight, SymInt number) -> Tensor", layer,
             result),
            ("layer_into", "(Tensor x, Tensor? expert, Tensor? weight, Tensor(a!) out, "
             "SymInt number) -> ()", into, lambda *_: None),
            ("experts", "(Tensor x, Tensor expert, Tensor weight, SymInt number) -> Tensor", experts,
             result),
            ("experts_into", "(Tensor x, Tensor expert, Tensor weight, Tensor(a!) out, "
             "SymInt number) -> ()", into, lambda *_: None),
            ("train", f"(Tensor x, Tensor? expert, Tensor? weight, {parameters}, SymInt number) -> "
             "(Tensor, Tensor)", train, saved),
            ("train_experts", "(Tensor x, Tensor expert, Tensor weight, Tensor w13, Tensor w2, "
             "Tensor? b13, Tensor? b2, str activation, float? alpha, float? limit, int? num_threads)"
             " -> (Tensor, Tensor)", train_experts, saved),
            ("train_backward", f"(Tensor token, Tensor dy, Tensor? weight, {parameters}, "
             f"bool[] wants) -> ({gradients})", backward, backward_fake))


def _derivatives(torch):
    """(operator, what it keeps for the way back, the way back)."""
    none = (None,) * len(_autograd.PARAMETERS)
    first = _autograd.PARAMETERS.index("w13")  # of w13, w2, b13, b2
    experts_end = first + 4

    def keep(ctx, weight, parameters, wants, output):
        ctx.save_for_backward(output[1], weight, *parameters)
        ctx.wants = wants

    def keep_train(ctx, inputs, output):
        needs = ctx.needs_input_grad
        wants = _autograd.available(inputs[2], [needs[0], *needs[2:-1]])
        keep(ctx, inputs[2], inputs[3:-1], wants, output)

    def keep_experts(ctx, inputs, output):
        needs = ctx.needs_input_grad
        spread = [*none[:first], *inputs[3:7], *none[experts_end:]]
        wants = [False] * first + list(needs[3:7]) + [False] * len(none[experts_end:])
        keep(ctx, inputs[2], spread, [needs[0], needs[2], *wants], output)

    def back(ctx, dy):
        found = torch.ops.switchyard.train_backward(*ctx.saved_tensors[:1], dy,
                                                    *ctx.saved_tensors[1:], ctx.wants)
        return [gradient if wanted else None for gradient, wanted in zip(found, ctx.wants)]

    def back_train(ctx, dy, _):
        dx, dweight, *rest = back(ctx, dy)
        return (dx, None, dweight, *rest, None)

    def back_experts(ctx, dy, _):
        dx, dweight, *rest = back(ctx, dy)
        return (dx, None, dweight, *rest[first:experts_end], None, None, None, None)

    return ("train", keep_train, back_train), ("train_experts", keep_experts, back_experts)


def layer(number, x, expert, weight, out):
    operators = sys.modules["torch"].ops.switchyard
    if out is None:
        return operators.layer(x, expert, weight, number)
    operators.layer_into(x, expert, weight, out, number)
    return out


def experts(number, x, expert, weight, out):
    operators = sys.modules["torch"].ops.switchyard
    if out is None:
        return operators.experts(x, expert, weight, number)
    operators.experts_into(x, expert, weight, out, number)
    return out


def with_gradients(target, number, x, expert, weight, parameters, out):
    """A call of which torch wants gradients. @param parameters  In the order of PARAMETERS."""
    _autograd.check_call(x, weight, out)
    if is_compiling():
        return sys.modules["torch"].ops.switchyard.train(x, expert, weight, *parameters, number)[0]
    return _autograd.run(target, x, expert, weight, parameters)


def experts_with_gradients(x, expert, weight, *rest):
    return sys.modules["torch"].ops.switchyard.train_experts(x, expert, weight, *rest)[0]
