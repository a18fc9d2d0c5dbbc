"""The structures of the C interface (include/switchyard/switchyard.h)."""

import ctypes
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64
from ctypes import c_size_t, c_uint8, c_uint16, c_uint64, c_void_p

from ._errors import INTEGERS, integer, invalid


class Tensor(Structure):
    """sy_tensor, which lies in memory as DLPack's DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("type_code", c_uint8),
        ("type_bits", c_uint8),
        ("type_lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Sized(Structure):
    """A struct that begins with its own size, as all but sy_tensor and sy_unique_id do: a library of
    another version can tell which fields there are."""

    _fields_ = [("struct_size", c_size_t)]

    def __init__(self, *values, **named):
        super().__init__(*values, **named)
        self.struct_size = ctypes.sizeof(self)

    def __setattr__(self, name, value):
        kind = dict(self._fields_).get(name)
        if kind in INTEGERS:
            value = integer(name, value, kind)
        try:
            super().__setattr__(name, value)
        except TypeError:
            raise invalid(f"{name}={value!r} is no number") from None


class RouterConfig(Sized):
    _fields_ = [
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("score", c_int32),
        ("renormalize", c_int32),
        ("scale", c_float),
        ("groups", c_int32),
        ("top_groups", c_int32),
        ("group_score", c_int32),
        ("router", c_char_p),
        ("hash_table", POINTER(Tensor)),
    ]


class RouteRequest(Sized):
    _fields_ = [
        ("seed", c_uint64),
        ("step", c_uint64),
        ("layer", c_int32),
        ("training", c_int32),
        ("first_token", c_int64),
        ("token_ids", POINTER(Tensor)),
        ("noise_logits", POINTER(Tensor)),
        ("selection_bias", POINTER(Tensor)),
        ("stream", c_void_p),
        ("logits", POINTER(Tensor)),
        ("previous_logits", POINTER(Tensor)),
    ]


class ExpertConfig(Sized):
    _fields_ = [
        ("num_experts", c_int32),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("gated", c_int32),
        ("activation", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
    ]


class SoftMoeConfig(Sized):
    _fields_ = [
        ("slots", c_int64),
        ("group", c_int64),
        ("sequence", c_int64),
        ("normalize", c_int32),
        ("causal", c_int32),
        ("scale", c_float),
    ]


class ExpertParallelConfig(Sized):
    _fields_ = [
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("hidden", c_int64),
        ("max_tokens", c_int64),
        ("dtype", c_int32),
        ("dispatch_wire", c_int32),
        ("combine_wire", c_int32),
        ("rank_invariant", c_int32),
        ("max_recv_rows", c_int64),
        ("capacity_factor", c_double),
        ("drop_policy", c_int32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("mode", c_int32),
        ("ctas", c_int32),
        ("device_engine", c_int32),
    ]


class Received(Sized):
    _fields_ = [
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("num_assignments", c_int64),
        ("num_local_experts", c_int32),
        ("expert_begin", c_void_p),
        ("row_x", c_void_p),
        ("row_weight", c_void_p),
        ("dropped_rows", c_int64),
        ("x_dtype", c_int32),
        ("num_scales", c_int64),
        ("scale", c_void_p),
        ("rows_received", c_void_p),
        ("rows_dropped", c_void_p),
        ("number", c_uint64),
    ]


class UniqueId(Structure):
    _fields_ = [("bytes", c_char * 64)]


class Flat(Sized):
    _fields_ = [
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("meta", c_void_p),
        ("rows_received", c_void_p),
    ]


class Bucketed(Sized):
    _fields_ = [
        ("expert_num_tokens", c_void_p),
        ("expert_x", c_void_p),
        ("expert_meta", c_void_p),
        ("num_local_experts", c_int32),
        ("capacity", c_int64),
    ]


class LossConfig(Sized):
    _fields_ = [
        ("balance", c_double),
        ("z", c_double),
        ("importance", c_double),
        ("device", c_double),
        ("communication", c_double),
        ("entropy", c_double),
        ("scope", c_int32),
        ("share", c_int32),
        ("sequence_length", c_int64),
        ("devices", c_int32),
        ("devices_per_token", c_int32),
    ]


class PerftConfig(Sized):
    _fields_ = [
        ("kind", c_int32),
        ("alpha", c_float),
        ("activation", c_int32),
        ("compute", c_int32),
        ("num_threads", c_int32),
        ("router", POINTER(RouterConfig)),
        ("losses", POINTER(LossConfig)),
        ("max_tokens", c_int64),
    ]


class RoutingStats(Sized):
    _fields_ = [
        ("cv", c_double),
        ("cv_floor", c_double),
        ("max_over_mean", c_double),
        ("min_over_mean", c_double),
        ("kl", c_double),
        ("entropy", c_double),
        ("effective_experts", c_double),
        ("gini", c_double),
        ("dead_experts", c_int64),
        ("rank_imbalance", c_double),
        ("entropy_router", c_double),
        ("entropy_weights", c_double),
        ("entropy_marginal", c_double),
        ("entropy_information", c_double),
        ("dropped_assignments", c_double),
        ("dropped_tokens", c_double),
        ("dropped_mass", c_double),
        ("padding_waste", c_double),
        ("counts", POINTER(c_int64)),
        ("dropped_by_choice", POINTER(c_double)),
    ]


class LayerOptions(Sized):
    _fields_ = [
        ("device_type", c_int32),
        ("compute", c_int32),
        ("layout", c_int32),
        ("alignment", c_int32),
        ("capacity_factor", c_double),
        ("drop_policy", c_int32),
        ("combine_wire", c_int32),
        ("batch_invariant", c_int32),
        ("rank_invariant", c_int32),
        ("max_tokens", c_int64),
        ("num_threads", c_int32),
        ("device_id", c_int32),
        ("dispatch_wire", c_int32),
        ("device_engine", c_int32),
        ("weights", c_int32),
        ("leave_out_shared", c_int32),
        ("router", c_char_p),
        ("losses", POINTER(LossConfig)),
        ("scratch", c_void_p),
    ]


class LayerArrays(Sized):
    _fields_ = [
        ("router", POINTER(RouterConfig)),
        ("experts", POINTER(ExpertConfig)),
        ("gate", POINTER(Tensor)),
        ("router_bias", POINTER(Tensor)),
        ("selection_bias", POINTER(Tensor)),
        ("w13", POINTER(Tensor)),
        ("w2", POINTER(Tensor)),
        ("b13", POINTER(Tensor)),
        ("b2", POINTER(Tensor)),
        ("router_in_place", c_int32),
        ("shared_w13", POINTER(Tensor)),
        ("shared_w2", POINTER(Tensor)),
        ("shared_gate", POINTER(Tensor)),
        ("experts_in_place", c_int32),
        ("noise_gate", POINTER(Tensor)),
        ("router_network", POINTER(Tensor)),
        ("identity_experts", c_int32),
        ("weight_on_input", c_int32),
        ("w13_scales", POINTER(Tensor)),
        ("w2_scales", POINTER(Tensor)),
        ("constant_experts", POINTER(Tensor)),
        ("gating_residual", POINTER(Tensor)),
    ]


class StoredExperts(Sized):
    _fields_ = [
        ("w13", POINTER(Tensor)),
        ("w13_scales", POINTER(Tensor)),
        ("w2", POINTER(Tensor)),
        ("w2_scales", POINTER(Tensor)),
        ("b13", POINTER(Tensor)),
        ("b2", POINTER(Tensor)),
        ("weights", c_int32),
        ("compute", c_int32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("num_threads", c_int32),
    ]


class Gradients(Sized):
    _fields_ = [
        ("tokens", POINTER(Tensor)),
        ("weight", POINTER(Tensor)),
        ("w13", POINTER(Tensor)),
        ("w2", POINTER(Tensor)),
        ("b13", POINTER(Tensor)),
        ("b2", POINTER(Tensor)),
        ("gate", POINTER(Tensor)),
        ("router_bias", POINTER(Tensor)),
        ("shared_w13", POINTER(Tensor)),
        ("shared_w2", POINTER(Tensor)),
        ("shared_gate", POINTER(Tensor)),
        ("dlogits", POINTER(Tensor)),
        ("accumulate", c_int32),
        ("loss_scale", c_double),
        ("loss_counts", POINTER(Tensor)),
        ("noise_gate", POINTER(Tensor)),
        ("router_network", POINTER(Tensor)),
        ("constant_experts", POINTER(Tensor)),
        ("gating_residual", POINTER(Tensor)),
        ("previous_logits", POINTER(Tensor)),
    ]


class CheckpointRecipe(Sized):
    _fields_ = [
        ("family", c_char_p),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("shared_experts", c_int32),
        ("groups", c_int32),
        ("top_groups", c_int32),
        ("num_layers", c_int32),
        ("dtype", c_int32),
        ("seed", c_uint64),
        ("shards", c_int32),
    ]
