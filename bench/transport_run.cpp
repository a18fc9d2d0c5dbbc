// One rank of the benchmark: its tokens, what must come out, and the round trip through a variant:
// dispatch, the experts' stand-in, combine. Every round trip starts behind a barrier.
#include "bench/transport_run.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench/peer_mpi.hpp"
#include "bench/rank_result.hpp"
#include "bench/synthetic.hpp"
#include "comm/variants/transport.hpp"
#include "core/half.hpp"
#include "core/row_ops.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
double us_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}

/// Who goes where, of every rank: each can make it for all.
struct Routing {
  std::vector<SyntheticRouting> ranks;
  std::vector<std::int64_t> num_tokens;

  Routing(const TransportCase& c) {
    const ExchangeShape& shape = c.shape;
    for (int rank = 0; rank < c.where.num_ranks; ++rank) {
      const std::uint64_t seed = shape.seed + static_cast<std::uint64_t>(rank);
      Random random(seed);
      const auto range =
          static_cast<std::uint64_t>(std::max<std::int64_t>(1, shape.max_tokens - 1));
      const std::int64_t drawn = 1 + static_cast<std::int64_t>(random.bits() % range);
      num_tokens.push_back(c.every_token ? shape.max_tokens : drawn);
      ranks.push_back(
          synthetic_routing(num_tokens.back(), shape.num_experts, shape.top_k, "uniform", seed));
      for (float& weight : ranks.back().weight) weight = static_cast<float>(random.uniform());
    }
  }

  [[nodiscard]] std::int64_t largest_bucket(std::int32_t num_experts) const {
    std::vector<std::int64_t> rows(at(num_experts));
    for (const SyntheticRouting& routing : ranks) {
      for (const std::int32_t expert : routing.expert) ++rows[at(expert)];
    }
    return *std::max_element(rows.begin(), rows.end());
  }
};

class Rank {
 public:
  Rank(const TransportCase& c, const Routing& routing, Communicator& communicator)
      : c_(c),
        shape_(c.shape),
        communicator_(communicator),
        pool_(c.where.threads_of_a_rank()),
        routing_(routing.ranks[at(communicator.rank())]),
        num_tokens_(routing.num_tokens[at(communicator.rank())]),
        x_(synthetic_tokens(num_tokens_, shape_.hidden, shape_.dtype,
                            shape_.seed + static_cast<std::uint64_t>(communicator.rank()))),
        out_(x_.size()) {
    make_expected();
    const std::int64_t experts = std::int64_t{shape_.num_experts};
    const std::int64_t buckets =
        communicator.size() * shape_.max_tokens * experts * shape_.hidden * size_of(shape_.dtype);
    if (2 * buckets > c.bucket_budget) capacity_ = routing.largest_bucket(shape_.num_experts);
    if (c.peer_mpi) make_peer(routing);
  }

  nlohmann::json run(const std::string& variant) {
    const TransportConfig config{.num_experts = shape_.num_experts,
                                 .top_k = shape_.top_k,
                                 .hidden = shape_.hidden,
                                 .max_tokens = shape_.max_tokens,
                                 .dtype = shape_.dtype,
                                 .capacity = variant == "bucketed" ? capacity_ : 0,
                                 .pool = &pool_};
    const auto transport = make_transport(variant, communicator_, config);
    StageTimes times;
    double error = 0;
    RunCounter counter(c_.count);
    for (int run = 0; run < counter.total(); ++run) {
      if (run == counter.warmup()) times.forget();
      times.start_run();
      const bool checked = run == 0 || run + 1 == counter.total();
      if (checked) std::fill(out_.begin(), out_.end(), std::byte{0xff});  // NaN
      const double us = round_trip(*transport, times);
      if (checked) error = std::max(error, largest_error());
      if (peer_ && variant == "native") run_peer(times);
      if (run == 0 && counter.wants_time()) {
        counter.set_time(std::chrono::duration<double>(from_first(communicator_, us * 1e-6)));
      }
    }
    communicator_.barrier("end of a variant");  // the window goes
    return {{"times", pack_times(times)},
            {"error", error},
            {"wire", transport->wire_bytes()},
            {"capacity", variant != "bucketed" ? 0
                         : capacity_ > 0       ? capacity_
                                               : shape_.max_tokens * communicator_.size()}};
  }

