#pragma once

// The peer of the CPU experts: a loop over the experts with oneDNN's products, as fast as it can
// fairly be made. Weights are packed and primitives made in the constructor, which tries the
// layouts that oneDNN has for weights and keeps the fastest.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::bench {

struct OnednnLoopArgs {
  ExpertConfig config{};  ///< Gated silu without biases.
  const ExpertSource* source = nullptr;
  ConstRawMatrix tokens{};              ///< [T, H] f32 or bf16: the compute type. Must live on.
  Matrix<const std::int32_t> expert{};  ///< [T, K].
  Matrix<const float> weight{};         ///< [T, K].
  int num_threads = 1;
};

class OnednnLoop {
 public:
  /// Why this build, this CPU or this layer cannot have the peer; nothing if it can.
  [[nodiscard]] static std::optional<std::string> unavailable(const ExpertConfig& config,
                                                              DType dtype);
  /// "2.6.3", or empty.
  [[nodiscard]] static std::string version();

  /// Limits oneDNN to the instruction set that is forced, if one is and nothing has run in it
  /// before.
  explicit OnednnLoop(const OnednnLoopArgs& args);
  ~OnednnLoop();
  OnednnLoop(OnednnLoop&&) noexcept;
  OnednnLoop& operator=(OnednnLoop&&) noexcept;

  /// The experts' weighted sums. Its threads spin for some milliseconds afterwards: wait before
  /// timing something else.
  void run();
  [[nodiscard]] const std::vector<float>& out() const;  ///< [T, H] of the last run.

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard::bench
