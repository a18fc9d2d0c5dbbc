#!/usr/bin/env python3
"""Compiles what SonicMoE tunes among, without a GPU: of six products there and back 80 kernels, which
do not depend on a layer's sizes. On a machine with a GPU its tuning then takes seconds instead of
minutes (docs/performance.md, "SonicMoE").

    PYTHONPATH=... python3 tools/peers/sonicmoe_kernels.py --cache DIR [--part 0 --parts 2]

Several processes may share the work, each its part. Then, with the same versions of Python and of the
packages, QUACK_CACHE_DIR=DIR and QUACK_COMPILE_WORKERS=1 where it is measured. python3 needs torch,
sonic-moe's packages quack 0.3.11 and cutlass-dsl 4.4.2, and no GPU.
"""

import argparse
import os
import sys
import time

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 32768, 128, 8, 2048, 768  # any


def compile_each(autotuner, part, parts):
    """In place of measuring: compiles the configurations of this part."""

    def call(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        configs = self.prune_configs(kwargs)
        for config in configs[part::parts]:
            begin = time.time()
            for attempt in (1, 2):  # the first of a process looks for a driver and fails
                try:
                    self.fn(*args, **kwargs, **config.all_kwargs())
                    break
                except Exception as error:  # whatever it throws, the next may compile
                    if attempt == 2:
                        print(f"{self.fn.__name__} {config}: {error}", file=sys.stderr)
            print(f"{self.fn.__name__} {config}: {time.time() - begin:.1f} s", flush=True)

    autotuner.Autotuner.__call__ = call


def products(torch, quack):
    """The six products as sonicmoe.functional asks for them."""

    def made(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="cuda")

    rows = TOKENS * TOP_K
    tokens, ends = made(TOKENS, HIDDEN), made(EXPERTS + 1, dtype=torch.int32)
    w13 = made(EXPERTS, 2 * INNER, HIDDEN).permute(1, 2, 0)
    w2 = made(EXPERTS, HIDDEN, INNER).permute(1, 2, 0)
    pre, act, out = made(rows, 2 * INNER), made(rows, INNER), made(rows, HIDDEN)
    index, share = made(rows, dtype=torch.int32), made(rows, dtype=torch.float32)
    quack.gemm_gated(tokens, w13.permute(2, 1, 0), activation="swiglu", cu_seqlens_m=ends,
                     A_idx=index, preact_out=pre, postact_out=act, store_preact=True, bias=None,
                     concat_layout=None)
    quack.gemm(act, w2.permute(2, 1, 0), out=out, cu_seqlens_m=ends, bias=None)
    quack.gemm_dgated(tokens, w2.permute(2, 0, 1), PreAct=pre, activation="swiglu",
                      dx_out=torch.empty_like(pre), postact_out=torch.empty_like(act),
                      colvec_scale=share, colvec_reduce=True, cu_seqlens_m=ends, A_idx=index,
                      dynamic_scheduler=False)
    ragged = {"cu_seqlens_k": ends, "A_idx": index, "batch_idx_permute": None,
              "dynamic_scheduler": False}
    quack.gemm(tokens.T, act, out=torch.empty_like(w2).permute(2, 0, 1), **ragged)
    quack.gemm(pre, w13.permute(2, 0, 1), cu_seqlens_m=ends, dynamic_scheduler=False,
               out=torch.empty_like(out), concat_layout=None)
    quack.gemm(tokens.T, pre, out=torch.empty_like(w13).permute(2, 1, 0), concat_layout=None,
               **ragged)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cache", required=True, help="folder that kernels are added to")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    args = parser.parse_args()
    if not 0 <= args.part < args.parts:
        parser.error(f"--part {args.part}: want 0 to {args.parts - 1}")
    os.environ.update(QUACK_ARCH="90", CUTE_DSL_ARCH="sm_90a", QUACK_CACHE_DIR=args.cache)
    import torch  # pylint: disable=import-outside-toplevel
    from torch._library.custom_ops import CustomOpDef
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    from quack import autotuner, cache_utils, gemm_interface

    cache_utils.COMPILE_ONLY = True
    compile_each(autotuner, args.part, args.parts)
    for name, value in list(vars(gemm_interface).items()):
        if isinstance(value, CustomOpDef):  # else torch asks for one configuration alone
            setattr(gemm_interface, name, value._init_fn)
    with FakeTensorMode():
        products(torch, gemm_interface)


if __name__ == "__main__":
    main()
