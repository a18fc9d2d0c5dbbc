// In a build without CUDA the interfaces between GPUs are errors by name, not missing symbols.
#include "core/check.hpp"
#include "interfaces/device_transports.hpp"

namespace switchyard {
namespace {

[[noreturn]] void refuse() {
  fail(ErrorCode::kUnsupported, "the exchange between GPUs: this library is built without CUDA");
}

}  // namespace

std::unique_ptr<DeviceNative> make_device_native(Communicator& /*communicator*/,
                                                 const DeviceNativeConfig& /*config*/) {
  refuse();
}
std::unique_ptr<DeviceAssignments> make_device_assignments(Communicator& /*communicator*/,
                                                           const TransportConfig& /*config*/,
                                                           DeviceExchangeOptions /*options*/) {
  refuse();
}

}  // namespace switchyard
