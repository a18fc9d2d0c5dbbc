// Forced loads on a CPU: experts by a token's place. Bound by writing the routing.
#include "route/cpu/tokens.hpp"
#include "route/forced_loads.hpp"
#include "route/implementations.hpp"
#include "route/placed_rules.hpp"

namespace switchyard {
namespace {

void write(const RouteArgs& args, const auto& choose) {
  const std::int64_t columns = args.routing.expert.shape[1];
  routing::for_tokens(args.execution.pool, args.routing.expert.shape[0], [&] {
    return [&](std::int64_t token) {
      choose(token, args.routing.expert.row(token));
      std::fill_n(args.routing.weight.row(token), columns, 1.0F / static_cast<float>(columns));
    };
  });
}

void run(const RouteArgs& args) {
  const auto& router = std::get<ForcedRouter>(args.config.kind);
  const std::int32_t num_experts = args.config.num_experts;
  const std::int64_t num_tokens = args.routing.expert.shape[0];
  if (num_tokens == 0) return;
  if (router.load == ForcedRouter::Load::kUniform) {
    const Draws draws(args.request, Draws::For::kUniform);
    write(args, [&](std::int64_t token, std::int32_t* expert) {
      draw_experts(draws, num_experts, token, router.top_k, expert);
    });
  } else if (router.load == ForcedRouter::Load::kRoundRobin) {
    write(args, [&](std::int64_t token, std::int32_t* expert) {
      for (std::int32_t k = 0; k < router.top_k; ++k) {
        expert[k] = expert_in_turn(args.request.first_token + token, k, router.top_k, num_experts);
      }
    });
  } else {
    const Deal deal = deal_out(router, num_experts, args.request, num_tokens);
    write(args, [&](std::int64_t token, std::int32_t* expert) {
      const std::int64_t first = deal.places.first_of(token);
      for (std::int32_t k = 0; k < router.top_k; ++k) {
        expert[k] = expert_at(first + k * num_tokens, deal.last.data(), num_experts);
      }
    });
  }
}

}  // namespace

const Implementation<RouteArgs> kRouteCpuForced{"cpu.forced", reject_but<ForcedRouter, RouteArgs>,
                                                run};

}  // namespace switchyard
