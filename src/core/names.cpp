// The one spelling of every enumerator that the tool, the results and the errors print.
#include "switchyard/comm.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kF8E4M3: return "fp8";
    case DType::kF64: return "f64";
    case DType::kI64: return "i64";
    case DType::kI32: return "i32";
    case DType::kU8: return "u8";
  }
  return "unknown";
}

const char* to_string(Backend backend) noexcept {
  return backend == Backend::kCpu ? "cpu" : "cuda";
}

const char* to_string(DeviceEngine engine) noexcept {
  switch (engine) {
    case DeviceEngine::kAuto: return "auto";
    case DeviceEngine::kPeer: return "peer";
    case DeviceEngine::kNccl: return "nccl";
    case DeviceEngine::kNcclPairs: return "nccl-pairs";
  }
  return "unknown";
}

const char* to_string(Activation activation) noexcept {
  switch (activation) {
    case Activation::kSilu: return "silu";
    case Activation::kGelu: return "gelu";
    case Activation::kGeluTanh: return "gelu_tanh";
    case Activation::kRelu: return "relu";
    case Activation::kRelu2: return "relu2";
    case Activation::kClampedSwiglu: return "clamped_swiglu";
  }
  return "unknown";
}

}  // namespace switchyard
