#pragma once

// The experts stage by itself on made-up weights, tokens and routing.

#include <memory>
#include <vector>

#include "bench/cases/cases.hpp"
#include "bench/cases/synthetic.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {

/// Weights cut from a pool of random values: fast to make, however many.
class PoolSource final : public ExpertSource {
 public:
  PoolSource(const ExpertConfig& config, DType dtype, std::uint64_t seed);
  [[nodiscard]] DType dtype() const override { return dtype_; }
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override;
  void read_bias(std::int32_t, ExpertPart, float*) const override {}

 private:
  static constexpr std::int64_t kPool = 1 << 20;
  ExpertConfig config_;
  DType dtype_;
  std::vector<float> values_;
};

/// experts() with the fused combine.
class ExpertsAlone {
 public:
  ExpertsAlone(const LayerCase& c, const ExpertSource& source, WeightFormat weights,
               ThreadPool& pool);

  [[nodiscard]] Matrix<const std::int32_t> expert() const {
    return {routing_.expert.data(), {x_.rows, num_assignments() / x_.rows}};
  }
  [[nodiscard]] Matrix<const float> weight() const {
    return {routing_.weight.data(), {x_.rows, num_assignments() / x_.rows}};
  }
  [[nodiscard]] const ConstRawMatrix& tokens() const { return x_; }
  [[nodiscard]] std::int64_t num_assignments() const {
    return static_cast<std::int64_t>(routing_.expert.size());
  }
  [[nodiscard]] std::int64_t hit() const;  ///< Experts with a row.
  [[nodiscard]] double weight_bytes() const {
    return weights_->bytes_per_expert() * static_cast<double>(hit());
  }
  [[nodiscard]] const std::vector<float>& out() const { return out_; }

  void run(StageRecorder* recorder);

 private:
  ExpertConfig config_;
  ThreadPool& pool_;
  std::vector<std::byte> tokens_;
  SyntheticRouting routing_;
  std::unique_ptr<ExpertWeights> weights_;
  ConstRawMatrix x_;
  Plan plan_;
  PlanView view_;
  std::vector<float> out_;
};

}  // namespace switchyard::bench
