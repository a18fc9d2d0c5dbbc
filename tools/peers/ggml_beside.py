#!/usr/bin/env python3
"""Times experts stored in MXFP4 on a CPU beside ggml's (llama.cpp), in turns in one process.

The sizes are gpt-oss-20b's, without biases. "theirs" is the graph that llama.cpp makes of such a
layer behind its router: mul_mat_id for gate and up, swiglu_oai, mul_mat_id for down, and the
weighted sum, from weights that ggml has repacked for this CPU where it can ("plain": as they are in
a file). "ours" is a switchyard.Experts of the same codes and scales, "bf16" one of the numbers that
they mean. Every call has another of a few routings, which together have all experts. Lines of JSON
on stdout (or added to --results); the outputs are compared first: ggml makes 8-bit integers of the
rows, so they differ by about a per cent.

    PYTHONPATH=python tools/peers/ggml_beside.py --ggml DIR   # with libggml-base.so, libggml-cpu.so

ggml is built by cmake from llama.cpp's folder ggml (the source package of llama-cpp-python has it in
vendor/), with GGML_NATIVE=ON.
"""

import argparse
import ctypes
import sys
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import beside
import numpy as np
from beside import in_turns, line_of, tell

import switchyard as sw

HIDDEN, INNER, EXPERTS, TOP_K = 2880, 2880, 32, 4
ALPHA, LIMIT = 1.702, 7.0
ROUTINGS = 8
BAR = 1.2
F32, I32, MXFP4 = 0, 26, 39  # ggml_type


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ggml", required=True, help="folder of ggml's libraries")
    parser.add_argument("--tokens", default="1,4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10, help="of each comparison")
    parser.add_argument("--by", choices=["median", "min"], default="median")
    parser.add_argument("--results", help="file that lines are added to")
    return parser.parse_args()


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Ggml:
    """The functions that are used, of the libraries in a folder."""

    SIGNATURES = {
        "ggml_init": (c_void_p, [InitParams]),
        "ggml_version": (c_char_p, []),
        "ggml_new_tensor_1d": (c_void_p, [c_void_p, c_int, c_int64]),
        "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
        "ggml_new_tensor_3d": (c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64]),
        "ggml_mul_mat_id": (c_void_p, [c_void_p] * 4),
        "ggml_swiglu_oai": (c_void_p, [c_void_p] * 3 + [c_float, c_float]),
        "ggml_mul": (c_void_p, [c_void_p] * 3),
        "ggml_add": (c_void_p, [c_void_p] * 3),
        "ggml_view_2d": (c_void_p, [c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t]),
        "ggml_cont": (c_void_p, [c_void_p] * 2),
        "ggml_new_graph": (c_void_p, [c_void_p]),
        "ggml_build_forward_expand": (None, [c_void_p] * 2),
        "ggml_nbytes": (c_size_t, [c_void_p]),
        "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p] * 2),
        "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
        "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
        "ggml_backend_cpu_init": (c_void_p, []),
        "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
        "ggml_backend_cpu_buffer_type": (c_void_p, []),
        "ggml_backend_graph_compute": (c_int, [c_void_p] * 2),
        "ggml_backend_get_device": (c_void_p, [c_void_p]),
        "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
        "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
        "ggml_backend_buft_name": (c_char_p, [c_void_p]),
    }

    def __init__(self, folder):
        libraries = [ctypes.CDLL(str(Path(folder) / name), mode=ctypes.RTLD_GLOBAL)
                     for name in ("libggml-base.so", "libggml-cpu.so")]
        for name, (result, arguments) in self.SIGNATURES.items():
            found = next((getattr(lib, name) for lib in libraries if hasattr(lib, name)), None)
            if found is None:
                sys.exit(f"ggml_beside: {folder} has no {name}")
            found.restype, found.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), found)

    def context(self):
        return self.init(InitParams(64 << 20, None, True))

    def repacking(self, backend):
        """The buffer type that repacks weights for this CPU, or None."""
        registry = self.backend_dev_backend_reg(self.backend_get_device(backend))
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        get = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)
        types = get(self.backend_get_device(backend))
        i = 0
        while types and types[i]:
            if b"REPACK" in self.backend_buft_name(types[i]):
                return types[i]
            i += 1
        return None


