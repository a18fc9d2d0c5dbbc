#pragma once

// Runs a layer some times on its ranks and takes the times of its stages: the one way in which
// `run` and `bench` do it.

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "bench/layer/training_pass.hpp"
#include "bench/measure/run_clock.hpp"
#include "bench/measure/run_count.hpp"
#include "bench/measure/stage_times.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::bench {

/// The stage that has the times of LayerRunArgs::beside_inference.
inline constexpr const char* kInferenceStage = "forward of inference";

struct LayerRunArgs {
  const LayerModel* model = nullptr;
  LayerOptions options{};  ///< Threads and max_tokens are set here, per rank.
  int num_ranks = 1;
  int num_threads = 1;  ///< Of all ranks of this process.
  std::chrono::milliseconds timeout{10000};
  /// Null: all ranks are threads of this process. Else this process is one rank of a launched
  /// world of num_ranks.
  Communicator* world = nullptr;
  ConstRawMatrix tokens{};              ///< [T, H], of all ranks.
  Matrix<const std::int32_t> expert{};  ///< [T, K] given routing, or empty.
  Matrix<const float> weight{};         ///< [T, K].
  /// What the router draws upon; token_ids [T] are of all tokens, first_token is set here.
  RouteRequest request{};
  bool route_too = false;  ///< Time the router as well although routing is given.
  DType out = DType::kF32;
  Pass pass = Pass::kForward;  ///< What is timed.
  Recompute recompute = Recompute::kNone;
  /// One rank and Pass::kForwardTrain: before each run the forward of inference is timed too.
  bool beside_inference = false;
  int copies = 1;  ///< Layers with weights of their own, used in turn: weights are cold.
  RunCount count{};
  /// One rank on CUDA: then also so many layers one after the other, which route by themselves.
  int chained = 0;
  std::function<void()> between{};  ///< Called by rank 0 before each run; may be empty.
};

struct LayerRunResult {
  std::vector<std::byte> out;            ///< [T, H].
  RoutingRecord record;                  ///< Of all tokens, global order.
  std::vector<StageSamples> stages;      ///< In order; the last is "layer", the whole call.
  std::vector<std::int64_t> rank_begin;  ///< [R+1] first token of each rank.
  Traffic traffic;                       ///< Of the last run; empty on one rank.
  std::int64_t rows_used = 0;            ///< Sum over ranks.
  std::int64_t rows_executed = 0;
  DType compute = DType::kF32;
  std::int64_t saved_bytes = 0;  ///< By one forward, for its backward.
  /// Of one rank; `device_bytes`: what its layers and this pass hold of a GPU's memory but for the
  /// tokens, their routing and the output; 0 on a CPU and over ranks.
  std::int64_t gradient_bytes = 0;
  std::int64_t device_bytes = 0;
  std::optional<ChainTimes> chain{};  ///< Where it was asked for.
};

/// First token of rank `rank`: r*T/R.
[[nodiscard]] std::int64_t first_token(std::int64_t num_tokens, int rank, int num_ranks);

/// Collective over the ranks of args.world, if it is given; the result is then that of all ranks on
/// rank 0, and this rank's own elsewhere.
/// @throws Error of the layer or the ranks.
[[nodiscard]] LayerRunResult run_layer(const LayerRunArgs& args);

}  // namespace switchyard::bench
