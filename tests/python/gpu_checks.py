"""What test_gpu.py checks of one rank's own calls on CUDA tensors: the stages and the layer."""

try:
    import torch
except ImportError:
    torch = None

import switchyard as sw

from near import furthest

GPUS = torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0


# Two products, an activation and a sum, their results rounded to bf16 between: 2^-9 each, and the
# elements farthest from the typical error are some five times as far.
BF16_CHAIN = 0.05


def require(holds, *what):
    if not holds:
        raise AssertionError(" ".join(map(str, what)))


def check_layer(comm, device):
    """The layer over the ranks gives what the CPU gives, eager and from a graph."""
    g = torch.Generator().manual_seed(5)
    experts, hidden, inner, top_k, tokens = 16, 256, 128, 4, 24
    gate = torch.randn(experts, hidden, generator=g).to(torch.bfloat16).float()
    w13 = torch.randn(experts, 2 * inner, hidden, generator=g).mul(hidden ** -0.5)
    w2 = torch.randn(experts, hidden, inner, generator=g).mul(inner ** -0.5)
    weights = {"gate": gate, "w13": w13.to(torch.bfloat16), "w2": w2.to(torch.bfloat16),
               "top_k": top_k}
    layer = sw.Layer(device=device, comm=comm if comm.size > 1 else None, max_tokens=tokens,
                     **weights)
    plain = sw.Layer(**weights)

    def tokens_of(seed):
        own = torch.Generator().manual_seed(100 * seed + comm.rank)
        return torch.randn(tokens, hidden, generator=own).to(torch.bfloat16)

    def check(y, x, what):
        error, place = furthest(y, plain(x).float())
        require(error < BF16_CHAIN, what, "relative error", error, "at", place)

    # A second one on the same communicator.
    other = sw.Layer(device=device, comm=comm if comm.size > 1 else None, max_tokens=tokens,
                     **{**weights, "w2": -weights["w2"]})
    x = tokens_of(0)
    on_gpu = x.to(device)
    if GPUS >= comm.size:  # ranks that share a GPU want streams of their own
        check(layer(on_gpu), x, "eager")
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        check(layer(on_gpu), x, "on a stream")
        for turn in range(3):
            x = tokens_of(10 + turn)
            on_gpu = x.to(device)
            check(-other(on_gpu), x, f"another layer, turn {turn}")
            check(layer(on_gpu), x, f"the first layer, turn {turn}")
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(on_gpu)
    for replay in range(1, 6):
        x = tokens_of(replay)
        on_gpu.copy_(x)
        graph.replay()
        check(y, x, f"replay {replay}")


