// Hash layers on a CPU: experts by the token's id alone. Bound by writing the routing.
#include <functional>
#include <utility>
#include <vector>

#include "route/cpu/tokens.hpp"
#include "route/implementations.hpp"
#include "route/placed_rules.hpp"

namespace switchyard {
namespace {

void run(const RouteArgs& args) {
  const auto& router = std::get<HashRouter>(args.config.kind);
  const Vector<const std::int32_t> ids = args.request.token_ids;
  const std::int64_t vocabulary =
      router.table == nullptr ? std::int64_t{1} << 31 : std::ssize(*router.table) / router.top_k;
  for (std::int64_t t = 0; t < ids.shape[0]; ++t) {
    require(ids[t] >= 0 && ids[t] < vocabulary, "token_ids[{}] is {}, want 0 to {}", t, ids[t],
            vocabulary - 1);
  }
  routing::for_tokens(args.execution.pool, ids.shape[0], [&] {
    return [&](std::int64_t token) {
      std::int32_t* expert = args.routing.expert.row(token);
      if (router.table == nullptr) {
        hash_of_id(router.salt, args.config.num_experts, ids[token], router.top_k, expert);
      } else {
        std::copy_n(router.table->data() + std::int64_t{ids[token]} * router.top_k, router.top_k,
                    expert);
      }
      std::fill_n(args.routing.weight.row(token), router.top_k,
                  1.0F / static_cast<float>(router.top_k));
    };
  });
}

}  // namespace

const Implementation<RouteArgs> kRouteCpuHash{"cpu.hash", reject_but<HashRouter, RouteArgs>, run};

std::vector<std::int32_t> balanced_hash_table(const std::vector<std::int64_t>& frequency,
                                              std::int32_t num_experts, std::int32_t top_k) {
  require(top_k >= 1 && top_k <= num_experts, "top_k={} is not in 1 to num_experts={}", top_k,
          num_experts);
  std::vector<std::size_t> ids(frequency.size());
  for (std::size_t v = 0; v < ids.size(); ++v) {
    require(frequency[v] >= 0, "frequency[{}]={} is negative", v, frequency[v]);
    ids[v] = v;
  }
  std::stable_sort(ids.begin(), ids.end(),
                   [&](std::size_t a, std::size_t b) { return frequency[a] > frequency[b]; });
  using Load = std::pair<std::int64_t, std::int32_t>;  // so far, of an expert
  std::vector<Load> heap;                              // the least on top
  heap.reserve(static_cast<std::size_t>(num_experts));
  for (std::int32_t e = 0; e < num_experts; ++e) heap.emplace_back(0, e);
  std::vector<std::int32_t> table(frequency.size() * static_cast<std::size_t>(top_k));
  for (const std::size_t v : ids) {
    for (std::int32_t k = 0; k < top_k; ++k) {
      std::pop_heap(heap.begin(), heap.end() - k, std::greater<>());
      Load& least = *(heap.end() - k - 1);
      table[v * static_cast<std::size_t>(top_k) + static_cast<std::size_t>(k)] = least.second;
      least.first += frequency[v];
    }
    for (std::int32_t k = top_k - 1; k >= 0; --k) {
      std::push_heap(heap.begin(), heap.end() - k, std::greater<>());
    }
  }
  return table;
}

}  // namespace switchyard