def blocks_of(codes, scales):
    """ggml's blocks of [E, R, C] codes (one a byte) and [E, R, C/32] scales: a scale, then codes i and
    i + 16 of each 32 in a byte."""
    experts, rows, cols = codes.shape
    parts = codes.reshape(experts, rows, cols // 32, 2, 16)
    packed = parts[..., 0, :] | parts[..., 1, :] << 4
    return np.concatenate([scales[..., None], packed], axis=-1)


class Theirs:
    """The layer's graph for calls of so many tokens."""

    def __init__(self, ggml, backend, buffer_type, weights, num_tokens):
        self._ggml, self._backend = ggml, backend
        context = ggml.context()
        held = ggml.context()
        names = {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
        w = {name: ggml.new_tensor_3d(held, MXFP4, *shape, EXPERTS) for name, shape in names.items()}
        if not ggml.backend_alloc_ctx_tensors_from_buft(held, buffer_type):
            sys.exit("ggml_beside: ggml has no memory for the weights")
        for name, tensor in w.items():
            blocks = np.ascontiguousarray(weights[name])
            assert blocks.nbytes == ggml.nbytes(tensor)
            ggml.backend_tensor_set(tensor, blocks.ctypes.data, 0, blocks.nbytes)
        self._x = ggml.new_tensor_3d(context, F32, HIDDEN, 1, num_tokens)
        self._ids = ggml.new_tensor_2d(context, I32, TOP_K, num_tokens)
        self._weight = ggml.new_tensor_3d(context, F32, 1, TOP_K, num_tokens)
        gate = ggml.mul_mat_id(context, w["gate"], self._x, self._ids)
        up = ggml.mul_mat_id(context, w["up"], self._x, self._ids)
        inner = ggml.swiglu_oai(context, gate, up, ALPHA, LIMIT)
        rows = ggml.mul(context, ggml.mul_mat_id(context, w["down"], inner, self._ids),
                        self._weight)
        row_bytes = 4 * HIDDEN
        parts = [ggml.view_2d(context, rows, HIDDEN, num_tokens, TOP_K * row_bytes, k * row_bytes)
                 for k in range(TOP_K)]
        out = parts[0]
        for part in parts[1:]:
            out = ggml.add(context, out, part)
        self._out = out
        self._graph = ggml.new_graph(context)
        ggml.build_forward_expand(self._graph, out)
        if not ggml.backend_alloc_ctx_tensors_from_buft(context, ggml.backend_cpu_buffer_type()):
            sys.exit("ggml_beside: ggml has no memory for a call")
        self.out = np.empty((num_tokens, HIDDEN), np.float32)

    def run(self, x, ids, weight):
        for tensor, values in ((self._x, x), (self._ids, ids), (self._weight, weight)):
            self._ggml.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
        if self._ggml.backend_graph_compute(self._backend, self._graph) != 0:
            sys.exit("ggml_beside: ggml's graph did not run")
        self._ggml.backend_tensor_get(self._out, self.out.ctypes.data, 0, self.out.nbytes)
        return self.out


def made_up(random):
    """{name: (codes, scales)} of gate, up and down, with outputs of about 1."""
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {name: (random.integers(0, 16, (EXPERTS, rows, cols), dtype=np.uint8),
                   random.integers(119, 122, (EXPERTS, rows, cols // 32), dtype=np.uint8))
            for name, (rows, cols) in shapes.items()}


def pairs(codes):
    """Two codes a byte, the even one below."""
    return np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)


def main():
    args = parse()
    if beside.torch:
        beside.torch.set_num_threads(args.threads)
    random = np.random.default_rng(1)
    weights = made_up(random)
    ggml = Ggml(args.ggml)
    backend = ggml.backend_cpu_init()
    ggml.backend_cpu_set_n_threads(backend, args.threads)
    blocks = {name: blocks_of(*of) for name, of in weights.items()}
    kinds = {"plain": ggml.backend_cpu_buffer_type()}
    if repacking := ggml.repacking(backend):
        kinds["theirs"] = repacking
    else:
        kinds = {"theirs": kinds["plain"]}

    codes13 = np.concatenate([weights["gate"][0], weights["up"][0]], axis=1)
    scales13 = np.concatenate([weights["gate"][1], weights["up"][1]], axis=1)
    codes2, scales2 = weights["down"]
    ours = {way: sw.Experts(pairs(codes13), pairs(codes2), "clamped_swiglu", alpha=ALPHA,
                            limit=LIMIT, num_threads=args.threads, w13_scales=scales13,
                            w2_scales=scales2, weights=kept, compute="bf16")
            for way, kept in (("ours", "stored"), ("bf16", "exact"))}

    for num_tokens in map(int, args.tokens.split(",")):
        x = random.standard_normal((num_tokens, HIDDEN), np.float32)
        calls = [(random.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (num_tokens, 1)),
                                  axis=1)[:, :TOP_K].copy(),
                  np.full((num_tokens, TOP_K), 1 / TOP_K, np.float32)) for _ in range(ROUTINGS)]
        theirs = {way: Theirs(ggml, backend, kind, blocks, num_tokens)
                  for way, kind in kinds.items()}
        want = ours["ours"](x, *calls[0])
        for way, layer in theirs.items():
            error = np.linalg.norm(layer.run(x, *calls[0]) - want) / np.linalg.norm(want)
            if not error < 0.03:
                sys.exit(f"ggml_beside: {way} and ours differ by {error:.3g} of the norm")
        number = dict.fromkeys((*theirs, *ours), 0)

        def call(way, run):
            number[way] += 1
            return run(x, *calls[number[way] % ROUTINGS])

        works = {way: lambda way=way, layer=layer: call(way, layer.run)
                 for way, layer in theirs.items()}
        works |= {way: lambda way=way, layer=layer: call(way, layer)
                  for way, layer in ours.items()}
        samples = in_turns(works, args.seconds)
        case = {"name": "gpt-oss-20b", "T": num_tokens, "E": EXPERTS, "K": TOP_K, "H": HIDDEN,
                "I": INNER, "weights": "mxfp4", "threads": args.threads}
        tell(args, line_of(args, "ggml_beside", ("Q8 ggml", "experts", "ours"), BAR, samples, case,
                           versions={"ggml": ggml.version().decode()}))


if __name__ == "__main__":
    main()
