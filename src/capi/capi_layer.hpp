#pragma once

#include "capi/capi.hpp"

struct sy_layer_t {
  switchyard::MoeLayer layer;
  switchyard::Backend backend;
  int device;       // CUDA; -1: the thread's current one
  bool can_reload;  // the experts can be read again where they came from
  switchyard::capi::Calls calls;
};

struct sy_scratch_t {
  std::shared_ptr<switchyard::LayerScratch> memory;
  int device;
  switchyard::capi::Calls calls;
  std::shared_ptr<switchyard::capi::CallLock> of_layers;  // of those that share it; null: none yet
};

namespace switchyard::capi {

/// @throws Error{kInvalidArgument}: a struct of another header, a number that is no enumerator.
[[nodiscard]] LossConfig to_losses(const sy_loss_config& config);

/// gradients.loss_counts [num_logits] i64, or an empty vector.
[[nodiscard]] Vector<const std::int64_t> loss_counts(const sy_gradients& gradients,
                                                     std::int64_t num_logits, Backend where);

/// What sy_routing_stats has of it, into a struct that was checked.
/// @param top_k  Of its dropped_by_choice.
void give_stats(const metrics::Routing& found, double padding_waste, std::int32_t top_k,
                sy_routing_stats& to);

/// The values as they lie on `where`, or a copy: then they lie in host memory.
[[nodiscard]] Parameter parameter(ConstRawMatrix values, Backend where, bool in_place);
/// The router's arrays: checked, and copied unless they are used where they lie.
void set_router(const sy_layer_arrays& arrays, const sy_layer_options& options, LayerModel& model);
/// sy_layer_arrays.identity_experts, which are not the router's own to say.
void set_copies(std::int32_t identity_experts, RouterConfig& router);

/// What sy_layer_forward reads and writes, checked.
[[nodiscard]] ForwardArgs forward_args(const sy_layer_t& layer, const sy_tensor* tokens,
                                       const sy_tensor* expert, const sy_tensor* weight,
                                       const sy_tensor* out, void* stream);

}  // namespace switchyard::capi
