"""How a layer is called: by its router's rule or a given routing, for torch's gradients, in torch.compile, and
what of a call goes to the library."""

import sys
from ctypes import byref

from . import _autograd, _compiled, _layer_losses
from ._arguments import forward_only, output, routing, rows
from ._errors import NotCopied, SwitchyardError, invalid
from ._native import native
from ._tensors import (behind_address_of_rows, describe, describe_optional, is_torch, is_torch_cuda, new_like,
                       stream_of, stream_of_torch)


class LayerCalls(NotCopied):
    """The calls of a Layer, which has made all that they read."""

    _is_plain = False  # on one rank, without a router of its own, and not trainable

    def __call__(self, x, expert=None, weight=None, out=None, logits=False, token_ids=None, step=0,
                 training=None, previous_logits=None):
        """Run the layer on x [T,H] or [B,S,H], f32, bf16 or f16, which is converted to the layer's
        compute type; the result has the shape and dtype of x, or is `out`, which does not overlap
        x. expert [T,K] or [B,S,K] of integers (-1 unused) and weight, of any float type, skip the
        router; they may lie on another device than x, at the price of a copy.

        logits=True, of a trainable layer or one with router=: the result and the router's logits [T,E] or
        [B,S,E] f32, for auxiliary losses or the layer behind; of a trainable one their gradients reach gate,
        router bias and x.

        With a router: token_ids [T] or [B,S] of integers where its rule goes by them, `step` for its
        noise, and whether this is training, which draws it; without `training`, where torch wants
        gradients. previous_logits [T,E] or [B,S,E] f32 of the same tokens in the layer before, of
        Router("moe++", ..., residual=True), which has gradients of them."""
        if (self._is_plain and expert is None and weight is None and out is None and not logits
                and token_ids is None and not training and previous_logits is None):
            y = self._run_plain(x)
            if y is not None:
                return y
        if self._router is not None and expert is None and weight is None:
            return self._routed(x, out, logits, token_ids, step, training, previous_logits)
        if previous_logits is not None:
            raise invalid("previous_logits are for a router with residual=True, and "
                          + ("the routing is given" if self._router else "the layer has none"))
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

    def _routed(self, x, out, logits, token_ids, step, training, previous_logits):
        """By the router's rule, with what it draws upon."""
        if _compiled.is_compiling():
            raise SwitchyardError("unsupported", "a layer with router= inside of torch.compile")
        if logits and not self._router.has_logits:
            raise invalid(f"logits=True, and the router {self._router.name} has none")
        parameters = () if self._parameters is None else self._parameters.tensors
        if self._parameters is not None and is_torch(previous_logits):
            parameters = (*parameters, previous_logits)
        learns = self._parameters is not None and _autograd.wants_gradient(x, *parameters)
        tokens = rows("x", x, self._hidden)
        request, kept = self._router.request(tokens.shape[0], token_ids, step,
                                             learns if training is None else training, like=tokens)
        call = _RoutedCall(self, request, (kept, self._router.add_previous(request, previous_logits, tokens)))
        saves = learns or (logits and self._parameters is not None)
        if saves:
            _autograd.check_call(x, None, out)
        if logits and saves:
            return (_autograd.run_with_logits(call, x, parameters) if learns
                    else call.save_with_logits(x)[:2])
        if learns:
            return _autograd.run(call, x, None, None, parameters)
        self._forward_only(x, None)
        if previous_logits is not None:
            forward_only("previous_logits", previous_logits, "make the layer with trainable=True, ")
        if self._parameters is not None:
            self._follow()
        if not logits:
            return self._run(x, None, None, out, None, request)
        found, kept = self._router.add_logits(request, tokens)
        y = self._run(x, None, None, out, None, request)
        return y, found.reshape(*x.shape[:-1], found.shape[-1])

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

    def _keep_losses(self, saved, device):
        if self._losses is not None:
            self._loss_values = _layer_losses.values_of(saved, self._num_experts, device)

    def _follow(self):
        with self._following:
            if self._parameters.follow():
                native.layer_reload_experts(self._handle.pointer)

    def _run_plain(self, x):
        """The call that serving repeats, in half of the time that the ways of all others take before they
        reach the library: tokens of torch without gaps, where torch wants no gradients. None: it is none,
        or there is something to say about it."""
        torch = sys.modules.get("torch")
        if torch is None or type(x) is not torch.Tensor or torch.is_grad_enabled() or _compiled.is_compiling():
            return None
        shape = x.shape
        behind = behind_address_of_rows(x.dtype, x.device, shape)
        if behind is None or shape[-1] != self._hidden or not x.is_contiguous():
            return None
        y = torch.empty_like(x)
        try:
            given = x.data_ptr().to_bytes(8, "little") + behind[0]
        except RuntimeError:  # of a tracer
            return None
        result = y.data_ptr().to_bytes(8, "little") + behind[0]
        if x.is_cuda:
            stream = stream_of_torch(x)
            self._order.run(self._native_forward, (self._handle.pointer, given, None, None, result, stream), x, stream)
        else:
            self._native_forward(self._handle.pointer, given, None, None, result, None)
        return y

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
