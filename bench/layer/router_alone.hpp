#pragma once

#include "bench/measure/stage_memory.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {

/// The router by itself, of a chain that of its first iteration: its time counts although the
/// routing that is worked with is a given one.
class RouterAlone {
 public:
  /// @param tokens   [T, H] where the backend reads them; model and tokens must outlive the object.
  /// @param request  What the router draws upon; token ids are on the host.
  RouterAlone(const LayerModel& model, ConstRawMatrix tokens, Backend backend, int num_threads,
              const RouteRequest& request = {});

  /// Stages "router_gemm", "noise" and "select"; of those the ones that the router has.
  void run(StageRecorder* recorder, void* stream);

 private:
  [[nodiscard]] bool draws(RouterNoise::Kind kind) const;
  void run_jitter();
  void run_gemm();
  void run_noise();
  void run_select();

  const RouterConfig& config_;
  ConstRawMatrix tokens_;
  RouteRequest request_;
  ThreadPool pool_;
  StageMemory memory_;
  Execution execution_;
  ConstRawMatrix gate_;
  Vector<const float> router_bias_, selection_bias_;
  Matrix<float> jittered_;
  ConstRawMatrix seen_;  ///< What the gate is multiplied with.
  Matrix<float> logits_, noise_logits_;
  Routing routing_;
};

}  // namespace switchyard::bench
