#!/usr/bin/env python3
"""Times experts as they are stored beside another program's, in turns: `bench --weights mxfp4 --peer
triton-mxfp4` and `bench --weights fp8 --peer deepgemm` ask. peer_process.py says how it is measured.

triton-mxfp4: triton_kernels (distribution tokenspeed-triton-kernels) on the codes of gpt-oss' experts.
Both have everything behind the router: theirs a gather in the first product with its activation, the
second product with its scatter, and the sum over K by torch, with the sorted order made beforehand;
ours a call of switchyard.Experts, which makes the plan too.

deepgemm: DeepGEMM's grouped products of e4m3 (distribution sgl-deep-gemm), scales of 1 x 128 and 128 x
128. Theirs are the two products alone, of rows that lie by expert as codes beforehand; ours is a whole
switchyard.Layer that computes in fp8: router, plan, the rows' codes, gather, activation and its codes,
both products and the sum over K.

Calls follow each other in a graph, each with a routing of its own, and take turns at as many sets of
weights as it takes to read them from memory. A request is one line of JSON on stdin: {"T", "E", "K", "H",
"I", "activation", "alpha", "limit", "seed", "rounds", "zipf"}; the answer one on stdout: {"median_us":
{"ours", NAME}, "ratio", "difference", "experts_hit"} or {"error": why}. python3 needs torch with a
GPU, the peer, and switchyard with SWITCHYARD_LIBRARY naming the libswitchyard.so that is measured.
"""

import math
import sys

from peer_process import NoPeer, Programs, in_turns, needed, relative, require_same, serve, tilt, version_of

COLD_BYTES = 1.2e9  # of weights in a graph: several times a cache
MOST_DIFFERENCE = 0.05  # of the norm: roundings of the rows
FEW_TOKENS, CALLS_OF_FEW, CALLS = 64, 16, 4
BLOCK = 128  # values, and rows of weights, that share a scale in e4m3
ROWS_ALIGNED = 128  # of an expert, in DeepGEMM's layout


def routing(torch, request, random):
    """K distinct experts a token [T,K] in int32, drawn by 1 / (e + 1)^zipf, and weights that sum to
    one."""
    experts = request["E"]
    rank = torch.arange(1, experts + 1, device=random.device).float()
    even = torch.rand(request["T"], experts, device=random.device, generator=random).clamp_min(1e-9)
    noise = -torch.log((-torch.log(even)).clamp_min(1e-9))  # Gumbel's
    ids = (noise - request.get("zipf", 0) * rank.log()).topk(request["K"], dim=1).indices.int()
    weight = torch.rand(ids.shape, device=random.device, generator=random) + 0.1
    return ids, weight / weight.sum(1, keepdim=True)


def by_expert(torch, ids, experts):
    """The choices in the order of their experts, and how many each has."""
    flat = ids.flatten().long()
    return torch.sort(flat, stable=True).indices, torch.bincount(flat, minlength=experts)


