// Rows of single assignments through a window: [counts of two epochs | meta | rows | results].
// Rows and results have one buffer each: a rank writes them only when the counts of the epoch (or
// the rows) say that their owner no longer reads the ones before. Bound by memory bandwidth.
#include "interfaces/assignments.hpp"

#include <algorithm>
#include <cstring>

#include "comm/expert_parallel_check.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

const TransportConfig& agreed(Communicator& communicator, const TransportConfig& config) {
  require_same(communicator, config);
  return config;
}

}  // namespace

AssignmentExchange::AssignmentExchange(Communicator& communicator, const TransportConfig& config,
                                       Order order)
    : communicator_(communicator),
      config_(agreed(communicator, config)),
      order_kind_(order),
      capacity_(config.capacity > 0 ? config.capacity : config.max_tokens * communicator.size()),
      recoveries_(communicator.recoveries()) {
  const std::int64_t ranks = communicator.size();
  const std::int64_t local = (config.num_experts + ranks - 1) / ranks;
  const std::int64_t assignments = config.max_tokens * config.top_k;
  const std::int64_t places = order == Order::kBuckets ? local * capacity_ : ranks * assignments;
  const std::int64_t row_bytes = config.hidden * size_of(config.dtype);
  meta_offset_ = 2 * ExchangeLayout::align(ranks * config.num_experts * 4);
  rows_offset_ = meta_offset_ +
                 ExchangeLayout::align(places * static_cast<std::int64_t>(sizeof(AssignmentMeta)));
  results_offset_ = rows_offset_ + ExchangeLayout::align(places * row_bytes);
  window_ = communicator.create_window(at(results_offset_ + assignments * row_bytes),
                                       static_cast<int>(3 * ranks));
  counts_.resize(at(ranks * config.num_experts));
}

ConstRawMatrix AssignmentExchange::rows() const {
  return {window_->local() + rows_offset_, config_.dtype, num_rows_, config_.hidden};
}

const AssignmentMeta* AssignmentExchange::meta() const {
  return reinterpret_cast<const AssignmentMeta*>(window_->local() + meta_offset_);
}

std::int32_t AssignmentExchange::rank_of(std::int32_t expert) const {
  // The rank r with r*E/R <= expert < (r+1)*E/R: a guess, then at most a step or two.
  auto rank =
      static_cast<std::int32_t>(std::int64_t{expert} * communicator_.size() / num_experts());
  while (first_expert(rank + 1) <= expert) ++rank;
  return rank;
}

std::int64_t AssignmentExchange::block_begin(std::int32_t source, std::int32_t to) const {
  std::int64_t begin = 0;
  for (std::int32_t s = 0; s < source; ++s) {
    for (std::int32_t e = first_expert(to); e < first_expert(to + 1); ++e) begin += count(s, e);
  }
  return begin;
}

std::int64_t AssignmentExchange::first_place(std::int32_t source, std::int32_t expert) const {
  const std::int32_t rank = rank_of(expert);
  std::int64_t place = 0;
  if (order_kind_ == Order::kBuckets) {
    place = (expert - first_expert(rank)) * capacity_;
    for (std::int32_t s = 0; s < source; ++s) place += count(s, expert);
    return place;
  }
  place = block_begin(source, rank);
  for (std::int32_t e = first_expert(rank); e < expert; ++e) place += count(source, e);
  return place;
}

void AssignmentExchange::exchange_counts(const TransportInput& input) {
  const std::int32_t ranks = communicator_.size();
  const std::int64_t record = std::int64_t{4} * num_experts();
  const std::int64_t buffer =
      static_cast<std::int64_t>(epoch_ % 2) * ExchangeLayout::align(ranks * record);
  std::vector<std::int32_t> own(at(num_experts()), 0);
  for (std::int64_t i = 0; i < input.expert.size(); ++i) {
    if (input.expert.data[i] >= 0) ++own[at(input.expert.data[i])];
  }
  for (std::int32_t i = 0; i < ranks; ++i) {
    const std::int32_t to = (communicator_.rank() + i) % ranks;
    window_->put(to, at(buffer + communicator_.rank() * record), own.data(), at(record));
    window_->signal(to, communicator_.rank(), epoch_);
  }
  for (std::int32_t from = 0; from < ranks; ++from) {
    window_->wait(from, epoch_, {.phase = "counts", .rank = from});
    std::memcpy(&counts_[at(std::int64_t{from} * num_experts())],
                window_->local() + buffer + from * record, at(record));
  }
  if (order_kind_ != Order::kBuckets) return;
  for (std::int32_t e = 0; e < num_experts(); ++e) {
    std::int64_t rows = 0;
    for (std::int32_t s = 0; s < ranks; ++s) rows += count(s, e);
    require(rows <= capacity_, "expert {} gets {} rows, its bucket has {}", e, rows, capacity_);
  }
}

