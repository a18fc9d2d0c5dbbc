#!/usr/bin/env python3
"""Times SonicMoE and this library's layer in turns: `bench --suite forward --peer sonicmoe` asks,
and `--suite training`, which goes the way back too and has PyTorch's grouped_mm beside both. In turns
with a dense product too, on the same tokens, weights and router; the weights lie twice, as each wants
them. peer_process.py says how it is measured.

A request is one line of JSON on stdin: {"T", "E", "K", "H", "I", "seed", "rounds", "pass": "forward"
or "both", "zipf"}. With "both" a run ends with the gradients of tokens, router and weights. A zipf above
0 tilts the router, so that expert e is drawn about 1 / (e + 1)^zipf as often as the first; what came of
it is in the answer, one line on stdout: {"median_us": {"ours", "sonicmoe", "dense"}, "ratio",
"difference", "max_over_mean"} or {"error": why}. python3 needs torch with a GPU, sonicmoe (sonic-moe 0.1.2), and switchyard with
SWITCHYARD_LIBRARY naming the libswitchyard.so that is measured.
"""

from peer_process import Programs, in_turns, needed, relative, require_same, serve, tilt, version_of

DENSE = 8192
# Of the norm. SonicMoE rounds its logits to bf16, so that one token in a hundred goes to another last
# expert: of one expert each that alone is 0.2. Another layer would be off by 1 and more.
MOST_DIFFERENCE = 0.3


class WithSonicmoe(Programs):
    """SonicMoE's layer, and this library's."""

    def find_peer(self):
        sonicmoe = needed("sonicmoe", "sonicmoe cannot be imported")
        self.sonic_layer = needed("sonicmoe.functional",
                                  "sonicmoe.functional cannot be imported"
                                  ).moe_TC_softmax_topk_layer
        self.grouped_mm = getattr(self.torch, "_grouped_mm", None)
        self.swiglu = needed("sonicmoe.enums",
                             "sonicmoe.enums cannot be imported").ActivationType.SWIGLU
        self.version = version_of(sonicmoe, "sonic-moe")


def made_up(torch, request):
    """Tokens, router [E,H] and weights [E,2I,H], [E,H,I] in bf16, scaled as the tool scales its
    own."""
    random = torch.Generator("cuda").manual_seed(request["seed"])
    experts, hidden, inner = request["E"], request["H"], request["I"]

    def normal(*shape, fan_in=1):
        values = torch.randn(*shape, device="cuda", generator=random)
        return (values / fan_in**0.5).bfloat16()

    tokens = normal(request["T"], hidden)
    gate = normal(experts, hidden, fan_in=hidden)
    if request.get("zipf", 0) > 0:
        tilt(torch, tokens, gate, request["zipf"])
    w13 = torch.empty(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16)
    w2 = torch.empty(experts, hidden, inner, device="cuda", dtype=torch.bfloat16)
    for e in range(experts):  # normal values in 32 bits would need twice the memory
        w13[e] = normal(2 * inner, hidden, fan_in=hidden)
        w2[e] = normal(hidden, inner, fan_in=inner)
    return tokens, gate, w13, w2


def torch_layer(programs, top_k):
    """The layer as plain PyTorch has it, without a wait for the GPU: sorted rows, grouped_mm."""
    torch = programs.torch

    def layer(tokens, gate, w13, w2):
        top, expert = torch.topk(torch.nn.functional.linear(tokens, gate).float(), top_k)
        weight = torch.softmax(top, -1)
        expert, order = torch.sort(expert.flatten())
        ends = torch.searchsorted(expert, torch.arange(gate.shape[0], device="cuda"),
                                  right=True).int()
        token = order // top_k
        up = programs.grouped_mm(tokens[token], w13.transpose(1, 2), offs=ends)
        gate_part, up_part = up.chunk(2, -1)
        rows = programs.grouped_mm(torch.nn.functional.silu(gate_part) * up_part,
                                   w2.transpose(1, 2), offs=ends)
        weighted = rows * weight.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(tokens).index_add(0, token, weighted)

    return layer


