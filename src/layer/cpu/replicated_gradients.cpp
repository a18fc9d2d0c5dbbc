#include "layer/cpu/replicated_gradients.hpp"

#include <utility>

#include "core/row_ops.hpp"

namespace switchyard {

std::int64_t most_replicated_values(const LayerConfig& config) {
  const std::int64_t hidden = config.experts.hidden;
  const std::int64_t router = config.router.num_experts * (hidden + 1);
  if (config.shared.num_experts == 0) return router;
  const std::int64_t width = (config.shared.gated ? 2 : 1) * config.shared.inner;
  return router + width * (hidden + 1) + hidden * (config.shared.inner + 1) + hidden;
}

BackwardArgs ReplicatedGradients::parts_of(const BackwardArgs& args) {
  BackwardArgs parts = args;
  parts.accumulate = false;
  pieces_.clear();
  wanted_ = 0;
  std::int64_t total = 0;
  std::uint64_t bit = 1;
  const auto add = [&](void* out, DType dtype, std::int64_t count) {
    if (out != nullptr) {
      pieces_.push_back({.begin = total, .count = count, .dtype = dtype, .out = out});
      total += count;
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

  float* next = parts_.vector(total).data;
  const auto take = [&](std::int64_t count) { return std::exchange(next, next + count); };
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
  return parts;
}

void ReplicatedGradients::add_up(GradientExchange& ranks, bool accumulate,
                                 const Execution& execution) {
  if (pieces_.empty()) return;
  const std::int64_t total = pieces_.back().begin + pieces_.back().count;
  const ScopedStage stage(execution, "exchange", {.bytes = 16 * static_cast<double>(total)});
  const Vector<float> sums = parts_.vector(total);
  ranks.sum_over_ranks(sums.data, total);
  for (const Piece& piece : pieces_) {
    row_ops::write_gradient(sums.data + piece.begin, piece.dtype, piece.out, piece.count,
                            accumulate);
  }
}

}  // namespace switchyard
