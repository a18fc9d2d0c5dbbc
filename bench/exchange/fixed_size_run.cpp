// Routing made up once, then exchanges behind barriers. What arrives is compared with what was sent
// by a checksum per message that sender and receiver take apart from each other.
#include "bench/exchange/fixed_size_run.hpp"

#include <cstring>

#include "bench/cases/synthetic.hpp"
#include "bench/measure/rank_result.hpp"
#include "bench/peers/mpi.hpp"
#include "core/check.hpp"
#include "switchyard/device.hpp"
#include "switchyard/thread_pool.hpp"

#ifdef SWITCHYARD_WITH_CUDA
#include "bench/exchange/device_fixed_size_run.hpp"
#endif

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Depends on every bit of every row and on the order of the rows.
class Checksum {
 public:
  void add_row(const std::byte* row, std::int64_t bytes) {
    std::uint64_t word = 0;
    for (std::int64_t i = 0; i < bytes; i += 8) {
      word = 0;
      std::memcpy(&word, row + i, at(std::min<std::int64_t>(8, bytes - i)));
      sum_ = (sum_ ^ word) * 0x9e3779b97f4a7c15ULL;
      sum_ ^= sum_ >> 29;
    }
  }
  [[nodiscard]] std::uint64_t value() const { return sum_; }

 private:
  std::uint64_t sum_ = 1;
};

class Rank {
 public:
  Rank(const FixedSizeCase& c, Communicator& communicator)
      : c_(c),
        communicator_(communicator),
        pool_(c.where.threads_of_a_rank()),
        routing_(make_fixed_size_routing(communicator, c.config, &pool_)) {}

  json run() {
    const std::int64_t message = routing_.rows_per_pair * c_.config.hidden * size_of(DType::kBF16);
    const std::int64_t ranks = communicator_.size();
    // Two buffers of the window; the peer's two.
    const std::int64_t wanted = ranks * ranks * message * (c_.peer_mpi || c_.peer_nccl ? 4 : 2);
    json said = {{"M", routing_.rows_per_pair}, {"padding", routing_.padding}};
    if (wanted > c_.memory_budget) {
      said["wanted"] = wanted;
      return said;
    }
    if (c_.backend == Backend::kCuda) {
      run_on_gpu(said);
      return said;
    }
    FixedSizeExchange exchange(communicator_, routing_.rows_per_pair, c_.config.hidden,
                               DType::kBF16);
    const auto x = make_tokens();
    const ConstRawMatrix tokens{x.data(), DType::kBF16, c_.config.tokens, c_.config.hidden};
    std::unique_ptr<MpiPeer> peer;
    if (c_.peer_mpi) {
      const std::vector<std::int64_t> sizes(at(ranks), message);
      peer = std::make_unique<MpiPeer>(sizes, sizes);
    }
    StageTimes times;
    const auto bytes = static_cast<double>(exchange.wire_bytes());
    ConstRawMatrix got;
    for (int run = 0; run < c_.count.warmup + c_.count.iterations; ++run) {
      if (run == c_.count.warmup) times.forget();
      times.start_run();
      communicator_.barrier("start of an exchange");
      const auto start = Clock::now();
      got = exchange.exchange(tokens, routing_, &pool_);
      times.add("exchange", {.bytes = 2 * bytes}, us_since(start));
      if (!peer) continue;
      communicator_.barrier("peer");
      const auto peer_start = Clock::now();
      peer->forward();
      times.add("mpi_alltoallv", {.bytes = 2 * bytes}, us_since(peer_start));
    }
    said["holds"] = arrived_as_sent(tokens, got);
    said["wire"] = exchange.wire_bytes();
    said["times"] = pack_times(times);
    return said;
  }

 private:
  [[nodiscard]] int rank() const { return communicator_.rank(); }
  [[nodiscard]] std::vector<std::byte> make_tokens() const {
    return synthetic_tokens(c_.config.tokens, c_.config.hidden, DType::kBF16,
                            c_.config.seed + static_cast<std::uint32_t>(rank()));
  }

  void run_on_gpu([[maybe_unused]] json& said) {
#ifdef SWITCHYARD_WITH_CUDA
    use_gpu_of_rank(rank());
    const auto x = make_tokens();
    const ConstRawMatrix tokens{x.data(), DType::kBF16, c_.config.tokens, c_.config.hidden};
    StageTimes times;
    const DeviceFixedSizeRun run =
        measure_device_fixed_size(communicator_, c_, routing_, tokens, times);
    said["holds"] =
        arrived_as_sent(tokens, {run.received.data(), DType::kBF16,
                                 communicator_.size() * routing_.rows_per_pair, c_.config.hidden});
    said["wire"] = run.wire_bytes;
    said["times"] = pack_times(times);
#else
    fail(ErrorCode::kUnsupported, "this build has no backend cuda");
#endif
  }

  static double us_since(Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  }

  /// The checksum of the message to `to`, from its tokens.
  [[nodiscard]] std::uint64_t sent_sum(ConstRawMatrix x, int to) const {
    const std::vector<std::byte> zeros(at(x.row_bytes()));
    Checksum sum;
    const std::int64_t begin = routing_.begin[at(to)];
    const std::int64_t count = routing_.begin[at(to) + 1] - begin;
    for (std::int64_t j = 0; j < routing_.rows_per_pair; ++j) {
      sum.add_row(j < count ? x.row(routing_.token[at(begin + j)]) : zeros.data(), x.row_bytes());
    }
    return sum.value();
  }

  bool arrived_as_sent(ConstRawMatrix x, ConstRawMatrix got) {
    const int ranks = communicator_.size();
    const auto window = communicator_.create_window(at(ranks) * 8, ranks);
    for (int to = 0; to < ranks; ++to) {
      const std::uint64_t sum = sent_sum(x, to);
      window->put(to, at(rank()) * 8, &sum, 8);
      window->signal(to, rank(), 1);
    }
    bool same = true;
    for (int from = 0; from < ranks; ++from) {
      Checksum sum;
      for (std::int64_t j = 0; j < routing_.rows_per_pair; ++j) {
        sum.add_row(got.row(from * routing_.rows_per_pair + j), got.row_bytes());
      }
      window->wait(from, 1, {.phase = "checksums", .rank = from});
      std::uint64_t want = 0;
      std::memcpy(&want, window->local() + from * 8, 8);
      same = same && want == sum.value();
    }
    communicator_.barrier("checksums");  // the windows go
    return same;
  }

  const FixedSizeCase& c_;
  Communicator& communicator_;
  ThreadPool pool_;
  FixedSizeRouting routing_;
};

}  // namespace

FixedSizeResult run_fixed_size(const FixedSizeCase& c) {
  const auto ranks =
      on_ranks(c.where, [&](Communicator& communicator) { return Rank(c, communicator).run(); });
  FixedSizeResult result;
  std::vector<StageTimes> times;
  for (const json& rank : ranks) {
    result.rows_per_pair = rank.at("M");
    result.padding = rank.at("padding");
    if (rank.contains("wanted")) {
      result.bytes_wanted = rank.at("wanted");
      continue;
    }
    result.holds = result.holds && rank.at("holds").get<bool>();
    result.wire_bytes += rank.at("wire").get<std::int64_t>();
    times.push_back(times_from(rank.at("times")));
  }
  result.stages = merge_ranks(times);
  return result;
}

}  // namespace switchyard::bench
