// C interface: auxiliary losses of a layer, and what a forward has saved for them.
#include "capi/capi_backward.hpp"
#include "capi/capi_layer.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

sy_loss_config default_losses() {
  return {.struct_size = sizeof(sy_loss_config),
          .balance = 0,
          .z = 0,
          .importance = 0,
          .device = 0,
          .communication = 0,
          .entropy = 0,
          .scope = SY_LOSS_BATCH,
          .share = SY_SHARE_ASSIGNMENTS,
          .sequence_length = 0,
          .devices = 1,
          .devices_per_token = 1};
}

/// What `read` finds in the state of a layer's forward; empty where that is of experts.
template <typename View>
View of_layer(sy_saved saved, View (SavedForward::*read)() const) {
  View found{};
  capi::guarded([&] {
    const auto call = saved->calls.begin();
    if (saved->of_experts.owner == 0) found = (saved->of_layer.*read)();
  });
  return found;
}

}  // namespace

LossConfig capi::to_losses(const sy_loss_config& config) {
  const sy_loss_config given = taken("losses", &config, default_losses());
  return {.balance = given.balance,
          .z = given.z,
          .importance = given.importance,
          .device = given.device,
          .communication = given.communication,
          .entropy = given.entropy,
          .scope = enumerator("losses.scope", given.scope, "sy_loss_scope", LossScope::kGlobal),
          .share = enumerator("losses.share", given.share, "sy_balance_share",
                              BalanceShare::kFirstChoice),
          .sequence_length = given.sequence_length,
          .devices = given.devices,
          .devices_per_token = given.devices_per_token};
}

Vector<const std::int64_t> capi::loss_counts(const sy_gradients& gradients, std::int64_t num_logits,
                                             Backend where) {
  const sy_tensor* const counts = gradients.loss_counts;
  if (counts == nullptr) return {};
  check_tensor("gradients.loss_counts", counts, {num_logits}, where);
  require(counts->type_code == SY_CODE_INT && counts->type_bits == 64,
          "gradients.loss_counts is not i64");
  return {reinterpret_cast<const std::int64_t*>(data_of(*counts)), {num_logits}};
}

void sy_loss_config_init(sy_loss_config* config, size_t struct_size) {
  capi::give(config, default_losses(), struct_size);
}

const float* sy_saved_logits(sy_saved saved) { return of_layer(saved, &SavedForward::logits).data; }

const double* sy_saved_losses(sy_saved saved) {
  return of_layer(saved, &SavedForward::losses).data;
}

const int64_t* sy_saved_counts(sy_saved saved, int64_t* groups) {
  const Matrix<const std::int64_t> counts = of_layer(saved, &SavedForward::counts);
  if (groups != nullptr) *groups = counts.shape[0];
  return counts.data;
}
