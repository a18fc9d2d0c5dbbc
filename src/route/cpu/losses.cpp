// Sums over tokens, and losses of them, on a CPU. Bound by the exponentials; tokens are split into
// parts of a fixed number, whose sums are added in order.
#include <algorithm>
#include <cstring>
#include <vector>

#include "route/cpu/token_scores.hpp"
#include "route/implementations.hpp"
#include "route/loss_formulas.hpp"
#include "route/token_places.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kTokensPerPart = 256;

/// Of tokens of one group.
struct Part {
  std::vector<std::int64_t> counts, first_choices, device_tokens;
  std::vector<double> scores;
  double squares = 0;
  double entropies = 0;

  Part(std::int64_t num_experts, std::int64_t devices)
      : counts(static_cast<std::size_t>(num_experts)),
        first_choices(counts.size()),
        device_tokens(static_cast<std::size_t>(devices)),
        scores(counts.size()) {}

  /// The ids of a token, in the order of its choice.
  void add_choices(const std::int32_t* begin, const std::int32_t* end) {
    const std::size_t per_device = counts.size() / device_tokens.size();
    for (const std::int32_t* id = begin; id != end; ++id) {
      if (*id < 0) continue;
      const auto e = static_cast<std::size_t>(*id);
      ++counts[e];
      if (id == begin) ++first_choices[e];
      const auto same = [&](std::int32_t other) {
        return other >= 0 && static_cast<std::size_t>(other) / per_device == e / per_device;
      };
      if (std::none_of(begin, id, same)) ++device_tokens[e / per_device];
    }
  }

  void add_scores(const TokenScores& token) {
    for (std::size_t e = 0; e < scores.size(); ++e) scores[e] += token.share(e);
    squares += token.log_sum_exp() * token.log_sum_exp();
    entropies += token.entropy();
  }

  void add_to(const RoutingSums& sums, std::int64_t group) const {
    const auto add = [](const auto& from, auto* to) {
      for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
    };
    add(counts, sums.counts.row(group));
    add(first_choices, sums.first_choices.row(group));
    add(device_tokens, sums.device_tokens.row(group));
    add(scores, sums.scores.row(group));
    sums.tokens[0] += squares;
    sums.tokens[1] += entropies;
  }
};

template <typename T>
std::optional<std::string> reject(const T& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run_sums(const RoutingSumsArgs& args) {
  const RoutingSums& sums = args.sums;
  const std::int64_t num_experts = args.logits.shape[1];
  const auto [groups, devices] = sums.device_tokens.shape;
  std::fill_n(sums.counts.data, sums.counts.size(), 0);
  std::fill_n(sums.first_choices.data, sums.first_choices.size(), 0);
  std::fill_n(sums.device_tokens.data, sums.device_tokens.size(), 0);
  std::fill_n(sums.scores.data, sums.scores.size(), 0.0);
  std::fill_n(sums.tokens.data, kTokenSums, 0.0);
  const std::int64_t per_group = args.logits.shape[0] / groups;
  const std::int64_t parts_per_group = (per_group + kTokensPerPart - 1) / kTokensPerPart;
  std::vector<Part> parts(static_cast<std::size_t>(groups * parts_per_group),
                          Part(num_experts, devices));
  const TokenPlaces places(args.assignments);
  const std::int32_t* const ids = places.expert().data;
  parallel_for(args.execution.pool, std::ssize(parts), [&](std::int64_t i, int) {
    Part& part = parts[static_cast<std::size_t>(i)];
    TokenScores scores(static_cast<std::int32_t>(num_experts), args.score);
    const std::int64_t group = i / parts_per_group;
    const std::int64_t first = group * per_group + i % parts_per_group * kTokensPerPart;
    const std::int64_t end = std::min(first + kTokensPerPart, (group + 1) * per_group);
    for (std::int64_t t = first; t < end; ++t) {
      scores.read(args.logits.row(t));
      part.add_scores(scores);
      part.add_choices(ids + places.begin(t), ids + places.begin(t + 1));
    }
  });
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].add_to(sums, static_cast<std::int64_t>(i) / parts_per_group);
  }
}

