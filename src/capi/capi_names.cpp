// C interface: the words for enumerators.
#include <iterator>
#include <span>
#include <string_view>

#include "switchyard/names.hpp"
#include "switchyard/perft.hpp"
#include "switchyard/switchyard.h"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

std::span<const char* const> words_of(std::string_view type) {
  if (type == "sy_dtype") return names_of<DType>().first(SY_FP8_E4M3 + 1);
  if (type == "sy_score") return names_of<Score>();
  if (type == "sy_group_score") return names_of<GroupScore>();
  if (type == "sy_activation") return names_of<Activation>();
  if (type == "sy_layout") return names_of<LayoutKind>();
  if (type == "sy_drop_policy") return names_of<DropPolicy>();
  if (type == "sy_exchange_mode") return names_of<ExchangeMode>();
  if (type == "sy_weight_format") return names_of<WeightFormat>();
  if (type == "sy_recompute") return names_of<Recompute>();
  if (type == "sy_loss_scope") return names_of<LossScope>();
  if (type == "sy_balance_share") return names_of<BalanceShare>();
  if (type == "sy_perft_kind") return names_of<PerftKind>();
  if (type == "sy_device_engine") return names_of<DeviceEngine>();
  return {};
}

}  // namespace

const char* sy_enumerator_name(const char* type, int32_t value) {
  if (type == nullptr) return nullptr;
  const std::span<const char* const> words = words_of(type);
  return value >= 0 && value < std::ssize(words) ? words[static_cast<std::size_t>(value)] : nullptr;
}
