// One case through the layer, against the reference: routing, drops, counts, rows sent, output,
// and, where the contract promises bits, a second run of another kind.
#include "verify/check_layer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "reference/reference.hpp"

namespace switchyard::verify {
namespace {

using reference::Bounded;

template <typename T>
std::span<const T> rows_of(const std::vector<T>& values, std::int64_t begin, std::int64_t end,
                           std::int64_t cols) {
  return std::span(values).subspan(static_cast<std::size_t>(begin * cols),
                                   static_cast<std::size_t>((end - begin) * cols));
}

class LayerCheck {
 public:
  LayerCheck(const Problem& problem, const CheckOptions& options)
      : problem_(problem),
        test_(problem.test),
        options_(options),
        begin_(rank_begin(problem.test)),
        tokens_(reference::as_computed(problem.tokens, problem.test.compute)) {}

  std::string run() {
    const RunArgs args{.threads = test_.threads,
                       .rank_begin = begin_,
                       .backend = options_.backend,
                       .device_engine = options_.device_engine,
                       .timeout = options_.timeout,
                       .group = options_.group};
    const RunResult result = options_.run(problem_, args);
    std::optional<RunResult> second;
    if (!result.error && !must_fail()) second = run_again(args);
    if (options_.group != nullptr && options_.group->rank() != 0) return {};
    if (must_fail()) return check_failure(result);
    if (result.error) return fmt::format("forward threw: {}", result.error->what());
    std::string wrong =
        test_.layer.router.is_chain() ? check_chain(problem_, options_, result) : check_one(result);
    if (wrong.empty() && second) wrong = check_again(result, *second);
    return wrong;
  }

 private:
  std::string check_one(const RunResult& result) {
    std::string wrong;
    for (int rank = 0; rank < test_.ranks && wrong.empty(); ++rank) {
      wrong = check_rank(rank, result.ranks[static_cast<std::size_t>(rank)]);
      if (!wrong.empty()) return fmt::format("rank {}: {}", rank, wrong);
    }
    wrong = check_rows(result);
    if (wrong.empty() && test_.ranks > 1) wrong = check_traffic(result);
    if (wrong.empty()) wrong = check_outputs(result);
    return wrong;
  }

  [[nodiscard]] bool must_fail() const {
    return test_.num_tokens > 0 && (test_.data == Data::kNan || test_.given == Given::kBadId);
  }

  [[nodiscard]] std::string check_failure(const RunResult& result) const {
    if (!result.error) return "forward took a NaN or an id out of range without an error";
    if (result.error->code() != ErrorCode::kInvalidArgument) {
      return fmt::format("want an invalid argument, got: {}", result.error->what());
    }
    return {};
  }

  [[nodiscard]] std::int64_t top_k() const { return test_.layer.router.top_k(); }

  /// Of an expert that computes, or of another; 0: any number.
  [[nodiscard]] std::int64_t capacity_of_rank(std::int64_t tokens, bool computes = true) const {
    if (test_.capacity_factor == 0) return 0;
    return reference::capacity(test_.layer.router, test_.capacity_factor, tokens, computes);
  }

  std::string check_rank(int rank, const RankResult& result) {
    const std::int64_t begin = begin_[static_cast<std::size_t>(rank)];
    const std::int64_t end = begin_[static_cast<std::size_t>(rank) + 1];
    const auto picks = static_cast<std::size_t>((end - begin) * top_k());
    const RoutingRecord& record = result.record;
    if (record.expert.size() != picks || record.weight.size() != picks ||
        record.kept.size() != picks) {
      return fmt::format("the record has {} picks, want {}", record.expert.size(), picks);
    }
    std::vector<Bounded> top_scores;
    std::string wrong = test_.given == Given::kNothing
                            ? check_routing(begin, end, record, top_scores)
                            : check_given(begin, end, record);
    if (!wrong.empty()) return wrong;
    const std::int64_t capacity = capacity_of_rank(end - begin);
    wrong =
        reference::check_kept({.expert = record.expert,
                               .weight = record.weight,
                               .top_score = top_scores,
                               .top_k = top_k(),
                               .capacity = capacity,
                               .first_zero_computation = test_.layer.experts.num_experts,
                               .zero_computation_capacity = capacity_of_rank(end - begin, false),
                               .policy = test_.drop_policy},
                              record.kept);
    return wrong.empty() ? check_counts(record) : wrong;
  }