/// Counting sort of the own assignments by destination or by expert, stable in (token, k).
void AssignmentExchange::sort_assignments(const TransportInput& input) {
  const bool by_rank = order_kind_ == Order::kToken;
  std::vector<std::int32_t> next(at(num_experts()) + 1, 0);
  const auto key = [&](std::int32_t e) { return at(by_rank ? rank_of(e) : e); };
  for (std::int64_t i = 0; i < input.expert.size(); ++i) {
    if (input.expert.data[i] >= 0) ++next[key(input.expert.data[i]) + 1];
  }
  for (std::size_t e = 1; e < next.size(); ++e) next[e] += next[e - 1];
  order_.resize(at(next.back()));
  order_place_.assign(at(input.expert.size()), -1);
  for (std::int64_t i = 0; i < input.expert.size(); ++i) {
    if (input.expert.data[i] < 0) continue;
    const std::int32_t place = next[key(input.expert.data[i])]++;
    order_[at(place)] = static_cast<std::int32_t>(i);
    order_place_[at(i)] = place;
  }
}

/// The pieces that `source` sends, in the order in which it has sorted them.
std::vector<AssignmentExchange::Piece> AssignmentExchange::pieces_from(std::int32_t source) const {
  std::vector<Piece> pieces;
  std::int64_t first = 0;
  for (std::int32_t to = 0; to < communicator_.size(); ++to) {
    Piece block{.to = to, .first = first, .place = block_begin(source, to), .count = 0};
    for (std::int32_t e = first_expert(to); e < first_expert(to + 1); ++e) {
      const std::int64_t rows = count(source, e);
      if (order_kind_ == Order::kBuckets && rows > 0) {
        pieces.push_back({to, first, first_place(source, e), rows});
      }
      block.count += rows;
      first += rows;
    }
    if (order_kind_ != Order::kBuckets && block.count > 0) pieces.push_back(block);
  }
  return pieces;
}

void AssignmentExchange::send(const TransportInput& input) {
  const std::int32_t ranks = communicator_.size();
  const std::int64_t row_bytes = config_.hidden * size_of(config_.dtype);
  constexpr auto kMetaBytes = static_cast<std::int64_t>(sizeof(AssignmentMeta));
  for (const Piece& piece : pieces_from(communicator_.rank())) {
    std::byte* const peer = window_->peer(piece.to);
    const std::int64_t bytes = piece.count * (row_bytes + kMetaBytes);
    if (peer == nullptr && std::ssize(staging_) < bytes) staging_.resize(at(bytes));
    std::byte* const meta_to =
        peer != nullptr ? peer + meta_offset_ + piece.place * kMetaBytes : staging_.data();
    std::byte* const rows_to = peer != nullptr ? peer + rows_offset_ + piece.place * row_bytes
                                               : staging_.data() + piece.count * kMetaBytes;
    parallel_for(config_.pool, piece.count, [&](std::int64_t i, int) {
      const std::int32_t position = order_[at(piece.first + i)];
      const AssignmentMeta meta{position, input.expert.data[position]};
      std::memcpy(meta_to + i * kMetaBytes, &meta, sizeof(meta));
      std::memcpy(rows_to + i * row_bytes, input.x.row(position / config_.top_k), at(row_bytes));
    });
    if (peer == nullptr) {
      window_->put(piece.to, at(meta_offset_ + piece.place * kMetaBytes), meta_to,
                   at(piece.count * kMetaBytes));
      window_->put(piece.to, at(rows_offset_ + piece.place * row_bytes), rows_to,
                   at(piece.count * row_bytes));
    }
    if (piece.to != communicator_.rank()) wire_bytes_ += bytes;
  }
  for (std::int32_t to = 0; to < ranks; ++to) {
    window_->signal(to, ranks + communicator_.rank(), epoch_);
  }
}

