#pragma once

#include <memory>
#include <vector>

#include "capi/capi.hpp"
#include "interfaces/device_transports.hpp"
#include "interfaces/transports.hpp"
#include "layer/cpu/buffers.hpp"
#include "switchyard/dispatch.hpp"

/// Dispatch and combine by all three interfaces, on the CPU and on a GPU; what is not made with the
/// handle is made by the first dispatch that needs it, on all ranks.
struct sy_ep_t {
  explicit sy_ep_t(const sy_communicator_t& communicator)
      : ranks(communicator.communicator.get()),
        calls("the exchange",
              ranks->size() > 1 ? switchyard::capi::StaysBehind::kRanks
                                : switchyard::capi::StaysBehind::kNothing,
              communicator.calls.lock()) {}

  switchyard::ExpertParallelConfig config;
  std::int32_t dtype_code = SY_F32;  // config.dtype
  double capacity_factor = 0;
  switchyard::DropPolicy drop_policy = switchyard::DropPolicy::kToken;
  switchyard::Communicator* ranks;
  switchyard::capi::Calls calls;
  std::int32_t device_type = SY_DEVICE_CPU;          // 0: that of the first dispatch
  int device = -1;                                   // CUDA
  switchyard::DeviceExchangeOptions device_options;  // CUDA
  std::int32_t first_expert = 0;
  std::int32_t num_local = 0;
  std::int64_t num_tokens = 0;   // of the last dispatch
  std::uint64_t dispatches = 0;  // native

  // On the CPU.
  std::unique_ptr<switchyard::ExpertParallel> exchange;
  switchyard::Received received{};
  switchyard::Plan plans[2];  // in turns, as the rows that they are of
  switchyard::RawBuffer sums;
  std::vector<std::uint8_t> kept;
  std::vector<std::int64_t> counts;
  std::unique_ptr<switchyard::FlatTransport> flat;
  std::unique_ptr<switchyard::BucketedTransport> bucketed;
  std::int64_t capacity = 0;  // of the buckets, on either

  // On a GPU.
  std::unique_ptr<switchyard::DeviceNative> native;
  std::unique_ptr<switchyard::DeviceAssignments> assignments;
  std::int64_t max_assignments = 0;  // of the last native dispatch

  /// Of the last dispatch.
  [[nodiscard]] switchyard::Plan& plan() { return plans[dispatches % 2]; }
  /// Where `x` lies. @throws Error{kInvalidArgument}: not where the handle works.
  [[nodiscard]] switchyard::Backend backend_for(const char* name, const sy_tensor* x);
  /// That all `tensors` which are given lie on the handle's GPU.
  void check_device(std::initializer_list<const sy_tensor*> tensors) const;
};

namespace switchyard::capi {

/// A dispatch's input, checked. @param dtype  Only this one, where given.
[[nodiscard]] TransportInput exchange_input(sy_ep_t& ep, const sy_tensor* x,
                                            const sy_tensor* expert, const sy_tensor* weight,
                                            Backend backend);
/// Makes what a handle needs on its GPU. Collective.
void make_native(sy_ep_t& ep);

// In capi_ep_device.cpp.
// What dispatches give leaves struct_size open, the native one its number too.
[[nodiscard]] sy_received device_dispatch(sy_ep_t& ep, const TransportInput& input, void* stream);
void device_combine(sy_ep_t& ep, const sy_tensor* rows, const sy_tensor* y, void* stream);
[[nodiscard]] sy_flat device_dispatch_flat(sy_ep_t& ep, const TransportInput& input, void* stream);
void device_combine_flat(sy_ep_t& ep, const sy_tensor* rows, const sy_tensor* weight,
                         const sy_tensor* y, void* stream);
[[nodiscard]] sy_bucketed device_dispatch_bucketed(sy_ep_t& ep, const TransportInput& input,
                                                   std::int64_t capacity, void* stream);
void device_combine_bucketed(sy_ep_t& ep, const sy_tensor* rows, const sy_tensor* weight,
                             const sy_tensor* y, void* stream);

}  // namespace switchyard::capi
