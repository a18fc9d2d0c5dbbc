"""Memory that layers use in turn."""

from ._errors import NotCopied, invalid
from ._native import Handle, native
from ._streams import CurrentStream
from ._tensors import CUDA, current_device, device_of


class Scratch(NotCopied):
    """Memory of a GPU in which a call of a Layer leaves nothing: rows on their way through experts, there and
    back. Layers made with scratch=that share it, whatever their shapes, so that a model's layers take the
    largest's once. Their calls take turns, and one on another stream than the last waits for that on the GPU.
    It grows with the calls, which moves it: before CUDA graphs are captured give max_tokens, or make the
    largest call of every layer."""

    def __init__(self, device="cuda"):
        kind, number = device_of(device)
        if kind != CUDA:
            raise invalid(f"device={device!r} of a scratch: want a GPU, only layers there have one")
        self._handle = Handle("scratch_free")
        native.scratch_create(current_device() if number is None else number, self._handle.out())
        self._order = CurrentStream()


def handle_of(scratch):
    """What the library calls it; None where a layer has its own."""
    if scratch is None:
        return None
    if not isinstance(scratch, Scratch):
        raise invalid(f"scratch={scratch!r} is no switchyard.Scratch")
    return scratch._handle.pointer
