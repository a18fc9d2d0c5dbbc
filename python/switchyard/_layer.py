"""The whole layer."""

import threading
from ctypes import byref
from ctypes import pointer as pointer_to

from . import _autograd, _compiled, _layer_losses
from ._arguments import as_f32, expert_weights
from ._errors import integer, invalid
from ._layer_arguments import (check_in_place, check_trainable, compute_of, gate_of, gpu_of,
                               layer_options, path_of, shared_gate_of)
from ._layer_calls import LayerCalls
from ._native import Handle, native
from ._ranks import communicator_of
from ._stages import expert_config, router_config
from ._stored import codes_a_byte, stored_weights
from ._streams import CurrentStream
from ._structs import LayerArrays
from ._tensors import on_host, pointer, require_tensor, views, views_in_place


class Layer(LayerCalls):
    """A Mixture-of-Experts layer: y = layer(x), x [T,H] or [B,S,H] -> y of the shape and dtype of x.

    device="cuda:0" runs it there, on torch's or cupy's current stream; with `comm` every rank calls with its
    own tokens, at most max_tokens of them, and holds its share of the experts. Weights may lie anywhere and may
    go afterwards; those on a GPU are copied by way of host memory. Calls of several threads take turns. In
    torch.compile a call is one operator (torch 2.4 or later).

    w13 is [E,2I,H], all gate rows, then all up rows; w13_layout="interleaved": gate, up, gate, up, ... (b13
    alike); transposed=True: w13 [E,H,2I] and w2 [E,I,H], as gpt-oss stores them, copied once more.

    The gate is of any float type, f64 and biases of other types are rounded to f32. With router_in_place=True
    gate and biases are used where they lie, on the layer's device, and what is written to them counts from the
    next call on; a gate is then f32, bf16 or f16, on a GPU f32 or of the layer's compute type, biases are f32.

    Experts stored in e4m3 or MXFP4 are given as their codes, with w13_scales and w2_scales. e4m3: w13 [E,2I,H]
    of float8_e4m3fn or uint8, w13_scales [E,2*ceil(I/128),ceil(H/128)] of floats, gate's blocks of 128 x 128,
    then up's, w2_scales [E,ceil(H/128),ceil(I/128)]. MXFP4: w13 [E,2I,H/2] of uint8, two codes a byte, or as
    blocks [E,2I,H/32,16], w13_scales [E,2I,H/32] of uint8 (e8m0), w2 [E,H,I/2] and w2_scales [E,H,I/32]. They are
    copied; weights="stored" keeps them as codes (GPUs: compute capability 8.0 or later), else they are
    dequantised; computed with in bf16, unless `compute` says another type.

    With experts_in_place=True the weights and biases of experts are used where they lie, too, on a layer's GPU,
    of its compute type (biases f32 there), on one rank, and what is written to them counts from the next call
    on. On a CPU, whose kernels want them in an order of their own, it is an error.

    Shared experts are given as one whose width is that of all: shared_w13 [2*S*I,H] (or [S*I,H]) and shared_w2
    [H,S*I] of the experts' type; with shared_gate [H] or [1,H] their sum counts sigmoid(x . shared_gate) times.

    trainable=True, on one rank: the parameters are the caller's torch tensors on the layer's device, used in
    place; on a GPU those of the experts are of the compute type. Where torch wants gradients, a call saves what
    its backward needs, and backward() gives those of x, of every parameter and, where the routing was given, of
    weight; the choice of experts is a constant. Under no_grad nothing is saved. On a CPU experts' weights are
    read again, one pass over them, at the first call after torch has counted a write to one; writes by .data,
    which it does not count, want reload_experts(); the memory of parameters' large gradients, once nobody
    holds it, is kept for those of the next backward. recompute="activation_input" saves the tokens only, and
    computes the first product again on the way back.

    router=Router(...) routes by that rule instead of top_k, score and what belongs to them; a call then takes
    token_ids, step and training too. `from_checkpoint` takes it as an option. Of "noisy-top-k" noise_gate [E,H]
    is what the size of its noise is made of: a parameter as the gate. Of Router(..., network="cosine", "mlp" or
    "hadamard", width=M) router_network [N] f32 has the parameters, a parameter as the router bias, and the gate
    is [E,D] (docs/routers.md).

    Of Router("moe++", num_experts=E, ...) the gate has E + Z rows, of E experts, then constant, copy and zero
    ones; constant_experts [C,3,H] f32 has the two rows of W and v of each constant one, and with residual=True
    gating_residual [E+Z,E+Z] f32 what logits of the layer before are multiplied by: both parameters as the
    router bias. A call then takes previous_logits, and logits=True gives those for the next.

    identity_experts=Z: the gate has Z rows more, of experts that return their input (LongCat-Flash). With
    weight_on_input=True (Llama 4) a token's weight multiplies what its one expert takes.

    scratch=Scratch("cuda:0") is memory that other layers use too, so that a model's layers take it once.

    losses={"balance": 0.01, "z": 0.001, ...}, of a trainable layer: coefficients of the router's auxiliary
    losses (docs/metrics.md), with scope, share, sequence_length, devices and devices_per_token where they are
    not the defaults. Their values are losses(), their gradients come with those of the result, times the
    attribute loss_scale; with the scope "global" by the attribute loss_counts.
    """

    _parameters = None  # of a trainable layer
    _copied = None  # of another, from arrays
    _router = None  # a Router, where one is given
    _losses = None  # a LossConfig, where there are some,
    _loss_values = None  # and what they and counts came to in the last call that saved
    loss_scale = 1.0  # of their gradient: what the main loss is scaled by
    loss_counts = None  # [E] of all ranks and steps, for the backward, with the scope "global"

    def __init__(self, gate, w13, w2, top_k=None, b13=None, b2=None, router_bias=None,
                 selection_bias=None, score="softmax", renormalize=True, scale=1.0, groups=1,
                 top_groups=1, group_score="max", activation="silu", alpha=None, limit=None,
                 router_in_place=False, shared_w13=None, shared_w2=None, shared_gate=None,
                 experts_in_place=False, comm=None, w13_layout="gate-up", transposed=False,
                 trainable=False, recompute="none", router=None, losses=None, noise_gate=None,
                 router_network=None, identity_experts=0, weight_on_input=False,
                 w13_scales=None, w2_scales=None, constant_experts=None, gating_residual=None, **options):
        require_tensor("gate", gate, "[E, H]")
        if top_k is None and router is None:
            raise invalid("top_k=None is no integer: want one, or a router")
        if top_k is not None and router is not None:
            raise invalid(f"top_k={top_k} and router are both given: want one of them")
        if w13_scales is not None or w2_scales is not None:
            w13, w2, w13_scales, w2_scales = stored_weights(w13, w2, w13_scales, w2_scales, w13_layout, transposed,
                                                            trainable)
        parameters = {"gate": gate, "router_bias": router_bias, "w13": w13, "w2": w2, "b13": b13,
                      "b2": b2, "shared_w13": shared_w13, "shared_w2": shared_w2,
                      "shared_gate": shared_gate, "noise_gate": noise_gate, "router_network": router_network,
                      "constant_experts": constant_experts, "gating_residual": gating_residual}
        if not trainable:
            self._copied = _autograd.Copied(**parameters)
        else:
            check_trainable(comm, w13_layout, transposed, selection_bias, options)
            self._compute = compute_of(options.get("compute"), w13)
            self._pool, self._following = _autograd.Pool(recompute), threading.Lock()
            self._parameters = _autograd.Parameters(gpu_of(options.get("device")), self._compute,
                                                    **parameters)
            (gate, router_bias, w13, w2, b13, b2, shared_w13, shared_w2, shared_gate, noise_gate,
             router_network, constant_experts, gating_residual) = self._parameters.used.values()  # as PARAMETERS
            router_in_place = True
        self._losses = options["losses"] = _layer_losses.config_of(losses, trainable)
        by_rule = router
        router = {"gate": gate, "noise_gate": noise_gate, "router_bias": router_bias,
                  "router_network": router_network, "selection_bias": selection_bias,
                  "constant_experts": constant_experts, "gating_residual": gating_residual}
        if experts_in_place:
            check_in_place(comm, w13_layout, transposed, options)
        elif not trainable:
            w13, w2, b13, b2, shared_w13, shared_w2, shared_gate = map(on_host, (
                w13, w2, b13, b2, shared_w13, shared_w2, shared_gate))
        w13, w2, b13, b2 = expert_weights(w13, w2, b13, b2, w13_layout, transposed)
        given = {"w13": w13, "w2": w2, "b13": b13, "b2": b2, "shared_w13": shared_w13,
                 "shared_w2": shared_w2, "shared_gate": shared_gate_of(shared_gate),
                 "w13_scales": w13_scales, "w2_scales": w2_scales}
        in_place = {}
        if experts_in_place:
            in_place |= {name: tensor for name, tensor in given.items() if name != "shared_gate"}
        if router_in_place:
            in_place |= router
            router = views_in_place(**router)
            self._kept = router  # outlive the handle
        else:
            router = views(**{
                name: gate_of(name, on_host(tensor)) if name.endswith("gate")
                else as_f32(name, on_host(tensor)) for name, tensor in router.items()})
        v = router | views(**given)
        if experts_in_place:
            self._kept_experts = v
        self._router = by_rule
        num_experts = gate.shape[0] if by_rule is None else by_rule.num_experts
        routes = router_config(num_experts, 1 if top_k is None else top_k, score, renormalize, scale, groups, top_groups,
                               group_score)
        if by_rule is not None:
            by_rule.fill(routes)
        experts = expert_config(w13, w2, activation, alpha, limit, codes_a_byte(w13_scales))
        arrays = LayerArrays(
            router=pointer_to(routes), experts=pointer_to(experts),
            router_in_place=int(bool(router_in_place)), experts_in_place=int(bool(trainable or experts_in_place)),
            identity_experts=integer("identity_experts", identity_experts), weight_on_input=int(bool(weight_on_input)),
            **{name: pointer(view) for name, view in v.items()})
        self._make(comm, lambda handle, communicator: native.layer_from_arrays(
            byref(arrays), byref(layer_options(**options)), communicator, handle), in_place, options.get("scratch"))

    @classmethod
    def from_checkpoint(cls, path, layer=0, comm=None, **options):
        """The MoE block of layer `layer` of a checkpoint; with shared=False without its shared
        experts. Options: device, compute, layout, ...; weights="stored" keeps quantised experts as they
        are (e4m3, MXFP4, int4, NVFP4; GPUs: compute capability 8.0 or later), in a half to a quarter of
        the memory of "exact", which dequantises them; on a CPU with its bits."""
        self = cls.__new__(cls)
        path = path_of("path", path)
        layer = integer("layer", layer)
        options["losses"] = _layer_losses.config_of(options.get("losses"), False)
        self._router = options.get("router")
        self._make(comm, lambda handle, communicator: native.layer_from_checkpoint(
            path, layer, byref(layer_options(**options)), communicator, handle), {}, options.get("scratch"))
        return self

    def _make(self, comm, create, in_place, scratch):
        communicator_of(comm)
        self._comm = comm  # outlives the handle
        self._in_place = {name: tensor for name, tensor in in_place.items() if tensor is not None}
        self._handle = Handle("layer_free", within=None if comm is None else comm.handle)
        if comm is None:
            create(self._handle.out(), None)
        else:
            comm.run(lambda: create(self._handle.out(), comm.pointer))
        self._hidden = native.layer_hidden(self._handle.pointer)
        self._num_experts = native.layer_num_experts(self._handle.pointer)
        self._native_forward = native.layer_forward
        self._native_saving = native.layer_forward_saved
        self._order = CurrentStream() if scratch is None else scratch._order
        self._number = _compiled.number_of(self)
        self._is_plain = comm is None and self._router is None and self._parameters is None

    @property
    def hidden(self):
        return self._hidden

    @property
    def top_k(self):
        return native.layer_top_k(self._handle.pointer)

    @property
    def num_experts(self):
        return self._num_experts

    def check(self):
        """Waits for the last call on a GPU and raises what its kernels found wrong, once."""
        native.layer_check(self._handle.pointer)

    def stats(self):
        """Statistics of the last call's routing, of this rank's tokens, as a dict of numbers, named as
        sw.metrics.routing() does, with counts [E], padding_waste and, with a capacity,
        dropped_by_choice [K]. Computed now, on a GPU after waiting; a call itself costs no more. Not of a
        routing that was given, and on a GPU not of a call of which torch wanted gradients."""
        return _layer_losses.stats_of(self._handle.pointer, self._num_experts, self.top_k)

    def losses(self):
        """Of the last call of which torch wanted gradients: each loss without its coefficient, and
        their `total` with them, as f64 tensors of no dimension where the layer is."""
        if self._losses is None:
            raise invalid("the layer has no losses: make it with losses={...}")
        if self._loss_values is None:
            raise invalid("there are no values of losses: the last call that wants gradients had its "
                          "routing given, or there was none")
        return dict(zip(_layer_losses.VALUES, self._loss_values[0].unbind()))

    def counts(self):
        """Of the same call: [E] i64 assignments of each expert before any was dropped, where the layer
        is. What loss_counts is the sum of, over ranks and accumulation steps."""
        self.losses()
        return self._loss_values[1]

    def read_expert(self, expert, w13=None, w2=None, b13=None, b2=None):
        """Writes the weights of one expert of this rank to tensors in host memory: w13 [2I,H] (or
        [I,H]) and w2 [H,I] f32, bf16 or f16, b13 [2I] (or [I]) and b2 [H] f32. In the layer's
        compute type they are the bits that it was made of; weights="q8" gives what they stand for.
        """
        v = views_in_place(w13=w13, w2=w2, b13=b13, b2=b2)
        native.layer_read_expert(self._handle.pointer, integer("expert", expert),
                                 *(pointer(view) for view in v.values()))

    def reload_experts(self):
        """Of a trainable layer: reads the experts' weights again, after writes that torch has not
        counted."""
        if self._parameters is not None:
            self._parameters.copy_anew()
        native.layer_reload_experts(self._handle.pointer)
