"""Single stages: routing, and the fused experts call."""

import collections
from ctypes import byref

from ._native import (ExpertConfig, Handle, RouterConfig, SwitchyardError, choose, initialised,
                      native)
from ._streams import Streams
from ._tensors import (CUDA, current_device, current_stream, device_of, empty_like, is_capturing,
                       is_torch_cuda, on_gpu, place_of, pointer, stream_of, threads_of_cpu,
                       views, views_in_place)


def router_config(num_experts, top_k, score="softmax", renormalize=True, scale=1.0, groups=1,
                  top_groups=1, group_score="max"):
    config = initialised(RouterConfig, "router_config")
    config.num_experts = num_experts
    config.top_k = top_k
    config.score = choose("score", score, "sy_score")
    config.renormalize = int(renormalize)
    config.scale = scale
    config.groups = groups
    config.top_groups = top_groups
    config.group_score = choose("group_score", group_score, "sy_group_score")
    return config


def expert_config(w13, w2, activation="silu", alpha=None, limit=None):
    """Sizes from the weights: w13 [E,2I,H] is gated, [E,I,H] plain; w2 is [E,H,I]."""
    config = initialised(ExpertConfig, "expert_config")
    if len(w13.shape) != 3 or len(w2.shape) != 3:
        raise SwitchyardError("invalid argument",
                              f"w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} must be "
                              "[E,2I,H] (or [E,I,H]) and [E,H,I]")
    config.num_experts, config.hidden, config.inner = w2.shape
    config.gated = int(w13.shape[1] != w2.shape[2])
    config.activation = choose("activation", activation, "sy_activation")
    if alpha is not None:
        config.alpha = alpha
    if limit is not None:
        config.limit = limit
    return config


def route(logits, top_k, score="softmax", renormalize=True, scale=1.0, groups=1, top_groups=1,
          group_score="max", selection_bias=None):
    """Choose each token's experts: logits [T,E] f32 -> expert [T,K] i32, weight [T,K] f32. On a GPU it
    only enqueues: a token with a NaN logit gets no expert (-1), which a later call raises, or
    route_check()."""
    num_tokens, num_experts = logits.shape
    config = router_config(num_experts, top_k, score, renormalize, scale, groups, top_groups,
                           group_score)
    expert = empty_like(logits, (num_tokens, top_k), "i32")
    weight = empty_like(logits, (num_tokens, top_k), "f32")
    v = views(logits=logits, selection_bias=selection_bias, expert=expert, weight=weight)
    native.route(byref(config), *(pointer(view) for view in v.values()), stream_of(logits))
    return expert, weight


def route_check(device="cuda"):
    """Waits for the current stream of a GPU and raises what route() has found wrong there, once."""
    kind, number = device_of(device)
    if kind == CUDA:
        number = current_device() if number is None else number
        native.route_check(number, current_stream(number))


class Experts:
    """Expert weights as the device computes with them: on a CPU placed once, and the tensors may go;
    on a GPU used where they lie, so what is written to the tensors later counts. There calls only
    enqueue, on the current stream of torch or cupy, and follow each other; a graph may hold them once
    a call with as many tokens has come before; and expert ids out of range are raised by a later
    call, or by check()."""

    def __init__(self, w13, w2, activation="silu", b13=None, b2=None, alpha=None, limit=None,
                 num_threads=None):
        config = expert_config(w13, w2, activation, alpha, limit)
        v = views(w13=w13, w2=w2, b13=b13, b2=b2)
        self._weights = v if on_gpu(w13) else None
        self._streams = Streams()
        self._handle = Handle("experts_free")
        native.experts_create(byref(config), *(pointer(view) for view in v.values()),
                              threads_of_cpu(num_threads), self._handle.out())

    def __call__(self, x, expert, weight):
        """y[t] = sum over k of weight[t,k] * expert[t,k](x[t]); y has the dtype of x."""

        def call():
            y = empty_like(x, tuple(x.shape))
            v = views(x=x, expert=expert, weight=weight, y=y)
            native.experts_run(self._handle.pointer, *(pointer(view) for view in v.values()),
                               stream_of(x))
            return y

        if is_torch_cuda(x):
            return self._streams.run(call, False, (x, expert, weight))
        return call()

    def read_expert(self, expert, w13=None, w2=None, b13=None, b2=None):
        """Of weights on a CPU: as Layer.read_expert()."""
        v = views_in_place(w13=w13, w2=w2, b13=b13, b2=b2)
        native.experts_read_expert(self._handle.pointer, expert,
                                   *(pointer(view) for view in v.values()))

    def check(self):
        """Waits for the last call on a GPU and raises what it found wrong."""
        native.experts_check(self._handle.pointer)


class _Recent:
    """Of the fused call on a GPU: its memory, by weights. The last few are kept, and all that a graph
    holds."""

    _MOST = 8

    def __init__(self):
        self._of = collections.OrderedDict()
        self._in_graphs = {}

    def experts(self, weights, options):
        key = (tuple(None if w is None else place_of(w) for w in weights), options)
        if key in self._in_graphs:
            return self._in_graphs[key]
        found, capturing = self._of.pop(key, None), is_capturing(weights[0])
        if found is None:
            if capturing:
                raise SwitchyardError("invalid argument", "experts() takes memory at the first call "
                                      "with these weights, which a graph cannot hold: call it "
                                      "once before")
            w13, w2, b13, b2 = weights
            activation, alpha, limit = options
            found = Experts(w13, w2, activation, b13, b2, alpha, limit)
            found._weights = None  # the caller's
        if capturing:
            self._in_graphs[key] = found
            return found
        self._of[key] = found
        while len(self._of) > self._MOST:
            self._of.popitem(last=False)
        return found


_recent = _Recent()


def experts(x, w13, w2, expert, weight, activation="silu", b13=None, b2=None, alpha=None,
            limit=None, num_threads=None):
    """The fused call on weights as they are. On a CPU it places them at every call: keep an Experts
    object to do that once. On a GPU they are used where they lie."""
    if not on_gpu(w13):
        return Experts(w13, w2, activation, b13, b2, alpha, limit, num_threads)(x, expert, weight)
    return _recent.experts((w13, w2, b13, b2), (activation, alpha, limit))(x, expert, weight)
