// The steps of an exchange on the host: counts to everybody, then every row straight to its final
// place, then results straight home. Bound by memory bandwidth (or by the engine); the rows of one
// destination are shared out over the rank's threads.
#include "comm/host/expert_parallel_state.hpp"

#include <algorithm>

#include "comm/expert_parallel_check.hpp"
#include "comm/host/wire.hpp"
#include "core/check.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

ExchangeLayout layout_of(const ExpertParallelConfig& config, std::int32_t num_ranks,
                         std::int32_t groups_per_row) {
  const std::int64_t all = num_ranks * config.max_tokens;
  return {.num_ranks = num_ranks,
          .top_k = config.top_k,
          .hidden = config.hidden,
          .max_rows = config.max_recv_rows == 0 ? all : std::min(all, config.max_recv_rows),
          .max_results = config.max_tokens * std::min(num_ranks, config.top_k) * groups_per_row,
          .dispatch_wire = dispatch_wire_of(config),
          .combine_wire = config.combine_wire};
}

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

ExpertParallel::State::State(Communicator& communicator, const ExpertParallelConfig& settings)
    : config(settings),
      num_ranks(communicator.size()),
      rank(communicator.rank()),
      subtree(subtree_of_rank({settings.num_experts, settings.reduction_groups}, rank, num_ranks)),
      groups_per_row(settings.rank_invariant ? subtree.num_groups : 1),
      map(make_expert_map({settings.num_experts, settings.reduction_groups}, num_ranks)),
      exchange(communicator, layout_of(settings, num_ranks, groups_per_row)),
      recoveries(communicator.recoveries()),
      counts(index(num_ranks) * index(num_ranks)) {
  for (auto& begin : source_begin) begin.assign(index(num_ranks) + 1, 0);
}

void ExpertParallel::State::start(const DispatchArgs& args) {
  if (recoveries != exchange.communicator().recoveries()) {
    recoveries = exchange.communicator().recoveries();
    epoch = 0;  // signals are zero again, on every rank
  }
  ++epoch;
  ++dispatches;
  num_tokens = args.x.rows;
  results_pending = false;
  make_send_plan(args.expert, args.kept, map, num_ranks, plan);
}

void ExpertParallel::State::exchange_counts() {
  const ExchangeLayout& layout = exchange.layout();
  const std::int64_t buffer = ExchangeLayout::buffer_of(epoch);
  std::vector<std::int64_t> own(index(num_ranks));
  for (std::int32_t to = 0; to < num_ranks; ++to) own[index(to)] = plan.count(to);
  exchange.publish("counts", epoch, own, layout.counts(buffer, rank), layout.counts_signal(rank));
  for (std::int32_t from = 0; from < num_ranks; ++from) {
    exchange.read("counts", epoch, from, layout.counts(buffer, from), layout.counts_signal(from),
                  config.max_tokens, &counts[index(from) * index(num_ranks)]);
  }
  make_placement(counts, num_ranks, layout.max_rows, placement);
}

/// Ids that came from other ranks become indices: each is one of this rank's experts, or -1.
void ExpertParallel::State::check_received_ids() {
  const std::int64_t buffer = ExchangeLayout::buffer_of(epoch);
  const std::vector<std::int64_t>& begin = source_begin[buffer];
  const std::int32_t first = first_expert_of(config.num_experts, num_ranks, rank);
  const std::int32_t end = first_expert_of(config.num_experts, num_ranks, rank + 1);
  const std::int64_t count = begin.back() * config.top_k;
  const auto* ids = exchange.at<const std::int32_t>(exchange.layout().ids(buffer, 0));
  const auto is_bad = [&](std::int32_t id) { return id != -1 && (id < first || id >= end); };
  bool any = false;  // no early exit: one pass that the compiler makes vectors of
  for (std::int64_t i = 0; i < count; ++i) any |= is_bad(ids[i]);
  if (!any) return;
  const std::int64_t bad = std::find_if(ids, ids + count, is_bad) - ids;
  const std::int64_t row = bad / config.top_k;
  const auto from = std::upper_bound(begin.begin(), begin.end(), row) - begin.begin() - 1;
  fail(ErrorCode::kCommunication,
       "rows: row {} of rank {} to rank {} has expert {}, want {} to {} or -1",
       row - begin[index(from)], from, rank, ids[bad], first, end - 1);
}

void ExpertParallel::State::mark_groups(const std::int32_t* ids, std::int64_t row,
                                        std::vector<std::uint8_t>& present) const {
  for (std::int32_t k = 0; k < config.top_k; ++k) {
    if (ids[k] < 0) continue;
    present[index(row * groups_per_row + map.group[index(ids[k])])] = 1;
  }
}

