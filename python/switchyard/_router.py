"""Routers by name: docs/routers.md."""

import ctypes
import functools
import sys
from ctypes import byref

from ._arguments import as_f32, rows
from ._errors import SwitchyardError, integer, invalid
from ._native import initialised, native
from ._ranks import communicator_of
from ._structs import RouterConfig, RouteRequest
from ._tensors import (empty_like, is_cupy, is_torch, on_gpu, on_host, pointer, require_tensor,
                       stream_of, views, views_in_place)


class Router:
    """A rule by which tokens get experts: Router("expert-choice", num_experts=E, top_k=K,
    capacity_factor=2.0). Options are those of `switchyard routers`, with "_" or "-"; one that the
    router has not is an error that lists them. `seed` is that of all noise. frequencies [V] of token ids
    make a "hash" router that balances: the most frequent ids go to the experts with the least load.

    a = router(logits) routes where the logits are, and layer = Layer(..., router=router) a whole layer. On a
    GPU it only enqueues: a token with a NaN logit gets no expert (-1), which a later call raises, or
    route_check(); frequencies are for a Layer there."""

    def __init__(self, name, num_experts, top_k=None, seed=0, frequencies=None, **options):
        if top_k is not None:
            options = {"top_k": integer("top_k", top_k), **options}
        self.name, self.num_experts = name, integer("num_experts", num_experts)
        self.seed = integer("seed", seed, ctypes.c_uint64)
        self.spelling = name
        if options:
            self.spelling += ":" + ",".join(f"{key.replace('_', '-')}={_spelled(value)}"
                                            for key, value in options.items())
        self.has_sigmoids = options.get("score") == "sigmoid"
        self._noise = float(options.get("noise", 1 / self.num_experts)) if name == "v-moe" else None
        self._floor = float(options.get("floor", 0.01)) if name == "noisy-top-k" else None
        self._config = initialised(RouterConfig, "router_config")
        self._config.num_experts = self.num_experts
        self._config.top_k = 1  # where nothing is said
        self._config.router = self.spelling.encode()
        self._table = None if frequencies is None else self._balanced(frequencies, top_k or 1)
        columns, has_logits, num_logits = (ctypes.c_int32() for _ in range(3))
        native.router_columns(byref(self._config), byref(columns), byref(has_logits))
        native.router_num_logits(byref(self._config), byref(num_logits))
        num_ids = ctypes.c_int32()
        native.router_num_experts(byref(self._config), byref(num_ids))
        self.num_ids = num_ids.value  # experts that a routing names: of "moe++" E and those beside them
        self.zero_computation = self.num_ids - self.num_experts
        self.tau = float(options.get("tau", 0.75)) if name == "moe++" else 0.0
        self.columns, self.has_logits = columns.value, bool(has_logits.value)
        self.num_logits = num_logits.value

    def _balanced(self, frequencies, top_k):
        """The table of a hash router, which the configuration points to."""
        ids = [integer("a frequency", n, ctypes.c_int64) for n in _plain(frequencies)]
        table = views(table=_numpy().empty((len(ids), top_k), "int32"))
        native.balanced_hash_table((ctypes.c_int64 * len(ids))(*ids), len(ids), self.num_experts,
                                   top_k, pointer(table["table"]))
        self._config.hash_table = pointer(table["table"])
        return table

    def fill(self, config):
        """What a struct of the C interface says of the router; this object must outlive its use."""
        config.router = self.spelling.encode()
        if self._table is None:
            return
        if not isinstance(config, RouterConfig):
            raise SwitchyardError("unsupported", "a router with frequencies for a layer of a checkpoint: "
                                  "give arrays")
        config.hash_table = self._config.hash_table

    def __repr__(self):
        return f"Router({self.spelling!r}, num_experts={self.num_experts})"

    def request(self, num_tokens, token_ids=None, step=0, training=True, layer=0, first_token=0,
                like=None):
        """What a call draws upon, and what must live until the call has returned. token_ids go where
        `like` is."""
        request = initialised(RouteRequest, "route_request")
        request.seed, request.step, request.layer = self.seed, step, layer
        request.first_token, request.training = first_token, int(bool(training))
        if token_ids is None:
            return request, None
        ids = _int32(token_ids, like)
        if tuple(ids.shape) != (num_tokens,):
            raise invalid(f"token_ids is {list(ids.shape)}, want [{num_tokens}]")
        kept = views(token_ids=ids)
        request.token_ids = pointer(kept["token_ids"])
        return request, (ids, kept)

    def add_previous(self, request, previous_logits, like):
        """The logits of the layer before, beside `like`; what must live as long as the request."""
        if previous_logits is None:
            return None
        found = rows("previous_logits", previous_logits, self.num_logits)
        found = (_beside(like, found.detach()).float().contiguous() if is_torch(found)
                 else as_f32("previous_logits", found))
        view = views(previous_logits=found)["previous_logits"]
        request.previous_logits = pointer(view)
        return found, view

    def add_logits(self, request, like):
        """Memory for the logits of a call beside `like`, and what must live as long as the request."""
        found = empty_like(like, (like.shape[0], self.num_logits), "f32")
        view = views_in_place(logits=found)["logits"]
        request.logits = pointer(view)
        return found, view

    def __call__(self, logits, token_ids=None, step=0, training=True, layer=0, first_token=0,
                 noise_logits=None, selection_bias=None):
        """logits [T, E] f32 -> Assignment, E here self.num_logits: null experts have columns too. A router without logits (hash, uniform, ...) takes of them
        only T, and None where token_ids [T] say it. In training noise is drawn, a function of (seed,
        step, layer, first_token + t, expert): `first_token` is the number of tokens on the ranks
        before. The jitter of "switch" is on what the gate is multiplied with: a Layer's. torch has
        gradients of the weights and of `probs`; the choice is a constant.

        noise_logits [T, E] f32 are those of "noisy-top-k" in training, x times its noise weights: its
        noise has the deviation softplus(noise_logits) + floor, and passes them gradients.
        selection_bias [E] f32 are the thresholds of "expert-threshold" with a minus: update_thresholds();
        without it 1/E each."""
        if logits is None:
            if self.has_logits or token_ids is None:
                raise invalid(f"logits is None, and the router {self.name} "
                              + ("chooses by them" if self.has_logits else "is not told token_ids"))
            like, num_tokens = token_ids, len(token_ids)
        else:
            require_tensor("logits", logits, "[T, E]")
            like, num_tokens = logits, logits.shape[0]
            if logits.shape[1] != self.num_logits:
                raise invalid(f"logits is {list(logits.shape)}, want [T, {self.num_logits}]")
        request, kept = self.request(num_tokens, token_ids, step, training, layer, first_token, like)
        request.stream = stream_of(like)
        deviation, view = self._deviation(request, logits, noise_logits)
        bias = views(selection_bias=_beside(like, selection_bias))["selection_bias"]
        request.selection_bias = pointer(bias)
        if not self.has_logits:
            logits = None
        if logits is not None and is_torch(logits):
            expert, weight, noisy = _function().apply(self, request, (kept, view, bias), logits,
                                                      noise_logits)
        else:
            noisy = None if logits is None else logits.astype("float32", copy=True)
            expert, weight = self.route(request, noisy, num_tokens, like)
        return Assignment(self, expert, weight, noisy, logits, deviation)

    def _deviation(self, request, logits, noise_logits):
        """Of the normal noise of a call, None where there is none; and what must live as long as the
        request, to which noise_logits are added."""
        if self._floor is None and noise_logits is not None:
            raise invalid(f"noise_logits are given, and the noise of the router {self.name} is not "
                          "learned: noisy-top-k's is")
        if not request.training or self._floor is None:
            return (self._noise if request.training else None), None
        require_tensor("noise_logits", noise_logits, "[T, E]")
        if is_torch(noise_logits) != is_torch(logits) or noise_logits.shape != logits.shape:
            raise invalid(f"noise_logits is {list(noise_logits.shape)}, want as logits "
                          f"{list(logits.shape)}, of the same library")
        if is_torch(logits):
            deviation = sys.modules["torch"].nn.functional.softplus(noise_logits) + self._floor
            given = noise_logits.detach().float().contiguous()
        else:
            module = sys.modules[type(logits).__module__.split(".", maxsplit=1)[0]]
            deviation = module.logaddexp(0, noise_logits) + self._floor
            given = module.ascontiguousarray(noise_logits, dtype="float32")
        view = views(noise_logits=given)["noise_logits"]
        request.noise_logits = pointer(view)
        return deviation, (given, view)

    def noise_backward(self, request, dlogits):
        request.stream = stream_of(dlogits)
        dnoise = empty_like(dlogits, tuple(dlogits.shape), "f32")
        v = views(dlogits=dlogits, dnoise_logits=dnoise)
        native.noise_backward(byref(self._config), byref(request),
                              *(pointer(view) for view in v.values()))
        return dnoise

    def route(self, request, logits, num_tokens, like):
        """[T, C] experts and weights; noise is added to logits, which may be None."""
        expert = empty_like(like, (num_tokens, self.columns), "i32")
        weight = empty_like(like, (num_tokens, self.columns), "f32")
        v = views(logits=logits, expert=expert, weight=weight)
        native.route_with(byref(self._config), byref(request), *(pointer(view) for view in v.values()))
        return expert, weight

    def backward(self, request, logits, expert, dweight):
        request.stream = stream_of(dweight)
        dlogits = empty_like(logits, tuple(logits.shape), "f32")
        v = views(logits=logits, expert=expert, dweight=dweight, dlogits=dlogits)
        native.route_backward(byref(self._config), byref(request),
                              *(pointer(view) for view in v.values()))
        return dlogits