 private:
  [[nodiscard]] int owner(std::int32_t expert) const {
    int rank = 0;
    while ((rank + 1) * std::int64_t{shape_.num_experts} / communicator_.size() <= expert) ++rank;
    return rank;
  }

  /// out[t] = sum over k of weight * y, y = x * (1 + the expert's rank) in the type of x.
  void make_expected() {
    expected_.resize(at(num_tokens_ * shape_.hidden));
    parallel_for(&pool_, num_tokens_, [&](std::int64_t token, int) {
      for (std::int64_t h = 0; h < shape_.hidden; ++h) {
        const float x = load_float(x_.data(), shape_.dtype, token * shape_.hidden + h);
        double sum = 0;
        for (std::int64_t k = 0; k < shape_.top_k; ++k) {
          const std::size_t i = at(token * shape_.top_k + k);
          const auto factor = static_cast<float>(1 + owner(routing_.expert[i]));
          sum += double{routing_.weight[i]} * round_to(shape_.dtype, x * factor);
        }
        expected_[at(token * shape_.hidden + h)] = static_cast<float>(sum);
      }
    });
  }

  /// Bytes of "native" from here to each rank: a row, its ids and weights once per rank; and back.
  void make_peer(const Routing& routing) {
    const std::int64_t row_bytes = shape_.hidden * size_of(shape_.dtype) + 8 * shape_.top_k;
    const auto bytes = [&](int source, int target) {
      const std::vector<std::int32_t>& experts = routing.ranks[at(source)].expert;
      std::int64_t rows = 0;
      for (std::size_t t = 0; t < experts.size(); t += at(shape_.top_k)) {
        rows += std::any_of(&experts[t], &experts[t] + shape_.top_k,
                            [&](std::int32_t expert) { return owner(expert) == target; })
                    ? 1
                    : 0;
      }
      return rows * row_bytes;
    };
    std::vector<std::int64_t> send;
    std::vector<std::int64_t> receive;
    for (int rank = 0; rank < communicator_.size(); ++rank) {
      send.push_back(bytes(communicator_.rank(), rank));
      receive.push_back(bytes(rank, communicator_.rank()));
    }
    peer_ = std::make_unique<MpiPeer>(std::move(send), std::move(receive));
  }

  void run_peer(StageTimes& times) {
    communicator_.barrier("peer");
    const auto start = Clock::now();
    peer_->forward();
    peer_->backward();
    times.add("mpi_alltoallv", {}, us_between(start, Clock::now()));
  }

  double round_trip(Transport& transport, StageTimes& times) {
    const std::int64_t hidden = shape_.hidden;
    communicator_.barrier("start of a round trip");
    const auto start = Clock::now();
    const ExpertInput in =
        transport.dispatch({.x = {x_.data(), shape_.dtype, num_tokens_, hidden},
                            .expert = {routing_.expert.data(), {num_tokens_, shape_.top_k}},
                            .weight = {routing_.weight.data(), {num_tokens_, shape_.top_k}}});
    const auto arrived = Clock::now();
    const auto there = static_cast<double>(transport.wire_bytes());
    const ConstRawMatrix rows = experts(in);
    const auto computed = Clock::now();
    transport.combine(rows, {out_.data(), shape_.dtype, num_tokens_, hidden});
    const auto end = Clock::now();
    const auto all = static_cast<double>(transport.wire_bytes());
    communicator_.barrier("end of a round trip");
    if (communicator_.rank() == 0) {
      times.add("barrier_to_barrier", {.bytes = 2 * all}, us_between(start, Clock::now()));
    }
    const double dispatch = us_between(start, arrived);
    const double combine = us_between(computed, end);
    times.add("dispatch", {.bytes = 2 * there}, dispatch);
    times.add("experts", {}, us_between(arrived, computed));
    times.add("combine", {.bytes = 2 * (all - there)}, combine);
    times.add("dispatch+combine", {.bytes = 2 * all}, dispatch + combine);
    times.add("round_trip", {.bytes = 2 * all}, us_between(start, end));
    return us_between(start, end);
  }

