#!/usr/bin/env python3
"""Golden values of small models: model_golden.json, by torch in double with its autograd, its
torch.optim.AdamW and its clip_grad_norm_, and nothing of the library's. Parameters and tokens are made
by formulas that the test has too.

usage: model_golden.py [--check]     write the file, or fail if it is not what would be written
"""

import json
import math
import os
import sys

import torch
import torch.nn.functional as F

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model_golden.json")
BATCH, POSITIONS, STEPS, RATE = 2, 24, 10, 3e-3

BASE = dict(vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=6,
            num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=10,
            max_position_embeddings=24, rms_norm_eps=1e-6, rope_theta=1000.0)
CASES = {
    "as Qwen3-MoE": dict(BASE, model_type="qwen3_moe", norm_topk_prob=True,
                         tie_word_embeddings=False),
    "as OLMoE, tied": dict(BASE, model_type="olmoe", norm_topk_prob=False, tie_word_embeddings=True,
                           intermediate_size=10, num_key_value_heads=4),
    "a dense layer first": dict(BASE, model_type="qwen3_moe", norm_topk_prob=True,
                                tie_word_embeddings=False, mlp_only_layers=[0],
                                intermediate_size=17),
}


def shapes(c):
    """Names and shapes of all parameters."""
    d, dim = c["hidden_size"], c["head_dim"]
    of_q, of_k = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    whole = c["model_type"] == "olmoe"
    out = [("model.embed_tokens.weight", (c["vocab_size"], d))]
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."
        a = p + "self_attn."
        out += [(p + "input_layernorm.weight", (d,)), (a + "q_proj.weight", (of_q, d)),
                (a + "k_proj.weight", (of_k, d)), (a + "v_proj.weight", (of_k, d)),
                (a + "q_norm.weight", (of_q if whole else dim,)),
                (a + "k_norm.weight", (of_k if whole else dim,)), (a + "o_proj.weight", (d, of_q)),
                (p + "post_attention_layernorm.weight", (d,))]
        mlps = []
        if l in c.get("mlp_only_layers", []):
            mlps = [(p + "mlp.", c["intermediate_size"])]
        else:
            out.append((p + "mlp.gate.weight", (c["num_experts"], d)))
            mlps = [(f"{p}mlp.experts.{e}.", c["moe_intermediate_size"])
                    for e in range(c["num_experts"])]
        for q, inner in mlps:
            out += [(q + "gate_proj.weight", (inner, d)), (q + "up_proj.weight", (inner, d)),
                    (q + "down_proj.weight", (d, inner))]
    out.append(("model.norm.weight", (d,)))
    if not c["tie_word_embeddings"]:
        out.append(("lm_head.weight", (c["vocab_size"], d)))
    return out


def made_up(name, shape):
    """Number i of a tensor, by the sum of its name's bytes, rounded to float32."""
    index = sum(name.encode())
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    wave = torch.sin(1.37 * i * (1 + index % 13 / 7) + index)
    value = 1 + 0.1 * wave if len(shape) == 1 else 0.3 * wave
    return value.to(torch.float32).to(torch.float64).reshape(shape)


def tokens(step):
    """[B, S] and the ids that follow; every seventh target is none."""
    ids = [(i * i * 7 + i * (step + 3) + step) % 31 for i in range(BATCH * POSITIONS)]
    targets = [-1 if i % 7 == 6 else (i * 5 + step * 11) % 31 for i in range(BATCH * POSITIONS)]
    return (torch.tensor(ids).reshape(BATCH, POSITIONS),
            torch.tensor(targets).reshape(BATCH, POSITIONS))


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x, theta):
    """x [B, heads, S, D], halves turned as Llama's rotate_half does."""
    dim, length = x.shape[-1], x.shape[-2]
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    angle = torch.cat([angle, angle], -1)
    rotated = torch.cat([-x[..., dim // 2:], x[..., :dim // 2]], -1)
    return x * angle.cos() + rotated * angle.sin()


def swiglu(x, w, prefix):
    inner = F.silu(x @ w[prefix + "gate_proj.weight"].T) * (x @ w[prefix + "up_proj.weight"].T)
    return inner @ w[prefix + "down_proj.weight"].T


def experts(x, w, prefix, c):
    flat = x.reshape(-1, x.shape[-1])
    p = torch.softmax(flat @ w[prefix + "gate.weight"].T, -1)
    weight, chosen = p.topk(c["num_experts_per_tok"], -1)
    if c["norm_topk_prob"]:
        weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for e in range(c["num_experts"]):
        token, k = (chosen == e).nonzero(as_tuple=True)
        part = swiglu(flat[token], w, f"{prefix}experts.{e}.") * weight[token, k, None]
        out = out.index_add(0, token, part)
    return out.reshape(x.shape)


def loss_of(c, w, ids, targets):
    eps, dim = c["rms_norm_eps"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    whole = c["model_type"] == "olmoe"
    batch, length = ids.shape
    x = w["model.embed_tokens.weight"][ids]
    causal = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."
        a = p + "self_attn."
        h = rms_norm(x, w[p + "input_layernorm.weight"], eps)

        def split(name, count):
            y = h @ w[f"{a}{name}_proj.weight"].T
            norm = w.get(f"{a}{name}_norm.weight")
            if norm is not None and whole:
                y = rms_norm(y, norm, eps)
            y = y.reshape(batch, length, count, dim)
            if norm is not None and not whole:
                y = rms_norm(y, norm, eps)
            return y.transpose(1, 2)

        q, k = rope(split("q", heads), c["rope_theta"]), rope(split("k", kv_heads), c["rope_theta"])
        v = split("v", kv_heads)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        score = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(dim) + causal, -1)
        mixed = (score @ v).transpose(1, 2).reshape(batch, length, heads * dim)
        x = x + mixed @ w[a + "o_proj.weight"].T
        h = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        dense = l in c.get("mlp_only_layers", [])
        x = x + (swiglu(h, w, p + "mlp.") if dense else experts(h, w, p + "mlp.", c))
    head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    logits = rms_norm(x, w["model.norm.weight"], eps) @ w[head].T
    return F.cross_entropy(logits.reshape(-1, c["vocab_size"]), targets.reshape(-1),
                           ignore_index=-1)


def run(c):
    w = {name: made_up(name, shape).requires_grad_() for name, shape in shapes(c)}
    first = loss_of(c, w, *tokens(0))
    first.backward()
    gradients = {}
    for name, tensor in w.items():
        flat = tensor.grad.reshape(-1)
        places = [n * (flat.numel() - 1) // 3 for n in range(4)]
        gradients[name] = dict(norm=flat.norm().item(), samples=flat[places].tolist())
    groups = [dict(params=[t for t in w.values() if t.dim() > 1], weight_decay=0.1),
              dict(params=[t for t in w.values() if t.dim() == 1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(c, w, *tokens(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(list(w.values()), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
    return dict(config=c, loss=first.item(), gradients=gradients, losses=losses, norms=norms)


def main():
    torch.set_num_threads(1)
    document = {name: run(c) for name, c in CASES.items()}
    if "--check" not in sys.argv[1:]:
        with open(FILE, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        return
    with open(FILE, encoding="utf-8") as file:
        stored = json.load(file)

    def same(a, b):
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        return abs(a - b) <= 1e-9 * (1 + abs(b)) if isinstance(a, float) else a == b

    if not same(stored, document):
        sys.exit(f"{FILE} is not what this script computes")


if __name__ == "__main__":
    main()