def update_selection_bias(bias, counts, rate=1e-3, centered=False, comm=None):
    """Balancing without a loss (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3), after a step of the
    optimizer: bias [E] f32, in place, += rate * sign(mean - counts), counts [E] assignments before any
    was dropped, of all accumulated steps (a.counts), summed over the ranks of `comm`, collectively.
    centered=True keeps the mean of the bias. Counts and biases on a GPU go by way of the host, which
    waits for them."""
    require_tensor("counts", counts, "[E]")
    values = [integer("a count", n, ctypes.c_int64) for n in _plain(counts)]
    require_tensor("bias", bias, "[E]")
    if len(values) != bias.shape[0]:
        raise invalid(f"counts is [{len(values)}], want [{bias.shape[0]}] as bias")
    _update(bias, comm, lambda view, handle: native.update_selection_bias(
        (ctypes.c_int64 * len(values))(*values), view, rate, int(bool(centered)), handle))


def update_thresholds(bias, logits, top_k, momentum=0.99, comm=None):
    """The thresholds of the router "expert-threshold" (arXiv:2603.11535), after a step of the optimizer:
    bias [E] f32, in place, = momentum * bias - (1 - momentum) * q, q the quantiles that top_k of E tokens
    of logits [T, E] are above; over the ranks of `comm`, collectively, their mean by tokens."""
    require_tensor("logits", logits, "[T, E]")
    require_tensor("bias", bias, "[E]")
    given = on_host(logits.detach() if is_torch(logits) else logits)
    logits = views(logits=as_f32("logits", given))["logits"]
    _update(bias, comm, lambda view, handle: native.update_thresholds(
        pointer(logits), integer("top_k", top_k), momentum, view, handle))


