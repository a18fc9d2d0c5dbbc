"""A whole block - router, experts, shared experts - as one call of a Layer."""

import copy

import torch

from . import _arrays, _router

_SHARED = ("shared_experts", "shared_expert", "shared_mlp")


class FastBlock:
    """What a block's forward becomes: one call where nobody looks at what happens between router
    and experts, else the block's own forward with Switchyard's experts in it."""

    def __init__(self, block, held, router, in_place):
        self.block = block
        self.held = held
        self.router = router
        self.shared = next((getattr(block, name) for name in _SHARED
                            if isinstance(getattr(block, name, None), torch.nn.Module)), None)
        gate = getattr(block, "shared_expert_gate", None)
        self.shared_gate = gate if isinstance(gate, torch.nn.Module) else None
        self._gate_address = router.weight.data_ptr()
        self._gate_version = None if in_place else _version(router.weight)
        watched = [router, held.module, self.shared, self.shared_gate]
        self._watched = [part for module in watched if module is not None
                         for part in module.modules()]

    def forward(self, hidden_states, *arguments, **named):
        if arguments or named or not self._is_plain(hidden_states):
            return type(self.block).forward(self.block, hidden_states, *arguments, **named)
        return self.run(hidden_states)

    def run(self, hidden_states):
        out = self.held.layer(hidden_states)
        if self.shared is None:
            return out
        shared = self.shared(hidden_states)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(hidden_states)) * shared
        return out + shared

    def _is_plain(self, hidden_states):
        """In training noise may be added, hooks want to see the router, and gradients are an error
        that the experts raise."""
        weight = self.router.weight
        if self.block.training or (torch.is_grad_enabled() and (
                hidden_states.requires_grad or weight.requires_grad
                or self.held.wants_gradient())):
            return False
        if not _arrays.is_compiling() and (
                weight.data_ptr() != self._gate_address
                or self._gate_version not in (None, _version(weight))):
            return False  # the layer routes by values that are no longer the router's
        return not any(part._forward_hooks or part._forward_pre_hooks for part in self._watched)


def _version(tensor):
    return None if tensor.is_inference() else tensor._version


@torch.no_grad()
def is_proved(block, fast):
    """Whether the block's own forward and the fast one agree on random tokens: those for which the
    rounding of 16-bit logits does not decide who is chosen."""
    tokens = _router.random_tokens(32, fast.router.weight)
    try:
        want = type(block).forward(block, tokens[None])
        if not isinstance(want, torch.Tensor) or want.shape != (1, *tokens.shape):
            return False
        got = fast.run(tokens[None])
        chosen = fast.router(tokens)[2].sort(dim=1).values
        exactly = copy.deepcopy(fast.router).float()(tokens.float())[2].sort(dim=1).values
    except (RuntimeError, TypeError, ValueError):
        return False
    clear = (chosen == exactly).all(dim=1)
    return bool(clear.any()) and agree(got[0][clear], want[0][clear])


def agree(got, want, exact_weights=True):
    """Within what rounding the results, and the sums of a few experts, may do."""
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}[want.dtype]
    tolerance = tolerance if exact_weights else 5e-2
    difference = (got.float() - want.float()).abs().amax()
    return bool(difference <= tolerance * want.float().abs().amax())


@torch.no_grad()
def are_proved(module, held, top_k):
    """Whether an experts module and what holds its weights agree on a few tokens and experts."""
    own = getattr(type(module).forward, "__wrapped__", type(module).forward)
    first, second = _arrays.to_arrays(
        module, *(getattr(module, name)[:1].detach() for name in _arrays.parameter_names(module)[:2]))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(3, first.shape[2], generator=generator)
    # Large enough that the activation is not near to a straight line.
    spread = float((tokens @ first[0].float().cpu().T).std())
    tokens = (tokens * (2.0 / spread if spread > 0 else 1.0)).to(second.device, second.dtype)
    num_experts = module.down_proj.shape[0]
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k]
                       for _ in range(3)]).to(second.device)
    weights = (torch.rand(3, top_k, generator=generator) + 0.5).to(second.device, second.dtype)
    return agree(held(tokens, ids, weights), own(module, tokens, ids, weights), held.is_exact)
