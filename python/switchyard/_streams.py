"""The order of calls on CUDA streams, torch's."""

import sys
import threading


class Streams:
    """Calls on one object follow each other on the GPU in the order in which they were made, on the
    current stream or, when asynchronous, on a stream of the object's own."""

    def __init__(self):
        self._own = None
        self._lock = threading.Lock()  # calls only enqueue: nobody waits long
        self._last = None  # stream, event behind its work, and whether that was captured

    def run(self, call, async_, tensors):
        """What call() gives; with async_ a handle whose wait() gives it. `tensors` are what the
        call uses: the first says on which device."""
        with self._lock:
            return self._run(call, async_, tensors)

    def _run(self, call, async_, tensors):
        torch = sys.modules["torch"]
        device = tensors[0].device
        current = torch.cuda.current_stream(device)
        stream = self._asynchronous(torch, device) if async_ else current
        if async_:
            stream.wait_stream(current)
        self._follow(torch, stream, current)
        with torch.cuda.stream(stream):
            result = call()
            event = torch.cuda.Event()
            event.record(stream)
            captured = torch.cuda.is_current_stream_capturing()
        self._last = (stream, event, captured)
        if not async_:
            return result
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)  # its memory is in use until then
        return PendingOnStream(result, event, device)

    def _asynchronous(self, torch, device):
        if self._own is None:
            self._own = torch.cuda.Stream(device)
        return self._own

    def _follow(self, torch, stream, current):
        if self._last is None:
            return
        last, event, captured = self._last
        with torch.cuda.stream(current):
            capturing = torch.cuda.is_current_stream_capturing()
        # What ran before a capture has ended when the capture begins, and a capture runs nothing.
        if last != stream and captured == capturing:
            stream.wait_event(event)


class CurrentStream:
    """The order of calls that only use torch's current stream: one on another stream than the last
    call's waits for that there. While the stream stays the same it costs a comparison."""

    def __init__(self):
        self._lock = threading.Lock()
        self._last = None  # stream as an integer
        self._stream = None  # as torch has it
        self._captured = False

    def run(self, call, arguments, tensor, stream):
        """call(*arguments), which enqueues on `stream`, the current one of the device of `tensor`."""
        with self._lock:
            if stream != self._last:
                self._follow(tensor.device)
                self._last = stream
            return call(*arguments)

    def _follow(self, device):
        torch = sys.modules["torch"]
        last, captured = self._stream, self._captured
        with torch.cuda.device(device):
            self._stream = torch.cuda.current_stream()
            self._captured = torch.cuda.is_current_stream_capturing()
        # As in Streams: what ran before a capture has ended, and a capture runs nothing.
        if last is not None and captured == self._captured:
            self._stream.wait_stream(last)


class PendingOnStream:
    """A call under way on another stream."""

    def __init__(self, result, event, device):
        self._result = result
        self._event = event
        self._device = device

    def wait(self):
        """What the call gives; the current stream goes on once it is there. The host waits for
        nothing."""
        torch = sys.modules["torch"]
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        result = self._result
        if isinstance(result, torch.Tensor):
            result.record_stream(stream)
        return result
