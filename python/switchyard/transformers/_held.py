"""The experts of one module in Switchyard's hands, never twice in memory."""

import torch

from .._layer import Layer
from .._native import SwitchyardError
from .._stages import Experts
from .._tensors import dtype_name
from . import _arrays


class HeldExperts:
    """Computes what an experts module computes: y = held(tokens, ids, weights).

    On a CPU the weights are placed for its kernels; hold() then gives the module's own memory back,
    its parameters lie on torch's device "meta", and its state_dict() reads them from here. On a GPU
    they are used where they lie; where their layout is another one, a copy takes their place.
    """

    def __init__(self, module, form, threads, weights, router=None):
        """`router`: the arguments of a Layer that describe one; then `layer` routes as well."""
        self._begin(module, form, weights)
        names = _arrays.parameter_names(form)
        given = [getattr(module, name).detach() for name in names]
        w13, w2 = _arrays.to_arrays(form, given[0][:form.num_experts], given[1])
        arrays = {"w13": w13.contiguous(), "w2": w2.contiguous()}
        if form.has_bias:
            arrays["b13"] = _arrays.to_arrays(form, given[2], None)[0].float().contiguous()
            arrays["b2"] = given[3].float().contiguous()
        self.routes_in_place = router is not None and router["router_in_place"]
        options = _arrays.activation(module)
        if w2.is_cuda:
            if weights != "exact":
                raise _arrays.NotTaken(f"weights={weights!r} are for a CPU")
            self._arrays = arrays
            if router is None:
                self._experts = Experts(**arrays, **options)
            else:
                self.layer = Layer(**router, **arrays, **options, device=w2.device,
                                   compute=dtype_name(w2.dtype), experts_in_place=True)
        elif router is not None:
            self.layer = Layer(**router, **arrays, **options, num_threads=threads, weights=weights)
        elif weights == "exact":
            self._experts = Experts(**arrays, **options, num_threads=threads)
        else:
            raise _arrays.NotTaken(f"weights={weights!r} need a router that Switchyard has, too")

    @classmethod
    def of_layer(cls, module, form, layer, weights):
        """Of a module whose parameters have no values yet, and a Layer without shared experts that
        has read them from a file. add_hooks() is still to come."""
        self = cls.__new__(cls)
        self._begin(module, form, weights)
        self.layer = layer
        for name in _arrays.parameter_names(form):
            own = getattr(module, name)
            self._saved[name] = (own, own.shape, torch.device("cpu"), None)
        return self

    def _begin(self, module, form, weights):
        given = [getattr(module, name) for name in _arrays.parameter_names(form)]
        self.module, self.form = module, form
        self.is_exact = weights == "exact"
        self.num_experts, self.dtype = form.num_experts, given[1].dtype
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in given)
        self.layer = None
        self._experts = None
        self._arrays = None
        self.routes_in_place = False
        self._saved = {}
        self._hooks = []

    def __call__(self, tokens, ids, weights):
        if torch.is_grad_enabled() and (
                tokens.requires_grad or weights.requires_grad or self.wants_gradient()):
            raise SwitchyardError(
                "unsupported", "Switchyard's experts have no gradients yet: call the model within "
                "torch.no_grad() or torch.inference_mode(), or undo() what accelerate() did")
        return (self.layer or self._experts)(tokens, ids, weights)

    def wants_gradient(self):
        """Whether a parameter of the module does, whose values are here."""
        return any(getattr(self.module, name).requires_grad
                   for name in _arrays.parameter_names(self.form))

    def hold(self):
        """Gives back the module's memory, unless it is what is computed with."""
        if self._arrays is not None and _arrays.is_plain(self.form):
            return
        for name in _arrays.parameter_names(self.form):
            own = getattr(self.module, name)
            kept = own.detach()[self.num_experts:].clone()  # rows of no expert, where there are any
            if name.endswith("_bias"):  # a few kilobytes
                kept = own.detach()
            self._saved[name] = (own, own.shape, own.device, kept)
            self.module._parameters[name] = torch.nn.Parameter(
                torch.empty_like(own, device="meta"), requires_grad=own.requires_grad)
            own.data = torch.empty(0, dtype=own.dtype, device=own.device)
        self.add_hooks()

    def add_hooks(self):
        """state_dict() has the weights; load_state_dict() is an error."""
        # By the names that every torch has: the public ones came with 2.5.
        self._hooks = [self.module._register_state_dict_hook(self._write_state),
                       self.module._register_load_state_dict_pre_hook(self._refuse_state)]

    def let_go(self):
        """The module has its parameters again, as they were."""
        for name, values in self._values().items():
            own = self._saved[name][0]
            if own.is_meta:  # it never had values
                own = torch.nn.Parameter(values, requires_grad=own.requires_grad)
            else:
                own.data = values
            self.module._parameters[name] = own
        self._saved.clear()
        for hook in self._hooks:
            hook.remove()

    def _values(self):
        """The parameters that are given back at present: name -> tensor on its own device."""
        if not self._saved:
            return {}
        values = {name: torch.empty(shape, dtype=own.dtype, device=device)
                  for name, (own, shape, device, _) in self._saved.items()}
        for expert in range(self.num_experts):
            for name, value in self.read(expert).items():
                values[name][expert].copy_(value)
        for name, (_, _, _, kept) in self._saved.items():
            if kept is not None and len(kept):
                values[name][-len(kept):].copy_(kept)
        return values

    def read(self, expert):
        """One expert's parameters, in the module's layout."""
        names = _arrays.parameter_names(self.form)
        shapes = [self._saved[name][1][1:] for name in names]
        if self._arrays is not None:
            arrays = [self._arrays[name][expert] for name in ("w13", "w2", "b13", "b2")[:len(names)]]
        else:
            arrays = [torch.empty(shape[::-1] if self.form.is_transposed else shape, dtype=self.dtype,
                                  device="cpu")
                      for shape in shapes[:2]]
            arrays += [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes[2:]]
            (self.layer or self._experts).read_expert(expert, *arrays)
        values = zip(names, _arrays.from_arrays(self.form, *arrays))
        return {name: value.to(self._saved[name][0].dtype) for name, value in values}

    def _write_state(self, _module, state, prefix, _metadata):
        for name, values in self._values().items():
            state[prefix + name] = values

    def _refuse_state(self, _state, prefix, *_):
        raise SwitchyardError(
            "unsupported", f"{prefix.rstrip('.') or 'experts'}: the weights are Switchyard's. undo() what accelerate() did, "
            "load the state, and accelerate again")

    def __deepcopy__(self, _memo):
        raise SwitchyardError("unsupported", "a model that Switchyard runs cannot be copied: undo() "
                                             "what accelerate() did, copy it, and accelerate both")

    def __reduce_ex__(self, _protocol):
        raise SwitchyardError("unsupported", "a model that Switchyard runs cannot be pickled: save "
                                             "its state_dict(), or undo() what accelerate() did")