def _update(bias, comm, call):
    """call(bias, communicator), and what it has written where the bias lies."""
    plain = bias.detach() if is_torch(bias) else bias
    host = on_host(plain)
    view = views_in_place(bias=host)["bias"]
    if communicator_of(comm) is None:
        call(pointer(view), None)
    else:
        comm.run(lambda: call(pointer(view), comm.pointer))
    if host is not plain:
        plain[...] = host if is_torch(host) else type(plain)(host)


class Assignment:
    """Who works on what, of T tokens: topk_expert [T, C] i32 and topk_weight [T, C] f32, C the router's
    columns (K, or E where a token has any number of experts), -1 and 0 behind a token's last; `logits`
    with their noise (None of a rule without them), and of normal noise `clean` logits without it and
    their `deviation`: what sw.losses takes. The rest is made when it is asked for."""

    def __init__(self, router, expert, weight, logits, clean=None, deviation=None):
        self.router, self.topk_expert, self.topk_weight = router, expert, weight
        self.logits = logits
        self.null_experts = router.num_logits - router.num_ids
        self.zero_computation, self.tau = router.zero_computation, router.tau
        if deviation is not None:
            self.clean, self.deviation = clean, deviation

    @functools.cached_property
    def probs(self):
        """[T, E] softmax of the logits, noise included; of the score "sigmoid" the sigmoids by their
        sum."""
        if self.logits is None:
            raise invalid(f"the router {self.router.name} has no logits, and so no probabilities")
        logits = self.logits
        if is_torch(logits):
            # Logarithms of sigmoids, so that none underflows.
            return (sys.modules["torch"].nn.functional.logsigmoid(logits)
                    if self.router.has_sigmoids else logits).softmax(-1)
        numpy = sys.modules["numpy"]
        if self.router.has_sigmoids:
            logits = -numpy.logaddexp(0, -logits)
        shares = numpy.exp(logits - logits.max(-1, keepdims=True))
        return shares / shares.sum(-1, keepdims=True)

    @functools.cached_property
    def counts(self):
        """[E] assignments of each expert, before any is dropped; of "moe++" all that it has."""
        found = self.topk_expert[self.topk_expert >= 0]
        if is_torch(found):
            return found.long().bincount(minlength=self.router.num_ids)
        return sys.modules["numpy"].bincount(found, minlength=self.router.num_ids)

    @functools.cached_property
    def expert_begin(self):
        """[E + 1] where each expert's rows begin in plan order."""
        begin = self.counts.cumsum(0)
        if is_torch(begin):
            return sys.modules["torch"].cat((begin.new_zeros(1), begin))
        return sys.modules["numpy"].concatenate(([0], begin))

    @functools.cached_property
    def _in_plan_order(self):
        used = self.topk_expert >= 0
        expert, weight = self.topk_expert[used], self.topk_weight[used]
        if is_torch(used):
            token, order = used.nonzero()[:, 0], expert.sort(stable=True).indices
        else:
            token, order = used.nonzero()[0], expert.argsort(kind="stable")
        return token[order], expert[order], weight[order]

    token = property(lambda self: self._in_plan_order[0], doc="[N] by expert, then token.")
    expert = property(lambda self: self._in_plan_order[1], doc="[N] ascending.")
    weight = property(lambda self: self._in_plan_order[2], doc="[N] of each assignment.")


