#pragma once

#include <cuda_runtime_api.h>

#include "comm/device/device_exchange.hpp"
#include "layer/gpu/shared_gpu.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// What a layer over ranks on GPUs adds to a layer on one: the way of its tokens to the experts'
/// ranks and of the sums home, and the checks that ranks which wait for each other can go on.
class CudaExchange {
 public:
  /// Collective, on the calling thread's current device.
  /// @throws As DeviceExchange and SharedGpu.
  CudaExchange(Communicator& communicator, const LayerConfig& config, const LayerOptions& options,
               DType compute, bool each_group);
  ~CudaExchange();
  CudaExchange(const CudaExchange&) = delete;
  CudaExchange& operator=(const CudaExchange&) = delete;

  /// The call's stream (null: the default one of a GPU that no other rank is on), or this rank's
  /// own where the call has none and all of it is in host memory.
  /// @throws Error{kInvalidArgument}: device memory on a shared GPU without a stream, or another
  /// device is current.
  [[nodiscard]] cudaStream_t stream_for(const ForwardArgs& args) const;
  /// The same of a backward: all of its memory is the device's. It waits for a call on this rank's
  /// own stream. @param last  Stream of the last call.
  [[nodiscard]] cudaStream_t stream_for(const BackwardArgs& args, cudaStream_t last) const;
  /// As DeviceExchange; all three report the stage "exchange".
  [[nodiscard]] DeviceReceived dispatch(ConstRawMatrix tokens, const Routing& routing,
                                        Matrix<const std::uint8_t> kept,
                                        const DeviceExpertLists& lists, const Execution& execution);
  void combine(ConstRawMatrix sums, Matrix<const float> shared, RawMatrix out,
               const Execution& execution);
  void combine_rows(ConstRawMatrix rows, const DeviceExpertLists& lists, Matrix<const float> shared,
                    RawMatrix out, const Execution& execution);
  [[nodiscard]] bool makes_lists() const { return exchange_.makes_lists(); }
  [[nodiscard]] RawMatrix place_of_partials() const { return exchange_.place_of_partials(); }
  void check() const { exchange_.check(); }
  [[nodiscard]] int device() const { return device_; }
  [[nodiscard]] ExchangeMode mode() const { return exchange_.mode(); }
  [[nodiscard]] DeviceEngine engine() const { return exchange_.engine(); }
  /// Of each wait on the device.
  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }
  [[nodiscard]] Traffic traffic(const std::int64_t* counts) const {
    return exchange_.traffic(counts);
  }

 private:
  void require_device() const;
  /// Says how the exchange moves rows: chosen when it was made.
  void tell(const ConstRawMatrix& rows, const Execution& execution) const;
  /// As SharedGpu, if there is one.
  void settle(const Execution& execution) const;

  int device_;
  std::chrono::milliseconds timeout_;
  cudaStream_t own_stream_ = nullptr;
  DeviceExchange exchange_;
  std::unique_ptr<SharedGpu> shared_gpu_;  ///< In tests; null where ranks have GPUs of their own.
};

}  // namespace switchyard
