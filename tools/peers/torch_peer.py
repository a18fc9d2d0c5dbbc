#!/usr/bin/env python3
"""Times torch beside our own stages: `switchyard bench --peer torch` starts this and asks.

A request is one line of JSON on stdin: {"work": select|pack|layer|naive, "file": a safetensors file
with the tokens and the routing that ours had, sizes and types}. The answer is one line on stdout:
{"median_us": {stage: microseconds}} or {"error": why}. Only the experts' weights are made here,
of the same sizes and scale. On a GPU each sample follows a fill that flushes the L2 cache, and
what can be captured in a graph is replayed as one, as ours is; on a CPU there is neither.
"""

import json
import statistics
import struct
import sys
import time

from peer_process import Gpu, NoPeer, serve, torch_for

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32"}
MOST_SAMPLES = 60
MOST_SECONDS = 3.0


def read_tensors(path, device):
    with open(path, "rb") as file:
        data = bytearray(file.read())
    size = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, spec in json.loads(data[8:8 + size].decode()).items():
        if name == "__metadata__":
            continue
        count = 1
        for length in spec["shape"]:
            count *= length
        flat = torch.frombuffer(data, dtype=getattr(torch, DTYPES[spec["dtype"]]), count=count,
                                offset=8 + size + spec["data_offsets"][0])
        tensors[name] = flat.reshape(spec["shape"]).clone().to(device)
    return tensors


class Clock:
    """Medians in microseconds, on a GPU or a CPU."""

    def __init__(self, place):
        global torch
        torch = self.torch = torch_for(place)
        self.version = torch.__version__
        self.place = place
        self.on_gpu = place == "cuda"
        self.gpu = Gpu(torch) if self.on_gpu else None
        self.device = self.gpu.device if self.on_gpu else "cpu"
        self.eager = ""  # why something could not be captured

    def median(self, work, graph=True):
        work = self.captured(work) if self.on_gpu and graph else work
        self.sample(work)
        first = self.sample(work)
        count = max(5, min(MOST_SAMPLES, int(MOST_SECONDS * 1e6 / max(first, 1.0))))
        return statistics.median(self.sample(work) for _ in range(count))

    def captured(self, work):
        try:
            return self.gpu.captured(work)
        except RuntimeError as error:  # an operation that waits for the device
            self.eager = f"not captured: {' '.join(str(error).split())[:80]}"
            torch.cuda.synchronize()
            return work

    def sample(self, work):
        if self.on_gpu:
            return self.gpu.sample(work)
        begin = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - begin)


class Routed:
    """The rows of the routing, sorted by expert as a plan sorts them."""

    def __init__(self, expert, weight, num_experts):
        self.top_k = expert.shape[1]
        flat = expert.flatten().long()
        order = torch.sort(flat, stable=True)[1]
        self.row_token = torch.div(order, self.top_k, rounding_mode="floor")
        self.row_weight = weight.flatten()[order][:, None]
        self.inverse = torch.empty_like(order)
        self.inverse[order] = torch.arange(order.numel(), device=order.device)
        counts = torch.bincount(flat, minlength=num_experts)
        self.ends = counts.cumsum(0).to(torch.int32)
        self.counts = counts.tolist()


def time_select(clock, request, inputs):
    """Logits are made in the tokens' type, as torch does; softmax of the chosen is the softmax over
    all once it is renormalized."""
    tokens, top_k = inputs["tokens"], request["K"]
    gate = inputs["gate"].to(tokens.dtype)
    logits = torch.nn.functional.linear(tokens.float(), inputs["gate"])

    def select():
        best, expert = torch.topk(logits, top_k)
        return torch.softmax(best, 1), expert

    product = lambda: torch.nn.functional.linear(tokens, gate)
    out = {"select": clock.median(select)}
    if clock.on_gpu or tokens.dtype == torch.float32:  # old versions lack 16-bit products on a CPU
        out["router_gemm"] = clock.median(product)
    return out


def time_pack(clock, request, inputs):
    x = inputs["tokens"]
    routed = Routed(inputs["expert"], inputs["weight"].to(x.dtype), request["E"])
    rows = x[routed.row_token]
    out = torch.zeros_like(x)
    shape = (x.shape[0], routed.top_k, x.shape[1])

    def pack():
        torch.index_select(x, 0, routed.row_token, out=rows)

    def gather():
        torch.sum((rows * routed.row_weight).index_select(0, routed.inverse).view(shape), 1, out=out)

    def index_add():
        out.zero_().index_add_(0, routed.row_token, rows * routed.row_weight)

    combines = {work: clock.median(work) for work in (gather, index_add)}
    best = min(combines, key=combines.get)

    def both():
        pack()
        best()

    return {"pack": clock.median(pack), "combine": combines[best],
            "combine, gather": combines[gather], "combine, index_add": combines[index_add],
            "pack+combine": clock.median(both)}