@functools.cache
def _function():
    torch = sys.modules["torch"]

    class RouterBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, router, request, kept, logits, noise_logits):
            noisy = logits.detach().float().contiguous().clone()
            expert, weight = router.route(request, noisy, noisy.shape[0], noisy)
            ctx.router, ctx.request, ctx.kept, ctx.dtype = router, request, kept, logits.dtype
            ctx.save_for_backward(expert, noisy)
            ctx.mark_non_differentiable(expert)
            return expert, weight, noisy

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, _, dweight, dnoisy):
            expert, noisy = ctx.saved_tensors
            dlogits = ctx.router.backward(ctx.request, noisy, expert,
                                          dweight.detach().float().contiguous()) + dnoisy
            dnoise = None
            if ctx.needs_input_grad[4]:
                dnoise = ctx.router.noise_backward(ctx.request, dlogits)
            return None, None, None, dlogits.to(ctx.dtype), dnoise

    return RouterBackward


def _spelled(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _plain(numbers):
    """A list of whole numbers."""
    return numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)


def _beside(like, tensor):
    """`tensor` where `like` is, which torch may copy."""
    if tensor is None or not on_gpu(like):
        return on_host(tensor)
    return sys.modules["torch"].as_tensor(tensor, device=like.device) if is_torch(like) else tensor


def _numpy():
    import numpy
    return numpy


def _int32(ids, like):
    """[T] where `like` is; None: in host memory."""
    if is_torch(ids):
        ids = ids.detach().reshape(-1).int()
        return (ids.to(like.device) if is_torch(like) else ids.cpu()).contiguous()
    if is_cupy(ids) and is_cupy(like):
        return ids.reshape(-1).astype("int32")
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(ids, numpy.ndarray):
        raise invalid(f"token_ids is a {type(ids).__name__}, want a tensor of integers")
    return numpy.ascontiguousarray(ids.reshape(-1), dtype=numpy.int32)
