// PERFT's adapters as they are spelled, and what a configuration of them has to be.
#include <cmath>

#include "route/given_options.hpp"
#include "switchyard/names.hpp"
#include "switchyard/perft.hpp"

namespace switchyard {

void check(const PerftConfig& config) {
  const char* const kind = to_string(config.kind);
  const RouterConfig& router = config.router;
  require(config.num_adapters >= 1, "num_adapters={}, want at least 1", config.num_adapters);
  require(config.hidden >= 1, "hidden={}, want at least 1", config.hidden);
  require(config.rank >= 1, "rank={}, want at least 1", config.rank);
  require(std::isfinite(config.alpha), "alpha={}, want a finite number", config.alpha);
  require(config.activation != Activation::kClampedSwiglu,
          "activation clamped_swiglu has a gate, which adapters have not");
  require(config.kind != PerftKind::kShared || config.num_adapters == 1,
          "num_adapters={} of kind shared, want 1, or kind dense", config.num_adapters);
  if (config.kind != PerftKind::kRouted && config.kind != PerftKind::kEmbedded) return;
  require(router.num_experts == config.num_adapters,
          "num_adapters={} of kind {}, but the router has num_experts={}", config.num_adapters,
          kind, router.num_experts);
  check(router);
  require(!router.is_chain(), "a chain with adapters of kind {}: want a router of one routing",
          kind);
  if (config.kind == PerftKind::kEmbedded) return;
  require(
      router.has_logits() && router.network.is_linear() &&
          router.noise.kind != RouterNoise::Kind::kLearned,
      "adapters of kind routed want a rule by logits of a gate alone, without network or learned "
      "noise");
}

PerftConfig parse_perft(std::string_view spelling, const PerftConfig& base) {
  const RouterKind& perft = adapter_kinds().front();
  const std::size_t colon = spelling.find(':');
  require(spelling.substr(0, colon) == perft.name, "adapters '{}' are not {}",
          printable(spelling.substr(0, colon)), perft.name);
  const Given given(
      perft, colon == std::string_view::npos ? std::string_view() : spelling.substr(colon + 1));
  PerftConfig config{.hidden = base.hidden};
  const std::string_view kind = given.word("kind").value_or("routed");
  config.kind = *parse<PerftKind>(kind);
  config.rank = given.whole("rank", 16);
  config.alpha = static_cast<float>(given.number("alpha", 32));
  if (const auto word = given.word("activation")) config.activation = *parse<Activation>(*word);
  const bool routed = config.kind == PerftKind::kRouted;
  for (const char* const option : {"top-k", "renormalize"}) {
    require(routed || !given.word(option), "router perft: {} with kind={}, want kind=routed",
            option, kind);
  }
  config.num_adapters = given.whole("adapters", 4);
  if (config.kind == PerftKind::kShared) config.num_adapters = given.whole("adapters", 1);
  if (config.kind == PerftKind::kEmbedded) {
    require(
        !given.word("adapters"),
        "router perft: adapters with kind=embedded, which has as many as the layer has experts");
    config.router = base.router;
    config.num_adapters = base.router.num_experts;
  }
  if (routed) {
    config.router = {.num_experts = config.num_adapters,
                     .kind = TopKRouter{.top_k = given.whole("top-k", 1),
                                        .renormalize = given.yes("renormalize", false)}};
  }
  // Of embedded ones nothing is known where no layer is: whoever runs them asks again.
  if (config.kind != PerftKind::kEmbedded || base.router.num_experts > 0) check(config);
  return config;
}

}  // namespace switchyard