  std::string check_routing(std::int64_t begin, std::int64_t end, const RoutingRecord& record,
                            std::vector<Bounded>& top_scores) const {
    const LayerModel& model = problem_.model;
    const RouterConfig& config = test_.layer.router;
    const reference::RouterWeights weights{model.gate.floats(), model.router_bias.floats(),
                                           model.selection_bias.floats(),
                                           model.router_network.floats()};
    const std::int64_t hidden = test_.layer.experts.hidden;
    const RouteRequest request = request_of(problem_, begin, end);
    std::vector<Bounded> logits;
    if (config.has_logits()) {
      logits = reference::network_logits(
          config,
          reference::seen_tokens(config, request, rows_of(tokens_, begin, end, hidden), hidden),
          hidden, weights);
      reference::add_residual(
          logits, model.gating_residual.floats(),
          rows_of(problem_.previous_logits, begin, end,
                  config.gating_residual ? std::int64_t{config.num_logits()} : 0));
      std::vector<Bounded> of_noise;
      if (!model.noise_gate.empty()) {
        of_noise =
            reference::router_logits(rows_of(tokens_, begin, end, hidden), hidden,
                                     config.num_logits(), {.gate = model.noise_gate.floats()});
      }
      reference::add_noise(config, request, logits, of_noise);
    }
    if (!config.is_top_k()) {
      return reference::check_rule(config, request, logits, record.expert, record.weight,
                                   model.selection_bias.floats());
    }
    const auto gate_ties = ties_of(config, weights);
    std::vector<std::int64_t> load(static_cast<std::size_t>(config.num_experts));
    for (std::int64_t t = 0; t < end - begin; ++t) {
      const auto of_token = rows_of(logits, t, t + 1, config.num_experts);
      const auto chosen = rows_of(record.expert, t, t + 1, top_k());
      auto scores = reference::token_scores(config, of_token, model.selection_bias.floats());
      auto ties = reference::token_ties(gate_ties, of_token, model.selection_bias.floats());
      top_scores.push_back(reference::top_score(scores));
      if (test_.capacity_factor > 0 && test_.drop_policy == DropPolicy::kReroute) {
        reference::leave_out_full(load, capacity_of_rank(end - begin), scores, ties);
      }
      for (const std::int32_t e : chosen) {
        if (e >= 0 && e < config.num_experts) ++load[static_cast<std::size_t>(e)];
      }
      std::string wrong = reference::check_choice(config, scores, ties, chosen);
      if (wrong.empty()) {
        wrong = reference::check_weights(reference::chosen_weights(config, of_token, chosen),
                                         rows_of(record.weight, t, t + 1, top_k()));
      }
      if (!wrong.empty()) return fmt::format("token {}: {}", t, wrong);
    }
    return {};
  }

  /// Noise tells twins apart, and so do rows of a gating residual.
  [[nodiscard]] std::vector<std::int32_t> ties_of(const RouterConfig& config,
                                                  const reference::RouterWeights& weights) const {
    const bool noisy = test_.training && config.noise.is_on_logits();
    if (!noisy && !config.gating_residual) {
      return reference::tie_classes(config.network.features(test_.layer.experts.hidden),
                                    config.num_experts, weights);
    }
    std::vector<std::int32_t> apart(static_cast<std::size_t>(config.num_experts));
    std::iota(apart.begin(), apart.end(), 0);
    return apart;
  }

