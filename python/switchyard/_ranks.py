"""Ranks, and dispatch and combine across them."""

from ctypes import addressof, byref, c_void_p

from ._native import ExpertParallelConfig, Handle, Received, SwitchyardError, native
from ._tensors import dtype_code, empty_like, pointer, stream_of, views, wrap


class Communicator:
    """The ranks that run one layer together; one object per rank."""

    def __init__(self, handle):
        self._handle = handle

    @classmethod
    def from_env(cls):
        """Rank and world as mpirun, srun or torchrun set them; a world of 1 without a launcher."""
        handle = Handle("communicator_free")
        native.communicator_from_environment(handle.out())
        return cls(handle)

    @classmethod
    def threads(cls, num_ranks):
        """Ranks as threads of this process: one communicator for each."""
        pointers = (c_void_p * num_ranks)()
        native.communicator_threads(num_ranks, pointers)
        ranks = []
        for value in pointers:
            handle = Handle("communicator_free")
            handle.pointer = c_void_p(value)
            ranks.append(cls(handle))
        return ranks

    @property
    def pointer(self):
        return self._handle.pointer

    @property
    def rank(self):
        return native.communicator_rank(self.pointer)

    @property
    def size(self):
        return native.communicator_size(self.pointer)

    def set_timeout(self, seconds):
        """How long any wait on another rank may take."""
        native.communicator_set_timeout(self.pointer, int(seconds * 1000))

    def recover(self):
        """Collective, after a timeout: afterwards the same objects work again."""
        native.communicator_recover(self.pointer)


class Dispatched:
    """What a rank received: views that stay valid until the second following dispatch.

    x [N,H]; row_x [S], row_weight [S] and expert_begin [E_local+1] say which rows each local expert
    works on, sorted by expert; num_rows N; dropped_rows of all that did not fit.
    """

    def __init__(self, owner, received, like, dtype, hidden):
        self._owner = owner
        n, s = received.num_rows, received.num_assignments

        def indices(field, count):
            return wrap(addressof(field.contents) if field else 0, (count,), "i32", like)

        self.num_rows = n
        self.dropped_rows = received.dropped_rows
        self.x = wrap(received.x or 0, (n, hidden), dtype, like)
        self.expert_begin = indices(received.expert_begin, received.num_local_experts + 1)
        self.row_x = indices(received.row_x, s)
        weight = received.row_weight
        self.row_weight = wrap(addressof(weight.contents) if weight else 0, (s,), "f32", like)


class ExpertParallel:
    """Dispatch and combine over the ranks of `comm`; expert e lives on the rank r with
    r*E/R <= e < (r+1)*E/R in integer division. All calls are collective."""

    def __init__(self, comm, num_experts, top_k, hidden, max_tokens, dtype="f32",
                 dispatch_wire=None, combine_wire=None, max_recv_rows=None, rank_invariant=False,
                 timeout_s=10.0):
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
        comm.set_timeout(timeout_s)
        self._comm = comm  # outlives the handle
        self._config = config
        self._handle = Handle("ep_free")
        native.ep_create(comm.pointer, byref(config), self._handle.out())
        self._num_tokens = None

    def dispatch(self, x, expert, weight):
        """x [T,H], expert [T,K] i32 (-1 unused), weight [T,K] f32 -> Dispatched."""
        received = Received()
        v = views(x=x, expert=expert, weight=weight)
        native.ep_dispatch(self._handle.pointer, *(pointer(view) for view in v.values()),
                           byref(received), stream_of(x))
        self._num_tokens = x.shape[0]
        dtype = ("f32", "bf16", "f16")[self._config.dtype]
        return Dispatched(self, received, x, dtype, self._config.hidden)

    def combine(self, rows, dispatched, out=None):
        """rows [S,H], the experts' outputs for `dispatched`, unweighted, in its order -> y [T,H]."""
        if dispatched._owner is not self:
            raise SwitchyardError("invalid argument", "rows belong to another ExpertParallel")
        y = empty_like(rows, (self._num_tokens, self._config.hidden)) if out is None else out
        v = views(rows=rows, y=y)
        native.ep_combine(self._handle.pointer, *(pointer(view) for view in v.values()),
                          stream_of(rows))
        return y
