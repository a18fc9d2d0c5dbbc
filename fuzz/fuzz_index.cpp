// Any index of shards is either refused, or names tensors that the shard beside it has.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "checkpoint/tensor_set.hpp"
#include "fuzz/scratch_folder.hpp"
#include "switchyard/error.hpp"

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::TensorSet;

namespace {

/// One shard with the tensors "a" and "b", each one byte.
void write_shard() {
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})";
  std::string shard(8, '\0');
  shard[0] = static_cast<char>(header.size());
  shard += header + "xy";
  switchyard::fuzz::write_scratch("s", reinterpret_cast<const std::uint8_t*>(shard.data()),
                                  shard.size());
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  write_shard();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  switchyard::fuzz::write_scratch("model.safetensors.index.json", data, size);
  try {
    const auto tensors = TensorSet::open(switchyard::fuzz::scratch_folder());
    for (const char* name : {"a", "b"}) {
      const auto* found = tensors->find(name);
      if (found != nullptr && (found->bytes.size() != 1 || found->spec.name != name)) std::abort();
    }
    if (tensors->find("c") != nullptr) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadFile && error.code() != ErrorCode::kIo) std::abort();
  }
  return 0;
}
