"""A Mixture-of-Experts layer in plain torch, as a reference for gradients."""

import torch


def activate(name, gate, up):
    if name == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    functions = {"silu": torch.nn.functional.silu, "relu": torch.relu,
                 "gelu": torch.nn.functional.gelu, "relu2": lambda z: torch.relu(z) ** 2,
                 "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh")}
    return functions[name](gate) * (1 if up is None else up)


def feed_forward(x, w13, w2, b13=None, b2=None, activation="silu"):
    z = x @ w13.T + (0 if b13 is None else b13)
    gate, up = z.chunk(2, dim=-1) if w13.shape[0] == 2 * w2.shape[1] else (z, None)
    return activate(activation, gate, up) @ w2.T + (0 if b2 is None else b2)


def route(logits, top_k, score="softmax", renormalize=True, scale=1.0, selection_bias=None):
    scores = logits if score == "topk-softmax" else (
        torch.sigmoid(logits) if score == "sigmoid" else logits.softmax(-1))
    chosen_by = scores if selection_bias is None else scores + selection_bias
    expert = chosen_by.topk(top_k, dim=-1).indices
    weight = scores.gather(-1, expert)
    if score == "topk-softmax":
        weight = weight.softmax(-1)
    elif renormalize:
        weight = weight / weight.sum(-1, keepdim=True)
    return expert, weight * scale


def experts(x, w13, w2, expert, weight, activation="silu", b13=None, b2=None):
    """x [T,H], expert and weight [T,K]; -1: unused."""
    y = torch.zeros_like(x)
    for e in range(w13.shape[0]):
        token, k = (expert == e).nonzero(as_tuple=True)
        own = feed_forward(x[token], w13[e], w2[e], None if b13 is None else b13[e],
                           None if b2 is None else b2[e], activation)
        y = y.index_add(0, token, own * weight[token, k].unsqueeze(-1))
    return y


def layer(x, parameters, top_k, routing=None, activation="silu", **router):
    """@param parameters  By Layer's names."""
    p = parameters
    tokens = x.reshape(-1, x.shape[-1])
    if routing is None:
        logits = tokens @ p["gate"].T
        if "router_bias" in p:
            logits = logits + p["router_bias"]
        routing = route(logits, top_k, **router)
    expert, weight = (part.reshape(tokens.shape[0], -1) for part in routing)
    y = experts(tokens, p["w13"], p["w2"], expert, weight, activation, p.get("b13"), p.get("b2"))
    if "shared_w13" in p:
        shared = feed_forward(tokens, p["shared_w13"], p["shared_w2"], activation=activation)
        if "shared_gate" in p:
            shared = shared * torch.sigmoid(tokens @ p["shared_gate"].reshape(-1, 1))
        y = y + shared
    return y.reshape(x.shape)
