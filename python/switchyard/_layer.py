"""The whole layer."""

import threading
from ctypes import byref
from ctypes import pointer as pointer_to

from . import _autograd, _compiled, _layer_losses
from ._arguments import as_f32, expert_weights, forward_only, output, routing, rows
from ._errors import NotCopied, SwitchyardError, integer, invalid
from ._layer_arguments import (check_in_place, check_trainable, compute_of, gate_of, gpu_of,
                               layer_options, path_of, shared_gate_of)
from ._native import Handle, native
from ._ranks import communicator_of
from ._stages import expert_config, router_config
from ._streams import CurrentStream
from ._structs import LayerArrays
from ._tensors import (describe, describe_optional, is_torch_cuda, new_like, on_host, pointer,
                       require_tensor, stream_of, views, views_in_place)


class Layer(NotCopied):
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
    which it does not count, want reload_experts(). recompute="activation_input" saves the tokens only, and
    computes the first product again on the way back.

    router=Router(...) routes by that rule instead of top_k, score and what belongs to them; a call then takes
    token_ids, step and training too. `from_checkpoint` takes it as an option. Of "noisy-top-k" noise_gate [E,H]
    is what the size of its noise is made of: a parameter as the gate. Of Router(..., network="cosine", "mlp" or
    "hadamard", width=M) router_network [N] f32 has the parameters, a parameter as the router bias, and the gate
    is [E,D] (docs/routers.md).

    identity_experts=Z: the gate has Z rows more, of experts that return their input (LongCat-Flash). With
    weight_on_input=True (Llama 4) a token's weight multiplies what its one expert takes.

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
                 router_network=None, identity_experts=0, weight_on_input=False, **options):
        require_tensor("gate", gate, "[E, H]")
        if top_k is None and router is None:
            raise invalid("top_k=None is no integer: want one, or a router")
        if top_k is not None and router is not None:
            raise invalid(f"top_k={top_k} and router are both given: want one of them")
        parameters = {"gate": gate, "router_bias": router_bias, "w13": w13, "w2": w2, "b13": b13,
                      "b2": b2, "shared_w13": shared_w13, "shared_w2": shared_w2,
                      "shared_gate": shared_gate, "noise_gate": noise_gate, "router_network": router_network}
        if not trainable:
            self._copied = _autograd.Copied(**parameters)
        else:
            check_trainable(comm, w13_layout, transposed, selection_bias, options)
            self._compute = compute_of(options.get("compute"), w13)
            self._pool, self._following = _autograd.Pool(recompute), threading.Lock()
            self._parameters = _autograd.Parameters(gpu_of(options.get("device")), self._compute,
                                                    **parameters)
            (gate, router_bias, w13, w2, b13, b2, shared_w13, shared_w2, shared_gate, noise_gate,
             router_network) = self._parameters.used.values()  # in the order of PARAMETERS
            router_in_place = True
        self._losses = options["losses"] = _layer_losses.config_of(losses, trainable)
        by_rule = router
        router = {"gate": gate, "noise_gate": noise_gate, "router_bias": router_bias,
                  "router_network": router_network, "selection_bias": selection_bias}
        if experts_in_place:
            check_in_place(comm, w13_layout, transposed, options)
        elif not trainable:
            w13, w2, b13, b2, shared_w13, shared_w2, shared_gate = map(on_host, (
                w13, w2, b13, b2, shared_w13, shared_w2, shared_gate))
        w13, w2, b13, b2 = expert_weights(w13, w2, b13, b2, w13_layout, transposed)
        given = {"w13": w13, "w2": w2, "b13": b13, "b2": b2, "shared_w13": shared_w13,
                 "shared_w2": shared_w2, "shared_gate": shared_gate_of(shared_gate)}
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
        experts = expert_config(w13, w2, activation, alpha, limit)
        arrays = LayerArrays(
            router=pointer_to(routes), experts=pointer_to(experts),
            router_in_place=int(bool(router_in_place)), experts_in_place=int(bool(trainable or experts_in_place)),
            identity_experts=integer("identity_experts", identity_experts), weight_on_input=int(bool(weight_on_input)),
            **{name: pointer(view) for name, view in v.items()})
        self._make(comm, lambda handle, communicator: native.layer_from_arrays(
            byref(arrays), byref(layer_options(**options)), communicator, handle), in_place)

    @classmethod
    def from_checkpoint(cls, path, layer=0, comm=None, **options):
        """The MoE block of layer `layer` of a checkpoint; with shared=False without its shared
        experts. Options: device, compute, layout, ...; weights="stored" keeps quantised experts as they
        are (e4m3, MXFP4; on a CPU int4, NVFP4 too; GPUs: compute capability 9.0), in a half to a
        quarter of the memory of "exact", which dequantises them; on a CPU with its bits."""
        self = cls.__new__(cls)
        path = path_of("path", path)
        layer = integer("layer", layer)
        options["losses"] = _layer_losses.config_of(options.get("losses"), False)
        self._router = options.get("router")
        self._make(comm, lambda handle, communicator: native.layer_from_checkpoint(
            path, layer, byref(layer_options(**options)), communicator, handle), {})
        return self

    def _make(self, comm, create, in_place):
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
        self._order = CurrentStream()
        self._number = _compiled.number_of(self)

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

    def _keep_losses(self, saved, device):
        if self._losses is not None:
            self._loss_values = _layer_losses.values_of(saved, self._num_experts, device)

    def read_expert(self, expert, w13=None, w2=None, b13=None, b2=None):
        """Writes the weights of one expert of this rank to tensors in host memory: w13 [2I,H] (or
        [I,H]) and w2 [H,I] f32, bf16 or f16, b13 [2I] (or [I]) and b2 [H] f32. In the layer's
        compute type they are the bits that it was made of; weights="q8" gives what they stand for.
        """
        v = views_in_place(w13=w13, w2=w2, b13=b13, b2=b2)
        native.layer_read_expert(self._handle.pointer, integer("expert", expert),
                                 *(pointer(view) for view in v.values()))

    def __call__(self, x, expert=None, weight=None, out=None, logits=False, token_ids=None, step=0,
                 training=None):
        """Run the layer on x [T,H] or [B,S,H], f32, bf16 or f16, which is converted to the layer's
        compute type; the result has the shape and dtype of x, or is `out`, which does not overlap
        x. expert [T,K] or [B,S,K] of integers (-1 unused) and weight, of any float type, skip the
        router; they may lie on another device than x, at the price of a copy.

        logits=True, of a trainable layer: the result and the router's logits [T,E] or [B,S,E] f32, for
        auxiliary losses, whose gradients reach gate, router bias and x through them.

        With a router: token_ids [T] or [B,S] of integers where its rule goes by them, `step` for its
        noise, and whether this is training, which draws it; without `training`, where torch wants
        gradients."""
        if self._router is not None and expert is None and weight is None:
            return self._routed(x, out, logits, token_ids, step, training)
        if token_ids is not None or training:
            raise invalid("token_ids and training are a router's, and "
                          + ("the routing is given" if self._router else "the layer has none"))
        if logits:
            return self._with_logits(x, expert, weight, out)
        if self._parameters is not None and _autograd.wants_gradient(
                x, weight, *self._parameters.tensors):
            return _compiled.with_gradients(self, self._number, x, expert, weight,
                                            self._parameters.tensors, out)
        if _compiled.is_compiling():
            self._forward_only(x, weight)
            return _compiled.layer(self._number, x, expert, weight, out)
        return self.run(x, expert, weight, out)

    def _routed(self, x, out, logits, token_ids, step, training):
        """By the router's rule, with what it draws upon."""
        if _compiled.is_compiling():
            raise SwitchyardError("unsupported", "a layer with router= inside of torch.compile")
        parameters = () if self._parameters is None else self._parameters.tensors
        learns = self._parameters is not None and _autograd.wants_gradient(x, *parameters)
        tokens = rows("x", x, self._hidden)
        request, kept = self._router.request(tokens.shape[0], token_ids, step,
                                             learns if training is None else training, like=tokens)
        call = _RoutedCall(self, request, kept)
        if logits and self._parameters is None:
            raise invalid("logits=True wants a layer with trainable=True")
        if logits and not self._router.has_logits:
            raise invalid(f"logits=True, and the router {self._router.name} has none")
        if learns or logits:
            _autograd.check_call(x, None, out)
        if logits:
            return (_autograd.run_with_logits(call, x, parameters) if learns
                    else call.save_with_logits(x)[:2])
        if learns:
            return _autograd.run(call, x, None, None, parameters)
        self._forward_only(x, None)
        if self._parameters is not None:
            self._follow()
        return self._run(x, None, None, out, None, request)

    def _with_logits(self, x, expert, weight, out):
        if self._parameters is None:
            raise invalid("logits=True wants a layer with trainable=True")
        if expert is not None or weight is not None:
            raise invalid("logits=True is given, and a routing too, for which there are none")
        if _compiled.is_compiling():
            raise SwitchyardError("unsupported", "logits=True inside of torch.compile")
        _autograd.check_call(x, None, out)
        parameters = self._parameters.tensors
        if _autograd.wants_gradient(x, *parameters):
            return _autograd.run_with_logits(self, x, parameters)
        y, found, _ = self.save_with_logits(x)
        return y, found

    def save_with_logits(self, x, request=None):
        """A call that saves: its result, the logits, and a tensor that stands for what is saved."""
        self._follow()
        saved = self._pool.take()
        y = self._run(x, None, None, None, saved, request)
        self._keep_losses(saved, y.device)
        columns = self._num_experts if self._router is None else self._router.num_logits
        found = _autograd.logits_of(saved, (x.numel() // self._hidden, columns), y.device)
        token = _autograd.tensor_for(saved, self._pool, self._parameters, self._gradients, y)
        return y, found.reshape(*x.shape[:-1], columns), token

    def _forward_only(self, x, weight):
        otherwise = "make the layer with trainable=True, "
        for name, tensor in (("x", x), ("weight", weight), *self._in_place.items()):
            forward_only(name, tensor, otherwise)
        if self._copied is not None:
            self._copied.refuse(otherwise)

    def _enqueue(self, call, arguments, tokens, stream):
        if is_torch_cuda(tokens):
            self._order.run(call, arguments, tokens, stream)
        else:
            call(*arguments)

    def run(self, x, expert, weight, out):
        """A call outside of torch.compile."""
        self._forward_only(x, weight)
        if self._parameters is not None:
            self._follow()
        return self._run(x, expert, weight, out, None)

    def save(self, x, expert, weight, request=None):
        """A call that saves what its backward needs: its result, and a tensor that stands for that."""
        self._follow()
        saved = self._pool.take()
        y = self._run(x, expert, weight, None, saved, request)
        self._keep_losses(saved, y.device)
        return y, _autograd.tensor_for(saved, self._pool, self._parameters, self._gradients, y)

    def _gradients(self, saved, dy, weight, parameters, wants, dlogits=None):
        """Of a call that has filled `saved`: see _autograd.gradients()."""
        wants = _autograd.available(weight, wants)

        def call(rows_of_dy, *rest):
            self._enqueue(native.layer_backward, (self._handle.pointer, *rest), rows_of_dy, rest[-1])

        return _autograd.run_backward(call, saved, dy, weight, parameters, wants, self._compute,
                                      self._hidden, dlogits, self.loss_scale,
                                      _layer_losses.counts_for(self.loss_counts, self._losses,
                                                               self._num_experts))

    def reload_experts(self):
        """Of a trainable layer: reads the experts' weights again, after writes that torch has not
        counted."""
        if self._parameters is not None:
            self._parameters.copy_anew()
        native.layer_reload_experts(self._handle.pointer)

    def _follow(self):
        with self._following:
            if self._parameters.follow():
                native.layer_reload_experts(self._handle.pointer)

    def _run(self, x, expert, weight, out, saved, request=None):
        tokens = rows("x", x, self._hidden)
        expert, weight = routing(expert, weight, x, self._num_experts)
        # What descriptions point to, which is their second part, lives until the call has returned.
        given, kept = describe("x", tokens)
        if out is None:
            y, result = new_like("out", tokens, given)
        else:
            y = output("out", out, x, x.shape)
            result, kept_of_out = describe("out", y)
        ids, kept_of_ids = describe_optional("expert", expert)
        weights, kept_of_weights = describe_optional("weight", weight)
        stream = stream_of(tokens)
        if request is not None:
            arguments = (self._handle.pointer, given, byref(request), result,
                         None if saved is None else saved.pointer, stream)
            if self._comm is not None:
                self._comm.run(lambda: native.layer_forward_with(*arguments))
            else:
                native.layer_forward_with(*arguments)
            return out if out is not None else y if len(x.shape) == 2 else y.reshape(x.shape)
        arguments = (self._handle.pointer, given, ids, weights, result, stream)
        if saved is not None:
            self._enqueue(self._native_saving, (*arguments[:-1], saved.pointer, stream), tokens, stream)
            return y if len(x.shape) == 2 else y.reshape(x.shape)
        if self._comm is not None:
            self._comm.run(lambda: self._enqueue(self._native_forward, arguments, tokens, stream))
        else:
            self._enqueue(self._native_forward, arguments, tokens, stream)
        if out is not None:
            return out
        return y if len(x.shape) == 2 else y.reshape(x.shape)


class _RoutedCall:
    """A call of a layer that saves, with what its router draws upon."""

    def __init__(self, layer, request, kept):
        self._layer, self._request, self._kept = layer, request, kept

    def save(self, x, expert, weight):
        return self._layer.save(x, expert, weight, self._request)

    def save_with_logits(self, x):
        return self._layer.save_with_logits(x, self._request)
