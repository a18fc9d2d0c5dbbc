#pragma once

// A model's tensors on a GPU: values, gradients and moments in f32, and copies of the values in the
// compute type where that is bf16. Places are the host's but for gaps, which are zero: each tensor
// begins at a multiple of 128 numbers, keys' and values' matrices right behind the queries'.

#include <vector>

#include "core/gpu/dense/products.hpp"
#include "core/gpu/device_buffer.hpp"
#include "models/gpu/stages.hpp"
#include "models/parameters.hpp"
#include "switchyard/models/optimizer.hpp"

namespace switchyard::models::gpu {

class DeviceParameters {
 public:
  DeviceParameters(const ModelConfig& config, const Parameters& host, bool bf16);

  [[nodiscard]] const Parameters& host() const { return *host_; }
  /// Null for -1.
  [[nodiscard]] float* value(std::int64_t index) const { return at(values_, index); }
  [[nodiscard]] float* gradient(std::int64_t index) const { return at(gradients_, index); }
  /// As products take it.
  [[nodiscard]] Dense typed(std::int64_t index) const;
  [[nodiscard]] Dense dense_gradient(std::int64_t index) const { return {gradient(index), false}; }
  [[nodiscard]] float* buffer(std::int64_t index) const;

  void upload_values(cudaStream_t stream) const;
  void download_values(cudaStream_t stream) const;
  void download_gradients(cudaStream_t stream) const;
  void upload_moments(AdamW& optimizer, cudaStream_t stream);
  void download_moments(AdamW& optimizer, cudaStream_t stream) const;
  /// Whether there are moments.
  [[nodiscard]] bool trains() const { return m_.bytes() > 0; }
  /// The optimiser's step; moments are there.
  void step(const StepInputs* inputs, StepFactors* factors, cudaStream_t stream) const;

 private:
  [[nodiscard]] float* at(const DeviceBuffer& buffer, std::int64_t index) const;
  void copy(const DeviceBuffer& device, const std::vector<float*>& host, bool to_device,
            cudaStream_t stream) const;
  [[nodiscard]] std::vector<float*> host_places(bool gradients) const;
  void copy_buffers(bool to_device, cudaStream_t stream) const;
  void copy_moments(AdamW& optimizer, bool to_device, cudaStream_t stream) const;
  void make_pieces();

  const Parameters* host_;
  bool bf16_;
  std::vector<std::int64_t> offsets_, buffer_offsets_;
  std::int64_t size_ = 0;
  std::int64_t num_pieces_ = 0;
  DeviceBuffer values_, gradients_, typed_, m_, v_, buffers_, pieces_, sums_;
};

}  // namespace switchyard::models::gpu
