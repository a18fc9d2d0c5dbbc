// In a build without NCCL it is an error by name.
#include "comm/nccl/nccl.hpp"
#include "comm/nccl/pairs/pairs.hpp"
#include "comm/nccl/windows/windows.hpp"
#include "core/check.hpp"

namespace switchyard {

std::string nccl_missing() { return "built without NCCL"; }
std::string nccl_windows_missing() { return nccl_missing(); }
std::string nccl_description() { return ""; }

struct NcclWindows::State {};

NcclWindows::NcclWindows(Communicator& /*communicator*/, std::size_t /*bytes*/) {
  fail(ErrorCode::kUnsupported, "engine nccl: {}", nccl_missing());
}
NcclWindows::~NcclWindows() = default;
void NcclWindows::keep() {}
std::byte* NcclWindows::part(int /*rank*/) const { return nullptr; }
void NcclWindows::check() const {}

struct NcclPairs::State {};

NcclPairs::NcclPairs(Communicator& /*communicator*/) {
  fail(ErrorCode::kUnsupported, "engine nccl: {}", nccl_missing());
}
NcclPairs::~NcclPairs() = default;
void NcclPairs::exchange(std::span<const RankBytes> /*sends*/,
                         std::span<const RankBytes> /*receives*/, void* /*stream*/) {}
void NcclPairs::check() const {}
void NcclPairs::keep() {}
void NcclPairs::abort() noexcept {}

}  // namespace switchyard
