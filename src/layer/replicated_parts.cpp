#include "layer/replicated_parts.hpp"

#include <utility>

namespace switchyard {
namespace {

std::int64_t aligned(std::int64_t count) {
  constexpr std::int64_t kAlignment = ReplicatedParts::kAlignment;
  return (count + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

void ReplicatedParts::lay_out(const BackwardArgs& args) {
  pieces_.clear();
  total_ = 0;
  wanted_ = 0;
  std::uint64_t bit = 1;
  const auto add = [&](void* out, DType dtype, std::int64_t count) {
    if (out != nullptr) {
      pieces_.push_back({.begin = total_, .count = count, .dtype = dtype, .out = out});
      total_ += aligned(count);
      wanted_ |= bit;
    }
    bit *= 2;
  };
  const auto add_raw = [&](const RawMatrix& m) { add(m.data, m.dtype, m.rows * m.cols); };
  const auto add_floats = [&](const auto& m) { add(m.data, DType::kF32, m.size()); };
  add_raw(args.dgate);
  add_floats(args.drouter_bias);
  add_raw(args.shared.w13);
  add_raw(args.shared.w2);
  add_floats(args.shared.b13);
  add_floats(args.shared.b2);
  add_floats(args.dshared_gate);
  add_raw(args.dnoise_gate);
  add_floats(args.drouter_network);
  add_floats(args.dconstant_experts);
  add_floats(args.dgating_residual);
}

BackwardArgs ReplicatedParts::in(float* memory, const BackwardArgs& args) const {
  BackwardArgs parts = args;
  parts.accumulate = false;
  const auto take = [&](std::int64_t count) {
    return std::exchange(memory, memory + aligned(count));
  };
  const auto place_raw = [&](RawMatrix& m) {
    if (m.data == nullptr) return;
    m.data = reinterpret_cast<std::byte*>(take(m.rows * m.cols));
    m.dtype = DType::kF32;
  };
  const auto place_floats = [&](auto& m) {
    if (m.data != nullptr) m.data = take(m.size());
  };
  place_raw(parts.dgate);
  place_floats(parts.drouter_bias);
  place_raw(parts.shared.w13);
  place_raw(parts.shared.w2);
  place_floats(parts.shared.b13);
  place_floats(parts.shared.b2);
  place_floats(parts.dshared_gate);
  place_raw(parts.dnoise_gate);
  place_floats(parts.drouter_network);
  place_floats(parts.dconstant_experts);
  place_floats(parts.dgating_residual);
  return parts;
}

std::int64_t ReplicatedParts::most(const LayerConfig& config) {
  const std::int64_t hidden = config.experts.hidden;
  const std::int64_t num_experts = config.router.num_logits();
  const RouterNetwork& network = config.router.network;
  std::int64_t total = aligned(num_experts * network.features(hidden)) + aligned(num_experts) +
                       aligned(network.size(hidden));
  if (config.router.noise.kind == RouterNoise::Kind::kLearned) {
    total += aligned(num_experts * hidden);
  }
  total += aligned(3 * hidden * config.router.zero_computation.constant);
  if (config.router.gating_residual) total += aligned(num_experts * num_experts);
  if (config.shared.num_experts == 0) return total;
  const std::int64_t width = (config.shared.gated ? 2 : 1) * config.shared.inner;
  total += aligned(width * hidden) + aligned(hidden * config.shared.inner) + aligned(width);
  return total + 2 * aligned(hidden);
}

}  // namespace switchyard
