"""Dispatch and combine across ranks."""

from ctypes import addressof, byref

from ._native import (Bucketed, ExpertParallelConfig, Flat, Handle, Received, SwitchyardError,
                      native)
from ._stages import choose
from ._tensors import (address_of, dtype_code, empty_like, full_like, pointer, stream_of, views,
                       wrap)

_DTYPES = ("f32", "bf16", "f16")
_MODES = ("auto", "throughput", "low-latency")
_DROP_POLICIES = ("token", "choice", "probs", "bpr")


class Dispatched:
    """What a rank received: views that stay valid until the second following dispatch.

    x [N,H]; row_x [S], row_weight [S] and expert_begin [E_local+1] say which rows each local expert
    works on, sorted by expert; num_rows [1] has N; dropped_rows of all that did not fit.
    """

    def __init__(self, owner, received, like, dtype, hidden):
        self._owner = owner
        n, s = received.num_rows, received.num_assignments

        def indices(field, count):
            return wrap(addressof(field.contents) if field else 0, (count,), "i32", like)

        self.num_rows = full_like(like, n)
        self.dropped_rows = received.dropped_rows
        self.x = wrap(received.x or 0, (n, hidden), dtype, like)
        self.expert_begin = indices(received.expert_begin, received.num_local_experts + 1)
        self.row_x = indices(received.row_x, s)
        weight = received.row_weight
        self.row_weight = wrap(addressof(weight.contents) if weight else 0, (s,), "f32", like)


class FlatDispatched:
    """Received rows in the order source rank, token, k: x [S,H] and meta [S,2] i32, token * K + k
    at the source and global expert. Views, valid until the next dispatch_flat."""

    def __init__(self, owner, flat, like, dtype, hidden):
        self._owner = owner
        self.x = wrap(flat.x or 0, (flat.num_rows, hidden), dtype, like)
        self.meta = wrap(flat.meta or 0, (flat.num_rows, 2), "i32", like)


