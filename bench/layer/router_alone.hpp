#pragma once

#include "bench/measure/stage_memory.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {

/// The router by itself: its time counts although the routing that is worked with is a given one.
class RouterAlone {
 public:
  /// @param tokens  [T, H] where the backend reads them; model and tokens must outlive the object.
  RouterAlone(const LayerModel& model, ConstRawMatrix tokens, Backend backend, int num_threads);

  /// Stages "router_gemm" and "select".
  void run(StageRecorder* recorder, void* stream);

 private:
  void run_gemm();
  void run_select();

  const RouterConfig& config_;
  ConstRawMatrix tokens_;
  ThreadPool pool_;
  StageMemory memory_;
  Execution execution_;
  ConstRawMatrix gate_;
  Vector<const float> router_bias_, selection_bias_;
  Matrix<float> logits_;
  Routing routing_;
};

}  // namespace switchyard::bench
