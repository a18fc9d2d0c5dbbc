"""Memory of gradients on a CPU that torch has given back.

torch asks the system for each large tensor anew, which gives it page by page at the first write: a
gradient of 1 GB costs as long as a product with it. Gradients of one backward are as large as those of
the next, so what nobody holds any more is kept for it. Those of parameters alone: others are as large
as a call, and each size would be kept.
"""

import ctypes
import functools
import math
import sys

_LEAST_BYTES = 1 << 20  # smaller ones come from torch's heap, whose pages are there


@functools.cache
def _lent_type(num_bytes):
    class Lent(ctypes.c_char * num_bytes):
        """The memory of `base` while a tensor, or what shares its memory, holds it."""

        def __del__(self):
            self.owner.take_back(self.base)

    return Lent


class Recycled:
    """The memory that tensors of one object have had, by size: as much as they ever held at once."""

    def __init__(self):
        self._free = {}

    def empty(self, shape, dtype, device):
        """As torch.empty()."""
        torch = sys.modules["torch"]
        num_bytes = math.prod(shape) * _bytes_of(dtype)
        if device.type != "cpu" or num_bytes < _LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        try:
            base = self._free[num_bytes].pop()
        except (KeyError, IndexError):
            base = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        lent = _lent_type(num_bytes).from_address(base.data_ptr())
        lent.owner, lent.base = self, base
        return torch.frombuffer(lent, dtype=dtype).reshape(shape)

    def take_back(self, base):
        self._free.setdefault(base.numel(), []).append(base)


@functools.cache
def _bytes_of(dtype):
    return sys.modules["torch"].empty(0, dtype=dtype, device="cpu").element_size()