void ExpertParallel::State::send_rows(const DispatchArgs& args) {
  const ExchangeLayout& layout = exchange.layout();
  const std::int64_t buffer = ExchangeLayout::buffer_of(epoch);
  const std::int64_t ids_bytes = std::int64_t{4} * config.top_k;
  partial_row.assign(index(num_tokens * num_ranks), -1);
  own_groups.assign(index(layout.max_results), 0);
  for (std::int32_t i = 0; i < num_ranks; ++i) {
    const std::int32_t to = exchange.in_turn(i);
    const std::int64_t first = placement.first_row(rank, to);
    const std::int64_t home = placement.first_result(rank, to);
    const std::int32_t* tokens = plan.token.data() + plan.begin[index(to)];
    const std::vector<RowArray> arrays = {
        {layout.row(buffer, first), layout.row_bytes()},
        {layout.scales(buffer, first), layout.row_scales() * 4},
        {layout.ids(buffer, first), ids_bytes},
        {layout.weights(buffer, first), ids_bytes},
    };
    const auto fill = [&](const RowTarget& target, std::int64_t j) {
      const std::int64_t token = tokens[j];
      encode_row(args.x.row(token), config.dtype, target.at(0, j), layout.dispatch_wire,
                 reinterpret_cast<float*>(target.at(1, j)), config.hidden);
      auto* ids = reinterpret_cast<std::int32_t*>(target.at(2, j));
      auto* weights = reinterpret_cast<float*>(target.at(3, j));
      for (std::int64_t k = 0; k < config.top_k; ++k) {
        const std::int32_t id = args.expert.row(token)[k];
        const bool here = id >= 0 && map.rank[index(id)] == to &&
                          (args.kept.data == nullptr || args.kept.row(token)[k] != 0);
        ids[k] = here ? id : -1;
        weights[k] = here ? args.weight.row(token)[k] : 0.0F;
        if (here)
          own_groups[index((home + j) * groups_per_row +
                           (groups_per_row > 1 ? map.group[index(id)] : 0))] = 1;
      }
      partial_row[index(token * num_ranks + to)] = static_cast<std::int32_t>(home + j);
    };
    writer.write(exchange.window(), to, arrays, placement.sent_rows(rank, to), args.execution.pool,
                 fill);
    exchange.window().signal(to, layout.rows_signal(rank), epoch);
  }
}

Received ExpertParallel::State::receive_rows(const DispatchArgs& args) {
  const ExchangeLayout& layout = exchange.layout();
  const std::int64_t buffer = ExchangeLayout::buffer_of(epoch);
  std::vector<std::int64_t>& begin = source_begin[buffer];
  for (std::int32_t from = 0; from < num_ranks; ++from) {
    exchange.window().wait(layout.rows_signal(from), epoch, {.phase = "rows", .rank = from});
    begin[index(from) + 1] = begin[index(from)] + placement.sent_rows(from, rank);
  }
  check_received_ids();
  const std::int64_t rows = begin.back();
  const std::byte* x = exchange.at(layout.row(buffer, 0));
  if (layout.dispatch_wire != config.dtype) {
    std::vector<std::byte>& out = converted[buffer];
    const std::int64_t row_bytes = config.hidden * size_of(config.dtype);
    if (std::ssize(out) < rows * row_bytes) out.resize(index(rows * row_bytes));
    parallel_for(args.execution.pool, rows, [&](std::int64_t i, int) {
      decode_row(exchange.at(layout.row(buffer, i)), layout.dispatch_wire,
                 exchange.at<const float>(layout.scales(buffer, i)), out.data() + i * row_bytes,
                 config.dtype, config.hidden);
    });
    x = out.data();
  }
  results_pending = true;
  return {.x = {x, config.dtype, rows, config.hidden},
          .expert = {exchange.at<const std::int32_t>(layout.ids(buffer, 0)), {rows, config.top_k}},
          .weight = {exchange.at<const float>(layout.weights(buffer, 0)), {rows, config.top_k}},
          .source_begin = {begin.data(), {num_ranks + std::int64_t{1}}},
          .dropped_rows = placement.dropped[index(rank)]};
}

