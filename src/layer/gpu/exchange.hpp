#pragma once

#include <cuda_runtime_api.h>

#include "comm/device/device_exchange.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// What a layer over ranks on GPUs adds to a layer on one: the way of its tokens to the experts'
/// ranks and of the sums home, and the checks that ranks which wait for each other can go on.
class CudaExchange {
 public:
  /// Collective, on the calling thread's current device.
  /// @throws As DeviceExpertParallel; Error{kUnsupported}: ranks share a device, and one might wait
  /// for room, or for a kernel to be loaded, until another has ended.
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
  [[nodiscard]] Traffic traffic(const std::int64_t* counts) const {
    return exchange_.traffic(counts);
  }

 private:
  /// Where ranks share a device, waits for the stream (unless it is captured): a kernel that waits
  /// for other ranks then has nothing queued before or behind it, which with many ranks could keep
  /// the kernel of another from being started.
  void settle(const Execution& execution) const;

  int device_;
  cudaStream_t own_stream_ = nullptr;
  DeviceExchange exchange_;
};

}  // namespace switchyard
