"""Dispatch and combine across ranks."""

from ctypes import byref

from ._arguments import forward_only, ids, output, routing_weights, rows as rows_of
from ._errors import NotCopied, SwitchyardError, integer, invalid
from ._memory import wrap
from ._native import Handle, choose, initialised, names_of, native
from ._ranks import communicator_of
from ._streams import Streams
from ._structs import Bucketed, ExpertParallelConfig, Flat, Received
from ._tensors import (CUDA, address_of, current_device, device_of, dtype_code, empty_like,
                       full_like, is_torch_cuda, pointer, require_tensor, stream_of, views)


class _Received(NotCopied):
    """Views into the exchange's memory, which a later dispatch of the same kind writes over: to ask
    for one that is no longer valid is an error."""

    def __init__(self, owner, kind, lasts):
        self._owner = owner
        self._number = owner._number
        self._kind = kind
        self._end = owner._numbers[kind] + lasts
        self._views = {}

    def __getattr__(self, name):
        if name.startswith("_") or name not in self._views:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        if self._owner._numbers[self._kind] >= self._end:
            raise SwitchyardError("invalid argument",
                                  f"{name} is stale: a later dispatch has written over it")
        return self._views[name]


class Dispatched(_Received):
    """What a rank received: views, valid on a CPU until the second following dispatch, on a GPU
    until the next one on the object; later it is an error to ask for them.

    x [N,H]; row_x [S], row_weight [S] and expert_begin [E_local+1] say which rows each local expert
    works on, sorted by expert; num_rows [1] has N; dropped_rows of all that did not fit. On a GPU
    everything is there, and N and S are the most there can be: num_rows [1] and expert_begin[-1] say
    how many count, later entries of row_x name some row of x, dropped_rows is [1], and x with
    scale [N, ceil(H/128)] is as it has crossed a wire of fp8 (else scale is None).
    """

    def __init__(self, owner, received, like):
        on_gpu = received.rows_received is not None
        super().__init__(owner, "native", 1 if on_gpu else 2)
        n, s = received.num_rows, received.num_assignments
        view, hidden = owner._view, owner._config.hidden
        self._views = {
            "x": view(received.x, (n, hidden), names_of("sy_dtype")[received.x_dtype], like),
            "scale": view(received.scale, (n, received.num_scales), "f32", like)
                     if received.num_scales else None,
            "num_rows": view(received.rows_received, (1,), "i64", like)
                        if on_gpu else full_like(like, n),
            "dropped_rows": view(received.rows_dropped, (1,), "i64", like)
                            if on_gpu else received.dropped_rows,
            "expert_begin": view(received.expert_begin, (received.num_local_experts + 1,), "i32",
                                 like),
            "row_x": view(received.row_x, (s,), "i32", like),
            "row_weight": view(received.row_weight, (s,), "f32", like),
        }


class FlatDispatched(_Received):
    """Received rows in the order source rank, token, k: x [S,H] and meta [S,2] i32, token * K + k
    at the source and global expert. Views, valid until the next dispatch_flat, later it is an error
    to ask for them. num_rows [1] has S;
    on a GPU S is the most there can be, num_rows says how many of the first rows count, and meta is
    -1, -1 behind them."""

    def __init__(self, owner, flat, like):
        super().__init__(owner, "flat", 1)
        rows = flat.num_rows
        self._views = {
            "x": owner._view(flat.x, (rows, owner._config.hidden), owner._dtype, like),
            "meta": owner._view(flat.meta, (rows, 2), "i32", like),
            "num_rows": full_like(like, rows) if flat.rows_received is None
                        else owner._view(flat.rows_received, (1,), "i64", like),
        }


