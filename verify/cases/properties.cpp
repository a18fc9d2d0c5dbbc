// What follows from a case.
#include <algorithm>

#include "testkit/random.hpp"
#include "verify/case.hpp"

namespace switchyard::verify {

Int4Form int4_form_of(const Case& test) {
  constexpr std::uint64_t kOfForm = 0x1474;
  Random random(test.seed, kOfForm);
  Int4Form form;
  form.group = random.any_of({32, 32, 64, 128});
  form.scale = random.any_of({DType::kF16, DType::kBF16});
  form.zero_points = random.one_in(2);
  return form;
}

std::int64_t scale_group_of(const Case& test) {
  switch (test.weights) {
    case WeightFormat::kMxfp4: return kMxfp4Block;
    case WeightFormat::kInt4: return int4_form_of(test).group;
    case WeightFormat::kNvfp4: return kNvfp4Block;
    default: return 1;
  }
}

bool routes_token_by_token(const Case& test) {
  const auto* forced = std::get_if<ForcedRouter>(&test.layer.router.kind);
  const bool exact_loads = forced != nullptr && forced->load != ForcedRouter::Load::kUniform &&
                           forced->load != ForcedRouter::Load::kRoundRobin;
  return !exact_loads && !std::holds_alternative<ExpertChoiceRouter>(test.layer.router.kind);
}

std::vector<std::int64_t> rank_begin(const Case& test) {
  std::vector<std::int64_t> begin;
  Random random(test.seed, 77);
  for (int r = 0; r <= test.ranks; ++r) {
    switch (test.split) {
      case Split::kEven: begin.push_back(r * test.num_tokens / test.ranks); break;
      case Split::kFirst: begin.push_back(r == 0 ? 0 : test.num_tokens); break;
      case Split::kLast: begin.push_back(r == test.ranks ? test.num_tokens : 0); break;
      case Split::kUneven: begin.push_back(random.between(0, test.num_tokens)); break;
    }
  }
  begin.front() = 0;
  begin.back() = test.num_tokens;
  std::sort(begin.begin(), begin.end());
  return begin;
}

bool may_have_selection_bias(const Case& test) {
  const RouterConfig& router = test.layer.router;
  return std::holds_alternative<ExpertThresholdRouter>(router.kind) ||
         (router.is_top_k() && router.as_top_k().score != Score::kSparseMixer);
}

bool may_reroute(const Case& test) {
  const RouterConfig& router = test.layer.router;
  return test.drop_policy != DropPolicy::kReroute ||
         (router.is_top_k() && router.as_top_k().score != Score::kSparseMixer);
}

}  // namespace switchyard::verify
