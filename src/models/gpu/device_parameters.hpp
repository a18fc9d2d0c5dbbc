#pragma once

// A model's tensors on a GPU: values, gradients and moments in f32. Where products take bf16, the
// values of what nothing but products reads are split (split_floats()): the bf16 number that the
// products take, and the 16 bits that the optimiser wants besides; the others, an embedding, norms
// and gates, are f32 with a copy in bf16. Places are in the host's order but for gaps, which are
// zero: each tensor begins at a multiple of 128 numbers, keys' and values' matrices right behind
// the queries'. Over ranks what they add up once a step comes first, then what they tell each other
// with it (RankTotalsArgs), then the rest.

#include <optional>
#include <vector>

#include "core/gpu/dense/products.hpp"
#include "core/gpu/device_buffer.hpp"
#include "models/gpu/stages.hpp"
#include "models/gpu/step_sums.hpp"
#include "models/parameters.hpp"
#include "switchyard/models/optimizer.hpp"

namespace switchyard::models::gpu {

[[nodiscard]] inline float* floats(const DeviceBuffer& buffer) {
  return reinterpret_cast<float*>(buffer.data());
}

class DeviceParameters {
 public:
  /// @param ranks  Null: one rank. Else collective.
  DeviceParameters(const ModelConfig& config, const Parameters& host, bool bf16,
                   Communicator* ranks = nullptr);

  [[nodiscard]] const Parameters& host() const { return *host_; }
  /// Null for -1. Of a tensor that is not split.
  [[nodiscard]] float* value(std::int64_t index) const;
  [[nodiscard]] float* gradient(std::int64_t index) const { return at(gradients_, index); }
  /// Over ranks: whether some share a GPU, where no graph may hold what they wait for.
  [[nodiscard]] bool shares_gpu() const {
    return sums_over_ranks_ && sums_over_ranks_->shares_gpu();
  }
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
  [[nodiscard]] bool trains() const { return has_moments_; }
  /// What selection biases go by: [layers] of [experts] counts, `stride` numbers apart.
  struct Counts {
    const std::int64_t* data = nullptr;  ///< Null: not wanted.
    std::int64_t stride = 0;
  };
  /// The optimiser's step; moments are there. Over ranks gradients are added up before.
  /// @returns The counts of all ranks.
  Counts step(const StepInputs* inputs, StepFactors* factors, const Counts& counts,
              cudaStream_t stream);
  /// Waits for nothing; throws what ranks have waited for in vain.
  void check() const {
    if (sums_over_ranks_) sums_over_ranks_->check();
  }

 private:
  /// @returns How many numbers ranks add up; 0 of one.
  std::int64_t place(const ModelConfig& config);
  /// Null for -1.
  [[nodiscard]] float* at(float* first, std::int64_t index) const;
  [[nodiscard]] bool is_split(std::size_t index) const { return value_offsets_[index] < 0; }
  /// @returns How many numbers are not split, with gaps.
  std::int64_t place_values(const ModelConfig& config);
  void upload_value(std::size_t index, cudaStream_t stream) const;
  void download_value(std::size_t index, cudaStream_t stream) const;
  [[nodiscard]] std::uint16_t* low() const { return reinterpret_cast<std::uint16_t*>(low_.data()); }
  void copy(float* device, const std::vector<float*>& host, bool to_device,
            cudaStream_t stream) const;
  Counts add_up(const Counts& counts, cudaStream_t stream);
  void copy_buffers(bool to_device, cudaStream_t stream) const;
  void copy_moments(AdamW& optimizer, bool to_device, cudaStream_t stream) const;
  void make_pieces();

  const Parameters* host_;
  bool bf16_;
  int rank_ = 0, num_ranks_ = 1;
  std::int64_t layers_, experts_;
  std::vector<std::int64_t> offsets_, buffer_offsets_;
  std::vector<std::int64_t> value_offsets_;  ///< In values_; -1: split.
  std::int64_t size_ = 0;
  std::int64_t totals_ = 0;  ///< Where what ranks tell each other begins.
  std::int64_t num_pieces_ = 0;
  std::int64_t num_alike_ = 0;  ///< Of these, the first ones: what all ranks have.
  DeviceBuffer values_, typed_, low_, m_, v_, buffers_, pieces_, sums_, counts_;
  DeviceBuffer staging_;                       ///< [kStaged] floats on their way, of what is split.
  DeviceBuffer own_gradients_;                 ///< Of one rank;
  std::optional<StepSums> sums_over_ranks_{};  ///< else they lie here.
  float* gradients_ = nullptr;
  bool has_moments_ = false;
};

}  // namespace switchyard::models::gpu