  /// The experts' stand-in on every row that is used; the others are left as they are.
  ConstRawMatrix experts(const ExpertInput& in) {
    const std::int64_t hidden = shape_.hidden;
    const std::int64_t bytes = in.rows() * hidden * size_of(shape_.dtype);
    if (results_bytes_ < bytes) {  // pages that no row lies on are never touched
      results_ = std::make_unique_for_overwrite<std::byte[]>(at(bytes));
      results_bytes_ = bytes;
    }
    const RawMatrix y{results_.get(), shape_.dtype, in.rows(), hidden};
    scratch_.resize(at(hidden * pool_.num_threads()));
    const auto factor = static_cast<float>(1 + communicator_.rank());
    parallel_for(&pool_, in.rows(), [&](std::int64_t i, int worker) {
      if (in.expert[i] < 0) return;
      float* values = &scratch_[at(worker * hidden)];
      row_ops::widen(shape_.dtype, in.x.row(in.x_row.empty() ? i : in.x_row[i]), values, hidden);
      for (std::int64_t h = 0; h < hidden; ++h) values[h] *= factor;
      row_ops::narrow(shape_.dtype, values, y.row(i), hidden);
    });
    return {y.data, y.dtype, y.rows, y.cols};
  }

  /// The published check, allclose with rtol 1e-2 and atol 5e-3, as a share of what it allows.
  [[nodiscard]] double largest_error() const {
    double largest = 0;
    for (std::int64_t i = 0; i < std::ssize(expected_); ++i) {
      const double want = expected_[at(i)];
      const double share = std::fabs(load_float(out_.data(), shape_.dtype, i) - want) /
                           (5e-3 + 1e-2 * std::fabs(want));
      if (!(share <= largest)) largest = std::isnan(share) ? HUGE_VAL : share;
    }
    return largest;
  }

  const TransportCase& c_;
  const ExchangeShape& shape_;
  Communicator& communicator_;
  ThreadPool pool_;
  const SyntheticRouting& routing_;
  const std::int64_t num_tokens_;
  std::vector<std::byte> x_, out_;
  std::vector<float> expected_, scratch_;
  std::unique_ptr<std::byte[]> results_;
  std::int64_t results_bytes_ = 0;
  std::int64_t capacity_ = 0;
  std::unique_ptr<MpiPeer> peer_;
};

}  // namespace

std::vector<TransportResult> run_transports(const TransportCase& c) {
  const Routing routing(c);
  const auto ranks = on_ranks(c.where, [&](Communicator& communicator) {
    Rank rank(c, routing, communicator);
    nlohmann::json all = nlohmann::json::array();
    for (const std::string& variant : c.variants) all.push_back(rank.run(variant));
    return all;
  });
  std::vector<TransportResult> results;
  for (std::size_t v = 0; v < c.variants.size() && !ranks.empty(); ++v) {
    TransportResult result{.variant = c.variants[v]};
    std::vector<StageTimes> times;
    for (const nlohmann::json& rank : ranks) {
      const nlohmann::json& mine = rank.at(v);
      times.push_back(times_from(mine.at("times")));
      result.error = std::max(result.error, mine.at("error").get<double>());
      result.wire_bytes += mine.at("wire").get<std::int64_t>();
      result.capacity = mine.at("capacity");
    }
    for (const std::int64_t tokens : routing.num_tokens) result.num_tokens += tokens;
    result.stages = merge_ranks(times);
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace switchyard::bench
