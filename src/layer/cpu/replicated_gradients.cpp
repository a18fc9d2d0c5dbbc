#include "layer/cpu/replicated_gradients.hpp"

#include "core/row_ops.hpp"

namespace switchyard {

BackwardArgs ReplicatedGradients::parts_of(const BackwardArgs& args) {
  parts_.lay_out(args);
  return parts_.in(values_.vector(parts_.total()).data, args);
}

void ReplicatedGradients::add_up(GradientExchange& ranks, bool accumulate,
                                 const Execution& execution) {
  if (parts_.pieces().empty()) return;
  const std::int64_t total = parts_.total();
  const ScopedStage stage(execution, "exchange", {.bytes = 16 * static_cast<double>(total)});
  const Vector<float> sums = values_.vector(total);
  ranks.sum_over_ranks(sums.data, total);
  for (const ReplicatedParts::Piece& piece : parts_.pieces()) {
    row_ops::write_gradient(sums.data + piece.begin, piece.dtype, piece.out, piece.count,
                            accumulate);
  }
}

}  // namespace switchyard
