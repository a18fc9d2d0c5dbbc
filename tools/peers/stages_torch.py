#!/usr/bin/env python3
"""Times of torch for the stages around the experts, on the shapes of bench/kernels/stages_bench.cpp.

Each work is captured in a CUDA graph and replayed; the median over replays, one line of JSON each.
"""

import json
import statistics

import torch


def median_us(work, calls=4, replays=60):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return statistics.median(times)


def show(name, work, **options):
    line = {"stage": name.partition(" ")[0], "case": {"name": name}, "peer": "torch"}
    try:
        line["median_us"] = round(median_us(work, **options), 2)
    except RuntimeError as error:
        line.update(median_us=None, error=str(error)[:80])
    print(json.dumps(line), flush=True)


def main():
    torch.manual_seed(0)
    device = "cuda"

    logits = torch.randn(16384, 128, device=device)
    show("select 16384 x 128 top-2, softmax over all",
         lambda: torch.topk(torch.softmax(logits, 1), 2))
    show("select 16384 x 128 top-2, softmax of the chosen",
         lambda: torch.softmax(torch.topk(logits, 2)[0], 1))

    wide = torch.randn(4096, 256, device=device)
    bias = torch.randn(256, device=device) * 0.1

    def deepseek_v3():
        scores = torch.sigmoid(wide)
        biased = (scores + bias).view(4096, 8, 32)
        groups = torch.topk(biased.topk(2, dim=2)[0].sum(2), 4)[1]
        mask = torch.ones(4096, 8, dtype=torch.bool, device=device).scatter_(1, groups, False)
        chosen = torch.topk(biased.masked_fill(mask[:, :, None], float("-inf")).view(4096, 256), 8)[1]
        weight = scores.gather(1, chosen)
        return weight / weight.sum(1, keepdim=True) * 2.5

    show("select 4096 x 256 DeepSeek-V3", deepseek_v3)

    for experts in (128, 256):
        ids = torch.randint(0, experts, (32768,), device=device)

        def plan(ids=ids, experts=experts):
            order = torch.sort(ids, stable=True)[1]
            counts = torch.zeros(experts, dtype=torch.int64, device=device)
            counts.scatter_add_(0, ids, torch.ones_like(ids))
            begin = torch.cumsum(counts, 0)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(32768, device=device)
            return begin, order // 8, inverse

        show(f"plan S 32768 E {experts}", plan)

    x = torch.randn(16384, 4096, device=device, dtype=torch.float16)
    token = torch.arange(16384, device=device).repeat_interleave(2)
    order = torch.randperm(32768, device=device)
    row_token = token[order]
    row_weight = torch.rand(32768, 1, device=device, dtype=torch.float16)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(32768, device=device)
    rows = x[row_token]
    show("pack 16384 x 4096 K 2 f16", lambda: x.index_select(0, row_token))
    show("combine 16384 x 4096 K 2 f16, gather",
         lambda: (rows * row_weight).index_select(0, inverse).view(16384, 2, 4096).sum(1))
    out = torch.zeros_like(x)
    show("combine 16384 x 4096 K 2 f16, index_add",
         lambda: out.zero_().index_add_(0, row_token, rows * row_weight))

    tokens = torch.randn(32768, 4096, device=device, dtype=torch.bfloat16)
    gate = torch.randn(256, 4096, device=device, dtype=torch.bfloat16)
    show("router_gemm 32768 x 256 x 4096 bf16 (out bf16)", lambda: tokens @ gate.T)
    for num_tokens, experts, hidden, dtype in ((16384, 128, 2048, torch.bfloat16),
                                               (8192, 64, 2048, torch.float16),
                                               (4096, 256, 7168, torch.bfloat16)):
        some = torch.randn(num_tokens, hidden, device=device, dtype=dtype)
        few = torch.randn(experts, hidden, device=device, dtype=dtype)
        show(f"router_gemm {num_tokens} x {experts} x {hidden} {str(dtype)[6:]} (out 16-bit)",
             lambda: some @ few.T)
    one, big = torch.randn(1, 7168, device=device, dtype=torch.bfloat16), torch.randn(
        256, 7168, device=device, dtype=torch.bfloat16)
    show("router_gemm T 1 E 256 H 7168 warm (out bf16)", lambda: one @ big.T)
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    us = median_us(lambda: a @ a)
    print(json.dumps({"stage": "dense", "case": {"name": "dense bf16 8192^3"}, "peer": "torch",
                      "median_us": round(us, 1), "tflops": round(2 * 8192**3 / us * 1e-6, 1)}))


if __name__ == "__main__":
    main()
