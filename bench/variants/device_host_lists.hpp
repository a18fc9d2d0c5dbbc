#pragma once

// The two lowest steps of the published ladder between GPUs, to be measured beside the others: the
// host reads the ids, makes the lists and waits; rows move by copies from GPU to GPU.

#include <cstdint>
#include <memory>

#include "interfaces/transport.hpp"
#include "switchyard/device_dispatch.hpp"

namespace switchyard {

enum class HostLists {
  kReference,  ///< Lists per destination, a row at a time, meta there and back.
  kSorted,     ///< One sort by expert, rows gathered by kernels, meta there alone.
};

class DeviceHostLists {
 public:
  /// Collective. `options`: device and engine. @throws As DeviceExpertParallel.
  DeviceHostLists(Communicator& communicator, const TransportConfig& config, HostLists lists,
                  const DeviceExchangeOptions& options);
  /// Collective.
  ~DeviceHostLists();
  DeviceHostLists(const DeviceHostLists&) = delete;
  DeviceHostLists& operator=(const DeviceHostLists&) = delete;

  /// Collective; `input` on the device. The rows of this rank's experts in the order expert, source
  /// rank, token, k; valid until the next dispatch. Waits for the stream: cannot be captured.
  /// @throws Error{kInvalidArgument}: an id out of range; {kTimeout}.
  ConstRawMatrix dispatch(const TransportInput& input, void* stream);
  /// Collective, once after each dispatch. @param rows  In the order of dispatch, unweighted.
  void combine(ConstRawMatrix rows, RawMatrix out, void* stream);
  /// Bytes that this rank has sent to others: by the last dispatch, by the last combine.
  [[nodiscard]] std::int64_t bytes_there() const;
  [[nodiscard]] std::int64_t bytes_back() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
