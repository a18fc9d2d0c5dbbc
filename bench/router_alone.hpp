#pragma once

#include <vector>

#include "switchyard/layer.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {

/// The router by itself: its time counts although the routing that is worked with is a given one.
class RouterAlone {
 public:
  /// @param tokens  [T, H]; model, tokens and recorder must outlive the object.
  RouterAlone(const LayerModel& model, ConstRawMatrix tokens, StageRecorder& recorder,
              int num_threads);

  /// Stages "router_gemm" and "select".
  void run();

 private:
  void run_gemm(Matrix<float> logits);
  void run_select(Matrix<const float> logits);

  const LayerModel& model_;
  ConstRawMatrix tokens_;
  ThreadPool pool_;
  Execution execution_;
  std::vector<float> logits_, weight_;
  std::vector<std::int32_t> expert_;
};

}  // namespace switchyard::bench