class ExpertParallel:
    """Dispatch and combine over the ranks of `comm`; expert e lives on the rank r with
    r*E/R <= e < (r+1)*E/R in integer division. All calls are collective. On a CPU there is one
    protocol: `mode` and `ctas` change nothing."""

    def __init__(self, comm, num_experts, top_k, hidden, max_tokens, dtype="f32",
                 mode="auto", dispatch_wire=None, combine_wire=None, max_recv_rows=None,
                 capacity_factor=None, drop_policy="token", rank_invariant=False, ctas=None,
                 timeout_s=10.0):
        choose("mode", mode, _MODES)
        if ctas is not None and ctas < 1:
            raise SwitchyardError("invalid argument", f"ctas={ctas} is less than 1")
        config = ExpertParallelConfig()
        native.ep_config_init(byref(config))
        config.num_experts = num_experts
        config.top_k = top_k
        config.hidden = hidden
        config.max_tokens = max_tokens
        config.dtype = dtype_code("dtype", dtype)
        if dispatch_wire is not None:
            config.dispatch_wire = dtype_code("dispatch_wire", dispatch_wire)
        config.combine_wire = (config.dtype if combine_wire is None
                               else dtype_code("combine_wire", combine_wire))
        config.rank_invariant = int(rank_invariant)
        config.max_recv_rows = max_recv_rows or 0
        config.capacity_factor = capacity_factor or 0.0
        config.drop_policy = choose("drop_policy", drop_policy, _DROP_POLICIES)
        comm.set_timeout(timeout_s)
        self._comm = comm  # outlives the handle
        self._config = config
        self._handle = Handle("ep_free")
        comm.run(lambda: native.ep_create(comm.pointer, byref(config), self._handle.out()))
        self._num_tokens = None
        self._bucketed_meta = None

    def dispatch(self, x, expert, weight, async_=False):
        """x [T,H], expert [T,K] i32 (-1 unused), weight [T,K] f32 -> Dispatched."""
        v = views(x=x, expert=expert, weight=weight)

        def call():
            received = Received()
            native.ep_dispatch(self._handle.pointer, *map(pointer, v.values()), byref(received),
                               stream_of(x))
            self._num_tokens = x.shape[0]
            return Dispatched(self, received, x, self._dtype, self._config.hidden)

        return self._do(call, async_)

    def combine(self, rows, dispatched, out=None, async_=False):
        """rows [S,H], the experts' outputs for `dispatched`, unweighted, in its order -> y [T,H]."""
        self._own(dispatched)

        def call():
            y = self._result(rows, out)
            v = views(rows=rows, y=y)
            native.ep_combine(self._handle.pointer, *map(pointer, v.values()), stream_of(rows))
            return y

        return self._do(call, async_)

    def dispatch_flat(self, x, expert, weight, async_=False):
        """A row per (token, k), never regrouped -> FlatDispatched."""
        v = views(x=x, expert=expert, weight=weight)

        def call():
            flat = Flat()
            native.ep_dispatch_flat(self._handle.pointer, *map(pointer, v.values()), byref(flat),
                                    stream_of(x))
            self._num_tokens = x.shape[0]
            return FlatDispatched(self, flat, x, self._dtype, self._config.hidden)

        return self._do(call, async_)

    def combine_flat(self, rows, dispatched, out=None, async_=False):
        """rows [S,H] of the configured dtype, in the order of `dispatched` -> y [T,H]."""
        self._own(dispatched)

        def call():
            y = self._result(rows, out)
            v = views(rows=rows, weight=None, y=y)
            native.ep_combine_flat(self._handle.pointer, *map(pointer, v.values()),
                                   stream_of(rows))
            return y

        return self._do(call, async_)

    def dispatch_bucketed(self, x, expert, weight, capacity=None):
        """A bucket per local expert: (expert_num_tokens [El] i32, expert_x [El,C,H], expert_meta
        [El,C,5] i32: expert, source rank, token, k, 0). C is `capacity`, or max_tokens * R; rows
        from expert_num_tokens on are undefined. Views, valid until the next dispatch_bucketed."""
        v = views(x=x, expert=expert, weight=weight)

        def call():
            got = Bucketed()
            native.ep_dispatch_bucketed(self._handle.pointer, *map(pointer, v.values()),
                                        capacity or 0, byref(got), stream_of(x))
            self._num_tokens = x.shape[0]
            shape = (got.num_local_experts, got.capacity)
            self._bucketed_meta = got.expert_meta
            return (wrap(got.expert_num_tokens or 0, shape[:1], "i32", x),
                    wrap(got.expert_x or 0, (*shape, self._config.hidden), self._dtype, x),
                    wrap(got.expert_meta or 0, (*shape, 5), "i32", x))

        return self._comm.run(call)

    def combine_bucketed(self, out, weight, expert_meta, expert_y, expert_num_tokens):
        """Results expert_y [El,C,H] of the last dispatch_bucketed, whose meta and numbers are given
        back -> out[:T] = sum over k of weight [T,K] * result; `out` has T rows or more."""
        if expert_y.shape[0] > 0 and address_of(expert_meta) != (self._bucketed_meta or 0):
            raise SwitchyardError("invalid argument",
                                  "expert_meta is not what the last dispatch_bucketed gave")
        if expert_num_tokens.shape[0] != expert_y.shape[0]:
            raise SwitchyardError("invalid argument",
                                  f"expert_num_tokens is [{expert_num_tokens.shape[0]}], want "
                                  f"[{expert_y.shape[0]}]")

        def call():
            y = out[:self._num_tokens]
            v = views(rows=expert_y, weight=weight, y=y)
            native.ep_combine_bucketed(self._handle.pointer, *map(pointer, v.values()),
                                       stream_of(expert_y))
            return y

        return self._comm.run(call)

    @property
    def _dtype(self):
        return _DTYPES[self._config.dtype]

    def _do(self, call, async_):
        return self._comm.start(call) if async_ else self._comm.run(call)

    def _own(self, dispatched):
        if dispatched._owner is not self:
            raise SwitchyardError("invalid argument", "rows belong to another ExpertParallel")

    def _result(self, rows, out):
        return empty_like(rows, (self._num_tokens, self._config.hidden)) if out is None else out