void AssignmentExchange::dispatch(const TransportInput& input) {
  const std::int32_t ranks = communicator_.size();
  require(input.x.rows <= config_.max_tokens, "{} tokens exceed max_tokens={}", input.x.rows,
          config_.max_tokens);
  require(input.x.rows == 0 || (input.x.cols == config_.hidden && input.x.dtype == config_.dtype &&
                                input.expert.shape[1] == config_.top_k),
          "x or expert is not as configured: H={}, K={}, {}", config_.hidden, config_.top_k,
          to_string(config_.dtype));
  check_assignments(input.expert, input.weight, num_experts());
  if (recoveries_ != communicator_.recoveries()) {
    recoveries_ = communicator_.recoveries();
    epoch_ = 0;
  }
  ++epoch_;
  num_tokens_ = input.x.rows;
  weight_.assign(input.weight.data, input.weight.data + input.weight.size());
  wire_bytes_ = (ranks - 1) * std::int64_t{4} * num_experts();
  exchange_counts(input);
  sort_assignments(input);
  const std::int32_t rank = communicator_.rank();
  num_rows_ = order_kind_ == Order::kBuckets
                  ? (first_expert(rank + 1) - first_expert(rank)) * capacity_
                  : block_begin(ranks, rank);
  send(input);
  for (std::int32_t from = 0; from < ranks; ++from) {
    window_->wait(ranks + from, epoch_, {.phase = "rows", .rank = from});
  }
}

void AssignmentExchange::set_weight(Matrix<const float> weight) {
  require(weight.size() == std::ssize(weight_), "weight is [{}, {}], want [{}, {}]",
          weight.shape[0], weight.shape[1], num_tokens_, config_.top_k);
  weight_.assign(weight.data, weight.data + weight.size());
}

void AssignmentExchange::combine(ConstRawMatrix rows, RawMatrix out) {
  const std::int32_t ranks = communicator_.size();
  const std::int64_t row_bytes = config_.hidden * size_of(config_.dtype);
  require(rows.rows == num_rows_ && out.rows == num_tokens_,
          "rows is [{}, H], want {}; out is [{}, H], want {}", rows.rows, num_rows_, out.rows,
          num_tokens_);
  for (std::int32_t i = 0; i < ranks; ++i) {
    const std::int32_t home = (communicator_.rank() + i) % ranks;
    for (const Piece& piece : pieces_from(home)) {
      if (piece.to != communicator_.rank()) continue;
      window_->put(home, at(results_offset_ + piece.first * row_bytes), rows.row(piece.place),
                   at(piece.count * row_bytes));
      if (home != communicator_.rank()) wire_bytes_ += piece.count * row_bytes;
    }
    window_->signal(home, 2 * ranks + communicator_.rank(), epoch_);
  }
  for (std::int32_t from = 0; from < ranks; ++from) {
    window_->wait(2 * ranks + from, epoch_, {.phase = "results", .rank = from});
  }
  add_up(out);
}

/// Ascending k, fp32, one rounding.
void AssignmentExchange::add_up(RawMatrix out) const {
  const std::byte* const results = window_->local() + results_offset_;
  const std::int64_t row_bytes = config_.hidden * size_of(config_.dtype);
  parallel_for(config_.pool, num_tokens_, [&](std::int64_t token, int) {
    std::vector<float> sum(at(config_.hidden), 0.0F);
    for (std::int64_t k = 0; k < config_.top_k; ++k) {
      const std::int64_t position = token * config_.top_k + k;
      const std::int64_t place = order_place_[at(position)];
      if (place < 0) continue;
      row_ops::accumulate(config_.dtype, weight_[at(position)], results + place * row_bytes,
                          sum.data(), config_.hidden);
    }
    row_ops::narrow(out.dtype, sum.data(), out.row(token), config_.hidden);
  });
}

}  // namespace switchyard
