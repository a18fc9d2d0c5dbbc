// Cases whose weights go elsewhere than on the outputs of experts: on their inputs, or on tokens
// that experts return.
#include <algorithm>

#include "testkit/random.hpp"
#include "verify/case.hpp"

namespace switchyard::verify {

void use_places(Case& test, std::uint64_t seed, std::uint64_t index) {
  constexpr std::uint64_t kOfPlaces =
      0x11a4a;  // drawn apart, so that the others are what they were
  Random random(seed ^ kOfPlaces, index);
  if (is_perft(test.router)) return;
  LayerConfig& layer = test.layer;
  const bool has_others = layer.router.zero_computation.total() > 0;
  if (random.one_in(8) && layer.router.num_experts > 1 && !has_others) {
    layer.router.zero_computation.copy = test.identity_experts =
        static_cast<std::int32_t>(random.between(1, layer.router.num_experts - 1));
  }
  if (random.one_in(12)) {
    if (layer.router.is_top_k() && test.router.empty()) {
      test.base.top_k = layer.router.as_top_k().top_k = 1;
    }
    layer.weight_on_input = true;
  }
  fit_places(test);
}

void fit_places(Case& test) {
  LayerConfig& layer = test.layer;
  RouterConfig& router = layer.router;
  if (router.is_chain() || is_perft(test.router)) {
    router.zero_computation = {};
    test.identity_experts = 0;
  }
  layer.weight_on_input = layer.weight_on_input && !router.is_chain() && router.top_k() == 1;
  layer.experts.num_experts = router.num_computing();
  if (router.zero_computation.total() > 0 && test.drop_policy == DropPolicy::kReroute) {
    test.drop_policy = DropPolicy::kToken;
  }
}

}  // namespace switchyard::verify
