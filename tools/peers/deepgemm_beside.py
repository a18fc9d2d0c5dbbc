#!/usr/bin/env python3
"""Times the grouped product of e4m3 by itself beside DeepGEMM's, in turns in one process.

Six published shapes, as many rows for each expert: codes with scales of 1 x 128 and 128 x 128 in, bf16
out. Both are given the same codes and scales, each as it wants them, and the outputs are compared
first. Each product is a CUDA graph, timed with the L2 cache flushed before it; a dense product of bf16
takes turns with both. Ours is the kernel that the layers' second product is, out of the module that the
build makes for this (target fp8_product).

    python3 tools/peers/deepgemm_beside.py --module build/device/bench/libfp8_product.so

python3 needs torch with a GPU and DeepGEMM (sgl-deep-gemm 0.1.4 with apache-tvm-ffi 0.1.11, which
compile their kernels with nvcc). Lines of JSON answer the bar Q1, each shape and their geometric mean;
tools/add_results.py takes them.
"""

import argparse
import ctypes
import json
import math
import sys

from peer_process import NoPeer, in_turns, relative
from stored_peer import DeepGemm

# Name, experts, rows of each (DeepGEMM wants multiples of 128), depth, columns (multiples of 8).
SHAPES = (("V3 w13", 32, 1024, 7168, 4096), ("V3 w2", 32, 1024, 2048, 7168),
          ("Mixtral w13", 8, 2048, 4096, 28672), ("Qwen3 w13", 128, 512, 2048, 1536),
          ("Qwen3 w2", 128, 512, 768, 2048), ("E32 K1024", 32, 1024, 1024, 8192))
EACH, MEAN = 1.00, 1.03
DENSE = 8192
MOST_DIFFERENCE = 0.01  # of the norm: both round to bf16, and keep some 14 bits of their sums


class Alone(DeepGemm):
    """DeepGEMM without the package of this library, whose module is loaded by hand."""

    wants_switchyard = False


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--module", required=True, help="libfp8_product.so of the build")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args()


def product_of(path):
    """The function of the module, of tensors."""
    call = ctypes.CDLL(path).switchyard_bench_fp8_product
    pointer, wide = ctypes.c_void_p, ctypes.c_int64
    call.argtypes = [pointer] * 8 + [ctypes.c_int32, wide, wide, wide, pointer]

    def product(tensors, experts, rows, depth, columns, stream):
        if call(*(tensor.data_ptr() for tensor in tensors), experts, rows, depth, columns, stream):
            raise RuntimeError("the product was refused; the words are above")

    return product


def made_up(programs, shape, random):
    """What both multiply: rows (codes, scales), weights (codes, scales)."""
    torch = programs.torch
    _, experts, each, depth, columns = shape
    x = torch.randn(experts * each, depth, device="cuda", generator=random).bfloat16()
    return (programs.cast.per_token_cast_to_fp8(x, use_ue8m0=False),
            programs.weights(experts, columns, depth, random))


def works_of(programs, product, shape, random):
    """Both calls, and what they write."""
    torch = programs.torch
    _, experts, each, depth, columns = shape
    (x, x_scales), (w, w_scales) = made_up(programs, shape, random)
    rows = experts * each
    outs = [torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    begin = torch.arange(0, rows + 1, each, device="cuda", dtype=torch.int32)
    counts = torch.full((experts,), each, device="cuda", dtype=torch.int32)
    counters = torch.zeros(64, device="cuda", dtype=torch.int32)
    # Units of 8 rows by 16 codes, of 8 rows one behind the other (coded/layout.hpp).
    laid = w.view(torch.uint8).view(experts, columns // 8, 8, depth // 16, 16)
    laid = laid.permute(0, 1, 3, 2, 4).contiguous()
    tensors = (x, x_scales.contiguous(), laid, w_scales, outs[0], begin, counts, counters)
    owner = torch.arange(experts, device="cuda", dtype=torch.int32).repeat_interleave(each)
    theirs = (x, programs.scales_laid(x_scales)), (w, w_scales), outs[1], owner
    return {"ours": lambda: product(tensors, experts, rows, depth, columns,
                                    torch.cuda.current_stream().cuda_stream),
            "deepgemm": lambda: programs.product(*theirs)}, outs


def measure(programs, product, shape, args):
    """A shape's line, without what add_results.py adds."""
    torch = programs.torch
    random = torch.Generator("cuda").manual_seed(args.seed)
    works, outs = works_of(programs, product, shape, random)
    for work in works.values():
        work()
    torch.cuda.synchronize()
    difference = relative(*outs)
    if not difference <= MOST_DIFFERENCE:
        raise ValueError(f"{shape[0]}: the outputs differ by {difference:.3g} of their norm")
    graphs = {name: programs.captured(work) for name, work in works.items()}
    square = torch.randn(DENSE, DENSE, device="cuda").bfloat16()
    graphs["dense"] = lambda: square @ square
    in_turns(graphs, 5, programs.sample)
    us = in_turns(graphs, args.rounds, programs.sample)
    name, experts, each, depth, columns = shape
    operations = 2e-6 * experts * each * depth * columns
    ratio = us["deepgemm"] / us["ours"]
    return {"stage": "fp8 product beside DeepGEMM",
            "case": {"shape": name, "E": experts, "rows": experts * each, "depth": depth,
                     "columns": columns, "dtype": "e4m3"},
            "median_us": round(us["ours"], 1), "tflops": round(operations / us["ours"]),
            "peers": {"deepgemm": round(us["deepgemm"], 1)},
            "deepgemm_tflops": round(operations / us["deepgemm"]),
            "dense_bf16_tflops": round(2e-6 * DENSE**3 / us["dense"]), "difference": difference,
            "peer_version": programs.version, "bar": "Q1", "value": round(ratio, 3),
            "target": EACH, "holds": ratio >= EACH}


def main():
    args = parse()
    try:
        programs = Alone()
    except NoPeer as error:
        sys.exit(f"deepgemm_beside.py: {error}")
    product = product_of(args.module)
    values = []
    with programs.torch.no_grad():
        for shape in SHAPES:
            line = measure(programs, product, shape, args)
            print(f"{shape[0]:12} ours {line['median_us']:7.1f} us {line['tflops']:5} TFLOP/s, DeepGEMM "
                  f"{line['peers']['deepgemm']:7.1f} us {line['deepgemm_tflops']:5}: {line['value']:.3f} x "
                  f"(dense bf16 {line['dense_bf16_tflops']})", flush=True)
            print(json.dumps(line), flush=True)
            values.append(line["value"])
            programs.torch.cuda.empty_cache()
    mean = math.prod(values) ** (1 / len(values))
    print(json.dumps({"stage": "fp8 product beside DeepGEMM", "case": {"shape": "mean of all", "dtype": "e4m3"},
                      "bar": "Q1", "value": round(mean, 3), "target": MEAN,
                      "holds": mean >= MEAN}), flush=True)


if __name__ == "__main__":
    main()
