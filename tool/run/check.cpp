// --check: the run against the reference, which shares no code with the stages.
#include "tool/run/check.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "core/half.hpp"
#include "reference/reference.hpp"

namespace switchyard::tool {
namespace {

using reference::Bounded;

std::vector<float> floats_of(ConstRawMatrix matrix, std::int64_t begin, std::int64_t end) {
  std::vector<float> out;
  for (std::int64_t i = begin * matrix.cols; i < end * matrix.cols; ++i) {
    out.push_back(load_float(matrix.data, matrix.dtype, i));
  }
  return out;
}

/// Tokens whose output is compared: all, or some that are evenly spread.
std::vector<std::int64_t> sample_tokens(const LayerConfig& config, std::int64_t num_tokens) {
  const double matrices = config.experts.gated ? 3 : 2;
  const double inner =
      static_cast<double>(config.router.top_k() * config.experts.inner) +
      (config.shared.num_experts > 0 ? static_cast<double>(config.shared.inner) : 0);
  const double per_token = 2 * matrices * inner * static_cast<double>(config.experts.hidden);
  const double fit = std::max(1.0, 2e10 / per_token);
  const auto count = static_cast<std::int64_t>(std::min(fit, static_cast<double>(num_tokens)));
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) tokens.push_back(i * num_tokens / count);
  return tokens;
}

template <typename T>
std::vector<T> rows_of(const std::vector<T>& values, const std::vector<std::int64_t>& rows,
                       std::int64_t cols) {
  std::vector<T> out;
  for (const std::int64_t row : rows) {
    out.insert(out.end(), values.begin() + row * cols, values.begin() + (row + 1) * cols);
  }
  return out;
}

class Checker {
 public:
  Checker(const bench::LayerRunArgs& args, const bench::LayerRunResult& result)
      : args_(args), result_(result), config_(args.model->config) {}

  Verdict run() {
    for (int rank = 0; rank < args_.num_ranks && verdict_.holds; ++rank) check_source_rank(rank);
    if (verdict_.holds) check_outputs();
    return verdict_;
  }

 private:
  void miss(const std::string& what) {
    if (!verdict_.holds) return;
    verdict_.holds = false;
    verdict_.miss = what;
  }

  [[nodiscard]] std::vector<double> computed_tokens(std::int64_t begin, std::int64_t end) const {
    return reference::as_computed(floats_of(args_.tokens, begin, end), result_.compute);
  }

  /// @param load  Of each expert by the rank's tokens before, and then by this one too.
  void check_token(std::int64_t token, std::span<const Bounded> logits,
                   const std::vector<std::int32_t>& gate_ties, std::int64_t capacity,
                   std::vector<Bounded>& top_scores, std::vector<std::int64_t>& load) {
    const LayerModel& model = *args_.model;
    auto scores = reference::token_scores(config_.router, logits, model.selection_bias.floats());
    top_scores.push_back(reference::top_score(scores));
    if (args_.expert.data != nullptr) return;
    const auto top_k = static_cast<std::size_t>(config_.router.top_k());
    const std::size_t begin = static_cast<std::size_t>(token) * top_k;
    const std::span chosen = std::span(result_.record.expert).subspan(begin, top_k);
    const std::span weights = std::span(result_.record.weight).subspan(begin, top_k);
    auto ties = reference::token_ties(gate_ties, logits, model.selection_bias.floats());
    if (capacity > 0 && args_.options.drop_policy == DropPolicy::kReroute) {
      reference::leave_out_full(load, capacity, scores, ties);
    }
    for (const std::int32_t e : chosen) {
      if (e >= 0 && e < config_.router.num_experts) ++load[static_cast<std::size_t>(e)];
    }
    std::string wrong = reference::check_choice(config_.router, scores, ties, chosen);
    if (wrong.empty()) {
      wrong = reference::check_weights(reference::chosen_weights(config_.router, logits, chosen),
                                       weights);
    }
    if (!wrong.empty()) miss(fmt::format("routing of token {}: {}", token, wrong));
  }

  /// A rule that is not top-k chooses for all tokens of a rank.
  void check_rule(std::int64_t begin, std::int64_t end) {
    RouteRequest request = args_.request;
    request.first_token = begin;
    if (request.token_ids.data != nullptr) {
      request.token_ids = {request.token_ids.data + begin, {end - begin}};
    }
    const reference::RouterWeights weights{args_.model->gate.floats(),
                                           args_.model->router_bias.floats(),
                                           {},
                                           args_.model->router_network.floats()};
    std::vector<Bounded> logits;
    if (config_.router.has_logits()) {
      logits = reference::network_logits(config_.router, computed_tokens(begin, end),
                                         config_.experts.hidden, weights);
    }
    const auto columns = static_cast<std::size_t>(config_.router.top_k());
    const std::size_t first = static_cast<std::size_t>(begin) * columns;
    const std::size_t count = static_cast<std::size_t>(end - begin) * columns;
    const std::string wrong = reference::check_rule(
        config_.router, request, logits, std::span(result_.record.expert).subspan(first, count),
        std::span(result_.record.weight).subspan(first, count),
        args_.model->selection_bias.floats());
    if (!wrong.empty()) miss(fmt::format("routing: {}", wrong));
  }

