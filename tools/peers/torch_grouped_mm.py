"""Times torch._grouped_mm on the contiguous products of bench/grouped_gemm_bench, same loads.

    grouped_gemm_bench products | tee ours.log
    python3 tools/peers/torch_grouped_mm.py --ours ours.log

or on the weight gradients of the layers of bench/experts_backward_bench, all rows of an expert
summed, on contiguous operands where ours gathers one of them:

    experts_backward_bench | tee ours.log
    python3 tools/peers/torch_grouped_mm.py --gradients --ours ours.log

Prints one line a measurement, the median with the L2 cache flushed before each sample, and the same
as a JSON line. Clocks follow the power drawn, so both sides are taken as shares of cuBLAS's dense
8192^3 in turns with them; with --ours their ratio is judged by bar G1, of gradients B3.
"""

import argparse
import json
from pathlib import Path

import torch

TARGET = 1.05  # G1: our share over torch's
GRADIENT_TARGET = 1.10  # B3, likewise
GRADIENT_SHARE = 0.88  # B3: our share of dense in the mean

PRODUCTS = [  # name, experts, rows, depth, columns, top_k
    ("V3 w13", 32, 32768, 7168, 4096, 8),
    ("V3 w2", 32, 32768, 2048, 7168, 8),
    ("Mixtral w13", 8, 16384, 4096, 28672, 2),
    ("Mixtral w2", 8, 16384, 14336, 4096, 2),
    ("Qwen3 w13", 128, 65536, 2048, 1536, 8),
    ("Qwen3 w2", 128, 65536, 768, 2048, 8),
    ("E32 K1024", 32, 32768, 1024, 8192, 8),
    ("E32 N1024", 32, 32768, 4096, 1024, 8),
]

LAYERS = [  # name, experts, top_k, hidden, inner, tokens: those of experts_backward_bench
    ("qwen3-30b", 128, 8, 2048, 768, 32768),
    ("30b-256", 256, 16, 4096, 256, 32768),
    ("30b-512", 128, 8, 4096, 512, 32768),
    ("30b-1024", 64, 4, 4096, 1024, 32768),
    ("olmoe", 64, 8, 2048, 1024, 32768),
    ("7b-256", 128, 8, 1536, 256, 24576),
    ("qwen3-235b", 128, 8, 4096, 1536, 16384),
    ("mixtral", 8, 2, 4096, 14336, 8192),
    ("dsv3-32e", 32, 1, 7168, 2048, 32768),
]


