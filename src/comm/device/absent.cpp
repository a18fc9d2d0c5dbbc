// In a build without CUDA the exchange between GPUs is an error by name, not a missing symbol.
#include "core/check.hpp"
#include "switchyard/device_expert_parallel.hpp"

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
DeviceReceived DeviceExpertParallel::dispatch(const DispatchArgs& /*args*/,
                                              const DeviceExpertLists& /*lists*/) {
  refuse();
}
void DeviceExpertParallel::combine(const ReturnArgs& /*args*/,
                                   Vector<const std::int32_t> /*partial_row*/) {
  refuse();
}
void DeviceExpertParallel::combine_rows(const ReturnArgs& /*args*/,
                                        const DeviceExpertLists& /*lists*/) {
  refuse();
}
bool DeviceExpertParallel::makes_lists() const { refuse(); }
void DeviceExpertParallel::check() const { refuse(); }
void DeviceExpertParallel::recover() { refuse(); }
RawMatrix DeviceExpertParallel::place_of_partials() const { refuse(); }
Subtree DeviceExpertParallel::subtree() const { refuse(); }
ExchangeMode DeviceExpertParallel::mode() const { refuse(); }
DeviceEngine DeviceExpertParallel::engine() const { refuse(); }
int DeviceExpertParallel::ctas() const { refuse(); }
int DeviceExpertParallel::ranks_on_device() const { refuse(); }
Traffic DeviceExpertParallel::traffic(const std::int64_t* /*counts*/) const { refuse(); }

}  // namespace switchyard