/// Of one group: what its experts and devices have.
class GroupShares {
 public:
  GroupShares(const losses::Shape& shape, std::int64_t group)
      : shape_(shape),
        group_(group),
        of_device_(static_cast<std::size_t>(shape.devices)),
        scores_of_device_(of_device_.size()) {
    const std::int64_t* const counted = losses::counted(shape, group);
    const std::int64_t* const counts = shape.counts + group * shape.num_experts;
    std::int64_t all = 0;
    std::int64_t assigned = 0;
    for (std::int32_t e = 0; e < shape.num_experts; ++e) all += counted[e], assigned += counts[e];
    const double factor = losses::share_factor(shape, all, assigned);
    for (std::int32_t e = 0; e < shape.num_experts; ++e) {
      share_.push_back(factor * static_cast<double>(counted[e]));
      of_device_[device(e)] += share_.back();
      scores_of_device_[device(e)] += scores()[e];
    }
  }

  [[nodiscard]] double price(std::int32_t e) const {
    return losses::score_price(shape_, balanced(e), of_device_[device(e)],
                               losses::sent_share(shape_, group_, static_cast<int>(device(e))));
  }

  /// Sums of f P over the group's tokens, not yet by their number.
  void add_to(LossValues& values) const {
    for (std::int32_t e = 0; e < shape_.num_experts; ++e) {
      values.balance += balanced(e) * scores()[e];
    }
    for (std::size_t d = 0; d < of_device_.size(); ++d) {
      values.device += of_device_[d] * scores_of_device_[d];
      values.communication +=
          losses::sent_share(shape_, group_, static_cast<int>(d)) * scores_of_device_[d];
    }
  }

 private:
  [[nodiscard]] double balanced(std::int32_t e) const {
    return losses::balanced_share(shape_, e, share_[static_cast<std::size_t>(e)]);
  }
  [[nodiscard]] std::size_t device(std::int32_t e) const {
    return static_cast<std::size_t>(e / (shape_.num_experts / shape_.devices));
  }
  [[nodiscard]] const double* scores() const { return shape_.scores + group_ * shape_.num_experts; }

  const losses::Shape& shape_;
  std::int64_t group_;
  std::vector<double> share_, of_device_, scores_of_device_;
};

void run_losses(const RouterLossesArgs& args) {
  const losses::Shape shape = losses::shape_of(args);
  std::vector<double> importance(static_cast<std::size_t>(shape.num_experts));
  std::vector<double> slope(importance.size());
  for (std::int64_t i = 0; i < args.sums.scores.size(); ++i) {
    importance[static_cast<std::size_t>(i) % importance.size()] += args.sums.scores.data[i];
  }
  LossValues values;
  values.importance = cv_squared({importance.data(), {shape.num_experts}}, shape.importance,
                                 {slope.data(), {shape.num_experts}});
  for (std::int64_t group = 0; group < shape.groups; ++group) {
    const GroupShares shares(shape, group);
    for (std::int32_t e = 0; e < shape.num_experts; ++e) {
      args.score_prices.row(group)[e] =
          static_cast<float>(shares.price(e) + slope[static_cast<std::size_t>(e)]);
    }
    shares.add_to(values);
  }
  if (args.values.data == nullptr) return;
  values = losses::finish(shape, args.config, values);
  std::memcpy(args.values.data, &values, sizeof values);
}

}  // namespace

const Implementation<RoutingSumsArgs> kRoutingSumsCpu{"cpu.scan", reject<RoutingSumsArgs>,
                                                      run_sums};
const Implementation<RouterLossesArgs> kRouterLossesCpu{"cpu.sums", reject<RouterLossesArgs>,
                                                        run_losses};

}  // namespace switchyard
