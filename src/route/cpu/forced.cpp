// Forced loads on a CPU: experts by a token's place. Bound by writing the routing.
#include <numeric>
#include <vector>

#include "route/cpu/tokens.hpp"
#include "route/draws.hpp"
#include "route/forced_loads.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

/// Number k is the r-th expert that is not yet taken, r uniform.
void draw_uniform(const Draws& draws, std::int32_t num_experts, std::int64_t token,
                  std::int32_t top_k, std::int32_t* expert) {
  for (std::int32_t k = 0; k < top_k; ++k) {
    const std::uint64_t word =
        draws.words(token, static_cast<std::uint32_t>(k) / 4).word[static_cast<unsigned>(k) % 4];
    auto e = static_cast<std::int32_t>(word * static_cast<std::uint64_t>(num_experts - k) >> 32U);
    std::int32_t place = 0;
    for (; place < k && expert[place] <= e; ++place) ++e;
    std::copy_backward(expert + place, expert + k, expert + k + 1);  // they stay in order
    expert[place] = e;
  }
}

/// The assignments in a row, those of an expert behind each other: token t has those at places
/// p(t) + k T, p a permutation of the tokens. No expert has more than T of them, so none is a
/// token's twice.
class Deal {
 public:
  Deal(const RouteArgs& args, const ForcedRouter& router, std::int64_t num_tokens)
      : num_tokens_(num_tokens),
        top_k_(router.top_k),
        last_(apportion(forced_shares(router, args.config.num_experts, args.request), num_tokens,
                        router.top_k)) {
    std::partial_sum(last_.begin(), last_.end(), last_.begin());
    const Draws draws(args.request, Draws::For::kUniform);
    const PhiloxWords words = draws.words(0, 0);
    const auto size = static_cast<std::uint64_t>(num_tokens);
    offset_ = words.word[0] % size;
    factor_ = words.word[1] % size;
    while (std::gcd(factor_, size) != 1) factor_ = (factor_ + 1) % size;
  }

  void operator()(std::int64_t token, std::int32_t* expert) const {
    const std::uint64_t at = (factor_ * static_cast<std::uint64_t>(token) + offset_) %
                             static_cast<std::uint64_t>(num_tokens_);
    for (std::int32_t k = 0; k < top_k_; ++k) {
      const std::int64_t place = static_cast<std::int64_t>(at) + k * num_tokens_;
      expert[k] = static_cast<std::int32_t>(std::upper_bound(last_.begin(), last_.end(), place) -
                                            last_.begin());
    }
  }

 private:
  std::int64_t num_tokens_;
  std::int32_t top_k_;
  std::uint64_t offset_ = 0;
  std::uint64_t factor_ = 1;
  std::vector<std::int64_t> last_;  ///< [E] places up to and with each expert's.
};

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
      draw_uniform(draws, num_experts, token, router.top_k, expert);
    });
  } else if (router.load == ForcedRouter::Load::kRoundRobin) {
    write(args, [&](std::int64_t token, std::int32_t* expert) {
      const std::int64_t first = (args.request.first_token + token) * router.top_k;
      for (std::int32_t k = 0; k < router.top_k; ++k) {
        expert[k] = static_cast<std::int32_t>((first + k) % num_experts);
      }
    });
  } else {
    write(args, Deal(args, router, num_tokens));
  }
}

}  // namespace

const Implementation<RouteArgs> kRouteCpuForced{"cpu.forced", reject_but<ForcedRouter, RouteArgs>,
                                                run};

}  // namespace switchyard
