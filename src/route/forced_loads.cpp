// The loads of benchmarks: shares of experts, and whole numbers of assignments from them.
#include "route/forced_loads.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "route/normal.hpp"

namespace switchyard {
namespace {

/// A number of the gamma distribution with this shape (Marsaglia and Tsang 2000), of the numbers of
/// one expert.
double gamma_draw(const Draws& draws, std::int64_t expert, double shape) {
  // Where the shape is small that of one more, times a power of a uniform number.
  const double u = double{draws.unit(expert, 0)} + 0x1p-25;
  const double power = shape < 1 ? std::pow(u, 1 / shape) : 1;
  const double d = (shape < 1 ? shape + 1 : shape) - 1.0 / 3;
  const double c = 1 / std::sqrt(9 * d);
  for (std::uint32_t block = 1;; ++block) {
    const PhiloxWords words = draws.words(expert, block);
    const double normal = normal_pair_of(words.word[0], words.word[1]).first;
    const double v = std::pow(1 + c * normal, 3);
    const double least = std::log(double{unit_of(words.word[2])} + 0x1p-25);
    if (v > 0 && least < 0.5 * normal * normal + d - d * v + d * std::log(v)) return power * d * v;
  }
}

}  // namespace

std::vector<double> forced_shares(const ForcedRouter& router, std::int32_t num_experts,
                                  const RouteRequest& request) {
  RouteRequest of_all = request;
  of_all.first_token = 0;  // every rank has the same shares
  const Draws draws(of_all, Draws::For::kShares);
  std::vector<double> shares(static_cast<std::size_t>(num_experts), 1.0);
  for (std::int32_t e = 0; e < num_experts; ++e) {
    double& share = shares[static_cast<std::size_t>(e)];
    switch (router.load) {
      case ForcedRouter::Load::kZipf: share = std::pow(e + 1.0, -router.amount); break;
      case ForcedRouter::Load::kHot:
        share = e == 0 ? router.amount : (1 - router.amount) / (num_experts - 1);
        break;
      case ForcedRouter::Load::kDirichlet: share = gamma_draw(draws, e, router.amount); break;
      default: break;
    }
  }
  return shares;
}

std::vector<std::int64_t> apportion(const std::vector<double>& shares, std::int64_t num_tokens,
                                    std::int32_t top_k) {
  std::vector<std::int64_t> counts(shares.size(), -1);  // -1: not yet known
  std::int64_t left = num_tokens * top_k;
  double sum = 0;
  double unknown = 0;
  const auto wanted = [&](std::size_t e) {
    return static_cast<double>(left) * (sum > 0 ? shares[e] / sum : 1 / unknown);
  };
  for (bool capped = true; capped;) {
    capped = false;
    sum = unknown = 0;
    for (std::size_t e = 0; e < shares.size(); ++e) {
      if (counts[e] >= 0) continue;
      sum += shares[e];
      ++unknown;
    }
    std::vector<std::size_t> full;
    for (std::size_t e = 0; e < shares.size(); ++e) {
      if (counts[e] < 0 && wanted(e) > static_cast<double>(num_tokens)) full.push_back(e);
    }
    for (const std::size_t e : full) {
      counts[e] = num_tokens;
      left -= num_tokens;
      capped = true;
    }
  }
  std::vector<std::pair<double, std::size_t>> remainders;  // negative: the largest first
  std::int64_t rest = left;
  for (std::size_t e = 0; e < shares.size(); ++e) {
    if (counts[e] >= 0) continue;
    const double share = wanted(e);
    counts[e] = static_cast<std::int64_t>(share);
    rest -= counts[e];
    remainders.emplace_back(static_cast<double>(counts[e]) - share, e);
  }
  std::sort(remainders.begin(), remainders.end());
  for (std::size_t i = 0; rest > 0; i = (i + 1) % remainders.size()) {
    std::int64_t& count = counts[remainders[i].second];
    if (count == num_tokens) continue;
    ++count;
    --rest;
  }
  return counts;
}

Deal deal_out(const ForcedRouter& router, std::int32_t num_experts, const RouteRequest& request,
              std::int64_t num_tokens) {
  const PhiloxWords words = Draws(request, Draws::For::kUniform).words(0, 0);
  const auto size = static_cast<std::uint64_t>(num_tokens);
  Deal deal{
      .places = {.num_tokens = size,
                 .factor = words.word[1] % size,
                 .offset = words.word[0] % size},
      .last = apportion(forced_shares(router, num_experts, request), num_tokens, router.top_k)};
  std::uint64_t& factor = deal.places.factor;
  while (std::gcd(factor, size) != 1) factor = (factor + 1) % size;
  std::partial_sum(deal.last.begin(), deal.last.end(), deal.last.begin());
  return deal;
}

}  // namespace switchyard
