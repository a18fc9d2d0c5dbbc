#pragma once

#include <memory>
#include <string>

#include "bench/exchange/device_stand_in.hpp"
#include "bench/exchange/transport_run.hpp"
#include "bench/measure/stage_times.hpp"
#include "core/gpu/device_buffer.hpp"
#include "interfaces/transport.hpp"
#include "switchyard/device_dispatch.hpp"

namespace switchyard::bench {

/// A variant's dispatch and combine on a GPU with the stand-in between them, on a stream.
class Trip {
 public:
  virtual ~Trip() = default;
  Trip(const Trip&) = delete;
  Trip& operator=(const Trip&) = delete;

  void run(StageRecorder* recorder, void* stream);
  virtual void check() {}
  /// Only enqueues, and may be captured in a graph; else it waits for the stream, too.
  [[nodiscard]] virtual bool only_enqueues() const { return true; }
  /// Rows of a bucket; 0: none.
  [[nodiscard]] virtual std::int64_t capacity() const { return 0; }

  virtual void dispatch(void* stream) = 0;
  void run_experts(void* stream);
  virtual void combine(void* stream) = 0;

 protected:
  Trip(Communicator& communicator, const TransportCase& c, const TransportInput& input,
       RawMatrix out);
  [[nodiscard]] virtual StandIn experts() const = 0;
  void make_results(std::int64_t rows) {
    results_ = results_memory_.matrix(shape_.dtype, rows, shape_.hidden);
  }

  const ExchangeShape& shape_;
  const TransportInput input_;
  const RawMatrix out_;
  const float factor_;
  DeviceExchangeOptions options_;
  DeviceBuffer results_memory_;
  RawMatrix results_{};
};

/// Collective; `c` has to live as long. "reference", "sorted", "flat", "bucketed", "native".
[[nodiscard]] std::unique_ptr<Trip> make_trip(const std::string& variant,
                                              Communicator& communicator, const TransportCase& c,
                                              const TransportInput& input, RawMatrix out);

}  // namespace switchyard::bench
