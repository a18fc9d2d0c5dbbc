// Made-up routing, and the exchange of equal messages. Window: two buffers of [R sources, M, H]; a
// rank that is one exchange ahead writes into the other one. Bound by memory bandwidth.
#include "bench/variants/fixed_size.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <numeric>

#include "comm/exchange_layout.hpp"
#include "comm/ranks/agreement.hpp"
#include "comm/ranks/collectively.hpp"
#include "core/check.hpp"
#include "core/splitmix64.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Number `index` of the stream of `seed`, standard normal (Box-Muller over SplitMix64): any
/// part of a stream can be made by itself.
float normal_number(std::uint32_t seed, std::uint64_t index) {
  const auto uniform = [&](std::uint64_t i) {
    const std::uint64_t key = std::uint64_t{seed} << 40;
    return static_cast<float>(splitmix64_mix(key + (i + 1) * kSplitMix64Step) >> 40) * 0x1p-24F;
  };
  const float radius = std::sqrt(-2.0F * std::log(1.0F - uniform(2 * (index / 2))));
  const float angle = 2.0F * std::numbers::pi_v<float> * uniform(2 * (index / 2) + 1);
  return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

/// The ranks that a token's top-k experts live on, one bit each.
std::uint64_t destinations(const FixedSizeConfig& config, const std::vector<float>& logits) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto better = [&](std::int32_t a, std::int32_t b) {
    return logits[at(a)] != logits[at(b)] ? logits[at(a)] > logits[at(b)] : a < b;
  };
  std::partial_sort(ids.begin(), ids.begin() + config.top_k, ids.end(), better);
  std::uint64_t ranks = 0;
  for (std::int32_t k = 0; k < config.top_k; ++k) {
    ranks |= std::uint64_t{1} << (ids[at(k)] / config.local_experts);
  }
  return ranks;
}

std::vector<std::uint64_t> route_all(int rank, int num_ranks, const FixedSizeConfig& config,
                                     ThreadPool* pool) {
  const std::int64_t experts = std::int64_t{num_ranks} * config.local_experts;
  const std::uint32_t seed = config.seed + static_cast<std::uint32_t>(rank);
  std::vector<float> gate(at(experts * config.hidden));
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = normal_number(seed, i);
  std::vector<std::uint64_t> ranks(at(config.tokens));
  parallel_for(pool, config.tokens, [&](std::int64_t token, int) {
    std::vector<float> logits(at(experts), 0.0F);
    std::vector<float> x(at(config.hidden));
    const auto first = gate.size() + at(token * config.hidden);
    for (std::size_t h = 0; h < x.size(); ++h) x[h] = normal_number(seed, first + h);
    for (std::int64_t e = 0; e < experts; ++e) {
      const float* row = &gate[at(e * config.hidden)];
      for (std::size_t h = 0; h < x.size(); ++h) logits[at(e)] += x[h] * row[h];
    }
    ranks[at(token)] = destinations(config, logits);
  });
  return ranks;
}

void require_same(Communicator& communicator, const FixedSizeConfig& config) {
  const AgreedValue values[] = {{"tokens", config.tokens},
                                {"local_experts", config.local_experts},
                                {"top_k", config.top_k},
                                {"hidden", config.hidden},
                                {"seed", config.seed}};
  require_agreement(communicator, values);
  require(config.tokens >= 0 && config.local_experts >= 1 && config.hidden >= 1,
          "tokens={}, local_experts={}, hidden={}: all must be positive", config.tokens,
          config.local_experts, config.hidden);
  require(config.top_k >= 1 && config.top_k <= config.local_experts * communicator.size(),
          "top_k={} exceeds {} experts", config.top_k, config.local_experts * communicator.size());
}

}  // namespace

