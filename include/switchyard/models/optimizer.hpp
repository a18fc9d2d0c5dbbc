#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/models/model.hpp"

namespace switchyard::models {

/// How the learning rate goes over a run.
struct Schedule {
  enum class Kind : std::uint8_t {
    kConstant,  ///< The peak.
    kCosine,    ///< Half a cosine from the peak to final_share of it. Loshchilov and Hutter 2016
                ///< (arXiv:1608.03983).
    kWsd,       ///< The peak, then straight down to final_share of it over the last `decay` steps:
                ///< warm-up, stable, decay. MiniCPM (arXiv:2404.06395) section 4.
  };
  Kind kind = Kind::kCosine;
  double peak = 1e-3;
  std::int64_t warmup = 0;  ///< Steps in which it rises in a straight line: (step + 1) / warmup.
  std::int64_t steps = 1;   ///< Of the whole run.
  std::int64_t decay = 0;   ///< kWsd; warmup + decay <= steps.
  double final_share = 0.1;
};

/// "constant", "cosine", "wsd".
[[nodiscard]] const char* to_string(Schedule::Kind kind) noexcept;
/// @throws Error{kInvalidArgument} with all names.
[[nodiscard]] Schedule::Kind parse_schedule(std::string_view name);
/// @throws Error{kInvalidArgument} that names the value out of range.
void check(const Schedule& schedule);
/// Of step 0, 1, ...; behind the last step that of the last.
[[nodiscard]] double learning_rate(const Schedule& schedule, std::int64_t step);

struct AdamWConfig {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  ///< Of tensors with ParameterTensor::decay.
  double clip = 1.0;          ///< Largest norm of all gradients together; 0: any.
};

/// @throws Error{kInvalidArgument} that names the value out of range.
void check(const AdamWConfig& config);

/// The square root of the sum of all squares, in double and in an order that sizes alone decide;
/// without those of frozen tensors.
/// NaN or infinity where a gradient is.
[[nodiscard]] double gradient_norm(std::span<const ParameterTensor> tensors,
                                   ThreadPool* pool = nullptr);

/// AdamW: with g clipped, m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, n steps so far,
///   p = p (1 - lr decay) - lr (m / (1 - b1^n)) / (sqrt(v / (1 - b2^n)) + epsilon)
/// in fp32, factors of the step made in double. A frozen tensor is left as it is. Source:
/// Loshchilov and Hutter 2017 (arXiv:1711.05101); as torch.optim.AdamW. Clipping: g times clip /
/// norm where the norm is larger. Every number is computed by itself: no bits depend on threads.
class AdamW {
 public:
  /// Of these tensors, which it keeps the pointers of. Moments begin as zeros.
  /// @throws Error{kInvalidArgument}, {kOutOfMemory}.
  AdamW(std::span<const ParameterTensor> tensors, const AdamWConfig& config);

  /// One step. @returns the norm of the gradients before clipping. Where that is not finite nothing
  /// is changed, and steps() stays: the caller finds the tensor by find_non_finite().
  /// Model::parameters_changed() is the caller's to call.
  /// Cost: reads and writes 28 bytes a parameter, and reads 4 for the norm.
  double step(double learning_rate, ThreadPool* pool = nullptr);
  /// The same where the norm is known: over ranks that of all ranks' gradients.
  /// @param norm  Finite.
  void apply(double learning_rate, double norm, ThreadPool* pool = nullptr);

  [[nodiscard]] std::int64_t steps() const { return steps_; }
  void set_steps(std::int64_t steps) { steps_ = steps; }  ///< After moments were read from a file.
  /// Moments of tensor `index`, of its shape and parts: to be saved, or filled from a file. Empty
  /// of a frozen one, which has none.
  [[nodiscard]] std::span<float> m(std::size_t index);
  [[nodiscard]] std::span<float> v(std::size_t index);
  [[nodiscard]] const AdamWConfig& config() const { return config_; }

 private:
  [[nodiscard]] std::span<float> moments(std::vector<float>& of, std::size_t index) const;

  std::vector<ParameterTensor> tensors_;
  std::vector<std::int64_t> offsets_;
  std::vector<float> m_;
  std::vector<float> v_;
  AdamWConfig config_;
  std::int64_t steps_ = 0;
};

}  // namespace switchyard::models
