#pragma once

// Dense tensors of a whole model, each read once, and which of a layer nobody has read.

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/tensor_set.hpp"
#include "models/cpu/linear.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

/// y = x W^T + b.
class Projection {
 public:
  Projection(std::int64_t in, std::int64_t out) : linear_(in, out) {}
  /// @param weights  [out, in]. @param bias  [out], or none.
  void pack(const std::vector<float>& weights, std::vector<float> bias, ThreadPool* pool);
  void forward(const float* x, std::int64_t rows, float* y, ThreadPool* pool) const;
  [[nodiscard]] std::int64_t in() const { return linear_.in(); }
  [[nodiscard]] std::int64_t out() const { return linear_.out(); }

 private:
  Linear linear_;
  std::vector<float> bias_;
};

class DenseTensors {
 public:
  DenseTensors(std::shared_ptr<const TensorSet> tensors, ThreadPool* pool)
      : tensors_(std::move(tensors)), pool_(pool) {}

  [[nodiscard]] const TensorSet& all() const { return *tensors_; }
  /// @throws Error{kBadFile}: missing, of another shape or dtype than f32, bf16 or f16.
  [[nodiscard]] std::vector<float> vector(const std::string& name, std::int64_t size);
  /// Rows of several matrices [rows, in], one after the other, as one projection.
  struct Part {
    std::string name{};  ///< Before ".weight" and ".bias".
    std::int64_t rows = 0;
  };
  [[nodiscard]] Projection projection(const std::vector<Part>& parts, std::int64_t in, bool bias);
  /// @throws Error{kBadFile}: a tensor whose name begins so was not read, and begins with none of
  ///         `others`.
  void refuse_unread(const std::string& prefix, const std::vector<std::string>& others) const;

 private:
  std::shared_ptr<const TensorSet> tensors_;
  ThreadPool* pool_;
  std::set<std::string> read_;
};

}  // namespace switchyard::models