/// Returns the number of results that go to each rank.
std::vector<std::int64_t> ExpertParallel::State::send_results(const ReturnArgs& args) {
  const ExchangeLayout& layout = exchange.layout();
  const std::int64_t buffer = ExchangeLayout::buffer_of(epoch);
  const std::vector<std::int64_t>& begin = source_begin[buffer];
  std::vector<std::int64_t> sent(index(num_ranks), 0);
  received_groups.assign(index(begin.back() * groups_per_row), groups_per_row > 1 ? 0 : 1);
  if (groups_per_row > 1) {
    for (std::int64_t row = 0; row < begin.back(); ++row) {
      mark_groups(exchange.at<const std::int32_t>(layout.ids(buffer, row)), row, received_groups);
    }
  }
  for (std::int32_t i = 0; i < num_ranks; ++i) {
    const std::int32_t to = exchange.in_turn(i);
    const std::int64_t first = begin[index(to)] * groups_per_row;
    const std::int64_t count = begin[index(to) + 1] * groups_per_row - first;
    const std::int64_t home = placement.first_result(to, rank) * groups_per_row;
    const auto fill = [&](const RowTarget& target, std::int64_t j) {
      if (received_groups[index(first + j)] == 0) return;
      encode_row(args.partials.row(first + j), args.partials.dtype, target.at(0, j),
                 layout.combine_wire, reinterpret_cast<float*>(target.at(1, j)), config.hidden);
    };
    writer.write(exchange.window(), to,
                 {{layout.result(home), layout.result_bytes()},
                  {layout.result_scale(home), layout.result_scales() * 4}},
                 count, args.execution.pool, fill);
    sent[index(to)] = std::count(received_groups.begin() + first,
                                 received_groups.begin() + first + count, std::uint8_t{1});
  }
  return sent;
}

/// The partial rows at home, as finish() takes them.
ConstRawMatrix ExpertParallel::State::receive_results(const ReturnArgs& args) {
  const ExchangeLayout& layout = exchange.layout();
  result_counts.resize(counts.size());
  std::int64_t rows = 0;
  for (std::int32_t from = 0; from < num_ranks; ++from) {
    exchange.read("results", epoch, from, layout.returned(from), layout.results_signal(from),
                  config.max_tokens * groups_per_row,
                  &result_counts[index(from) * index(num_ranks)]);
    rows += placement.sent_rows(rank, from) * groups_per_row;
  }
  const bool decode = layout.combine_wire == DType::kF8E4M3;
  const std::int64_t row_bytes = decode ? 4 * config.hidden : layout.result_bytes();
  if (decode && std::ssize(results) < rows * row_bytes) results.resize(index(rows * row_bytes));
  std::byte* const out = decode ? results.data() : exchange.at(layout.result(0));
  parallel_for(args.execution.pool, rows, [&](std::int64_t i, int) {
    if (own_groups[index(i)] == 0) {  // nothing came: an absent group is +0
      std::fill_n(out + i * row_bytes, row_bytes, std::byte{0});
    } else if (decode) {
      decode_row(exchange.at(layout.result(i)), layout.combine_wire,
                 exchange.at<const float>(layout.result_scale(i)), out + i * row_bytes, DType::kF32,
                 config.hidden);
    }
  });
  return {out, decode ? DType::kF32 : layout.combine_wire, rows, config.hidden};
}

void ExpertParallel::State::report_dispatch() {
  const ExchangeLayout& layout = exchange.layout();
  const std::int64_t row_meta = 8 * std::int64_t{config.top_k} + 4 * layout.row_scales();
  constexpr std::int64_t kSignalBytes = 16;  // two of 8
  traffic.rows = placement.sent;
  traffic.payload_bytes.resize(counts.size());
  traffic.meta_bytes.resize(counts.size());
  for (std::size_t pair = 0; pair < counts.size(); ++pair) {
    traffic.payload_bytes[pair] = traffic.rows[pair] * layout.row_bytes();
    traffic.meta_bytes[pair] =
        layout.message_bytes() + kSignalBytes + traffic.rows[pair] * row_meta;
  }
  traffic.return_rows.assign(counts.size(), 0);
  traffic.return_payload_bytes.assign(counts.size(), 0);
  traffic.return_meta_bytes.assign(counts.size(), 0);
}

void ExpertParallel::State::report_results() {
  const ExchangeLayout& layout = exchange.layout();
  traffic.return_rows = result_counts;
  for (std::size_t pair = 0; pair < counts.size(); ++pair) {
    traffic.return_payload_bytes[pair] = result_counts[pair] * layout.result_bytes();
    traffic.return_meta_bytes[pair] =
        layout.message_bytes() + 8 + result_counts[pair] * 4 * layout.result_scales();
  }
}

}  // namespace switchyard
