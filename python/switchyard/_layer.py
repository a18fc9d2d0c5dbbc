"""The whole layer, and made-up checkpoints."""

import os
from ctypes import byref
from ctypes import pointer as pointer_to

from ._native import (CheckpointRecipe, Handle, LayerArrays, LayerOptions, choose, initialised,
                      native)
from ._stages import expert_config, router_config
from ._tensors import (CUDA, current_device, device_of, dtype_code, empty_like, on_host, pointer,
                       stream_of, threads_of_cpu, views, views_in_place)


def _options(device="cpu", compute=None, layout="compact", alignment=1, capacity_factor=None,
             drop_policy="token", combine_wire="f32", batch_invariant=False,
             rank_invariant=False, max_tokens=0, num_threads=None, dispatch_wire=None,
             device_engine="auto", weights="exact", shared=True, wire=None):
    options = initialised(LayerOptions, "layer_options")
    options.device_type, number = device_of("cpu" if device is None else device)
    if options.device_type == CUDA:
        options.device_id = current_device() if number is None else number
    options.compute = -1 if compute is None else dtype_code("compute", compute)
    options.layout = choose("layout", layout, "sy_layout")
    options.alignment = alignment
    options.capacity_factor = capacity_factor or 0.0
    options.drop_policy = choose("drop_policy", drop_policy, "sy_drop_policy")
    # wire: the old name.
    options.combine_wire = dtype_code("combine_wire", combine_wire if wire is None else wire)
    options.dispatch_wire = (
        -1 if dispatch_wire is None else dtype_code("dispatch_wire", dispatch_wire))
    options.batch_invariant = int(batch_invariant)
    options.rank_invariant = int(rank_invariant)
    options.max_tokens = max_tokens
    options.num_threads = threads_of_cpu(num_threads)
    options.weights = choose("weights", weights, "sy_weight_format")
    options.leave_out_shared = int(not shared)
    options.device_engine = choose("device_engine", device_engine, "sy_device_engine")
    return options


class Layer:
    """A Mixture-of-Experts layer: y = layer(x), x [T,H] -> y [T,H] in the dtype of x.

    device="cuda:0" runs it there, on torch's or cupy's current stream; with `comm` every rank calls
    with its own tokens, at most max_tokens of them, and holds its share of the experts. Weights
    may lie anywhere and may go afterwards; those on a GPU are copied by way of host memory.

    The gate is f32, bf16 or f16. With router_in_place=True gate and biases are used where they lie,
    on the layer's device, and what is written to them counts from the next call on; on a GPU such a
    gate is f32 or of the layer's compute type.

    Shared experts are given as one whose width is that of all: shared_w13 [2*S*I,H] (or [S*I,H]) and
    shared_w2 [H,S*I]; with shared_gate [H] their sum counts sigmoid(x . shared_gate) times.
    """

    def __init__(self, gate, w13, w2, top_k, b13=None, b2=None, router_bias=None,
                 selection_bias=None, score="softmax", renormalize=True, scale=1.0, groups=1,
                 top_groups=1, group_score="max", activation="silu", alpha=None, limit=None,
                 router_in_place=False, shared_w13=None, shared_w2=None, shared_gate=None,
                 comm=None, **options):
        router = {"gate": gate, "router_bias": router_bias, "selection_bias": selection_bias}
        given = {"w13": w13, "w2": w2, "b13": b13, "b2": b2, "shared_w13": shared_w13,
                 "shared_w2": shared_w2, "shared_gate": shared_gate}
        if router_in_place:
            router = views_in_place(**router)
            self._kept = router  # outlive the handle
        else:
            router = views(**{name: on_host(tensor) for name, tensor in router.items()})
        v = router | views(**{name: on_host(tensor) for name, tensor in given.items()})
        routing = router_config(gate.shape[0], top_k, score, renormalize, scale, groups, top_groups,
                                group_score)
        experts = expert_config(w13, w2, activation, alpha, limit)
        arrays = LayerArrays(
            router=pointer_to(routing), experts=pointer_to(experts),
            router_in_place=int(router_in_place),
            **{name: pointer(view) for name, view in v.items()})
        self._make(comm, lambda handle, communicator: native.layer_from_arrays(
            byref(arrays), byref(_options(**options)), communicator, handle))

    @classmethod
    def from_checkpoint(cls, path, layer=0, comm=None, **options):
        """The MoE block of layer `layer` of a checkpoint; with shared=False without its shared
        experts. Options: device, compute, layout, ..."""
        self = cls.__new__(cls)
        self._make(comm, lambda handle, communicator: native.layer_from_checkpoint(
            os.fsencode(path), layer, byref(_options(**options)), communicator, handle))
        return self

    def _make(self, comm, create):
        self._comm = comm  # outlives the handle
        self._handle = Handle("layer_free", within=None if comm is None else comm.handle)
        create(self._handle.out(), None if comm is None else comm.pointer)

    @property
    def hidden(self):
        return native.layer_hidden(self._handle.pointer)

    @property
    def top_k(self):
        return native.layer_top_k(self._handle.pointer)

    @property
    def num_experts(self):
        return native.layer_num_experts(self._handle.pointer)

    def check(self):
        """Waits for the last call on a GPU and raises what its kernels found wrong, once."""
        native.layer_check(self._handle.pointer)

    def read_expert(self, expert, w13=None, w2=None, b13=None, b2=None):
        """Writes the weights of one expert of this rank to tensors in host memory: w13 [2I,H] (or
        [I,H]) and w2 [H,I] f32, bf16 or f16, b13 [2I] (or [I]) and b2 [H] f32. In the layer's
        compute type they are the bits that it was made of; weights="q8" gives what they stand for.
        """
        v = views_in_place(w13=w13, w2=w2, b13=b13, b2=b2)
        native.layer_read_expert(self._handle.pointer, expert,
                                 *(pointer(view) for view in v.values()))

    def __call__(self, x, expert=None, weight=None, out=None):
        """Run the layer; expert [T,K] i32 and weight [T,K] f32 skip the router."""
        y = empty_like(x, tuple(x.shape)) if out is None else out
        v = views(tokens=x, expert=expert, weight=weight, out=y)
        native.layer_forward(self._handle.pointer, *(pointer(view) for view in v.values()),
                             stream_of(x))
        return y


def make_checkpoint(directory, family, hidden, inner, num_experts, top_k, shared_experts=0,
                    groups=1, top_groups=1, num_layers=1, dtype="bf16", seed=0, shards=1):
    """Write a small checkpoint of a family with made-up weights; same bytes on every machine."""
    recipe = initialised(CheckpointRecipe, "checkpoint_recipe")
    recipe.family = family.encode()
    recipe.hidden = hidden
    recipe.inner = inner
    recipe.num_experts = num_experts
    recipe.top_k = top_k
    recipe.shared_experts = shared_experts
    recipe.groups = groups
    recipe.top_groups = top_groups
    recipe.num_layers = num_layers
    recipe.dtype = dtype_code("dtype", dtype)
    recipe.seed = seed
    recipe.shards = shards
    native.make_checkpoint(byref(recipe), os.fsencode(directory))