def activation(request):
    act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
           "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
           "relu": torch.relu, "relu2": lambda g: torch.relu(g).square(),
           "identity": lambda g: g}
    if request["activation"] not in act:
        raise NoPeer(f"no peer for the activation {request['activation']}")
    act = act[request["activation"]]
    inner = request["I"]
    if request["gated"]:
        return lambda h: act(h[:, :inner]) * h[:, inner:]
    return act


def grouped_product(rows, weights, routed):
    """[S, N]: torch's grouped GEMM where it has one for the type, else one product an expert."""
    if hasattr(torch, "_grouped_mm") and rows.is_cuda and rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, weights.transpose(1, 2), offs=routed.ends)
    parts, begin = [], 0
    for expert, count in enumerate(routed.counts):
        if count > 0:
            parts.append(torch.mm(rows[begin:begin + count], weights[expert].T))
        begin += count
    return torch.cat(parts)


def random_weights(request, rows, cols, dtype, device):
    weights = torch.empty(request["E"], rows, cols, dtype=dtype, device=device)
    for matrix in weights:  # one at a time: normal values in 32 bits would need twice the memory
        matrix.copy_(torch.randn(rows, cols, device=device) * cols**-0.5)
    return weights


def time_layer(clock, request, inputs):
    x = inputs["tokens"]
    if x.is_cuda and x.dtype == torch.float16 and hasattr(torch, "_grouped_mm"):
        x = x.bfloat16()  # the grouped GEMM has no other type; it is as fast
    if not x.is_cuda:
        x = x.float()
    inner, hidden, top_k = request["I"], request["H"], request["K"]
    w13 = random_weights(request, (2 if request["gated"] else 1) * inner, hidden, x.dtype, x.device)
    w2 = random_weights(request, hidden, inner, x.dtype, x.device)
    gate = inputs["gate"].to(x.dtype)
    act = activation(request)
    out = torch.zeros_like(x)
    given = Routed(inputs["expert"], inputs["weight"].to(x.dtype), request["E"])

    def experts(routed=given):
        rows = x.index_select(0, routed.row_token)
        hidden_rows = act(grouped_product(rows, w13, routed))
        y = grouped_product(hidden_rows, w2, routed)
        out.zero_().index_add_(0, routed.row_token, y * routed.row_weight)

    flat = inputs["expert"].flatten().long()
    weight = inputs["weight"].to(x.dtype).flatten()
    ones = torch.ones_like(flat)

    class Planned:
        """The given routing, planned anew by operations that can be captured."""

        def __init__(self):
            order = torch.sort(flat, stable=True)[1]
            self.row_token = torch.div(order, top_k, rounding_mode="floor")
            self.row_weight = weight[order][:, None]
            counts = torch.zeros(request["E"], dtype=torch.int64, device=x.device)
            self.ends = counts.scatter_add_(0, flat, ones).cumsum(0).to(torch.int32)
            self.counts = given.counts

    def layer():
        logits = torch.nn.functional.linear(x, gate).float()
        torch.softmax(torch.topk(logits, top_k)[0], 1)
        experts(Planned())

    return {"experts+combine": clock.median(experts), "layer": clock.median(layer)}


def time_naive(clock, request, inputs):
    x, expert, weight = inputs["tokens"], inputs["expert"].long(), inputs["weight"]
    inner, hidden = request["I"], request["H"]
    w13 = random_weights(request, 2 * inner, hidden, x.dtype, x.device)
    w2 = random_weights(request, hidden, inner, x.dtype, x.device)
    out = torch.zeros_like(x)

    def naive():
        out.zero_()
        for e in range(request["E"]):
            token, k = (expert == e).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            rows = x[token]
            h = torch.nn.functional.silu(rows @ w13[e, :inner].T) * (rows @ w13[e, inner:].T)
            out.index_add_(0, token, (h @ w2[e].T) * weight[token, k, None])

    return {"layer": clock.median(naive, graph=False)}


WORKS = {"select": time_select, "pack": time_pack, "layer": time_layer, "naive": time_naive}


def measure(clock, request):
    torch.manual_seed(request["seed"])
    clock.eager = ""
    inputs = read_tensors(request["file"], clock.place)
    return {"median_us": WORKS[request["work"]](clock, request, inputs), "eager": clock.eager}


if __name__ == "__main__":
    serve(lambda: Clock(sys.argv[1] if len(sys.argv) > 1 else "cuda"), measure)
