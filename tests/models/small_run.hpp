#pragma once

// Runs and texts that take no time.

#include <cstdint>
#include <string>

#include "switchyard/models/trainer.hpp"

namespace switchyard::models {

inline ModelConfig small_bytes_model() {
  ModelConfig config;
  config.hidden = 16;
  config.layers = 2;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 8;
  config.sequence = 16;
  config.experts = 4;
  config.top_k = 2;
  config.inner = 8;
  return config;
}

/// 12 steps of 4 sequences.
inline TrainConfig small_run() {
  TrainConfig config;
  config.model = small_bytes_model();
  config.seed = 5;
  config.sequences = 4;
  config.schedule = {.peak = 1e-2, .warmup = 3, .steps = 12};
  return config;
}

/// Words in an order that repeats late.
inline std::string small_text(std::size_t size = 3000) {
  const std::string words[] = {"all ",   "happy ", "families ", "are ",
                               "alike ", "each ",  "unhappy "};
  std::string text;
  for (std::uint32_t i = 1; text.size() < size; ++i) {
    text += words[(i * i * 2654435761U >> 16U) % 7];
  }
  return text.substr(0, size);
}

}  // namespace switchyard::models
