#include "layer/choice_gradients.hpp"

namespace switchyard {

void give_choice_gradients(const ChoiceGradientsArgs& args) {
  const auto [num_tokens, top_k] = args.expert.shape;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const std::int32_t* expert = args.expert.row(t);
    const std::uint8_t* kept = args.kept.data == nullptr ? nullptr : args.kept.row(t);
    const auto counts = [&](std::int64_t k) {
      return expert[k] >= 0 && (kept == nullptr || kept[k] != 0);
    };
    for (std::int64_t k = 0; k < top_k; ++k) {
      float& gradient = args.dweight.row(t)[k];
      gradient = 0.0F;
      if (!counts(k)) continue;
      // A token's rows ascend by (expert, k).
      std::int32_t place = args.plan.token_begin[t];
      for (std::int64_t other = 0; other < top_k; ++other) {
        const bool before = expert[other] < expert[k] || (expert[other] == expert[k] && other < k);
        if (counts(other) && before) ++place;
      }
      gradient = args.drow_weight[args.plan.token_row[place]];
    }
  }
}

}  // namespace switchyard
