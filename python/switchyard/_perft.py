"""PERFT: LoRA experts that learn beside a frozen layer. docs/routers.md."""

import functools
import threading
from ctypes import byref
from ctypes import pointer as pointer_to

from . import _autograd, _compiled, _layer_losses
from ._arguments import forward_only, rows, routing
from ._errors import NotCopied, integer, invalid
from ._layer_arguments import compute_of, gate_of
from ._native import Handle, choose, initialised, names_of, native
from ._ranks import communicator_of
from ._stages import router_config
from ._streams import CurrentStream
from ._structs import PerftConfig
from ._tensors import (describe, describe_optional, dtype_code, is_torch, is_torch_cuda, new_like,
                       on_gpu, pointer, require_tensor, stream_of, threads_of_cpu, views)


class Perft(NotCopied):
    """PERFT's adapters (Liu et al. 2024, arXiv:2411.08212, section 3): what D_j(x) = alpha / r B_j
    act(A_j x) adds to the output of a layer that stays as it is, for a [M,r,H] and b [M,H,r]. By kind
        "routed"    sum of g_j D_j(x) over the top_k of a router of their own: gate [M,H], weights of a
                    softmax over all M, with renormalize=True over the chosen
        "embedded"  sum of w_e D_e(x) over each token's experts: by the layer's own routing, M = E
        "dense"     sum of D_j(x) over all
        "shared"    D_0(x): dense with M = 1
    trainable=True: a, b and gate are torch tensors, and torch has gradients of them, of x, and, embedded,
    of weight. losses, num_threads and recompute as of a Layer, and so are the attributes loss_scale and
    loss_counts. With `comm` every rank holds all adapters and calls with its own tokens; gradients of a,
    b and gate are then sums over the ranks, and backward() is collective. compute: "f32", "bf16", "f16",
    by default a's type.

    a, b and gate on a GPU are used where they lie, so what is written to them counts from the next call
    on; H is a multiple of 16 bytes of the compute type there, and with max_tokens a graph may hold calls,
    once one with as many tokens has come before. On a CPU those that do not train are copied.

    y = frozen(x) + perft(x); or perft(x, base), which adds in the type of base."""

    _losses = None  # a LossConfig, where there are some,
    _loss_values = None  # and what they and counts came to in the last call that saved
    loss_scale = 1.0
    loss_counts = None

    def __init__(self, kind, a, b, gate=None, alpha=None, top_k=1, renormalize=False,
                 activation="identity", trainable=False, num_threads=None, losses=None,
                 recompute="none", comm=None, compute=None, max_tokens=0):
        config = initialised(PerftConfig, "perft_config")
        if kind not in names_of("sy_perft_kind"):
            raise invalid(f"kind={kind!r} is none of {', '.join(names_of('sy_perft_kind'))}")
        config.kind = choose("kind", kind, "sy_perft_kind")
        require_tensor("a", a, "[M, r, H]")
        require_tensor("b", b, "[M, H, r]")
        adapters, rank, hidden = a.shape
        if tuple(b.shape) != (adapters, hidden, rank):
            raise invalid(f"b is {list(b.shape)}, want {[adapters, hidden, rank]} beside a")
        if kind == "shared" and adapters != 1:
            raise invalid(f"a has {adapters} adapters, and kind='shared' has one: want that, or 'dense'")
        if (gate is None) == (kind == "routed"):
            raise invalid("kind='routed' wants a gate [M, H]" if gate is None
                          else f"a gate is given, and kind={kind!r} has no router of its own")
        if kind != "routed" and losses is not None:
            raise invalid(f"losses are given, and kind={kind!r} has no router of its own")
        communicator_of(comm)
        self.kind, self.num_adapters, self.hidden = kind, adapters, hidden
        self.top_k = integer("top_k", top_k)
        config.alpha = 2 * rank if alpha is None else alpha
        config.activation = choose("activation", activation, "sy_activation")
        config.num_threads = threads_of_cpu(num_threads)
        self.scale = config.alpha / rank
        self._losses = _layer_losses.config_of(losses, trainable)
        if self._losses is not None:
            config.losses = pointer_to(self._losses)
        self._pool, self._following = _autograd.Pool(recompute), threading.Lock()
        self._dtype, self._renormalize = compute_of(compute, a), renormalize
        if compute is not None:
            config.compute = dtype_code("compute", compute)
        config.max_tokens = max_tokens
        self._order = CurrentStream()
        self._parameters, self._copied = None, _autograd.Copied(a=a, b=b, gate=gate)
        if trainable:
            self._parameters = _autograd.Parameters(a.device.index if is_torch_cuda(a) else None,
                                                    self._dtype, gate=gate, w13=a, w2=b)
            a, b, gate = (self._parameters.used[name] for name in ("w13", "w2", "gate"))
        elif gate is not None and not on_gpu(gate):  # read at every call, and a and b are not
            gate = gate_of("gate", gate)
            gate = gate.detach().clone() if is_torch(gate) else gate.copy()
        self._arrays = views(a=a, b=b, gate=gate)  # outlive the handles
        self._comm, self._config, self._handles = comm, config, {}
        self._number = _compiled.number_of(self)
        self._handle(self.top_k)

    def _handle(self, columns):
        """The adapters that take `columns` experts a token: of embedded ones the layer's, which only a
        call knows."""
        found = self._handles.get(columns)
        if found is not None:
            return found
        config, comm = self._config, self._comm
        if self.kind in ("routed", "embedded"):
            config.router = pointer_to(router_config(self.num_adapters, columns,
                                                     renormalize=self._renormalize))
        found = Handle("perft_free", within=None if comm is None else comm.handle)
        self._ordered(lambda: native.perft_create(
            byref(config), *(pointer(view) for view in self._arrays.values()),
            None if comm is None else comm.pointer, found.out()))
        self._handles[columns] = found
        return found

    def _ordered(self, call, tensor=None):
        """@param tensor  That call() reads; None: it enqueues nothing."""
        if self._comm is not None:
            return self._comm.run(call)
        if tensor is not None and is_torch_cuda(tensor):
            return self._order.run(call, (), tensor, stream_of(tensor))
        return call()

    def __call__(self, x, base=None, expert=None, weight=None):
        """What the adapters add for x [T,H] or [B,S,H], of its shape and type; with `base`, the frozen
        layer's output, the sum of both. Embedded: expert and weight [T,K] as Layer takes them, the
        layer's routing, -1 where it has dropped."""
        if self.kind != "embedded" and (expert is not None or weight is not None):
            raise invalid(f"a routing is given, and kind={self.kind!r} takes none")
        if self.kind == "embedded" and (expert is None or weight is None):
            raise invalid("kind='embedded' wants expert and weight: the layer's routing")
        if self._parameters is not None and _autograd.wants_gradient(
                x, weight, *self._parameters.tensors):
            y = _compiled.with_gradients(self, self._number, x, expert, weight,
                                         self._parameters.tensors, None)
        elif _compiled.is_compiling():
            self._forward_only(x, weight)
            y = _compiled.layer(self._number, x, expert, weight, None)
        elif base is None or _autograd.wants_gradient(base):
            y = self.run(x, expert, weight)
        else:
            return self.run(x, expert, weight, base=base)
        return y if base is None else (base + y).to(base.dtype)

    def _forward_only(self, x, weight):
        otherwise = "make the adapters with trainable=True, "
        forward_only("x", x, otherwise)
        forward_only("weight", weight, otherwise)
        if self._parameters is None:
            self._copied.refuse(otherwise)

    def run(self, x, expert, weight, out=None, base=None):
        """A call outside of torch.compile. @param out  None."""
        self._forward_only(x, weight)
        self._follow()
        return self._run(x, expert, weight, base)[0]

    def save(self, x, expert, weight):
        """A call that saves what its backward needs: its result, and a tensor that stands for that."""
        self._follow()
        saved = self._pool.take()
        y, handle = self._run(x, expert, weight, None, saved)
        if self._losses is not None:
            self._loss_values = _layer_losses.values_of(saved, self.num_adapters, y.device)
        backward = functools.partial(self._gradients, handle)
        return y, _autograd.tensor_for(saved, self._pool, self._parameters, backward, y)

    def _run(self, x, expert, weight, base, saved=None):
        tokens = rows("x", x, self.hidden)
        expert, weight = routing(expert, weight, x, self.num_adapters)
        handle = self._handle(self.top_k if expert is None else expert.shape[1])
        # What descriptions point to, which is their second part, lives until the call has returned.
        given, kept = describe("x", tokens)
        like, of_like, before = tokens, given, None
        if base is not None:
            if tuple(base.shape) != tuple(x.shape):
                raise invalid(f"base is {list(base.shape)}, want {list(x.shape)} as x")
            like = rows("base", base, self.hidden)
            of_like, kept_of_base = describe("base", like)
            before = of_like
        y, result = new_like("y", like, of_like)
        ids, kept_of_ids = describe_optional("expert", expert)
        weights, kept_of_weights = describe_optional("weight", weight)
        self._ordered(lambda: native.perft_forward(
            handle.pointer, given, before, ids, weights, None, result,
            None if saved is None else saved.pointer, stream_of(tokens)), tokens)
        return (y if len(x.shape) == 2 else y.reshape(x.shape)), handle

    def _gradients(self, handle, *call):
        return _autograd.run_backward(
            lambda dy, saved, given, *rest: self._ordered(
                lambda: native.perft_backward(handle.pointer, saved, given, None, *rest), dy),
            *call, self._dtype, self.hidden, loss_scale=self.loss_scale,
            loss_counts=_layer_losses.counts_for(self.loss_counts, self._losses, self.num_adapters))

    def reload(self):
        """Of trainable ones: reads a and b again, after writes that torch has not counted."""
        if self._parameters is None:
            raise invalid("adapters that do not train have copied a and b: make new ones")
        self._parameters.copy_anew()
        self._read_again()

    def _read_again(self):
        for handle in self._handles.values():
            self._ordered(lambda handle=handle: native.perft_reload(handle.pointer))

    def _follow(self):
        if self._parameters is None:
            return
        with self._following:
            if self._parameters.follow():
                self._read_again()

    def check(self):
        """Waits for the last call on a GPU and raises what its kernels found wrong, once."""
        for handle in self._handles.values():
            native.perft_check(handle.pointer)

    def losses(self):
        """As Layer.losses(), of the adapters' router."""
        if self._losses is None:
            raise invalid(f"kind={self.kind!r} has no router of its own" if self.kind != "routed"
                          else "the adapters have no losses: make them with losses={...}")
        if self._loss_values is None:
            raise invalid("there are no values of losses: no call has wanted gradients")
        return dict(zip(_layer_losses.VALUES, self._loss_values[0].unbind()))

    def counts(self):
        """As Layer.counts(), of the adapters' router."""
        self.losses()
        return self._loss_values[1]

    def stats(self):
        """As Layer.stats(), of the adapters' router."""
        return _layer_losses.stats_of(self._handle(self.top_k).pointer, self.num_adapters, self.top_k,
                                      native.perft_stats)