class Triton(Programs):
    """triton_kernels' products of MXFP4."""

    name, distribution = "triton-mxfp4", "tokenspeed-triton-kernels"
    WARPS = (4, 8)  # that its layout of scales is made for; the faster one counts

    def find_peer(self):
        self.suit_compiler()
        package = needed("triton_kernels", "triton_kernels cannot be imported")
        why = "triton_kernels has not the names that are used"
        self.products = needed("triton_kernels.matmul", why)
        self.tensors = needed("triton_kernels.tensor", why)
        self.layouts = needed("triton_kernels.tensor_details.layout", why)
        self.ragged = needed("triton_kernels.tensor_details.ragged_tensor", why)
        self.swiglu = needed("triton_kernels.swiglu", why).swiglu_fn
        self.version = version_of(package, self.distribution)

    @staticmethod
    def suit_compiler():
        """Names that the package asks for and Triton 3.6 has not."""
        triton = needed("triton", "triton cannot be imported")
        info = needed("triton.language.target_info", "triton cannot be imported")
        if not hasattr(info, "is_hip_gfx1250"):
            info.is_hip_gfx1250 = triton.constexpr_function(_no)
        function = triton.runtime.jit.JITFunction
        if not hasattr(function, "def_file_line_number"):  # of stack traces
            function.def_file_line_number, function.def_file_col_number = 1, 0

    def placed(self, codes, scales, warps):
        """Weights [E, rows, bytes] as the kernels want them, and what a product is told of them."""
        value = self.tensors.convert_layout(
            self.tensors.wrap_torch_tensor(codes.transpose(-2, -1), dtype=self.tensors.FP4),
            self.layouts.make_default_matmul_mxfp4_w_layout(mx_axis=-2))
        scale = self.tensors.convert_layout(
            self.tensors.wrap_torch_tensor(scales.transpose(-2, -1)),
            self.layouts.make_default_matmul_mxfp4_w_scale_layout(mx_axis=-2, num_warps=warps))
        return value, self.products.PrecisionConfig(b_mx_scale=scale, b_microblock_size=32,
                                                    out_dtype=self.torch.bfloat16)

    def call(self, request, weights, x, ids, weight):
        """A function that is one call, its plan made now."""
        order, counts = by_expert(self.torch, ids, request["E"])
        ragged = self.ragged.make_ragged_tensor_metadata(counts.int(), ids.numel())
        token, place = (order // request["K"]).int(), order.int()
        gammas = weight.flatten()[order]
        activation = self.products.FusedActivation(
            self.products.FnSpecs("swiglu", self.swiglu, ("alpha", "limit"), reduction_n=2),
            (request["alpha"], request["limit"]))
        (w13, of_w13), (w2, of_w2) = weights
        matmul = self.products.matmul

        def work():
            inner = matmul(x, w13, None, a_ragged_metadata=ragged, gather_indx=token,
                           precision_config=of_w13, fused_activation=activation)
            y = matmul(inner, w2, None, a_ragged_metadata=ragged, scatter_indx=place,
                       precision_config=of_w2, gammas=gammas)
            return y.view(*ids.shape, request["H"]).sum(1)

        return work


def _no():
    return False


def random_mxfp4(torch, request, rows, cols, random):
    """Codes [E, rows, cols / 2] and scales [E, rows, cols / 32] of numbers of about 1 / sqrt(cols)."""
    experts = request["E"]
    codes = torch.randint(0, 256, (experts, rows, cols // 2), device="cuda", dtype=torch.uint8,
                          generator=random)
    exponent = round(127 - math.log2(2.9 * math.sqrt(cols)))  # 2.9: the codes' root mean square
    scales = torch.randint(exponent, exponent + 2, (experts, rows, cols // 32), device="cuda",
                           dtype=torch.uint8, generator=random)
    return codes, scales


def measure_mxfp4(programs, request):
    """The answer of triton-mxfp4."""
    torch = programs.torch
    if request["activation"] != "clamped_swiglu":
        raise ValueError(f"triton_kernels fuses gpt-oss' activation, want clamped_swiglu, not "
                         f"{request['activation']}")
    random = torch.Generator("cuda").manual_seed(request["seed"])
    tokens, experts, hidden, inner = (request[name] for name in "TEHI")
    bytes_of_set = experts * 3 * hidden * inner * 17 / 32
    sets = []
    for _ in range(max(1, math.ceil(COLD_BYTES / bytes_of_set))):
        w13 = random_mxfp4(torch, request, 2 * inner, hidden, random)
        w2 = random_mxfp4(torch, request, hidden, inner, random)
        sets.append({"ours": programs.switchyard.Experts(
            w13[0], w2[0], activation="clamped_swiglu", alpha=request["alpha"],
            limit=request["limit"], w13_layout="interleaved", w13_scales=w13[1], w2_scales=w2[1],
            weights="stored", compute="bf16")} | {
                warps: [programs.placed(*w13, warps), programs.placed(*w2, warps)]
                for warps in programs.WARPS})
    works = {way: [] for way in ("ours", *programs.WARPS)}
    hit = 0
    for i in range(CALLS_OF_FEW if tokens <= FEW_TOKENS else CALLS):
        of = sets[i % len(sets)]
        ids, weight = routing(torch, request, random)
        hit += ids.unique().numel()
        x = torch.randn(tokens, hidden, device="cuda", generator=random).bfloat16()
        out = torch.empty_like(x)
        works["ours"].append(lambda e=of["ours"], x=x, ids=ids, weight=weight, out=out:
                             e(x, ids, weight, out=out))
        for warps in programs.WARPS:
            works[warps].append(programs.call(request, of[warps], x, ids, weight))
    return timed(programs, request, works, programs.WARPS) | {"experts_hit": hit / (i + 1)}


def timed(programs, request, works, theirs):
    """In turns, each way's calls in a graph. A way of theirs that cannot run is left out, unless no
    other is left."""
    graphs, failed, differences = {}, None, []
    want = [work() for work in works["ours"]]
    for way, calls in works.items():
        try:
            differences += [relative(a, call()) for a, call in zip(want, calls)]
            graphs[way] = programs.captured(lambda calls=calls: [call() for call in calls])
        except Exception as error:
            if way == "ours":
                raise
            failed = error
    ways = [way for way in theirs if way in graphs]
    if not ways:
        raise failed
    require_same(max(differences), MOST_DIFFERENCE)
    in_turns(graphs, 5, programs.sample)  # clocks settle
    medians = in_turns(graphs, request["rounds"], programs.sample)
    us = {way: median / len(works["ours"]) for way, median in medians.items()}
    best = min(ways, key=us.get)
    return {"median_us": {"ours": us["ours"], programs.name: us[best]},
            "ratio": us[best] / us["ours"], "way": best, "difference": max(differences),
            "calls": len(works["ours"]), "rounds": request["rounds"]}


class DeepGemm(Programs):
    """DeepGEMM's grouped products of e4m3, rows by expert."""

    name, distribution = "deepgemm", "sgl-deep-gemm"

    def find_peer(self):
        package = needed("deep_gemm", "deep_gemm cannot be imported")
        why = "deep_gemm has not the names that are used"
        self.cast = needed("deep_gemm.utils.math", why)
        layout = needed("deep_gemm.utils.layout", why)
        self.scales_laid = getattr(layout, "get_mn_major_tma_aligned_tensor", None) or getattr(
            package, "get_mn_major_tma_aligned_tensor", None)
        self.product = getattr(package, "m_grouped_fp8_gemm_nt_contiguous", None)
        if self.scales_laid is None or self.product is None:
            raise NoPeer(why)
        self.version = version_of(package, self.distribution)

    def rows(self, values):
        """Codes of rows with scales of 1 x 128, as a product takes them."""
        codes, scales = self.cast.per_token_cast_to_fp8(values, use_ue8m0=False)
        return codes, self.scales_laid(scales)

    def weights(self, experts, rows, cols, random):
        """Codes [E, rows, cols] and scales of 128 x 128, of normal numbers."""
        torch = self.torch
        codes = torch.empty(experts, rows, cols, device="cuda", dtype=torch.float8_e4m3fn)
        scales = torch.empty(experts, -(-rows // BLOCK), -(-cols // BLOCK), device="cuda")
        for e in range(experts):
            values = torch.randn(rows, cols, device="cuda", generator=random) / cols**0.5
            codes[e], scales[e] = self.cast.per_block_cast_to_fp8(values.bfloat16(),
                                                                 use_ue8m0=False)
        return codes, scales


def numbers(codes, scales):
    """What one matrix of codes with scales of 128 x 128 means."""
    wide = scales.repeat_interleave(BLOCK, 0)[:codes.shape[0]].repeat_interleave(BLOCK, 1)
    return codes.float() * wide[:, :codes.shape[1]]


def plain_layer(torch, x, ids, weight, w13, w2):
    """The layer by its definition, in f32."""
    out = torch.zeros(x.shape, device="cuda")
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = ids[t, k]
            gate, up = (numbers(w13[0][e], w13[1][e]) @ x[t].float()).chunk(2)
            out[t] += weight[t, k] * (numbers(w2[0][e], w2[1][e])
                                      @ (torch.nn.functional.silu(gate) * up))
    return out


def rows_of_experts(torch, order, counts, sorted_ids):
    """Where DeepGEMM has the choices in the order of their experts, and whose each of its rows is: an
    expert's begin at a multiple of ROWS_ALIGNED, those behind them are nobody's (-1)."""
    room = (counts + ROWS_ALIGNED - 1) // ROWS_ALIGNED * ROWS_ALIGNED
    shift = (room - counts).cumsum(0) - (room - counts)
    place = torch.arange(order.numel(), device=order.device) + shift[sorted_ids]
    owner = torch.full((int(room.sum()),), -1, device=order.device, dtype=torch.int32)
    owner[place] = sorted_ids.int()
    return place, owner


def measure_fp8(programs, request):
    """The answer of deepgemm."""
    torch = programs.torch
    if request["activation"] != "silu":
        raise ValueError(f"want the activation silu, not {request['activation']}")
    random = torch.Generator("cuda").manual_seed(request["seed"])
    tokens, experts, top_k, hidden, inner = (request[name] for name in "TEKHI")
    w13 = programs.weights(experts, 2 * inner, hidden, random)
    w2 = programs.weights(experts, hidden, inner, random)
    x = torch.randn(tokens, hidden, device="cuda", generator=random).bfloat16()
    gate = torch.randn(experts, hidden, device="cuda", generator=random) / hidden**0.5
    if request.get("zipf", 0) > 0:
        tilt(torch, x, gate, request["zipf"])
    layer = programs.switchyard.Layer(gate, w13[0], w2[0], w13_scales=w13[1], w2_scales=w2[1],
                                      weights="stored", compute="fp8", top_k=top_k,
                                      score="topk-softmax", device="cuda:0", max_tokens=tokens)
    top, ids = torch.topk(x.float() @ gate.T, top_k)
    order, counts = by_expert(torch, ids, experts)
    out = torch.empty_like(x)
    layer(x, out=out)
    few = slice(0, min(tokens, 4))
    difference = relative(out[few], plain_layer(torch, x[few], ids[few], torch.softmax(top, -1)[few],
                                                w13, w2))
    require_same(difference, 2 * MOST_DIFFERENCE)  # rows and the intermediate become e4m3
    sorted_ids = ids.flatten()[order]
    place, owner = rows_of_experts(torch, order, counts, sorted_ids)
    spread = torch.zeros(owner.numel(), hidden, device="cuda", dtype=torch.bfloat16)
    spread[place] = x[order // top_k]
    rows = programs.rows(spread)
    act = programs.rows(torch.randn(owner.numel(), inner, device="cuda", generator=random
                                    ).bfloat16())
    y13 = torch.empty(owner.numel(), 2 * inner, device="cuda", dtype=torch.bfloat16)
    y2 = torch.empty_like(spread)

    def theirs():
        programs.product(rows, w13, y13, owner)
        programs.product(act, w2, y2, owner)

    theirs()
    first = place[:64]
    want = torch.stack([numbers(w13[0][e], w13[1][e]) @ row for e, row in
                        zip(sorted_ids[:64], spread[first].float())])
    require_same(relative(y13[first], want), MOST_DIFFERENCE)
    graphs = {programs.name: programs.captured(theirs),
              "ours": programs.captured(lambda: layer(x, out=out))}
    in_turns(graphs, 5, programs.sample)  # clocks settle
    medians = in_turns(graphs, request["rounds"], programs.sample)
    return {"median_us": medians, "ratio": medians[programs.name] / medians["ours"],
            "difference": difference, "experts_hit": int((counts > 0).sum()), "calls": 1,
            "max_over_mean": (counts.max() * experts / counts.sum()).item(),
            "rounds": request["rounds"]}


PEERS = {"triton-mxfp4": (Triton, measure_mxfp4), "deepgemm": (DeepGemm, measure_fp8)}

if __name__ == "__main__":
    serve(*PEERS[sys.argv[1]])
