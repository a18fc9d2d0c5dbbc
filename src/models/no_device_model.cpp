// In a build without CUDA a model on a GPU is an error by name.
#include "core/check.hpp"
#include "models/device_model.hpp"

namespace switchyard::models {

std::unique_ptr<DeviceModel> make_device_model(const ModelConfig& /*config*/,
                                               const ModelOptions& /*options*/,
                                               const Parameters& /*parameters*/) {
  fail(ErrorCode::kUnsupported, "a model on a GPU: this library is built without CUDA");
}

}  // namespace switchyard::models
