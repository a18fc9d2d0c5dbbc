#pragma once

// What `bench` measures: a whole layer, the stages around the experts, or the router alone. Each
// function runs one case with made-up data.

#include <string>
#include <vector>

#include "bench/layer/training_pass.hpp"
#include "bench/measure/results.hpp"
#include "bench/measure/run_count.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/routing/soft_moe.hpp"

namespace switchyard::bench {

class SonicmoePeer;
class StoredPeer;
class TorchPeer;

/// One case, complete.
struct LayerCase {
  std::string name{};
  LayerConfig config{};
  bool router_bias = false;
  bool selection_bias = false;
  std::int32_t shared_experts = 0;  ///< For the record; config.shared has their width.
  DType dtype = DType::kBF16;       ///< Of weights and tokens.
  LayerOptions options{};
  std::int64_t num_tokens = 0;
  std::string skew = "uniform";
  std::string router{};            ///< As it was spelled, and then the layer routes; or empty.
  std::string layout = "compact";  ///< As it was spelled.
  int num_ranks = 1;
  int num_threads = 1;
  Communicator* world = nullptr;  ///< As in LayerRunArgs.
  std::chrono::milliseconds timeout{10000};
  RunCount count{};
  std::uint64_t seed = 17;
  std::string checkpoint{};               ///< Of the suite "load".
  bool peer_onednn = false;               ///< Time oneDNN's loop over the experts beside the layer.
  TorchPeer* peer_torch = nullptr;        ///< Asked for the same on the same data, if it is there.
  SonicmoePeer* peer_sonicmoe = nullptr;  ///< Asked for layers of the suite "forward".
  StoredPeer* peer_stored = nullptr;      ///< Asked for layers of stored weights.
  bool published_data = false;  ///< Of the suite "fused-moe": nothing is scaled, ids may repeat.
  SoftMoeConfig mixing{};       ///< Of the suite "soft-moe".
  std::string bar{};            ///< The project's promise that this case answers; "": none.
  Pass pass = Pass::kForward;
  Recompute recompute = Recompute::kNone;
  bool beside_dense = false;  ///< In turns with dense products, of whose rate it takes a share.
};

/// Of one expert's weights, as they are computed with.
[[nodiscard]] double bytes_per_expert(const LayerCase& c);
/// Layers that a case rotates through, so that none finds its weights in a cache.
/// @param experts_hit  Experts that have a token.
[[nodiscard]] int cold_copies(const LayerCase& c, double experts_hit, const Machine& machine);

/// Every stage of the layer, weights cold: layers with weights of their own are used in turn, as
/// many as it takes to fill the caches twice (within a quarter of the memory; "cold" says so).
[[nodiscard]] CaseResult run_layer_case(const LayerCase& c, const Machine& machine,
                                        const Limits& limits);

/// The same with experts that give back what they get: plan, pack, exchange and combine alone. The
/// output must be the input.
[[nodiscard]] CaseResult run_identity_case(const LayerCase& c, const Machine& machine,
                                           const Limits& limits);

/// router_gemm and select alone; of a router that c.router names what it does in training, noise
/// included.
[[nodiscard]] CaseResult run_router_case(const LayerCase& c, const Limits& limits);

/// The layer against a naive loop over the experts on the CPU, in the same run: whether all outputs
/// (95% with published_data) agree within atol 1e-5, rtol 1e-3. f32, gated silu. On a CPU also
/// naive/ours - 1; on CUDA the time of a layer in a chain of calls with other routings, all in one
/// graph, over the time that the weights of the experts hit need at the measured read rate.
[[nodiscard]] CaseResult run_fused_moe_case(const LayerCase& c, const Machine& machine,
                                            const Limits& limits);

/// Soft-MoE, stage by stage, and in turns with it the combine of a top-k routing whose experts have
/// as many rows, K = slots over tokens: what writing back costs both ways. "layer_over_limit": of
/// the larger of its bytes by the bandwidth and its products by their peak.
[[nodiscard]] CaseResult run_soft_moe_case(const LayerCase& c, const Limits& limits);

/// A chain of iterations on the CPU, stage by stage, and in turns with it one pass of as many
/// experts: what going on one after the other costs.
[[nodiscard]] CaseResult run_chain_case(const LayerCase& c, const Limits& limits);

/// What all cases record of themselves.
[[nodiscard]] CaseResult start_result(const LayerCase& c, const Limits& limits);

}  // namespace switchyard::bench