  [[nodiscard]] std::string check_given(std::int64_t begin, std::int64_t end,
                                        const RoutingRecord& record) const {
    const auto expert = rows_of(problem_.given_expert, begin, end, top_k());
    const auto weight = rows_of(problem_.given_weight, begin, end, top_k());
    if (!std::equal(expert.begin(), expert.end(), record.expert.begin()) ||
        !std::equal(weight.begin(), weight.end(), record.weight.begin())) {
      return "the record is not the routing that was given";
    }
    return {};
  }

  [[nodiscard]] std::string check_counts(const RoutingRecord& record) const {
    const auto num_experts = static_cast<std::size_t>(test_.layer.router.num_experts);
    std::vector<std::int64_t> counts(num_experts);
    std::vector<std::int64_t> counts_kept(num_experts);
    for (std::size_t i = 0; i < record.expert.size(); ++i) {
      if (record.expert[i] < 0) continue;
      ++counts[static_cast<std::size_t>(record.expert[i])];
      counts_kept[static_cast<std::size_t>(record.expert[i])] += record.kept[i];
    }
    if (counts != record.counts) return "counts are not those of the routing";
    if (counts_kept != record.counts_kept) return "counts_kept are not those of the routing";
    return {};
  }

  [[nodiscard]] std::int32_t border(int rank) const {
    return static_cast<std::int32_t>(std::int64_t{rank} * test_.layer.experts.num_experts /
                                     test_.ranks);
  }

  /// Rows of the layout: as many as assignments kept for the experts of each rank.
  [[nodiscard]] std::string check_rows(const RunResult& result) const {
    for (int rank = 0; rank < test_.ranks; ++rank) {
      std::int64_t used = 0;
      std::int64_t blocks = 0;
      for (std::int32_t e = border(rank); e < border(rank + 1); ++e) {
        std::int64_t rows = 0;
        for (const RankResult& source : result.ranks) {
          rows += source.record.counts_kept[static_cast<std::size_t>(e)];
        }
        used += rows;
        const std::int64_t n = test_.layout.alignment;
        blocks += (rows + n - 1) / n * n;
      }
      const RankResult& mine = result.ranks[static_cast<std::size_t>(rank)];
      if (mine.rows_used != used) {
        return fmt::format("rank {} used {} rows, want {}", rank, mine.rows_used, used);
      }
      const bool right = test_.layout.kind == LayoutKind::kCompact   ? mine.rows_executed == used
                         : test_.layout.kind == LayoutKind::kAligned ? mine.rows_executed == blocks
                                                                     : mine.rows_executed >= used;
      if (!right) {
        return fmt::format("rank {} executed {} rows for {} used", rank, mine.rows_executed, used);
      }
    }
    return {};
  }

  /// A token crosses once to each rank that has one of its experts, and every rank knows of all.
  [[nodiscard]] std::string check_traffic(const RunResult& result) const {
    const auto num_ranks = static_cast<std::size_t>(test_.ranks);
    std::vector<std::int64_t> rows(num_ranks * num_ranks);
    for (std::size_t source = 0; source < num_ranks; ++source) {
      const RoutingRecord& record = result.ranks[source].record;
      const auto k = static_cast<std::size_t>(top_k());
      for (std::size_t t = 0; t * k < record.expert.size(); ++t) {
        for (std::size_t target = 0; target < num_ranks; ++target) {
          const auto goes_there = [&](std::size_t i) {
            return record.kept[i] != 0 && record.expert[i] >= border(static_cast<int>(target)) &&
                   record.expert[i] < border(static_cast<int>(target) + 1);
          };
          bool any = false;
          for (std::size_t i = t * k; i < (t + 1) * k; ++i) any = any || goes_there(i);
          rows[source * num_ranks + target] += any ? 1 : 0;
        }
      }
    }
    const std::int64_t row_bytes = test_.layer.experts.hidden * size_of(test_.dispatch_wire);
    for (const RankResult& rank : result.ranks) {
      if (rank.traffic.rows != rows) return "rows sent are not the distinct destinations";
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rank.traffic.payload_bytes[i] != rows[i] * row_bytes) {
          return fmt::format("{} rows are {} bytes of payload, want {}", rows[i],
                             rank.traffic.payload_bytes[i], rows[i] * row_bytes);
        }
      }
    }
    return {};
  }