class ExpertParallel(NotCopied):
    """Dispatch and combine over the ranks of `comm`; expert e lives on the rank r with
    r*E/R <= e < (r+1)*E/R in integer division. All calls are collective.

    device: "cpu", "cuda:0" (this rank's), "cuda" (the current one), or None: that of the tensors of
    the first dispatch, which then makes what it needs. On a CPU there is one protocol: `mode` and
    `ctas` change nothing. On GPUs `device_engine` says how they reach each other's memory: "auto",
    "peer", "nccl", "nccl-pairs" (dispatch and combine only). On GPUs calls only enqueue, on the current stream of torch or cupy; they
    may be captured in a CUDA graph once everything is made (a device is given, or an uncaptured call
    of the same kind came before); every dispatch is followed by its combine; and what kernels find
    wrong (a timeout, an expert id out of range) is raised by a later call, or by check().
    """

    def __init__(self, comm, num_experts, top_k, hidden, max_tokens, dtype="bf16",
                 mode="auto", dispatch_wire=None, combine_wire=None, max_recv_rows=None,
                 capacity_factor=None, drop_policy="token", rank_invariant=False, ctas=None,
                 timeout_s=10.0, device=None, device_engine="auto"):
        if communicator_of(comm) is None:
            raise invalid("comm is None, want a Communicator")
        if ctas is not None and integer("ctas", ctas) < 1:
            raise invalid(f"ctas={ctas} is less than 1")
        config = initialised(ExpertParallelConfig, "ep_config")
        config.num_experts = num_experts
        config.top_k = top_k
        config.hidden = hidden
        config.max_tokens = max_tokens
        config.dtype = dtype_code("dtype", dtype)
        if dispatch_wire is not None:
            config.dispatch_wire = dtype_code("dispatch_wire", dispatch_wire)
        config.combine_wire = (config.dtype if combine_wire is None
                               else dtype_code("combine_wire", combine_wire))
        config.rank_invariant = int(bool(rank_invariant))
        config.max_recv_rows = max_recv_rows or 0
        config.capacity_factor = capacity_factor or 0.0
        config.drop_policy = choose("drop_policy", drop_policy, "sy_drop_policy")
        config.mode = choose("mode", mode, "sy_exchange_mode")
        config.ctas = ctas or 0
        config.device_engine = choose("device_engine", device_engine, "sy_device_engine")
        config.device_type, number = device_of(device)
        if config.device_type == CUDA:
            config.device_id = current_device() if number is None else number
        comm.set_timeout(timeout_s)
        self._comm = comm  # outlives the handle
        self._config = config
        self._handle = Handle("ep_free", within=comm.handle)
        comm.run(lambda: native.ep_create(comm.pointer, byref(config), self._handle.out()))
        self._streams = Streams()
        self._views = {}  # of GPU memory: always in the same place
        self._num_tokens = None
        self._bucketed_meta = None
        self._number = 0  # of the last dispatch of any kind
        self._numbers = {"native": 0, "flat": 0, "bucketed": 0}

    def dispatch(self, x, expert, weight, async_=False):
        """x [T,H], expert [T,K] of integers (-1 unused), weight [T,K] of any float type ->
        Dispatched."""

        def call():
            received = Received()
            v = self._views_of(x, expert, weight)
            native.ep_dispatch(self._handle.pointer, *map(pointer, v.values()), byref(received),
                               stream_of(x))
            self._count_dispatch(x, "native")
            return Dispatched(self, received, x)

        return self._do(call, async_, x, expert, weight)

    def combine(self, rows, dispatched, out=None, async_=False):
        """rows [S,H], the experts' outputs for `dispatched`, the last dispatch, unweighted, in its
        order -> y [T,H]. On a GPU rows may end behind the last that counts."""

        def call():
            self._own(dispatched)
            forward_only("rows", rows)
            y = self._result(rows, out)
            v = views(rows=rows_of("rows", rows), y=y)
            native.ep_combine(self._handle.pointer, *map(pointer, v.values()), stream_of(rows))
            return y

        return self._do(call, async_, rows, out)

    def dispatch_flat(self, x, expert, weight, async_=False):
        """A row per (token, k), never regrouped -> FlatDispatched."""

        def call():
            flat = Flat()
            v = self._views_of(x, expert, weight)
            native.ep_dispatch_flat(self._handle.pointer, *map(pointer, v.values()), byref(flat),
                                    stream_of(x))
            self._count_dispatch(x, "flat")
            return FlatDispatched(self, flat, x)

        return self._do(call, async_, x, expert, weight)

    def combine_flat(self, rows, dispatched, out=None, async_=False):
        """rows [S,H] of the configured dtype, in the order of `dispatched` -> y [T,H]."""

        def call():
            self._own(dispatched)
            forward_only("rows", rows)
            y = self._result(rows, out)
            v = views(rows=rows_of("rows", rows), weight=None, y=y)
            native.ep_combine_flat(self._handle.pointer, *map(pointer, v.values()),
                                   stream_of(rows))
            return y

        return self._do(call, async_, rows, out)

    def dispatch_bucketed(self, x, expert, weight, capacity=None):
        """A bucket per local expert: (expert_num_tokens [El] i32, expert_x [El,C,H], expert_meta
        [El,C,5] i32: expert, source rank, token, k, 0). C is `capacity`, or max_tokens * R; rows
        from expert_num_tokens on are undefined. Views, valid until the next dispatch_bucketed."""

        def call():
            got = Bucketed()
            v = self._views_of(x, expert, weight)
            native.ep_dispatch_bucketed(self._handle.pointer, *map(pointer, v.values()),
                                        integer("capacity", capacity or 0), byref(got),
                                        stream_of(x))
            self._count_dispatch(x, "bucketed")
            shape = (got.num_local_experts, got.capacity)
            self._bucketed_meta = got.expert_meta
            return (self._view(got.expert_num_tokens, shape[:1], "i32", x),
                    self._view(got.expert_x, (*shape, self._config.hidden), self._dtype, x),
                    self._view(got.expert_meta, (*shape, 5), "i32", x))

        return self._do(call, False, x)

    def combine_bucketed(self, out, weight, expert_meta, expert_y, expert_num_tokens):
        """Results expert_y [El,C,H] of the last dispatch_bucketed, whose meta and numbers are given
        back -> out[:T] = sum over k of weight [T,K] * result; `out` has T rows or more."""
        require_tensor("expert_y", expert_y, "[El, C, H]")
        require_tensor("expert_num_tokens", expert_num_tokens, "[El]")
        require_tensor("out", out, "[T, H]")
        for name, tensor in (("expert_y", expert_y), ("weight", weight), ("out", out)):
            forward_only(name, tensor)
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

        return self._do(call, False, expert_y)

    def check(self):
        """Raises what kernels on a GPU have found wrong, once the stream has been waited for. After
        a timeout Communicator.recover(), called by all ranks, makes the object usable again."""
        native.ep_check(self._handle.pointer)

    @property
    def _dtype(self):
        return names_of("sy_dtype")[self._config.dtype]

    def _views_of(self, x, expert, weight):
        forward_only("x", x)
        forward_only("weight", weight)
        return views(x=rows_of("x", x, self._config.hidden),
                     expert=ids("expert", expert, x, self._config.num_experts),
                     weight=routing_weights("weight", weight, x))

    def _count_dispatch(self, x, kind):
        self._num_tokens = x.shape[0]
        self._number += 1
        self._numbers[kind] += 1

    def _view(self, address, shape, dtype, like):
        if not is_torch_cuda(like):
            return wrap(address or 0, shape, dtype, like)
        key = (address, shape, dtype)
        if key not in self._views:
            self._views[key] = wrap(address or 0, shape, dtype, like)
        return self._views[key]

    def _do(self, call, async_, like, *others):
        if is_torch_cuda(like):
            return self._comm.run(lambda: self._streams.run(call, async_, (like, *others)))
        return self._comm.start(call) if async_ else self._comm.run(call)

    def _own(self, dispatched):
        if not isinstance(dispatched, _Received):
            raise invalid(f"dispatched={dispatched!r} is not what a dispatch has given")
        if dispatched._owner is not self:
            raise SwitchyardError("invalid argument", "rows belong to another ExpertParallel")
        if dispatched._number != self._number:
            raise SwitchyardError("invalid argument", "rows belong to an earlier dispatch")

    def _result(self, rows, out):
        shape = (self._num_tokens, self._config.hidden)
        return empty_like(rows, shape) if out is None else output("out", out, rows, shape)
