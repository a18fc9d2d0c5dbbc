"""Errors, and what is no value for the C interface."""

import operator
from ctypes import c_int32, c_int64, c_uint64


class SwitchyardError(RuntimeError):
    """What went wrong: `code` is the status' name ("invalid argument", "timeout", ...)."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code

    def __reduce__(self):
        return type(self), (self.code, str(self))


def invalid(message):
    return SwitchyardError("invalid argument", message)


def no_backward(name, otherwise=""):
    return SwitchyardError(
        "unsupported", f"{name} requires a gradient, and there is no backward pass here: {otherwise}call "
                       f"under torch.no_grad() or torch.inference_mode(), or give {name}.detach()")


INTEGERS = {c_int32: (-2**31, 2**31 - 1), c_int64: (-2**63, 2**63 - 1),
             c_uint64: (0, 2**64 - 1)}


def integer(name, value, kind=c_int32):
    """`value` as an integer that fits, or an error that names it: ctypes would cut off its bits."""
    low, high = INTEGERS[kind]
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(f"{name}={value!r} is no integer") from None
    if not low <= number <= high:
        raise invalid(f"{name}={number} is not in {low} to {high}")
    return number


class NotCopied:
    """Objects of memory, threads, ranks or GPUs that the library holds."""

    def __reduce_ex__(self, protocol):
        raise SwitchyardError(
            "unsupported", f"a {type(self).__name__} is held by the library and cannot be copied or "
                           "pickled: make another one, from the same arrays or checkpoint, where "
                           "it is wanted")
