"""Blocks with the structure of those of transformers 5, for machines without it: experts as one
tensor for both input products, routers that return (logits, weights, ids), shared experts."""

import sys
import types

import torch
from torch import nn


def without_transformers():
    """Makes `import switchyard.transformers` work where transformers is not installed."""
    try:
        import transformers.integrations.moe  # noqa: F401
    except ImportError:
        moe = types.ModuleType("transformers.integrations.moe")
        moe.ALL_EXPERTS_FUNCTIONS = type("Registry", (dict,), {"register": dict.__setitem__})()
        for name in ("transformers", "transformers.integrations"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[moe.__name__] = moe


class Experts(nn.Module):
    """[E,2I,H] and [E,H,I], or transposed and interleaved with biases, as gpt-oss has them."""

    def __init__(self, num_experts=6, hidden=24, inner=40, like_gpt_oss=False, act_fn=None):
        super().__init__()
        self.has_gate, self.has_bias = True, like_gpt_oss
        self.is_transposed, self.is_concatenated = like_gpt_oss, not like_gpt_oss
        self.has_post_expert_norm = self._is_expert_parallel = False
        self.num_experts = num_experts
        first, second = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
        if like_gpt_oss:
            first, second = (first[0], first[2], first[1]), (second[0], second[2], second[1])
            self.alpha, self.limit = 1.5, 0.9
            self.gate_up_proj_bias = nn.Parameter(torch.randn(num_experts, 2 * inner) * 0.3)
            self.down_proj_bias = nn.Parameter(torch.randn(num_experts, hidden) * 0.3)
        self.gate_up_proj = nn.Parameter(torch.randn(first) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(second) * inner**-0.5)
        self.act_fn = act_fn or nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for token, k in ((t, k) for t in range(len(hidden_states))
                         for k in range(top_k_index.shape[1])):
            expert = int(top_k_index[token, k])
            value = self._one(expert, hidden_states[token])
            out[token] += (value * top_k_weights[token, k]).to(out.dtype)
        return out

    def _one(self, expert, x):
        first, second = self.gate_up_proj[expert], self.down_proj[expert]
        if not self.is_transposed:
            gate, up = (first @ x).chunk(2)
            return second @ (self.act_fn(gate) * up)
        product = x @ first + self.gate_up_proj_bias[expert]
        gate = product[::2].clamp(max=self.limit)
        up = product[1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha) @ second + (
            self.down_proj_bias[expert])


class TopKRouter(nn.Module):
    """softmax over all, then the largest; renormalised or not."""

    def __init__(self, num_experts=6, hidden=24, top_k=2, norm_topk_prob=True):
        super().__init__()
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.weight = nn.Parameter(torch.randn(num_experts, hidden) * hidden**-0.5)

    def forward(self, x):
        logits = x @ self.weight.T
        weights, ids = logits.float().softmax(-1).topk(self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, ids


class SigmoidRouter(TopKRouter):
    """DeepSeek-V3's: groups by the sum of their two best, a bias for the choice only, a scale."""

    def __init__(self, num_experts=6, hidden=24, top_k=2):
        super().__init__(num_experts, hidden, top_k)
        self.n_group, self.topk_group, self.routed_scaling_factor = 2, 1, 2.5
        self.register_buffer("e_score_correction_bias", torch.randn(num_experts) * 0.2)

    def forward(self, x):
        logits = x.float() @ self.weight.float().T
        scores = logits.sigmoid()
        choice = (scores + self.e_score_correction_bias).view(len(x), self.n_group, -1)
        best = choice.topk(2, dim=-1)[0].sum(-1).topk(self.topk_group)[1]
        mask = torch.zeros(choice.shape[:2], device=choice.device).scatter_(1, best, 1).bool()[..., None]
        ids = choice.masked_fill(~mask, float("-inf")).flatten(1).topk(self.top_k)[1]
        weights = scores.gather(1, ids)
        return logits, weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor, ids


class OddRouter(TopKRouter):
    """A rule that nobody else has."""

    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits, weights**2, ids


class SharedExpert(nn.Module):
    def __init__(self, hidden=24, inner=16):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, inner, False), nn.Linear(inner, hidden, False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.up_proj(x)))


class Block(nn.Module):
    """The one of Mixtral, Qwen2-MoE and DeepSeek-V3, by what it is given."""

    def __init__(self, router, experts, shared_experts=None, shared_expert=None):
        super().__init__()
        self.gate, self.experts = router, experts
        self.shared_experts, self.shared_expert = shared_experts, shared_expert
        if shared_expert is not None:
            self.shared_expert_gate = nn.Linear(24, 1, False)

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = self.gate(x)
        out = self.experts(x, ids, weights).view(hidden_states.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden_states)
        if self.shared_expert is not None:
            gate = torch.sigmoid(self.shared_expert_gate(hidden_states))
            out = out + gate * self.shared_expert(hidden_states)
        return out


class TupleBlock(Block):
    """gpt-oss returns the router's weights too."""

    def forward(self, hidden_states):
        _, weights, _ = self.gate(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return super().forward(hidden_states), weights


class Model(nn.Module):
    """Blocks beside each other: [number of blocks, ...] of what each makes of x."""

    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        made = [block(x) for block in self.layers]
        return torch.stack([y[0] if isinstance(y, tuple) else y for y in made])
