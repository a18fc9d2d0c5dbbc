#!/usr/bin/env python3
"""Times steps of training a small language model on a GPU in PyTorch and in this library, in turns.

The model is one of the presets s, s:32 (32 experts) and m (docs/models.md), bf16 products over f32
weights: RMSNorm, queries and keys normalised by head, rotary positions, causal attention (torch's
flash kernels), SwiGLU experts by a stable sort and grouped products, load-balancing and z losses,
clipping and fused AdamW. "compiled" is that model behind torch.compile, "graph" as it is written;
the whole step of both is one CUDA graph. "ours" is `model_bench`, a process of its own that is
started between theirs. The ids of both are drawn evenly.

Lines of JSON on stdout (or added to --results) answer the bars M1 (s, compiled: 1.35 x), M2 (s:32,
graph: 2.2 x) and M3 (m, compiled: 1.28 x).

    python3 tools/peers/lm_beside.py --ours build/device/bench/model_bench
"""

import argparse
import datetime
import json
import math
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from beside import commit, cpu_name
from torch import nn


@dataclass(frozen=True)
class Sizes:
    """docs/models.md, "Presets"."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    experts: int
    top_k: int
    inner: int
    vocabulary: int
    sequences: int


S = Sizes(6, 512, 8, 512, 8, 2, 1024, 256, 64)
PRESETS = {"s": S, "s:32": replace(S, experts=32),
           "m": Sizes(12, 768, 12, 1024, 32, 4, 768, 16384, 32)}
BARS = {"s": ("M1", "compiled", 1.35), "s:32": ("M2", "graph", 2.2), "m": ("M3", "compiled", 1.28)}
BALANCE, Z, CLIP, RATE = 0.01, 0.001, 1.0, 1e-4


class Spread(torch.autograd.Function):
    """Rows of the experts, sorted, from tokens [T, H]; the gradient is gathered, not added."""

    @staticmethod
    def forward(ctx, tokens, token_of_row, row_of_choice, top_k):
        ctx.save_for_backward(row_of_choice)
        ctx.top_k = top_k
        return tokens[token_of_row]

    @staticmethod
    def backward(ctx, drows):
        (row_of_choice,) = ctx.saved_tensors
        by_choice = drows[row_of_choice].view(-1, ctx.top_k, drows.shape[1])
        return by_choice.sum(1), None, None, None


class Permute(torch.autograd.Function):
    """rows[index]; `inverse` is the permutation back."""

    @staticmethod
    def forward(ctx, rows, index, inverse):
        ctx.save_for_backward(inverse)
        return rows[index]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def parameter(*shape, scale=0.02):
    return nn.Parameter(torch.randn(*shape) * scale)


def swiglu(both):
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def turn(x, angles):
    """Rotary positions: x [B, S, N, D], angles (cos, sin) [S, 1, D/2]."""
    cos, sin = angles
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        h, deep = sizes.hidden, 0.02 / math.sqrt(2 * sizes.layers)
        d = h // sizes.heads
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(n)) for n in (h, h, d, d)])
        self.qkv, self.out = parameter(3 * h, h), parameter(h, h, scale=deep)
        self.gate = parameter(sizes.experts, h)
        self.w13 = parameter(sizes.experts, 2 * sizes.inner, h)
        self.w2 = parameter(sizes.experts, h, sizes.inner, scale=deep)

    def forward(self, x, angles):
        x = x + self.attention(self.norm(x, 0), angles)
        y, loss = self.moe(self.norm(x, 1).flatten(0, 1))
        return x + y.view(x.shape), loss

    def norm(self, x, which):
        return F.rms_norm(x, x.shape[-1:], self.norms[which].to(x.dtype), 1e-6)

    def attention(self, x, angles):
        shape = (*x.shape[:2], 3, self.sizes.heads, -1)
        q, k, v = F.linear(x, self.qkv).view(shape).unbind(2)
        q, k = turn(self.norm(q, 2), angles), turn(self.norm(k, 3), angles)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(x.shape), self.out)

    def moe(self, x):
        experts, top_k = self.sizes.experts, self.sizes.top_k
        with torch.autocast("cuda", enabled=False):  # the router in f32
            logits = F.linear(x.float(), self.gate)
            scores = logits.softmax(-1)
            weight, expert = scores.topk(top_k, dim=-1)
            weight = weight / weight.sum(-1, keepdim=True)
            key, choice_of_row = torch.sort(expert.flatten(), stable=True)
            ends = torch.searchsorted(key, torch.arange(experts, device=x.device), right=True)
            row_of_choice = torch.empty_like(choice_of_row).scatter_(
                0, choice_of_row, torch.arange(key.numel(), device=x.device))
            share = ends.diff(prepend=ends.new_zeros(1)).float() / x.shape[0]
            loss = (BALANCE * experts / top_k * (share * scores.mean(0)).sum()
                    + Z * logits.logsumexp(-1).square().mean())
            ends = ends.to(torch.int32)
            rows = Spread.apply(x, choice_of_row // top_k, row_of_choice, top_k)
            act = swiglu(F.grouped_mm(rows, self.w13.to(x.dtype).transpose(1, 2), offs=ends))
            y = F.grouped_mm(act, self.w2.to(x.dtype).transpose(1, 2), offs=ends)
            y = Permute.apply(y, row_of_choice, choice_of_row).view(-1, top_k, x.shape[1])
            return (y * weight[..., None].to(y.dtype)).sum(1), loss


class Model(nn.Module):
    """@param dtype  Of the residual stream."""

    def __init__(self, sizes, layer=Layer, dtype=torch.bfloat16):
        super().__init__()
        self.dtype = dtype
        self.embedding = parameter(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList([layer(sizes) for _ in range(sizes.layers)])
        self.norm = nn.Parameter(torch.ones(sizes.hidden))
        self.head = parameter(sizes.vocabulary, sizes.hidden)
        half = sizes.hidden // sizes.heads // 2
        angle = torch.outer(torch.arange(sizes.sequence), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("angle", angle[:, None, :])

    def forward(self, token, target):
        x = F.embedding(token, self.embedding).to(self.dtype)
        angles = (self.angle.cos().to(x.dtype), self.angle.sin().to(x.dtype))
        losses = 0.0
        for layer in self.layers:
            x, loss = layer(x, angles)
            losses = losses + loss
        x = F.rms_norm(x, x.shape[-1:], self.norm.to(x.dtype), 1e-6)
        logits = F.linear(x, self.head).flatten(0, 1).float()
        return F.cross_entropy(logits, target.flatten()) + losses


class Step:
    """Forward, backward, clipping and AdamW as one CUDA graph."""

    def __init__(self, sizes, compiled):
        torch.manual_seed(1)
        with torch.device("cuda"):
            model = Model(sizes)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1,
                                      fused=True, capturable=True)
        ids = torch.randint(sizes.vocabulary, (2, sizes.sequences, sizes.sequence), device="cuda")
        call = torch.compile(model) if compiled else model

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = call(ids[0], ids[1])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
            optimizer.step()
            return loss

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.first_loss = step().item()
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step()
        self.kept = (model, optimizer, ids)
        self.parameters = sum(p.numel() for p in parameters)

    def times_us(self, count):
        """Of `count` steps, one after the other."""
        self.graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def ours_us(program, name, steps):
    done = subprocess.run([program, str(steps), name], capture_output=True, text=True, check=False)
    found = re.search(r'"step_us": ([0-9.]+)', done.stdout)
    if done.returncode != 0 or not found:
        sys.exit(f"lm_beside: {program} {name} ended with {done.returncode}: {done.stderr.strip()}")
    return float(found.group(1))


def compare(args, name):
    bar, way, target = BARS[name]
    sizes = PRESETS[name]
    ours, theirs = [ours_us(args.ours, name, args.steps)], []
    begin = time.perf_counter()
    step = Step(sizes, compiled=way == "compiled")
    made = time.perf_counter() - begin
    for _ in range(args.turns):
        theirs += step.times_us(args.steps)
        ours.append(ours_us(args.ours, name, args.steps))
    last_loss = step.loss.item()
    if not (last_loss < step.first_loss):
        sys.exit(f"lm_beside: torch's loss of {name} went from {step.first_loss} to {last_loss}")
    medians = {"ours": statistics.median(ours), "theirs": statistics.median(theirs)}
    value = round(medians["theirs"] / medians["ours"], 3)
    line = {"schema": 1, "program": "lm_beside", "backend": "cuda",
            "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": commit(),
            "machine": {"cpu": cpu_name(), "gpu": torch.cuda.get_device_name()},
            "versions": {"torch": torch.__version__}, "stage": "training_step", "bar": bar,
            "case": {"name": name, "T": sizes.sequences * sizes.sequence, "way": way},
            "median_us": {key: round(us, 1) for key, us in medians.items()},
            "min_us": {"ours": min(ours), "theirs": round(min(theirs), 1)},
            "turns": args.turns, "parameters": step.parameters, "torch_made_s": round(made, 1),
            "torch_peak_bytes": torch.cuda.max_memory_allocated(),
            "value": value, "target": target, "holds": value >= target}
    text = json.dumps(line)
    print(text, flush=True)
    if args.results:
        with open(args.results, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ours", required=True, help="the program model_bench")
    parser.add_argument("--presets", type=lambda text: text.split(","), default=list(PRESETS))
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--results", help="file that lines are added to")
    args = parser.parse_args()
    for name in args.presets:
        if name not in PRESETS:
            parser.error(f"--presets: '{name}' is none of {', '.join(PRESETS)}")
    torch.set_float32_matmul_precision("high")
    for name in args.presets:
        compare(args, name)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
