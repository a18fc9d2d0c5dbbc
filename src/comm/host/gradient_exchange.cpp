// The exchange backwards on the host. One place for everything is enough: a rank sends rows only
// once it has all that was to come home before, for which their owners have read the rows before;
// and it brings home only once it has the rows of all, which have then read what came home before.
#include "comm/host/gradient_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/exchange_layout.hpp"
#include "comm/ranks/collectively.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"

namespace switchyard {
namespace {

/// What a rank says of its backward before its rows.
struct Opening {
  std::uint64_t forward = 0;
  std::uint64_t wishes = 0;
  std::uint64_t summed = 0;
};

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

GradientExchange::Layout GradientExchange::layout_of(const ExpertParallelConfig& config,
                                                     DType dtype, std::int32_t num_ranks) {
  const std::int64_t results = config.max_tokens * std::min(num_ranks, config.top_k);
  Layout layout;
  std::int64_t end = ExchangeLayout::align(num_ranks * std::int64_t{sizeof(Opening)});
  const auto reserve = [&](std::int64_t bytes) {
    return std::exchange(end, end + ExchangeLayout::align(bytes));
  };
  layout.rows = reserve(num_ranks * config.max_tokens * config.hidden * size_of(dtype));
  layout.dtokens = reserve(results * config.hidden * 4);
  layout.dweight = reserve(results * config.top_k * 4);
  layout.bytes = end;
  return layout;
}

GradientExchange::GradientExchange(Communicator& communicator, const ExpertParallelConfig& config,
                                   DType dtype, std::int64_t most_summed)
    : communicator_(communicator),
      config_(config),
      dtype_(dtype),
      num_ranks_(communicator.size()),
      rank_(communicator.rank()),
      map_(make_expert_map({config.num_experts, config.reduction_groups}, num_ranks_)),
      layout_(layout_of(config, dtype, num_ranks_)),
      recoveries_(communicator.recoveries()),
      window_(communicator.create_window(index(layout_.bytes), kKinds * num_ranks_)),
      sums_(communicator, most_summed),
      wishes_(index(num_ranks_)) {}

void GradientExchange::place(const GradientRoute& route, std::int64_t num_tokens) {
  route_ = route;
  num_tokens_ = num_tokens;
  make_send_plan(route.expert, route.kept, map_, num_ranks_, plan_);
  counts_.assign(route.sent.data, route.sent.data + route.sent.size());
  make_placement(counts_, num_ranks_, num_ranks_ * config_.max_tokens, placement_);
  partial_row_.assign(index(num_tokens * num_ranks_), -1);
  for (std::int32_t to = 0; to < num_ranks_; ++to) {
    const std::int64_t home = placement_.first_result(rank_, to);
    const std::int32_t* const tokens = plan_.token.data() + plan_.begin[index(to)];
    for (std::int64_t j = 0; j < plan_.count(to); ++j) {
      partial_row_[index(std::int64_t{tokens[j]} * num_ranks_ + to)] =
          static_cast<std::int32_t>(home + j);
    }
  }
}

void GradientExchange::hear(std::int32_t from) {
  window_->wait(from, epoch_, {.phase = "rows of dout", .rank = from});
  Opening said;
  std::memcpy(&said, at(from * std::int64_t{sizeof said}), sizeof said);
  if (said.forward != route_.forward) {
    fail(ErrorCode::kCommunication,
         "rows of dout: rank {} goes back through forward {}, rank {} through {}", from,
         said.forward, rank_, route_.forward);
  }
  if (said.summed != route_.summed) {
    fail(ErrorCode::kCommunication,
         "rows of dout: ranks {} and {} ask for gradients of different parameters ({:#x}, {:#x})",
         from, rank_, said.summed, route_.summed);
  }
  wishes_[index(from)] = said.wishes;
}

void GradientExchange::wait_for_all(const char* phase, Kind kind, std::uint64_t value) {
  for (std::int32_t from = 0; from < num_ranks_; ++from) {
    window_->wait(kind * num_ranks_ + from, value, {.phase = phase, .rank = from});
  }
}

ArrivedGradients GradientExchange::send(ConstRawMatrix dout, const GradientRoute& route,
                                        const Execution& execution) {
  return collectively(communicator_, [&]() -> ArrivedGradients {
    ++epoch_;
    place(route, dout.rows);
    const std::int64_t row_bytes = config_.hidden * size_of(dtype_);
    const Opening opening{.forward = route.forward,
                          .wishes = (route.dtokens ? kTokens : 0U) | (route.dweight ? kWeight : 0U),
                          .summed = route.summed};
    for (std::int32_t i = 0; i < num_ranks_; ++i) {
      const std::int32_t to = in_turn(i);
      const std::int32_t* const tokens = plan_.token.data() + plan_.begin[index(to)];
      window_->put(to, index(rank_) * sizeof opening, &opening, sizeof opening);
      const std::int64_t first = layout_.rows + placement_.first_row(rank_, to) * row_bytes;
      writer_.write(*window_, to, {{first, row_bytes}}, plan_.count(to), execution.pool,
                    [&](const RowTarget& target, std::int64_t j) {
                      std::memcpy(target.at(0, j), dout.row(tokens[j]), index(row_bytes));
                    });
      window_->signal(to, kRows * num_ranks_ + rank_, epoch_);
    }
    for (std::int32_t from = 0; from < num_ranks_; ++from) hear(from);
    std::int64_t rows = 0;
    for (std::int32_t from = 0; from < num_ranks_; ++from)
      rows += placement_.sent_rows(from, rank_);
    const auto anyone = [&](std::uint64_t wish) {
      return std::any_of(wishes_.begin(), wishes_.end(),
                         [&](std::uint64_t of_rank) { return (of_rank & wish) != 0; });
    };
    return {.dout = {at(layout_.rows), dtype_, rows, config_.hidden},
            .dtokens = anyone(kTokens),
            .dweight = anyone(kWeight)};
  });
}

GradientsAtHome GradientExchange::bring_home(Matrix<const float> dtokens,
                                             Matrix<const float> dweight, Matrix<float> of_choice,
                                             const Execution& execution) {
  return collectively(communicator_, [&]() -> GradientsAtHome {
    const auto bytes_for = [&](std::int32_t of, std::uint64_t wish, std::int64_t values) {
      return (wishes_[index(of)] & wish) != 0 ? 4 * values : 0;
    };
    for (std::int32_t i = 0; i < num_ranks_; ++i) {
      const std::int32_t to = in_turn(i);
      const std::int64_t row_bytes = bytes_for(to, kTokens, config_.hidden);
      const std::int64_t weight_bytes = bytes_for(to, kWeight, config_.top_k);
      const std::int64_t first = placement_.first_row(to, rank_);
      const std::int64_t home = placement_.first_result(to, rank_);
      writer_.write(*window_, to,
                    {{layout_.dtokens + home * row_bytes, row_bytes},
                     {layout_.dweight + home * weight_bytes, weight_bytes}},
                    placement_.sent_rows(to, rank_), execution.pool,
                    [&](const RowTarget& target, std::int64_t j) {
                      if (row_bytes > 0) {
                        std::memcpy(target.at(0, j), dtokens.row(first + j), index(row_bytes));
                      }
                      if (weight_bytes > 0) {
                        std::memcpy(target.at(1, j), dweight.row(first + j), index(weight_bytes));
                      }
                    });
      window_->signal(to, kHome * num_ranks_ + rank_, epoch_);
    }
    wait_for_all("gradients of rows", kHome, epoch_);
    if (of_choice.data != nullptr) choose(of_choice);
    const bool tokens_came = bytes_for(rank_, kTokens, 1) > 0;
    return {.dtokens = {reinterpret_cast<const float*>(at(layout_.dtokens)),
                        {tokens_came ? std::ssize(plan_.token) : 0, config_.hidden}},
            .partial_row = {partial_row_.data(), {num_tokens_, num_ranks_}}};
  });
}

/// From a row for each rank of a token to the choices that each has made.
void GradientExchange::choose(Matrix<float> of_choice) {
  const auto* const came = reinterpret_cast<const float*>(at(layout_.dweight));
  const std::int64_t top_k = config_.top_k;
  for (std::int64_t t = 0; t < num_tokens_; ++t) {
    for (std::int64_t k = 0; k < top_k; ++k) {
      const std::int32_t id = route_.expert.row(t)[k];
      const bool counts = id >= 0 && (route_.kept.data == nullptr || route_.kept.row(t)[k] != 0);
      of_choice.row(t)[k] =
          counts ? came[partial_row_[index(t * num_ranks_ + map_.rank[index(id)])] * top_k + k]
                 : 0.0F;
    }
  }
}

}  // namespace switchyard
