"""torch.compile: calls as operators of torch, which it puts into its graph without looking inside.

They are there from torch 2.4 on, once a Layer or an Experts object is made while torch is imported. An
operator knows its object by a number: an object is no argument of an operator."""

import itertools
import sys
import threading
import weakref

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
        if _library is not None or not hasattr(getattr(torch, "library", None), "register_fake"):
            return
        _library = torch.library.Library("switchyard", "FRAGMENT")
        for name, schema, run, fake in _operators(torch):
            _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            _library.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake("switchyard::" + name, fake, lib=_library)
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

    return (("layer", "(Tensor x, Tensor? expert, Tensor? weight, SymInt number) -> Tensor", layer,
             result),
            ("layer_into", "(Tensor x, Tensor? expert, Tensor? weight, Tensor(a!) out, "
             "SymInt number) -> ()", into, lambda *_: None),
            ("experts", "(Tensor x, Tensor expert, Tensor weight, SymInt number) -> Tensor", experts,
             result),
            ("experts_into", "(Tensor x, Tensor expert, Tensor weight, Tensor(a!) out, "
             "SymInt number) -> ()", into, lambda *_: None))


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
