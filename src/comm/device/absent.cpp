// In a build without CUDA the exchange between GPUs is an error by name, not a missing symbol.
#include "core/check.hpp"
#include "switchyard/device_dispatch.hpp"

namespace switchyard {
namespace {

[[noreturn]] void refuse() {
  fail(ErrorCode::kUnsupported, "the exchange between GPUs: this library is built without CUDA");
}

}  // namespace

struct DeviceExpertParallel::State {};

DeviceExpertParallel::DeviceExpertParallel(Communicator& /*communicator*/,
                                           const ExpertParallelConfig& /*config*/,
                                           const DeviceExchangeOptions& /*options*/) {
  refuse();
}
DeviceExpertParallel::~DeviceExpertParallel() = default;
DeviceExpertParallel::DeviceExpertParallel(DeviceExpertParallel&&) noexcept = default;
DeviceExpertParallel& DeviceExpertParallel::operator=(DeviceExpertParallel&&) noexcept = default;
DeviceReceived DeviceExpertParallel::dispatch(const DispatchArgs& /*args*/) { refuse(); }
void DeviceExpertParallel::combine(const ReturnArgs& /*args*/) { refuse(); }
void DeviceExpertParallel::check() const { refuse(); }
void DeviceExpertParallel::recover() { refuse(); }
const Topology& DeviceExpertParallel::topology() const { refuse(); }
Subtree DeviceExpertParallel::subtree() const { refuse(); }
ExchangeMode DeviceExpertParallel::mode() const { refuse(); }
DeviceEngine DeviceExpertParallel::engine() const { refuse(); }
int DeviceExpertParallel::ctas() const { refuse(); }
int DeviceExpertParallel::ranks_on_device() const { refuse(); }
Traffic DeviceExpertParallel::traffic(const std::int64_t* /*counts*/) const { refuse(); }

}  // namespace switchyard
