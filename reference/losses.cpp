#include "reference/losses.hpp"

#include <algorithm>
#include <cmath>
#include <set>

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

double log_sum_exp(std::span<const double> logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double x : logits) sum += std::exp(x - largest);
  return largest + std::log(sum);
}

/// Normalised to sum to 1.
std::vector<double> scores_of(std::span<const double> logits, Score score) {
  std::vector<double> p;
  const double lse = log_sum_exp(logits);
  double sum = 0;
  for (const double x : logits) {
    p.push_back(score == Score::kSigmoid ? 1 / (1 + std::exp(-x)) : std::exp(x - lse));
    sum += p.back();
  }
  for (double& x : p) x /= sum;
  return p;
}

/// f [E] of the tokens [first, end).
std::vector<double> shares(const RoutedTokens& routed, const LossConfig& config, std::size_t first,
                           std::size_t end, std::span<const std::int64_t> global_counts) {
  std::vector<double> f(at(routed.num_experts));
  double assigned = 0;
  for (std::size_t t = first; t < end; ++t) {
    for (std::size_t k = 0; k < routed.choices[t].size(); ++k) {
      if (routed.choices[t][k] < 0) continue;
      ++assigned;
      if (config.share == BalanceShare::kFirstChoice && k > 0) continue;
      f[at(routed.choices[t][k])] += 1;
    }
  }
  for (std::size_t e = 0; e < global_counts.size(); ++e) {
    f[e] = static_cast<double>(global_counts[e]);
  }
  double all = 0;
  for (const double n : f) all += n;
  const double per_token = assigned / static_cast<double>(end - first);
  for (double& n : f) {
    n = all == 0 ? 0 : n / all * (config.share == BalanceShare::kTokens ? per_token : 1);
  }
  return f;
}

/// How many of the tokens have an expert on each device.
std::vector<double> sent(const RoutedTokens& routed, std::int32_t devices, std::size_t first,
                         std::size_t end) {
  std::vector<double> tokens(at(devices));
  for (std::size_t t = first; t < end; ++t) {
    std::set<std::int64_t> of_token;
    for (const std::int32_t e : routed.choices[t]) {
      if (e >= 0) of_token.insert(e / (routed.num_experts / devices));
    }
    for (const std::int64_t d : of_token) tokens[at(d)] += 1;
  }
  return tokens;
}

}  // namespace

double cv_squared(std::span<const double> values) {
  double mean = 0;
  for (const double x : values) mean += x / static_cast<double>(values.size());
  double variance = 0;
  for (const double x : values) {
    variance += (x - mean) * (x - mean) / static_cast<double>(values.size());
  }
  return variance / (mean * mean + 1e-10);
}

LossValues loss_values(const RoutedTokens& routed, const LossConfig& config,
                       std::span<const std::int64_t> global_counts) {
  const std::size_t num_tokens = routed.choices.size();
  const std::size_t num_experts = at(routed.num_experts);
  const std::size_t length =
      config.scope == LossScope::kSequence ? at(config.sequence_length) : num_tokens;
  const double groups = static_cast<double>(num_tokens) / static_cast<double>(length);
  const std::size_t devices = at(config.devices);
  LossValues values;
  std::vector<double> importance(num_experts);
  for (std::size_t first = 0; first < num_tokens; first += length) {
    const std::vector<double> f = shares(routed, config, first, first + length, global_counts);
    const std::vector<double> tokens_sent = sent(routed, config.devices, first, first + length);
    std::vector<double> mean(num_experts);
    for (std::size_t t = first; t < first + length; ++t) {
      const std::span<const double> logits =
          std::span(routed.logits).subspan(t * num_experts, num_experts);
      const std::vector<double> p = scores_of(logits, routed.score);
      for (std::size_t e = 0; e < num_experts; ++e) {
        mean[e] += p[e] / static_cast<double>(length);
        importance[e] += p[e];
        if (p[e] > 0) values.entropy -= p[e] * std::log(p[e]) / static_cast<double>(num_tokens);
      }
      values.z += std::pow(log_sum_exp(logits), 2) / static_cast<double>(num_tokens);
    }
    for (std::size_t e = 0; e < num_experts; ++e) {
      const bool computes = e + at(config.zero_computation) < num_experts;
      values.balance +=
          static_cast<double>(num_experts) * (computes ? 1 : config.tau) * f[e] * mean[e] / groups;
    }
    for (std::size_t d = 0; d < devices; ++d) {
      double share = 0;
      double score = 0;
      for (std::size_t e = d * num_experts / devices; e < (d + 1) * num_experts / devices; ++e) {
        share += f[e];
        score += mean[e];
      }
      values.device += static_cast<double>(devices) * share * score / groups;
      values.communication += static_cast<double>(devices) /
                              (config.devices_per_token * static_cast<double>(length)) *
                              tokens_sent[d] * score / groups;
    }
  }
  values.importance = cv_squared(importance);
  values.total = config.balance * values.balance + config.z * values.z +
                 config.importance * values.importance + config.device * values.device +
                 config.communication * values.communication + config.entropy * values.entropy;
  return values;
}

std::vector<double> noisy_load(std::int64_t num_experts, std::int64_t top_k,
                               std::span<const double> clean, std::span<const double> noisy,
                               std::span<const double> deviation) {
  std::vector<double> load(at(num_experts));
  for (std::size_t first = 0; first < clean.size(); first += load.size()) {
    std::vector<double> sorted(noisy.begin() + static_cast<std::ptrdiff_t>(first),
                               noisy.begin() + static_cast<std::ptrdiff_t>(first) +
                                   static_cast<std::ptrdiff_t>(num_experts));
    std::sort(sorted.rbegin(), sorted.rend());
    for (std::size_t e = 0; e < load.size(); ++e) {
      const double next = sorted[at(top_k)];
      const double threshold = noisy[first + e] > next ? next : sorted[at(top_k) - 1];
      const double distance = (clean[first + e] - threshold) / deviation[first + e];
      load[e] += 0.5 * std::erfc(-distance / std::sqrt(2.0));
    }
  }
  return load;
}

}  // namespace switchyard::reference