FixedSizeRouting make_fixed_size_routing(Communicator& communicator, const FixedSizeConfig& config,
                                         ThreadPool* pool) {
  require_same(communicator, config);
  const int num_ranks = communicator.size();
  const std::vector<std::uint64_t> ranks = route_all(communicator.rank(), num_ranks, config, pool);
  FixedSizeRouting routing;
  routing.begin.push_back(0);
  std::int64_t most = 0;
  for (int to = 0; to < num_ranks; ++to) {
    for (std::int64_t token = 0; token < config.tokens; ++token) {
      if ((ranks[at(token)] >> to & 1U) != 0) {
        routing.token.push_back(static_cast<std::int32_t>(token));
      }
    }
    routing.begin.push_back(std::ssize(routing.token));
    most = std::max(most, routing.begin[at(to) + 1] - routing.begin[at(to)]);
  }
  // Everybody's largest count, and rows in all: M and the padding are the same on all ranks.
  const std::int64_t own[] = {most, std::ssize(routing.token)};
  const auto window = communicator.create_window(at(num_ranks) * sizeof(own), num_ranks);
  std::int64_t rows = 0;
  for (int to = 0; to < num_ranks; ++to) {
    window->put(to, at(communicator.rank()) * sizeof(own), own, sizeof(own));
    window->signal(to, communicator.rank(), 1);
  }
  for (int from = 0; from < num_ranks; ++from) {
    window->wait(from, 1, {.phase = "largest message", .rank = from});
    const auto* other =
        reinterpret_cast<const std::int64_t*>(window->local()) + std::ptrdiff_t{2} * from;
    routing.rows_per_pair = std::max(routing.rows_per_pair, other[0]);
    rows += other[1];
  }
  communicator.barrier("largest message");  // the window lives until all have written
  const double all = static_cast<double>(routing.rows_per_pair) * num_ranks * num_ranks;
  routing.padding = all > 0 ? 1.0 - static_cast<double>(rows) / all : 0.0;
  return routing;
}

FixedSizeExchange::FixedSizeExchange(Communicator& communicator, std::int64_t rows_per_pair,
                                     std::int64_t hidden, DType dtype)
    : communicator_(communicator),
      rows_per_pair_(rows_per_pair),
      hidden_(hidden),
      dtype_(dtype),
      window_(communicator.create_window(
          at(std::int64_t{2} * communicator.size() * rows_per_pair * hidden * size_of(dtype)),
          2 * communicator.size())),
      recoveries_(communicator.recoveries()) {}

std::int64_t FixedSizeExchange::wire_bytes() const {
  return (communicator_.size() - 1) * rows_per_pair_ * hidden_ * size_of(dtype_);
}

ConstRawMatrix FixedSizeExchange::exchange(ConstRawMatrix x, const FixedSizeRouting& routing,
                                           ThreadPool* pool) {
  const int num_ranks = communicator_.size();
  const int rank = communicator_.rank();
  const std::int64_t row_bytes = hidden_ * size_of(dtype_);
  const std::int64_t message = rows_per_pair_ * row_bytes;
  require(routing.rows_per_pair <= rows_per_pair_ && x.dtype == dtype_ && x.cols == hidden_,
          "messages of {} rows of {} {} were made, {} rows of {} {} are asked for", rows_per_pair_,
          hidden_, to_string(dtype_), routing.rows_per_pair, x.cols, to_string(x.dtype));
  return collectively(communicator_, [&] {
    if (recoveries_ != communicator_.recoveries()) {
      recoveries_ = communicator_.recoveries();
      epoch_ = 0;
    }
    ++epoch_;
    const std::int64_t buffer = static_cast<std::int64_t>(epoch_ % 2) * num_ranks * message;
    for (int i = 0; i < num_ranks; ++i) {
      const int to = (rank + i) % num_ranks;
      // A buffer is free once its owner has come to the exchange after the one that filled it.
      window_->signal(to, rank, epoch_);
    }
    for (int i = 0; i < num_ranks; ++i) {
      const int to = (rank + i) % num_ranks;
      window_->wait(to, epoch_ - 1, {.phase = "free", .rank = to});
      const std::int64_t first = routing.begin[at(to)];
      const std::int64_t count = routing.begin[at(to) + 1] - first;
      const std::int64_t offset = buffer + rank * message;
      std::byte* const peer = window_->peer(to);
      if (peer == nullptr && std::ssize(staging_) < message) staging_.resize(at(message));
      std::byte* const target = peer != nullptr ? peer + offset : staging_.data();
      parallel_for(pool, rows_per_pair_, [&](std::int64_t row, int) {
        if (row < count) {
          std::memcpy(target + row * row_bytes, x.row(routing.token[at(first + row)]),
                      at(row_bytes));
        } else {
          std::memset(target + row * row_bytes, 0, at(row_bytes));
        }
      });
      if (peer == nullptr) window_->put(to, at(offset), staging_.data(), at(message));
      window_->signal(to, num_ranks + rank, epoch_);
    }
    for (int from = 0; from < num_ranks; ++from) {
      window_->wait(num_ranks + from, epoch_, {.phase = "rows", .rank = from});
    }
    return ConstRawMatrix{window_->local() + buffer, dtype_, num_ranks * rows_per_pair_, hidden_};
  });
}

}  // namespace switchyard
