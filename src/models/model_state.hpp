#pragma once

// What a Model consists of. model.cpp has its forward and backward, as lists of calls.

#include <algorithm>
#include <memory>
#include <vector>

#include "comm/host/rank_sums.hpp"
#include "core/one_caller.hpp"
#include "models/activations.hpp"
#include "models/cache_state.hpp"
#include "models/counts.hpp"
#include "models/cpu/attention.hpp"
#include "models/cpu/linear.hpp"
#include "models/cpu/rope.hpp"
#include "models/device_model.hpp"
#include "models/moe_block.hpp"
#include "models/over_ranks.hpp"
#include "models/parameters.hpp"
#include "models/stage_clock.hpp"

namespace switchyard::models {

/// The two dense products of a layer.
struct AttentionWeights {
  Linear qkv, out;
};

/// A call's tokens and what is asked of it.
struct Call {
  Matrix<const std::int32_t> tokens;  ///< [B, S].
  bool training = false;              ///< Keeps what the backward wants.
  std::uint64_t step = 0;
  std::int64_t first_token = 0;
  Cache::State* cache = nullptr;  ///< Tokens follow those that are there; null: sequences begin.
  const RoutingHook* hook = nullptr;  ///< Or null.

  [[nodiscard]] std::int64_t size() const { return tokens.size(); }
  [[nodiscard]] std::int64_t before() const { return cache == nullptr ? 0 : cache->length; }
};

/// Operations of x [rows, in] W^T [in, out].
[[nodiscard]] inline double products(std::int64_t rows, std::int64_t in, std::int64_t out) {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(in * out);
}

struct Model::State {
  State(const ModelConfig& config, const ModelOptions& options);

  /// Model's calls of these names.
  double evaluate(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                  Matrix<float> nll, const RoutingHook* hook);
  double loss_and_gradients(const StepArgs& args);

  /// Before the first product behind a change of the weights.
  void pack();
  void pack_backward();
  /// What routers said of the forward just made, of this rank's tokens.
  void take_stats(CallSums& said);
  /// Over ranks, where this one has no tokens: its experts have those of others.
  void serve_experts();
  void check_tokens(const char* what, Matrix<const std::int32_t> ids, bool or_none) const;
  /// The stream behind the last layer, normalised: [T, H].
  const float* run(const Call& call);
  void attention_forward(const Call& call, std::int32_t l, LayerActivations& kept);
  void block_forward(const Call& call, std::int32_t l, LayerActivations& kept, float* out);
  /// Logits of rows of `normed` by pieces, each handed to `use(first, rows, logits)`.
  template <class Use>
  void logits_by_pieces(const float* normed, std::int64_t rows, const Use& use);
  [[nodiscard]] AttentionArgs attention_args(const Call& call, std::int32_t l,
                                             const LayerActivations& kept);
  [[nodiscard]] QueryKeyRows::Args query_key_args(const Call& call, std::int32_t l,
                                                  const LayerActivations& kept);

  /// Loss and gradient of logits; the gradient of the stream begins with it.
  double head_backward(const StepArgs& args, const float* normed, std::int64_t targets);
  void block_backward(const StepArgs& args, std::int32_t l);
  void attention_backward(const Call& call, std::int32_t l, bool accumulate);
  void embedding_backward(const StepArgs& args);

  ModelConfig config;
  ModelOptions options;
  Communicator* ranks;  ///< Null: one rank.
  ThreadPool pool;
  ThreadPool* threads;  ///< Null: the calling thread alone.
  Parameters parameters;
  QueryKeyRows query_key;
  std::vector<AttentionWeights> attention;
  std::vector<MoeBlock> blocks;
  Linear head;
  bool stale = true;           ///< Packed matrices are not those of the parameters.
  bool stale_backward = true;  ///< Likewise of what backward products read.
  Activations kept;
  std::unique_ptr<RankSums> sums;       ///< Over ranks, of gradients.
  std::unique_ptr<DeviceModel> device;  ///< Null on a CPU; else all but the parameters is its.
  StageClock clock;
};

template <class Use>
void Model::State::logits_by_pieces(const float* normed, std::int64_t rows, const Use& use) {
  constexpr std::int64_t kBytes = std::int64_t{64} << 20;
  const std::int64_t piece = std::max<std::int64_t>(1, kBytes / (4 * config.vocabulary));
  float* const logits = kept.logits.reserve(std::min(rows, piece) * config.vocabulary);
  for (std::int64_t first = 0; first < rows; first += piece) {
    const std::int64_t count = std::min(piece, rows - first);
    clock.time("head", products(count, config.hidden, config.vocabulary), [&] {
      head.forward(normed + first * config.hidden, count, logits, false, threads);
    });
    use(first, count, logits);
  }
}

}  // namespace switchyard::models
