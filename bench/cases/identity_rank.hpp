#pragma once

#include <memory>

#include "bench/cases/cases.hpp"
#include "bench/cases/synthetic.hpp"
#include "bench/layer/router_alone.hpp"
#include "bench/measure/stage_memory.hpp"
#include "switchyard/dispatch.hpp"

namespace switchyard::bench {

/// The data of all ranks of a layer whose experts give back what they get.
struct IdentityProblem {
  const LayerCase& c;
  LayerModel model;
  std::vector<std::byte> tokens;
  SyntheticRouting routing;
  std::vector<std::byte> out;
};

/// The flow of one rank without experts, on its backend. Buffers are made in the first run: the
/// routing stays, so every run needs the same.
class IdentityRank {
 public:
  /// @param communicator  Null: one rank. It and the problem must outlive the object.
  IdentityRank(IdentityProblem& problem, Communicator* communicator, int num_threads);

  /// Stages "router_gemm", "select", "exchange" (ranks), "plan", "pack" and "combine".
  void run(StageRecorder* recorder, void* stream);
  /// Pack and combine by themselves, once run() has made the plan; one rank.
  void run_pair(void* stream);
  /// The output to the problem's; waits for it.
  void fetch() const;

 private:
  void use(StageRecorder* recorder, void* stream);
  void make_exchange(Communicator& communicator);
  void make_plan(const Received& received);
  void reserve_plan(const Received& received, std::int32_t local);
  void reserve_rows(ConstRawMatrix x);
  void pack_and_combine(ConstRawMatrix x);
  [[nodiscard]] std::int64_t fullest(Matrix<const std::int32_t> ids) const;

  const LayerCase& c_;
  Backend backend_;
  ThreadPool pool_;
  StageMemory memory_;
  Execution execution_;
  int num_ranks_;
  int rank_;
  std::int64_t begin_;
  std::int64_t end_;
  ConstRawMatrix x_;
  std::byte* host_out_ = nullptr;
  RawMatrix out_;
  Matrix<const std::int32_t> host_expert_, expert_;
  Matrix<const float> weight_;
  Subtree subtree_;
  std::unique_ptr<RouterAlone> router_;
  std::unique_ptr<ExpertParallel> exchange_;
  PlanView view_;
  std::int64_t padded_rows_ = 0, used_rows_ = 0;
  RawMatrix packed_, sums_;
};

}  // namespace switchyard::bench
