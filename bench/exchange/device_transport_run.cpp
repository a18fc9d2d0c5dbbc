// One rank of the benchmark on a GPU. A run is one round trip with its stages by events, then 32
// chained in a graph, then one launched by the host between barriers: all ranks begin together.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "bench/exchange/device_trips.hpp"
#include "bench/exchange/transport_data.hpp"
#include "bench/exchange/transport_run.hpp"
#include "bench/measure/rank_result.hpp"
#include "bench/measure/run_clock.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/device_buffer.hpp"
#include "switchyard/device.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

class Rank {
 public:
  Rank(const TransportCase& c, const TransportData& data, Communicator& communicator)
      : c_(c), data_(data), communicator_(communicator) {
    const int rank = communicator.rank();
    use_gpu_of_rank(rank);
    const ExchangeShape& shape = c.shape;
    const std::int64_t tokens = data.num_tokens[at(rank)];
    const auto x = synthetic_tokens(tokens, shape.hidden, shape.dtype,
                                    shape.seed + static_cast<std::uint64_t>(rank));
    ThreadPool pool(c.where.threads_of_a_rank());
    expected_ = expected_rows(data, rank, x, &pool);
    const SyntheticRouting& routing = data.routing[at(rank)];
    const auto upload = [](const auto& from, void* to) {
      SWITCHYARD_CUDA(
          cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice));
    };
    const RawMatrix on_device = x_.matrix(shape.dtype, tokens, shape.hidden);
    const auto expert = expert_.matrix<std::int32_t>(tokens, shape.top_k);
    const auto weight = weight_.matrix<float>(tokens, shape.top_k);
    upload(x, on_device.data);
    upload(routing.expert, expert.data);
    upload(routing.weight, weight.data);
    input_ = {.x = on_device, .expert = expert, .weight = weight};
    out_ = out_memory_.matrix(shape.dtype, tokens, shape.hidden);
  }

  nlohmann::json run(const std::string& variant) {
    const std::unique_ptr<Trip> trip = make_trip(variant, communicator_, c_, input_, out_);
    StageTimes times;
    const auto clock =
        make_run_clock(Backend::kCuda, times, [this] { communicator_.barrier("graphs"); });
    cudaStream_t stream = nullptr;
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    // Buckets are made by the first call.
    trip->run(nullptr, stream);
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    trip->check();
    double error = 0;
    RunCounter counter(c_.count);
    for (int run = 0; run < counter.total(); ++run) {
      if (run == counter.warmup()) times.forget();
      times.start_run();
      const bool checked = run == 0 || run + 1 == counter.total();
      if (checked) {  // NaN
        SWITCHYARD_CUDA(cudaMemsetAsync(out_.data, 0xff, at(out_.bytes()), stream));
      }
      const double us = measure(*trip, *clock, times, stream);
      trip->check();
      if (checked) error = std::max(error, download_error());
      if (run == 0 && counter.wants_time()) {
        counter.set_time(std::chrono::duration<double>(from_first(communicator_, us * 1e-6)));
      }
    }
    communicator_.barrier("end of a variant");  // what follows waits for the device
    cudaStreamDestroy(stream);
    const auto [there, back] = wire_bytes(variant);
    return {{"times", pack_times(times)},
            {"error", error},
            {"wire", there + back},
            {"there", there},
            {"back", back},
            {"capacity", trip->capacity()}};
  }

 private:
  /// Microseconds of the host for one run.
  double measure(Trip& trip, RunClock& clock, StageTimes& times, cudaStream_t stream) {
    const auto start = Clock::now();
    communicator_.barrier("start of a run");
    if (trip.only_enqueues()) {
      // The clock calls once with stages, and captures once without: those are chained.
      const double chain = clock.run(&trip, [&](StageRecorder* recorder, void* on) {
        for (int i = 0; i < (recorder == nullptr ? TransportCase::kChain : 1); ++i) {
          trip.run(recorder, on);
        }
      });
      times.add("round_trip", {}, chain / TransportCase::kChain);
    } else {
      measure_on_host(trip, times, stream);
    }
    communicator_.barrier("start of a round trip");
    const auto launched = Clock::now();
    trip.run(nullptr, stream);
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    times.add("eager", {}, us_since(launched));
    communicator_.barrier("end of a round trip");
    if (communicator_.rank() == 0) times.add("barrier_to_barrier", {}, us_since(launched));
    return us_since(start);
  }

  /// Where the host takes part in every step, its clock is the only one.
  void measure_on_host(Trip& trip, StageTimes& times, cudaStream_t stream) {
    const auto timed = [&](const char* stage, const auto& step) {
      const auto start = Clock::now();
      step();
      SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
      times.add(stage, {}, us_since(start));
    };
    timed("dispatch", [&] { trip.dispatch(stream); });
    timed("experts", [&] { trip.run_experts(stream); });
    timed("combine", [&] { trip.combine(stream); });
    communicator_.barrier("start of a chain");
    const auto start = Clock::now();
    for (int i = 0; i < TransportCase::kHostChain; ++i) trip.run(nullptr, stream);
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    times.add("round_trip", {}, us_since(start) / TransportCase::kHostChain);
  }

  double download_error() {
    std::vector<std::byte> out(at(out_.bytes()));
    SWITCHYARD_CUDA(cudaMemcpy(out.data(), out_.data, out.size(), cudaMemcpyDeviceToHost));
    return largest_error(expected_, out.data(), out_.dtype);
  }

  /// To other ranks: by dispatch, by combine.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> wire_bytes(const std::string& variant) const {
    const std::int64_t row = c_.shape.hidden * size_of(c_.shape.dtype);
    const bool native = variant == "native";
    const bool by_lists = variant == "reference" || variant == "sorted";
    const std::int64_t meta = native ? 8 * std::int64_t{c_.shape.top_k} : by_lists ? 20 : 8;
    const std::int64_t meta_back = variant == "reference" ? 20 : 0;
    const int self = communicator_.rank();
    std::int64_t there = 0;
    std::int64_t back = 0;
    for (int other = 0; other < communicator_.size(); ++other) {
      if (other == self) continue;
      there += native ? data_.rows(self, other) : data_.assignments(self, other);
      back += native ? data_.rows(other, self) : data_.assignments(other, self);
    }
    return {there * (row + meta), back * (row + meta_back)};
  }

  const TransportCase& c_;
  const TransportData& data_;
  Communicator& communicator_;
  std::vector<float> expected_;
  DeviceBuffer x_, expert_, weight_, out_memory_;
  TransportInput input_{};
  RawMatrix out_{};
};

}  // namespace

nlohmann::json run_device_variants(const TransportCase& c, const TransportData& data,
                                   Communicator& communicator) {
  Rank rank(c, data, communicator);
  nlohmann::json all = nlohmann::json::array();
  for (const std::string& variant : c.variants) all.push_back(rank.run(variant));
  communicator.barrier("end of a case");
  return all;
}

}  // namespace switchyard::bench
