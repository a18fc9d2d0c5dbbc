#pragma once

#include <cstdint>
#include <memory>

#include "bench/variants/fixed_size.hpp"
#include "switchyard/device_dispatch.hpp"

namespace switchyard {

/// FixedSizeExchange between GPUs: each rank pushes its M rows for a peer, zeros after its own,
/// into that peer's window, in one launch. Calls only enqueue and may be captured in a graph; waits
/// have a deadline.
class DeviceFixedSize {
 public:
  /// Collective, on `options.device`, which becomes the current one; `mode` and `one_place` are
  /// not looked at. The routing is copied. @throws As DeviceExpertParallel.
  DeviceFixedSize(Communicator& communicator, const FixedSizeRouting& routing, std::int64_t hidden,
                  DType dtype, const DeviceExchangeOptions& options);
  ~DeviceFixedSize();
  DeviceFixedSize(const DeviceFixedSize&) = delete;
  DeviceFixedSize& operator=(const DeviceFixedSize&) = delete;

  /// `x` [T, H] on the device. The two places take turns.
  void exchange(ConstRawMatrix x, void* stream);
  /// What the last exchange that has run has left: row j from rank s is row s * M + j, valid until
  /// the next one begins. Waits for the device.
  [[nodiscard]] ConstRawMatrix received() const;
  /// After the stream has been waited for. @throws Error{kTimeout}.
  void check() const;
  /// Bytes to other ranks in one exchange: (R - 1) * M * H * size.
  [[nodiscard]] std::int64_t wire_bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
