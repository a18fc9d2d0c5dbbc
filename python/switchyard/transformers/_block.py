"""A whole block - router, experts, shared experts - as one call of a Layer."""

import copy

import torch

from . import _arrays, _router

_SHARED = ("shared_experts", "shared_expert", "shared_mlp")


class FastBlock:
    """What a block's forward becomes: one call where nobody looks at what happens between router
    and experts, else the block's own forward with Switchyard's experts in it."""

    def __init__(self, block, held, router):
        self.block = block
        self.held = held
        self.router = router
        self.gate = held.form.gate(router)
        self.shared = next((getattr(block, name) for name in _SHARED
                            if isinstance(getattr(block, name, None), torch.nn.Module)), None)
        gate = getattr(block, "shared_expert_gate", None)
        self.shared_gate = gate if isinstance(gate, torch.nn.Module) else None
        self._gate_address = self.gate.data_ptr()
        self._copied = None if held.routes_in_place else _state_of(router)
        watched = [router, held.module, self.shared, self.shared_gate]
        # What modules have of hooks, empty dictionaries as a rule: looked at in every call.
        self._hooks = [hooks for module in watched if module is not None
                       for part in module.modules()
                       for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    def forward(self, hidden_states, *arguments, **named):
        if arguments or named or not self._is_plain(hidden_states):
            return type(self.block).forward(self.block, hidden_states, *arguments, **named)
        return self.held.form.result(self.router, hidden_states, self.run(hidden_states))

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
        weight = self.held.form.gate(self.router)
        if self.block.training or any(self._hooks) or (torch.is_grad_enabled() and (
                hidden_states.requires_grad or weight.requires_grad
                or self.held.wants_gradient())):
            return False
        # Else the layer routes by values that are no longer the router's.
        return _arrays.is_compiling() or (
            weight.data_ptr() == self._gate_address
            and (self._copied is None or self._copied == _state_of(self.router)))


def _state_of(router):
    """What changes when one of its tensors is written to, or another takes its place."""
    return [(id(tensor), None if tensor.is_inference() else tensor._version)
            for tensor in (*router.parameters(), *router.buffers())]


@torch.no_grad()
def is_proved(block, fast):
    """Whether the block's own forward and the fast one agree on random tokens: those for which the
    rounding of 16-bit logits does not decide who is chosen."""
    form = fast.held.form
    tokens = _router.random_tokens(32, fast.gate)
    try:
        own = type(block).forward(block, tokens[None])
        want, got = form.out_of(own), form.out_of(fast.forward(tokens[None]))
        if want is None or want.shape != got.shape:
            return False
        want, got = want.reshape(tokens.shape), got.reshape(tokens.shape)
        chosen = form.chosen(fast.router, tokens).sort(dim=1).values
        exactly = form.chosen(copy.deepcopy(fast.router).float(), tokens.float()).sort(dim=1).values
    except (RuntimeError, TypeError, ValueError):
        return False
    clear = (chosen == exactly).all(dim=1)
    return bool(clear.any()) and agree(got[clear], want[clear])


def agree(got, want, exact_weights=True):
    """Within what rounding the results, and the sums of a few experts, may do."""
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}[want.dtype]
    tolerance = tolerance if exact_weights else 5e-2
    difference = (got.float() - want.float()).abs().amax()
    return bool(difference <= tolerance * want.float().abs().amax())


@torch.no_grad()
def are_proved(module, held, top_k, num_choices=None):
    """Whether an experts module and what holds its weights agree on a few tokens and experts, of the
    first `num_choices`."""
    own = getattr(type(module).forward, "__wrapped__", type(module).forward)
    form = held.form
    first, second = _arrays.to_arrays(
        form, *(getattr(module, name)[:1].detach() for name in _arrays.parameter_names(form)[:2]))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(3, first.shape[2], generator=generator, device="cpu")
    # Large enough that the activation is not near to a straight line.
    spread = float((tokens @ first[0].float().cpu().T).std())
    tokens = (tokens * (2.0 / spread if spread > 0 else 1.0)).to(second.device, second.dtype)
    ids = torch.stack([
        torch.randperm(num_choices or form.num_choices, generator=generator, device="cpu")[:top_k]
        for _ in range(3)]).to(second.device)
    weights = torch.rand(3, top_k, generator=generator, device="cpu") + 0.5
    weights = weights.to(second.device, second.dtype)
    call = form.call_of(tokens, ids, weights)
    return agree(held(*form.arguments(*call)), own(module, *call), held.is_exact)