def check_stages(comm, device):
    """Routing and the fused experts on tensors of the GPU, where their weights lie: eager, on another
    stream, in a graph; a layer whose weights lie there."""
    g = torch.Generator().manual_seed(7 + comm.rank)
    experts, hidden, inner, top_k, tokens = 16, 256, 128, 4, 70
    logits = torch.randn(tokens, experts, generator=g)
    gate = torch.randn(experts, hidden, generator=g).to(torch.bfloat16).float()
    w13 = torch.randn(experts, 2 * inner, hidden, generator=g).mul(hidden ** -0.5)
    w2 = torch.randn(experts, hidden, inner, generator=g).mul(inner ** -0.5)
    expert, weight = sw.route(logits, top_k)
    on_gpu = sw.route(logits.to(device), top_k)
    require(torch.equal(on_gpu[0].cpu(), expert), "routing")
    require(torch.allclose(on_gpu[1].cpu(), weight, rtol=1e-5), "weights")

    def check(y, x, chosen, what):
        want = sw.experts(x, w13.to(x.dtype), w2.to(x.dtype), *chosen).float()
        error, place = furthest(y, want)
        require(y.dtype == x.dtype and error < BF16_CHAIN, what, x.dtype, error, "at", place)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        own = [w.to(dtype).to(device) for w in (w13, w2)]
        for count in (tokens, 1, 0):
            x = torch.randn(tokens, hidden, generator=g).to(dtype)[:count]
            chosen = expert[:count], weight[:count]
            y = sw.experts(x.to(device), *own, *(c.to(device) for c in chosen))
            require(tuple(y.shape) == (count, hidden), "shape", tuple(y.shape))
            if count > 0:
                check(y, x, chosen, f"{count} tokens")
    plain = w13[:, :inner].contiguous()
    y = sw.experts(x.to(device), plain.to(device), own[1], *(c.to(device) for c in chosen))
    require(tuple(y.shape) == (0, hidden), "plain experts of no token")

    x = torch.randn(tokens, hidden, generator=g)
    x_gpu, e_gpu, w_gpu = x.to(device), expert.to(device), weight.to(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        check(sw.experts(x_gpu, *own, e_gpu, w_gpu), x, (expert, weight), "another stream")
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sw.experts(x_gpu, *own, e_gpu, w_gpu)
    for _ in range(20):
        x = torch.randn(tokens, hidden, generator=g)
        chosen = sw.route(torch.randn(tokens, experts, generator=g), top_k)
        for to, new in zip((x_gpu, e_gpu, w_gpu), (x, *chosen)):
            to.copy_(new)
        graph.replay()
    check(y, x, chosen, "graph")

    half = x_gpu.half()
    y = sw.experts(half, *own, e_gpu, w_gpu)
    require(torch.equal(y, sw.experts(half.float(), *own, e_gpu, w_gpu).half()), "tokens in f16")

    broken = logits.clone()
    broken[3, 5] = broken[2, 7] = float("nan")
    chosen = sw.route(broken.to(device), top_k)[0].cpu()
    require(bool((chosen[2:4] == -1).all()) and torch.equal(chosen[4:], expert[4:]), "tokens with NaN")
    try:
        sw.route_check(device)
        raise AssertionError("a NaN logit is not raised")
    except sw.SwitchyardError as error:
        require("token 2 for expert 7 is NaN" in str(error), error)
    sw.route_check(device)  # said once

    kept = sw.Experts(*own)
    e_gpu[1, 2] = experts
    kept(x_gpu, e_gpu, w_gpu)
    try:
        kept.check()
        raise AssertionError("an id out of range is not raised")
    except sw.SwitchyardError as error:
        require(error.code == "invalid argument" and "expert ids" in str(error), error)
    for bad, words in (((x, *own), "x lies on CPU"), ((x_gpu[:, ::2], *own), "x"),
                       ((x_gpu, own[0].mT, own[1]), "w13")):
        try:
            sw.experts(*bad, e_gpu, w_gpu)
            raise AssertionError(f"not refused: {words}")
        except sw.SwitchyardError as error:
            require(words in str(error), words, error)
    layers = [sw.Layer(gate.to(where), w13.to(where), w2.to(where), top_k, device=device)
              for where in ("cpu", device)]
    with torch.cuda.stream(torch.cuda.Stream(device)):
        require(torch.equal(*(layer(x_gpu) for layer in layers)), "weights of a GPU in a layer")
    torch.cuda.synchronize(device)

    router, *own = (w.bfloat16().to(device) for w in (gate, w13, w2))
    layer = sw.Layer(router, *own, top_k, device=device, router_in_place=True)
    x_gpu = x_gpu.bfloat16()
    for new in (gate, gate.flip(0)):
        for count in (tokens, 3):  # the kernel just before a call may write the gate
            router.copy_(-new)
            layer(x_gpu[:count])
            router.copy_(new)
            y = layer(x_gpu[:count])
            for copied in (new, new.bfloat16()):
                want = sw.Layer(copied, *own, top_k, device=device)(x_gpu[:count])
                require(torch.equal(y, want), "a gate that is used where it lies", count)
    try:
        sw.Layer(router.half(), *own, top_k, device=device, router_in_place=True)
        raise AssertionError("not refused: a gate of another 16-bit type where it lies")
    except sw.SwitchyardError as error:
        require("a gate of f16" in str(error), error)
