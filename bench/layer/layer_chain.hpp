#pragma once

#include <vector>

#include "bench/cases/synthetic.hpp"
#include "bench/measure/run_count.hpp"
#include "bench/measure/stage_times.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::bench {

/// Calls that follow each other in one graph.
inline constexpr int kChainLength = 4;

struct LayerChainArgs {
  const LayerModel* model = nullptr;
  LayerOptions options{};                         ///< Backend CUDA; max_tokens is set here.
  ConstRawMatrix tokens{};                        ///< [T, H], in host memory.
  const std::vector<SyntheticRouting>& routings;  ///< kChainLength of them, [T, K] each.
  RunCount count{};
};

struct LayerChainResult {
  std::vector<std::byte> out;        ///< [T, H] f32, with the first routing.
  std::vector<StageSamples> stages;  ///< Of the first routing alone; the last is "layer", a graph.
  std::vector<double> chain_us;      ///< Time of the chain over its length.
  DType compute = DType::kF32;
};

/// A layer on one GPU with routing that is given: by itself, its stages by events and as a graph,
/// and as a chain, where no launch is waited for and each call meets other experts than the one
/// before, so that the L2 cache has little of its weights.
/// @throws Error of the layer.
[[nodiscard]] LayerChainResult run_layer_chain(const LayerChainArgs& args);

}  // namespace switchyard::bench