  void check_source_rank(int rank) {
    const LayerModel& model = *args_.model;
    const auto index = static_cast<std::size_t>(rank);
    const std::int64_t begin = result_.rank_begin[index];
    const std::int64_t end = result_.rank_begin[index + 1];
    const reference::RouterWeights weights{model.gate.floats(), model.router_bias.floats(),
                                           model.selection_bias.floats(),
                                           model.router_network.floats()};
    const std::int32_t num_experts = config_.router.num_experts;
    const std::int64_t hidden = config_.experts.hidden;
    const auto& factor = args_.options.capacity_factor;
    const auto slots = [&](bool computes) {
      return factor ? reference::capacity(config_.router, *factor, end - begin, computes)
                    : std::int64_t{0};
    };
    const std::int64_t capacity = slots(true);
    std::vector<Bounded> top_scores;
    std::vector<std::int64_t> load(static_cast<std::size_t>(num_experts));
    if (!config_.router.is_top_k()) check_rule(begin, end);
    std::vector<std::int32_t> ties;
    if (config_.router.is_top_k()) {
      ties = reference::tie_classes(config_.router.network.features(hidden), num_experts, weights);
    }
    for (std::int64_t token = begin; token < end && config_.router.is_top_k(); ++token) {
      const auto x = computed_tokens(token, token + 1);
      check_token(token, reference::network_logits(config_.router, x, hidden, weights), ties,
                  capacity, top_scores, load);
    }
    const auto first = static_cast<std::size_t>(begin * config_.router.top_k());
    const auto count = static_cast<std::size_t>((end - begin) * config_.router.top_k());
    const reference::Wanted wanted{
        .expert = std::span(result_.record.expert).subspan(first, count),
        .weight = std::span(result_.record.weight).subspan(first, count),
        // Given routing has no scores: bpr then goes by the largest weight.
        // So it does with rules other than top-k.
        .top_score = args_.expert.data == nullptr && config_.router.is_top_k()
                         ? std::span<const Bounded>(top_scores)
                         : std::span<const Bounded>(),
        .top_k = config_.router.top_k(),
        .capacity = capacity,
        .first_zero_computation = config_.experts.num_experts,
        .zero_computation_capacity = slots(false),
        .policy = args_.options.drop_policy,
    };
    const std::string wrong =
        reference::check_kept(wanted, std::span(result_.record.kept).subspan(first, count));
    if (!wrong.empty()) miss(fmt::format("drops of rank {}: {}", rank, wrong));
    verdict_.tokens_routed += end - begin;
  }

  void check_outputs() {
    const std::int64_t hidden = config_.experts.hidden;
    const std::int64_t top_k = config_.router.top_k();
    const auto tokens = sample_tokens(config_, args_.tokens.rows);
    std::vector<float> x;
    std::vector<float> out;
    const ConstRawMatrix result{result_.out.data(), args_.out, args_.tokens.rows, hidden};
    for (const std::int64_t token : tokens) {
      for (const float value : floats_of(args_.tokens, token, token + 1)) x.push_back(value);
      for (const float value : floats_of(result, token, token + 1)) out.push_back(value);
    }
    const auto expert = rows_of(result_.record.expert, tokens, top_k);
    const auto weight = rows_of(result_.record.weight, tokens, top_k);
    const auto kept = rows_of(result_.record.kept, tokens, top_k);
    const bool multiplies_e4m3 = args_.options.backend == Backend::kCuda &&
                                 args_.options.weights != WeightFormat::kExact &&
                                 args_.model->experts->stored_format() == WeightFormat::kE4M3;
    const reference::LayerRun run{
        .precision = {.compute = result_.compute,
                      .quantize_q8 = args_.options.weights == WeightFormat::kQ8,
                      .may_scale_sums = multiplies_e4m3},
        .ranks = args_.num_ranks,
        .wire = args_.options.combine_wire,
        .rank_invariant = args_.options.rank_invariant,
        .dispatch_wire = args_.options.dispatch_wire,
        .fp8_rows = args_.options.compute != DType::kF8E4M3 ? reference::Fp8Rows::kNone
                    : args_.options.batch_invariant         ? reference::Fp8Rows::kAll
                                                            : reference::Fp8Rows::kPerhaps,
        .round_rows = args_.options.backend == Backend::kCuda};
    const auto expected =
        reference::layer_output(*args_.model, run, reference::as_computed(x, result_.compute),
                                {.expert = expert, .weight = weight, .kept = kept, .top_k = top_k});
    const std::string wrong = reference::check_output(expected, hidden, args_.out, out);
    if (!wrong.empty()) miss("output: " + wrong);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double error = std::abs(expected[i].value - static_cast<double>(out[i]));
      // NaN compares as smaller than nothing: it is no small error.
      const double known = std::isnan(error) ? HUGE_VAL : error;
      verdict_.largest_error = std::max(verdict_.largest_error, known);
      verdict_.largest_bound = std::max(verdict_.largest_bound, expected[i].error);
    }
    verdict_.tokens_computed = std::ssize(tokens);
  }

  const bench::LayerRunArgs& args_;
  const bench::LayerRunResult& result_;
  const LayerConfig& config_;
  Verdict verdict_;
};

}  // namespace

Verdict check_run(const bench::LayerRunArgs& args, const bench::LayerRunResult& result) {
  if (args.model->config.router.is_chain()) return check_chain(args, result);
  return Checker(args, result).run();
}

}  // namespace switchyard::tool
