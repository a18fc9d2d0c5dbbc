#pragma once

// -ln softmax(logits)[target], and its gradient in the logits' place.

#include <cstdint>

#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

struct CrossEntropyArgs {
  float* logits;                ///< [rows, vocabulary]; with `backward` overwritten by gradients.
  const std::int32_t* targets;  ///< [rows]; -1: none, a loss and a gradient of 0.
  std::int64_t rows;
  std::int64_t vocabulary;
  double* nll;  ///< out [rows], nats.
  bool backward;
  float scale;  ///< Of the gradient: scale * (softmax - 1 at the target).
  ThreadPool* pool;
};
void cross_entropy(const CrossEntropyArgs& args);

}  // namespace switchyard::models