def medians_us(calls, repeats):
    """Calls take turns, so that all meet the same clocks."""
    flush = torch.empty(192 << 20, dtype=torch.uint8, device="cuda")
    samples = [[] for _ in calls]
    for i in range(-3, repeats):
        for call, times in zip(calls, samples):
            flush.fill_(i & 1)
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if i >= 0:
                times.append(begin.elapsed_time(end) * 1e3)
    return [sorted(times)[repeats // 2] for times in samples]


def counts(experts, rows, top_k, zipf):
    """Rows of each expert: K distinct ones a token by Gumbel top-k over Zipf weights."""
    if zipf == 0:
        return torch.full((experts,), rows // experts, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(7)
    rank = torch.randperm(experts, generator=generator, device="cuda") + 1
    uniform = torch.rand(rows // top_k, experts, generator=generator, device="cuda")
    scores = -zipf * torch.log(rank.float()) - torch.log(-torch.log(uniform.clamp_min(1e-12)))
    chosen = scores.topk(top_k, dim=1).indices.flatten()
    return torch.bincount(chosen, minlength=experts)


def shares_of(log, stages):
    """Share of the dense rate by (stage, shape, zipf), from the JSON lines of our bench."""
    shares = {}
    for text in log.read_text(encoding="utf-8").splitlines():
        if not text.startswith("{"):
            continue
        line = json.loads(text)
        if line["stage"] in stages:
            shares[line["stage"], line["case"]["shape"], line["case"]["zipf"]] = line["share"]
    if not shares:
        raise SystemExit(f"torch_grouped_mm.py: --ours: {log} has no line of {' or '.join(stages)}")
    return shares


def report(stage, name, zipf, us, dense_tflops, flops, ours, bar, target):
    rate = flops / us / 1e6
    share = rate / dense_tflops
    line = {"stage": stage, "backend": "cuda", "peer": "torch",
            "case": {"shape": name, "zipf": zipf, "dtype": "bf16"}, "median_us": round(us, 1),
            "limit_us": round(flops / dense_tflops / 1e6, 1), "limit_by": "dense cuBLAS 8192^3",
            "share": round(share, 3)}
    text = (f"torch   {name:12} zipf {zipf}              {us:8.1f} us {rate:6.1f} TFLOP/s "
            f"{100 * share:5.1f}% of {dense_tflops:.0f}")
    if (stage, name, zipf) in ours:
        share_of_ours = ours[stage, name, zipf]
        ratio = share_of_ours / share
        line.update(bar=bar, value=round(ratio, 3), target=target, holds=ratio >= target)
        text += f"; ours {100 * share_of_ours:.1f}%: {ratio:.2f} x"
    print(text)
    print(json.dumps(line), flush=True)


def report_mean(ours):
    """Our weight gradients by themselves: B3's other half."""
    mean = sum(ours.values()) / len(ours)
    print(json.dumps({"stage": "experts_backward.weight_gradients", "backend": "cuda",
                      "case": {"shape": f"mean of {len(ours)} products", "dtype": "bf16"},
                      "share": round(mean, 3), "limit_by": "dense cuBLAS 8192^3", "bar": "B3",
                      "value": round(mean, 3), "target": GRADIENT_SHARE,
                      "holds": mean >= GRADIENT_SHARE}), flush=True)


def time_products(dense_call, repeats, ours):
    for name, experts, rows, depth, columns, top_k in PRODUCTS:
        x = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
        w = torch.randn(experts, columns, depth, dtype=torch.bfloat16, device="cuda")
        w *= depth**-0.5
        for zipf in (0.0, 1.0):
            offsets = counts(experts, rows, top_k, zipf).cumsum(0).to(torch.int32)
            grouped = lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)
            dense_us, us = medians_us([dense_call, grouped], repeats)
            report("grouped_gemm", name, int(zipf), us, 2 * 8192**3 / dense_us / 1e6,
                   2.0 * rows * depth * columns, ours, "G1 torch", TARGET)
        del x, w


def time_gradients(dense_call, repeats, ours):
    """dW2 [E, H, I] of dout and inner rows, dW13 [E, 2I, H] of dz and tokens."""
    for name, experts, top_k, hidden, inner, tokens in LAYERS:
        rows = tokens * top_k
        for stage, left, right in (("experts_backward.dw2", hidden, inner),
                                   ("experts_backward.dw13", 2 * inner, hidden)):
            a = torch.randn(rows, left, dtype=torch.bfloat16, device="cuda")
            b = torch.randn(rows, right, dtype=torch.bfloat16, device="cuda")
            for zipf in (0.0, 1.0):
                offsets = counts(experts, rows, top_k, zipf).cumsum(0).to(torch.int32)
                grouped = lambda: torch._grouped_mm(a.t(), b, offs=offsets)
                dense_us, us = medians_us([dense_call, grouped], repeats)
                report(stage, name, int(zipf), us, 2 * 8192**3 / dense_us / 1e6,
                       2.0 * rows * left * right, ours, "B3 torch", GRADIENT_TARGET)
            del a, b
    if ours:
        report_mean(ours)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20, help="samples of each (default 20)")
    parser.add_argument("--gradients", action="store_true", help="weight gradients")
    parser.add_argument("--ours", type=Path, help="what our bench printed in this run")
    options = parser.parse_args()
    stages = ("grouped_gemm",)
    if options.gradients:
        stages = ("experts_backward.dw2", "experts_backward.dw13")
    ours = shares_of(options.ours, stages) if options.ours else {}
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    print(f"torch {torch.__version__}")
    dense_call = lambda: a @ b.t()
    time = time_gradients if options.gradients else time_products
    time(dense_call, options.repeats, ours)


if __name__ == "__main__":
    main()
