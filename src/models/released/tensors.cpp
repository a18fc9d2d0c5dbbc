#include "models/released/tensors.hpp"

#include <algorithm>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "core/row_ops.hpp"

namespace switchyard::models {

void Projection::pack(const std::vector<float>& weights, std::vector<float> bias,
                      ThreadPool* pool) {
  linear_.pack(weights.data(), pool);
  bias_ = std::move(bias);
}

void Projection::forward(const float* x, std::int64_t rows, float* y, ThreadPool* pool) const {
  linear_.forward(x, rows, y, false, pool);
  if (bias_.empty()) return;
  for (std::int64_t row = 0; row < rows; ++row) row_ops::add(bias_.data(), y + row * out(), out());
}

std::vector<float> DenseTensors::vector(const std::string& name, std::int64_t size) {
  std::vector<float> values = tensors_->floats(name, {size});
  read_.insert(name);
  return values;
}

Projection DenseTensors::projection(const std::vector<Part>& parts, std::int64_t in, bool bias) {
  std::vector<float> weights, biases;
  std::int64_t out = 0;
  for (const Part& part : parts) {
    const std::string name = part.name + ".weight";
    const std::vector<float> rows = tensors_->floats(name, {part.rows, in});
    read_.insert(name);
    weights.insert(weights.end(), rows.begin(), rows.end());
    out += part.rows;
    if (!bias) continue;
    const std::vector<float> more = vector(part.name + ".bias", part.rows);
    biases.insert(biases.end(), more.begin(), more.end());
  }
  Projection projection(in, out);
  projection.pack(weights, std::move(biases), pool_);
  return projection;
}

void DenseTensors::refuse_unread(const std::string& prefix,
                                 const std::vector<std::string>& others) const {
  for (const std::string_view name : tensors_->names()) {
    if (!name.starts_with(prefix) || read_.count(std::string(name)) > 0) continue;
    const bool known = std::any_of(others.begin(), others.end(), [&](const std::string& other) {
      return name.starts_with(other);
    });
    // Old files have what follows from the configuration.
    require_file(known || name.ends_with("rotary_emb.inv_freq"), tensors_->name(),
                 "tensor '{}' is none of this family's: the model would compute something else",
                 name);
  }
}

}  // namespace switchyard::models
