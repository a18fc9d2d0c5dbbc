"""Single stages: routing, and the fused experts call."""

import collections
import functools
import threading
from ctypes import byref

from . import _autograd, _compiled
from ._arguments import (converted, expert_weights, forward_only, output, routing, rows,
                         stored_as_wanted)
from ._errors import NotCopied, SwitchyardError, integer, invalid
from ._native import Handle, choose, initialised, native
from ._streams import Streams
from ._stored import StoredWeights
from ._structs import ExpertConfig, RouterConfig
from ._tensors import (CUDA, current_device, current_stream, describe, device_of, dtype_name,
                       empty_like, is_capturing, is_torch_cuda, new_like, on_gpu, place_of, pointer,
                       require_tensor, stream_of, threads_of_cpu, views, views_in_place)


def router_config(num_experts, top_k, score="softmax", renormalize=True, scale=1.0, groups=1,
                  top_groups=1, group_score="max"):
    config = initialised(RouterConfig, "router_config")
    config.num_experts = num_experts
    config.top_k = top_k
    config.score = choose("score", score, "sy_score")
    config.renormalize = int(bool(renormalize))
    config.scale = scale
    config.groups = groups
    config.top_groups = top_groups
    config.group_score = choose("group_score", group_score, "sy_group_score")
    return config


def expert_config(w13, w2, activation="silu", alpha=None, limit=None, codes_a_byte=1):
    """Sizes from the weights: w13 [E,2I,H] is gated, [E,I,H] plain; w2 is [E,H,I]."""
    config = initialised(ExpertConfig, "expert_config")
    config.num_experts, config.hidden, config.inner = w2.shape
    config.inner *= codes_a_byte
    config.gated = int(w13.shape[1] != config.inner)
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
    require_tensor("logits", logits, "[T, E]")
    forward_only("logits", logits)
    num_tokens, num_experts = logits.shape
    top_k = integer("top_k", top_k)
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


