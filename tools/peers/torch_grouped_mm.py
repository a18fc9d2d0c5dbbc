"""Times torch._grouped_mm on the contiguous products of bench/grouped_gemm_bench, same loads.

    grouped_gemm_bench products | tee ours.log
    python3 tools/peers/torch_grouped_mm.py --ours ours.log

Prints one line a measurement, the median with the L2 cache flushed before each sample, and the same
as a JSON line. Clocks follow the power drawn, so both sides are taken as shares of cuBLAS's dense
8192^3 in turns with them; with --ours their ratio is judged by bar G1.
"""

import argparse
import json
from pathlib import Path

import torch

TARGET = 1.05  # G1: our share over torch's

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


def shares_of(log):
    """Share of the dense rate by (shape, zipf), from the JSON lines of grouped_gemm_bench."""
    shares = {}
    for text in log.read_text(encoding="utf-8").splitlines():
        if not text.startswith("{"):
            continue
        line = json.loads(text)
        if line["stage"] == "grouped_gemm":
            shares[line["case"]["shape"], line["case"]["zipf"]] = line["share"]
    return shares


def report(name, zipf, us, dense_tflops, flops, ours):
    rate = flops / us / 1e6
    share = rate / dense_tflops
    line = {"stage": "grouped_gemm", "backend": "cuda", "peer": "torch",
            "case": {"shape": name, "zipf": zipf, "dtype": "bf16"}, "median_us": round(us, 1),
            "limit_us": round(flops / dense_tflops / 1e6, 1), "limit_by": "dense cuBLAS 8192^3",
            "share": round(share, 3)}
    text = (f"torch   {name:12} zipf {zipf}              {us:8.1f} us {rate:6.1f} TFLOP/s "
            f"{100 * share:5.1f}% of {dense_tflops:.0f}")
    if (name, zipf) in ours:
        ratio = ours[name, zipf] / share
        line.update(bar="G1 torch", value=round(ratio, 3), target=TARGET, holds=ratio >= TARGET)
        text += f"; ours {100 * ours[name, zipf]:.1f}%: {ratio:.2f} x"
    print(text)
    print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20, help="samples of each (default 20)")
    parser.add_argument("--ours", type=Path, help="what grouped_gemm_bench printed in this run")
    options = parser.parse_args()
    repeats = options.repeats
    ours = shares_of(options.ours) if options.ours else {}
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    print(f"torch {torch.__version__}")
    for name, experts, rows, depth, columns, top_k in PRODUCTS:
        x = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
        w = torch.randn(experts, columns, depth, dtype=torch.bfloat16, device="cuda")
        w *= depth**-0.5
        for zipf in (0.0, 1.0):
            offsets = counts(experts, rows, top_k, zipf).cumsum(0).to(torch.int32)
            grouped = lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)
            dense_us, us = medians_us([lambda: a @ b.t(), grouped], repeats)
            dense = 2 * 8192**3 / dense_us / 1e6
            report(name, int(zipf), us, dense, 2.0 * rows * depth * columns, ours)
        del x, w


if __name__ == "__main__":
    main()
