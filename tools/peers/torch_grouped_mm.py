"""Times torch._grouped_mm on the contiguous products of bench/grouped_gemm_bench, same loads.

    python3 tools/peers/torch_grouped_mm.py [repeats]

Prints one line a measurement: median microseconds with the L2 cache flushed before each sample.
"""

import sys

import torch

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


def main():
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 20
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
            rate = 2.0 * rows * depth * columns / us / 1e6
            print(
                f"torch   {name:12} zipf {zipf:.0f}              {us:8.1f} us {rate:6.1f} TFLOP/s "
                f"{100 * rate / dense:5.1f}% of {dense:.0f}",
                flush=True,
            )
        del x, w


if __name__ == "__main__":
    main()