class Experts(NotCopied):
    """Expert weights as the device computes with them: on a CPU placed once, and the tensors may go;
    on a GPU used where they lie, so what is written to the tensors later counts. There calls only
    enqueue, on the current stream of torch or cupy, and follow each other; a graph may hold them once
    a call with as many tokens has come before; and expert ids out of range are raised by a later
    call, or by check().

    w13 is [E,2I,H], all gate rows, then all up rows ([E,I,H] without a gate), w2 [E,H,I];
    w13_layout="interleaved": gate, up, gate, up, ... (b13 alike); transposed=True: w13 [E,H,2I] and w2
    [E,I,H]. Weights stored so, and biases that are not f32, are copied, on a GPU too. Calls of several
    threads take turns; in torch.compile a call is one operator (torch 2.4 or later).

    With w13_scales and w2_scales w13 and w2 are codes, in e4m3 or MXFP4, as a Layer takes them: copied, on
    a GPU too, where they lie. weights="stored" keeps them as codes (GPUs: compute capability 8.0 or
    later), "exact" makes numbers of them; `compute` is the type that is computed in, bf16 unless it says
    another.

    trainable=True, recompute: as of a Layer, for gradients of x, w13, w2, b13, b2 and weight."""

    _parameters = None  # of trainable ones
    _pool = None
    _stored = None  # of codes

    def __init__(self, w13, w2, activation="silu", b13=None, b2=None, alpha=None, limit=None,
                 num_threads=None, w13_layout="gate-up", transposed=False, trainable=False,
                 recompute="none", w13_scales=None, w2_scales=None, weights="exact", compute=None):
        if w13_scales is not None or w2_scales is not None:
            self._stored = StoredWeights(w13, w2, b13, b2, w13_scales, w2_scales, weights, compute,
                                         w13_layout, transposed, trainable)
        elif weights != "exact" or compute is not None:
            name, value = ("weights", weights) if weights != "exact" else ("compute", compute)
            raise invalid(f"{name}={value!r} goes with w13_scales and w2_scales, which are not given")
        if trainable:
            _autograd.check_in_place(w13_layout, transposed)
            self._pool = _autograd.Pool(recompute)
            gpu = w13.device.index if is_torch_cuda(w13) else None
            self._parameters = _autograd.Parameters(gpu, w13=w13, w2=w2, b13=b13, b2=b2)
            w13, w2, b13, b2 = (self._parameters.used[name] for name in ("w13", "w2", "b13", "b2"))
        given = (w13, w2, b13, b2)
        self._copied = _autograd.Copied(w13=w13, w2=w2, b13=b13, b2=b2)
        if self._stored is not None:
            w13, w2, v = self._stored.w13, self._stored.w2, None
            config = expert_config(w13, w2, activation, alpha, limit, self._stored.codes_a_byte)
        else:
            w13, w2, b13, b2 = expert_weights(*given, w13_layout, transposed)
            config = expert_config(w13, w2, activation, alpha, limit)
            v = views(w13=w13, w2=w2, b13=b13, b2=b2)
        self._weights = v if trainable or on_gpu(w13) else None
        self.on_gpu, self.free_mixings = on_gpu(w13), {}
        self._hidden, self._num_experts = config.hidden, config.num_experts
        self._dtype = dtype_name(w13.dtype) if self._stored is None else self._stored.dtype
        self._streams = Streams()
        self._config, self._num_threads = config, integer("num_threads", threads_of_cpu(num_threads))
        self._handle = self._placed(v)
        self._following = threading.Lock()
        self._native_run = native.experts_run
        self._number = _compiled.number_of(self)

    def _placed(self, weights):
        handle = Handle("experts_free")
        if self._stored is not None:
            self._stored.place(self._config, self._num_threads, handle.out())
            return handle
        native.experts_create(byref(self._config), *(pointer(view) for view in weights.values()),
                              self._num_threads, handle.out())
        return handle

    def __call__(self, x, expert, weight, out=None):
        """y[t] = sum over k of weight[t,k] * expert[t,k](x[t]), for x [T,H] or [B,S,H] of f32, bf16 or
        f16, which is converted to the weights' type; y has the shape and dtype of x, or is `out`,
        which does not overlap x. expert and weight as Layer takes them."""
        if self._parameters is not None and _autograd.wants_gradient(
                x, weight, *self._parameters.tensors):
            return _compiled.with_gradients(self, self._number, x, expert, weight,
                                            self._parameters.tensors, out)
        if _compiled.is_compiling():
            self._forward_only(x, weight)
            return _compiled.experts(self._number, x, expert, weight, out)
        return self.run(x, expert, weight, out)

    def _forward_only(self, x, weight):
        trainable = "" if self._stored is not None else "make the experts with trainable=True, "
        forward_only("x", x, trainable)
        forward_only("weight", weight, trainable)
        self._copied.refuse(trainable)

    def run(self, x, expert, weight, out=None):
        """A call outside of torch.compile."""
        tokens = rows("x", x, self._hidden)
        self._forward_only(x, weight)
        if expert is None or weight is None:
            raise invalid("expert and weight must both be given")
        if self._parameters is not None:
            self._follow()
        if is_torch_cuda(x):
            return self._streams.run(lambda: self._run(x, tokens, expert, weight, out), False,
                                     (x, expert, weight))
        return self._run(x, tokens, expert, weight, out)

    def save(self, x, expert, weight):
        """A call that saves what its backward needs: its result, and a tensor that stands for that."""
        self._follow()
        return self.save_of(self._pool, self._parameters, x, expert, weight)

    def save_of(self, pool, used, x, expert, weight):
        """The same with states of another pool, of weights that are `used`."""
        if expert is None or weight is None:
            raise invalid("expert and weight must both be given")
        saved, handle = pool.take(), self._handle
        tokens = rows("x", x, self._hidden)
        y = self.ordered(x, lambda: self._run(x, tokens, expert, weight, None, handle, saved))
        backward = functools.partial(self._gradients, handle)
        return y, _autograd.tensor_for(saved, pool, used, backward, y)

    def ordered(self, x, call):
        return self._streams.run(call, False, (x,)) if is_torch_cuda(x) else call()

    def _gradients(self, handle, *call):
        return _autograd.run_backward(
            lambda dy, *rest: self.ordered(
                dy, lambda: native.experts_backward(handle.pointer, *rest)),
            *call, self._dtype, self._hidden)

    def pool_of_calls(self):
        """Of those on weights that are not this object's own."""
        if self._pool is None:
            self._pool = _autograd.Pool("none")
        return self._pool

    def reload_experts(self):
        """Of trainable ones: places the weights anew, after writes that torch has not counted."""
        self._parameters.copy_anew()
        self._handle = self._placed(self._weights)

    def _follow(self):
        with self._following:
            if self._parameters.follow():
                self._handle = self._placed(self._weights)

    def _run(self, x, tokens, expert, weight, out, handle=None, saved=None):
        expert, weight = routing(expert, weight, x, self._num_experts)
        # What descriptions point to, which is their second part, lives until the call has returned.
        given, kept = describe("x", tokens)
        if out is None:
            y, result = new_like("y", tokens, given)
        else:
            y = output("out", out, x, x.shape)
            result, kept_of_out = describe("y", y)
        rounds_rows = self._stored is not None and self._stored.rounds_rows
        if not rounds_rows and dtype_name(tokens.dtype) != self._dtype:
            tokens = converted(tokens, self._dtype)
            given, kept = describe("x", tokens)
        ids, kept_of_ids = describe("expert", expert)
        weights, kept_of_weights = describe("weight", weight)
        if saved is not None:
            native.experts_run_saved(handle.pointer, given, ids, weights, result, saved.pointer,
                                     stream_of(tokens))
        else:
            self._native_run(self._handle.pointer, given, ids, weights, result, stream_of(tokens))
        if out is not None:
            return out
        return y if len(x.shape) == 2 else y.reshape(x.shape)

    # For calls of the C interface on these weights, with ordered().
    pointer = property(lambda self: self._handle.pointer)
    num_experts = property(lambda self: self._num_experts)
    hidden = property(lambda self: self._hidden)
    dtype = property(lambda self: self._dtype)

    def read_expert(self, expert, w13=None, w2=None, b13=None, b2=None):
        """Of weights on a CPU: as Layer.read_expert()."""
        v = views_in_place(w13=w13, w2=w2, b13=b13, b2=b2)
        native.experts_read_expert(self._handle.pointer, integer("expert", expert),
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
        self._lock = threading.Lock()

    def experts(self, weights, options):
        with self._lock:
            return self._experts(weights, options)

    def _experts(self, weights, options):
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
            found._weights, found._copied = None, _autograd.Copied()  # the caller's
        if capturing:
            self._in_graphs[key] = found
            return found
        self._of[key] = found
        while len(self._of) > self._MOST:
            self._of.popitem(last=False)
        return found


_recent = _Recent()


def experts_in_place(w13, w2, b13, b2, activation, alpha, limit):
    """Those of weights on a GPU that are used where they lie; None where they are copied."""
    if not on_gpu(w13) or any(b is not None and dtype_name(b.dtype) != "float32" for b in (b13, b2)):
        return None
    return _recent.experts((w13, w2, b13, b2), (activation, alpha, limit))


def experts(x, w13, w2, expert=None, weight=None, activation="silu", b13=None, b2=None, alpha=None,
            limit=None, num_threads=None, w13_layout="gate-up", transposed=False, assignment=None):
    """The fused call on weights as they are, for expert and weight [T,K] as Layer takes them, or an
    `assignment` of a Router, with any number of experts a token. On a CPU, and where weights are stored in another way or
    biases are not f32 (see Experts), it places or copies them at every call: keep an Experts object
    to do that once. On a GPU they are used where they lie. torch has gradients of x, w13, w2, b13, b2
    and weight."""
    if assignment is not None:
        if expert is not None or weight is not None:
            raise invalid("assignment is given, and expert or weight too: want one of them")
        if assignment.zero_computation > 0:
            raise SwitchyardError("unsupported", f"the assignment is of the router {assignment.router.name}, whose "
                                  "zero-computation experts a Layer runs")
        expert, weight = assignment.topk_expert, assignment.topk_weight
    weights = (w13, w2, b13, b2)
    in_torch = is_torch_cuda(w13) or not on_gpu(w13)
    if in_torch and _autograd.wants_gradient(x, weight, *weights):
        weights = stored_as_wanted(*weights, w13_layout, transposed)
        if on_gpu(w13):
            weights = (*weights[:2], *(None if b is None else b.float() for b in weights[2:]))
        options = (activation, alpha, limit, num_threads)
        if _compiled.is_compiling():
            return _compiled.experts_with_gradients(x, expert, weight, *weights, *options)
        if not on_gpu(w13):
            return Experts(weights[0], weights[1], activation, weights[2], weights[3], alpha, limit,
                           num_threads, trainable=True)(x, expert, weight)
        _autograd.check_call(x, weight, None)
        return _autograd.run(_OnGpu(weights, options), x, expert, weight,
                             _autograd.in_order(w13=weights[0], w2=weights[1], b13=weights[2],
                                                b2=weights[3]))
    for name, tensor in zip(("w13", "w2", "b13", "b2"), weights):
        forward_only(name, tensor)
    in_place = on_gpu(w13) and not transposed and w13_layout == "gate-up" and all(
        b is None or dtype_name(b.dtype) == "float32" for b in (b13, b2))
    if not in_place:
        return Experts(w13, w2, activation, b13, b2, alpha, limit, num_threads, w13_layout,
                       transposed)(x, expert, weight)
    return _recent.experts(weights, (activation, alpha, limit))(x, expert, weight)


class _OnGpu:
    """A call of experts() that saves, on weights that are used where they lie on a GPU."""

    def __init__(self, weights, options):
        weights = tuple(None if w is None else w.detach() for w in weights)
        self._experts = _recent.experts(weights, options[:3])

    def save(self, x, expert, weight):
        return self._experts.save_of(self._experts.pool_of_calls(), _autograd.Given(), x, expert,
                                     weight)


def save_experts(x, expert, weight, w13, w2, b13, b2, activation, alpha, limit, num_threads):
    """As experts(), with what its backward needs: the result, and a tensor that stands for that."""
    if on_gpu(w13):
        return _OnGpu((w13, w2, b13, b2), (activation, alpha, limit)).save(x, expert, weight)
    return Experts(w13, w2, activation, b13, b2, alpha, limit, num_threads,
                   trainable=True).save(x, expert, weight)