  [[nodiscard]] std::string check_outputs(const RunResult& result) const {
    std::vector<std::int32_t> expert;
    std::vector<float> weight;
    std::vector<std::uint8_t> kept;
    std::vector<float> out;
    for (const RankResult& rank : result.ranks) {
      const RoutingRecord& record = rank.record;
      expert.insert(expert.end(), record.expert.begin(), record.expert.end());
      weight.insert(weight.end(), record.weight.begin(), record.weight.end());
      kept.insert(kept.end(), record.kept.begin(), record.kept.end());
      const std::vector<float> values = decode(test_.output, rank.out);
      out.insert(out.end(), values.begin(), values.end());
    }
    const reference::LayerRun run{
        .precision = {.compute = test_.compute,
                      .quantize_q8 = test_.weights == WeightFormat::kQ8,
                      .may_scale_sums = options_.backend == Backend::kCuda &&
                                        test_.weights == WeightFormat::kE4M3,
                      .may_split_products = options_.backend == Backend::kCuda,
                      .may_split_rows = options_.backend == Backend::kCuda &&
                                        test_.weights == WeightFormat::kMxfp4},
        .ranks = test_.ranks,
        .wire = test_.wire,
        .rank_invariant = test_.rank_invariant,
        .dispatch_wire = dispatch_wire_of(test_),
        .fp8_rows = !test_.fp8_rows         ? reference::Fp8Rows::kNone
                    : test_.batch_invariant ? reference::Fp8Rows::kAll
                                            : reference::Fp8Rows::kPerhaps,
        .round_rows = options_.backend == Backend::kCuda,
        .row_scale = options_.row_scale};
    const auto expected = reference::layer_output(
        problem_.model, run, tokens_,
        {.expert = expert, .weight = weight, .kept = kept, .top_k = top_k()});
    return reference::check_output(expected, test_.layer.experts.hidden, test_.output, out);
  }

  /// The token that runs alone.
  [[nodiscard]] std::int64_t lone_token() const {
    return static_cast<std::int64_t>(
        test_.seed % static_cast<std::uint64_t>(std::max<std::int64_t>(1, test_.num_tokens)));
  }

  /// The run that must give the same bits, if there is one.
  [[nodiscard]] std::optional<RunResult> run_again(const RunArgs& first) const {
    RunArgs args = first;
    switch (test_.again) {
      case Again::kNothing: return std::nullopt;
      case Again::kCall: args.calls = 2; break;
      case Again::kThreads: args.threads = test_.again_threads; break;
      case Again::kRanks:
        args.rank_begin = {0, test_.num_tokens};
        args.threads = test_.again_threads;
        break;
      case Again::kAlone: args.rank_begin = {lone_token(), lone_token() + 1}; break;
    }
    return options_.run(problem_, args);
  }

  [[nodiscard]] std::string check_again(const RunResult& result, const RunResult& second) const {
    if (second.error) return fmt::format("the second run threw: {}", second.error->what());
    const auto all = [](const RunResult& run) {
      std::vector<std::byte> bytes;
      for (const RankResult& rank : run.ranks) {
        bytes.insert(bytes.end(), rank.out.begin(), rank.out.end());
      }
      return bytes;
    };
    std::vector<std::byte> before = all(result);
    if (test_.again == Again::kAlone) {
      const auto row =
          static_cast<std::ptrdiff_t>(test_.layer.experts.hidden * size_of(test_.output));
      const auto begin = before.begin() + lone_token() * row;
      before = std::vector<std::byte>(begin, begin + row);
    }
    if (before != all(second)) return "the second run has other bits";
    return {};
  }

  const Problem& problem_;
  const Case& test_;
  const CheckOptions& options_;
  std::vector<std::int64_t> begin_;
  std::vector<double> tokens_;
};

}  // namespace

std::string check_layer(const Problem& problem, const CheckOptions& options) {
  return LayerCheck(problem, options).run();
}

}  // namespace switchyard::verify
