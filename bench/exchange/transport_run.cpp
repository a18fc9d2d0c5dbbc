// One rank of the benchmark: its tokens, what must come out, and the round trip through a variant:
// dispatch, the experts' stand-in, combine. Every round trip starts behind a barrier.
#include "bench/exchange/transport_run.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench/cases/synthetic.hpp"
#include "bench/exchange/transport_data.hpp"
#include "bench/measure/rank_result.hpp"
#include "bench/peers/mpi.hpp"
#include "bench/variants/transports.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
double us_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}

class Rank {
 public:
  Rank(const TransportCase& c, const TransportData& data, Communicator& communicator)
      : c_(c),
        shape_(c.shape),
        communicator_(communicator),
        pool_(c.where.threads_of_a_rank()),
        data_(data),
        routing_(data.routing[at(communicator.rank())]),
        num_tokens_(data.num_tokens[at(communicator.rank())]),
        x_(synthetic_tokens(num_tokens_, shape_.hidden, shape_.dtype,
                            shape_.seed + static_cast<std::uint64_t>(communicator.rank()))),
        out_(x_.size()) {
    expected_ = expected_rows(data, communicator.rank(), x_, &pool_);
    const std::int64_t experts = std::int64_t{shape_.num_experts};
    const std::int64_t buckets =
        communicator.size() * shape_.max_tokens * experts * shape_.hidden * size_of(shape_.dtype);
    if (2 * buckets > c.bucket_budget) capacity_ = data.largest_bucket();
    if (c.peer_mpi) make_peer();
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
      if (checked) error = std::max(error, largest_error(expected_, out_.data(), shape_.dtype));
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
  /// Bytes of "native" from here to each rank: a row, its ids and weights once per rank; and back.
  void make_peer() {
    const std::int64_t row_bytes = shape_.hidden * size_of(shape_.dtype) + 8 * shape_.top_k;
    std::vector<std::int64_t> send;
    std::vector<std::int64_t> receive;
    for (int rank = 0; rank < communicator_.size(); ++rank) {
      send.push_back(data_.rows(communicator_.rank(), rank) * row_bytes);
      receive.push_back(data_.rows(rank, communicator_.rank()) * row_bytes);
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

  const TransportCase& c_;
  const ExchangeShape& shape_;
  Communicator& communicator_;
  ThreadPool pool_;
  const TransportData& data_;
  const SyntheticRouting& routing_;
  const std::int64_t num_tokens_;
  std::vector<std::byte> x_, out_;
  std::vector<float> expected_, scratch_;
  std::unique_ptr<std::byte[]> results_;
  std::int64_t results_bytes_ = 0;
  std::int64_t capacity_ = 0;
  std::unique_ptr<MpiPeer> peer_;
};

nlohmann::json run_variants(const TransportCase& c, const TransportData& data,
                            Communicator& communicator) {
#ifdef SWITCHYARD_WITH_CUDA
  if (c.backend == Backend::kCuda) return run_device_variants(c, data, communicator);
#endif
  require(c.backend == Backend::kCpu, "this build has no backend cuda");
  Rank rank(c, data, communicator);
  nlohmann::json all = nlohmann::json::array();
  for (const std::string& variant : c.variants) all.push_back(rank.run(variant));
  return all;
}

}  // namespace

std::vector<TransportResult> run_transports(const TransportCase& c) {
  const TransportData data(c.shape, c.where.num_ranks, c.every_token);
  const auto ranks = on_ranks(
      c.where, [&](Communicator& communicator) { return run_variants(c, data, communicator); });
  std::vector<TransportResult> results;
  for (std::size_t v = 0; v < c.variants.size() && !ranks.empty(); ++v) {
    TransportResult result{.variant = c.variants[v]};
    std::vector<StageTimes> times;
    for (const nlohmann::json& rank : ranks) {
      const nlohmann::json& mine = rank.at(v);
      times.push_back(times_from(mine.at("times")));
      result.error = std::max(result.error, mine.at("error").get<double>());
      result.wire_bytes += mine.at("wire").get<std::int64_t>();
      result.most_there = std::max(result.most_there, mine.value("there", std::int64_t{0}));
      result.most_back = std::max(result.most_back, mine.value("back", std::int64_t{0}));
      result.capacity = mine.at("capacity");
    }
    for (const std::int64_t tokens : data.num_tokens) result.num_tokens += tokens;
    result.stages = merge_ranks(times);
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace switchyard::bench
