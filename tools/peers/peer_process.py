"""What the peers of `bench --peer` have in common. The tool starts them by `python3 -c`, this file's
text in front of theirs.

A ratio to another program holds for one process on one card only: clocks follow the power drawn, and
a launch costs one program more than another. So most run here beside this library, on the same data,
each in a CUDA graph of its own, in turns with each other, the L2 cache flushed before each.
"""

import gc
import importlib
import importlib.metadata
import json
import os
import signal
import statistics
import sys
import traceback


class NoPeer(Exception):
    """Something that is needed is missing; the words say what."""


def needed(name, why):
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import may fail in any way, a missing library among them
        words = " ".join(str(error).split()) or type(error).__name__
        raise NoPeer(f"{why}: {words} (python3 is {sys.executable})") from None


def version_of(module, distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown"))


def torch_for(device):
    torch = needed("torch", "torch cannot be imported")
    if device == "cuda" and not torch.cuda.is_available():
        raise NoPeer(f"torch {torch.__version__} of {sys.executable} sees no GPU")
    return torch


class Gpu:
    """Graphs and times of a GPU."""

    def __init__(self, torch):
        self.torch = torch
        self.device = torch.cuda.get_device_name(0)
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 64 << 20
        self.flushed = torch.empty(2 * cache, dtype=torch.uint8, device="cuda")

    def captured(self, work):
        """The work as a graph, warmed up before on a stream of its own."""
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def sample(self, work):
        """Microseconds of one run, what it reads cold."""
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.fill_(1)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)


class Programs(Gpu):
    """torch with a GPU and this library; a peer adds its own modules, and `version`."""

    version = "unknown"
    wants_switchyard = True

    def __init__(self):
        self.torch = torch_for("cuda")
        self.find_peer()
        if self.wants_switchyard:
            self.switchyard = needed("switchyard", "switchyard cannot be imported, for PYTHONPATH "
                                                   "has not its folder python or SWITCHYARD_LIBRARY "
                                                   "does not name libswitchyard.so")
        super().__init__(self.torch)

    def find_peer(self):
        """Imports the peer. Raises NoPeer."""


def in_turns(works, rounds, sample):
    """The median of each work. Who begins changes with every round: the last one has warmed the
    card for the next."""
    times = {name: [] for name in works}
    names = list(works)
    for _ in range(rounds):
        for name in names:
            times[name].append(sample(works[name]))
        names.append(names.pop(0))
    return {name: statistics.median(values) for name, values in times.items()}


def tilt(torch, tokens, gate, exponent):
    """Makes softmax's input of expert e larger by log 1 / (e + 1)^exponent: the first of the hidden
    values is the same for all tokens and carries it. The rest varies as Gumbel noise does, with which
    the largest K would be draws by that law."""
    level = 8.0
    gate *= torch.pi / 6**0.5
    tokens[:, 0] = level
    rank = torch.arange(1, gate.shape[0] + 1, device=gate.device)
    gate[:, 0] = (-exponent / level) * rank.float().log()


def relative(a, b):
    """The norm of a - b by that of b."""
    return ((a - b).float().norm() / b.float().norm()).item()


def require_same(difference, most):
    """Raises if two outputs differ by more than `most` of their norm (or are no numbers)."""
    if not difference <= most:
        raise ValueError(f"the outputs differ by {difference:.3g} of their norm, at most {most}: this "
                         "is not the same layer")


def answer(programs, measure, request):
    try:
        with programs.torch.no_grad():
            return measure(programs, request)
    except NoPeer as error:
        return {"error": str(error)}
    except Exception as error:  # whatever goes wrong in it, the tool goes on with the next shape
        traceback.print_exc()
        words = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {words[0] if words else 'no words'}"}
    finally:
        gc.collect()  # a layer's memory is not torch's to reuse
        programs.torch.cuda.empty_cache()


def serve(make_programs, measure):
    """Answers requests, a line of JSON on stdin each, on stdout; first what the peer is, {"version",
    "device"}, or {"error": why it cannot be had}. make_programs() gives who has these two, `torch`,
    and what measure(programs, request) wants beside."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who has started this closes stdin
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer

    def say(value):
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        programs = make_programs()
    except NoPeer as error:
        say({"error": str(error)})
        return
    say({"version": programs.version, "device": programs.device})
    for line in sys.stdin:
        say(answer(programs, measure, json.loads(line)))