def forward_works(programs, request, values):
    """What runs, and by how much ours differs."""
    torch = programs.torch
    tokens, gate, w13, w2 = values
    top_k, inner = request["K"], request["I"]
    layer = programs.switchyard.Layer(gate.float(), w13, w2, top_k=top_k, score="topk-softmax",
                                      device="cuda:0", max_tokens=request["T"])
    out = torch.empty_like(tokens)
    # SonicMoE wants a row of gate and one of up in turns.
    pairs = torch.stack((w13[:, :inner], w13[:, inner:]), 2).reshape(w13.shape)
    up, down = pairs.permute(1, 2, 0), w2.permute(1, 2, 0)

    def sonic():
        stream = torch.cuda.current_stream().cuda_stream
        return programs.sonic_layer(tokens, gate, up, None, down, None, top_k, stream,
                                    programs.swiglu, True)[0]

    def ours():
        layer(tokens, out=out)

    theirs = sonic()
    ours()
    torch.cuda.synchronize()
    return {"sonicmoe": sonic, "ours": ours}, relative(out, theirs)


def training_works(programs, request, values):
    """As forward_works, there and back: the largest difference of an output or a gradient."""
    torch = programs.torch
    tokens, gate, w13, w2 = (value.requires_grad_() for value in values)
    top_k, inner = request["K"], request["I"]
    layer = programs.switchyard.Layer(gate, w13, w2, top_k=top_k, score="topk-softmax",
                                      trainable=True, device="cuda:0", max_tokens=request["T"])
    plain = torch_layer(programs, top_k)
    with torch.no_grad():
        pairs = torch.stack((w13[:, :inner], w13[:, inner:]), 2).reshape(w13.shape)
    pairs.requires_grad_()
    dout = torch.randn_like(tokens)

    def there_and_back(forward, leaves):
        with torch.enable_grad():
            y = forward()
            return (y.detach(), *torch.autograd.grad(y, leaves, dout))

    def sonic():
        stream = torch.cuda.current_stream().cuda_stream
        return there_and_back(lambda: programs.sonic_layer(
            tokens, gate, pairs.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, top_k, stream,
            programs.swiglu)[0], (tokens, gate, pairs, w2))

    def ours():
        return there_and_back(lambda: layer(tokens), (tokens, gate, w13, w2))

    works = {"sonicmoe": sonic, "ours": ours}
    if programs.grouped_mm is not None:
        works["torch"] = lambda: there_and_back(lambda: plain(tokens, gate, w13, w2),
                                                (tokens, gate, w13, w2))
    theirs, out = sonic(), ours()
    in_turn = out[3].unflatten(1, (2, inner)).transpose(1, 2).flatten(1, 2)
    differences = [relative(a, b) for a, b in zip((*out[:3], in_turn, out[4]), theirs)]
    return works, max(differences)


def load(torch, tokens, gate, top_k):
    """The fullest expert's rows by the mean."""
    expert = torch.topk(tokens.float() @ gate.float().T, top_k).indices
    counts = torch.bincount(expert.flatten(), minlength=gate.shape[0]).float()
    return (counts.max() / counts.mean()).item()


def measure(programs, request):
    torch = programs.torch
    values = made_up(torch, request)
    max_over_mean = load(torch, *values[:2], request["K"])
    make = training_works if request.get("pass") == "both" else forward_works
    works, difference = make(programs, request, values)
    require_same(difference, MOST_DIFFERENCE)
    graphs = {name: programs.captured(work) for name, work in works.items()}  # use what works hold
    square = torch.randn(DENSE, DENSE, device="cuda").bfloat16()
    graphs["dense"] = lambda: square @ square
    in_turns(graphs, 5, programs.sample)  # clocks and tuned kernels settle
    medians = in_turns(graphs, request["rounds"], programs.sample)
    return {"median_us": medians, "ratio": medians["sonicmoe"] / medians["ours"],
            "difference": difference, "max_over_mean": max_over_mean, "rounds": request["rounds"]}


if __name__ == "__main__":
    serve(WithSonicmoe, measure)
