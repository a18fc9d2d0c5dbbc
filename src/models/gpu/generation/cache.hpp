#pragma once

// Keys and values of sequences on a GPU, and the token steps behind them: one more token of each
// sequence as one kernel or one graph, in memory of the cache's own. So nothing that else a model
// does makes a graph void.

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "models/cache_state.hpp"
#include "models/gpu/block.hpp"
#include "models/gpu/generation/batch/stages.hpp"
#include "models/gpu/generation/persistent/step.hpp"
#include "models/gpu/generation/stages.hpp"
#include "models/gpu/graph.hpp"

namespace switchyard::models::gpu {

/// What a model lends to its caches' steps.
struct StepTools {
  DenseProducts* products = nullptr;
  const float* cosine = nullptr;
  const float* sine = nullptr;
  cudaStream_t stream = nullptr;
};

/// Whether routing is choose_experts().
[[nodiscard]] bool chooses_by_softmax(const RouterConfig& router);

class GpuCache final : public DeviceCache {
 public:
  /// `parameters` and all of StepTools outlive it.
  GpuCache(const ModelConfig& config, const ModelOptions& options,
           const DeviceParameters& parameters, std::int64_t batch, std::int64_t capacity);
  ~GpuCache() override;

  [[nodiscard]] bool is_of(const DeviceParameters& parameters) const {
    return parameters_ == &parameters;
  }
  [[nodiscard]] CacheLayer layer(std::int32_t l) const;

  /// Enqueues a step of the tokens at `position`: `tokens` [B] of the host's, or (null) the
  /// likeliest ones of the step before. At most kRing steps are under way, none where there are
  /// tokens.
  void start(const std::int32_t* tokens, std::int64_t position, const StepTools& tools);
  /// On the device [B, V]: of the last step.
  [[nodiscard]] const float* logits() const {
    return reinterpret_cast<const float*>(logits_.data());
  }
  /// Waits for the oldest step under way. @returns [B] the likeliest tokens behind it; -1: not all
  /// logits are numbers. Until kRing more steps are started.
  std::span<const std::int32_t> finish();
  [[nodiscard]] std::int64_t under_way() const { return under_way_; }
  /// Waits; throws what the layers' kernels found wrong.
  void check();

 private:
  static constexpr std::int32_t kRing = 4;

  /// What steps need that are a list of calls.
  void reserve_for_calls(const ModelOptions& options);
  void reserve_for_choice(std::int32_t top_k);
  void reserve_splits(std::int32_t splits);
  // one_kernel.cpp
  /// Whether a step is one kernel: then what it needs has been made.
  bool reserve_for_one_kernel(const ModelOptions& options);
  /// Whether this rank has all experts by itself, nothing stands beside them and they are chosen by
  /// softmax.
  [[nodiscard]] bool has_plain_experts(const ModelOptions& options) const;
  [[nodiscard]] PersistentLayer persistent_layer(std::int32_t l) const;

  // batch_step.cpp
  /// Whether a step consists of the stages of a batch: then what they need has been made.
  bool reserve_for_batch(const ModelOptions& options);
  void batch_layer(std::int32_t l, const StepTools& tools);
  void batch_norm(std::int32_t l, const StepTools& tools);
  void batch_block(std::int32_t l, const StepTools& tools);
  [[nodiscard]] std::int32_t splits_of_experts() const;
  [[nodiscard]] BatchExpertsArgs experts_args(std::int32_t l, const StepTools& tools) const;
  void batch_head(const StepTools& tools);

  // token_step.cpp
  void enqueue(const StepTools& tools);
  void attention_step(std::int32_t l, const StepTools& tools);
  void attend_step(std::int32_t l, const StepTools& tools);
  void norm_route_step(std::int32_t l, const TopKRouter& router, const StepTools& tools);
  void block_step(std::int32_t l, const StepTools& tools);
  void head_step(const StepTools& tools);
  void norm(const float* x, const std::byte* delta, float* sum, std::int64_t weight,
            const StepTools& tools);

  [[nodiscard]] CachePlace* place() const { return reinterpret_cast<CachePlace*>(input_.data()); }
  [[nodiscard]] std::int32_t* ids() const {
    return reinterpret_cast<std::int32_t*>(input_.data() + kIdsAt);
  }
  [[nodiscard]] Dense typed(const DeviceBuffer& buffer) const { return {buffer.data(), bf16_}; }
  static constexpr std::size_t kIdsAt = 16;  ///< Behind the place.

  ModelConfig config_;
  const DeviceParameters* parameters_;
  const Parameters* host_;
  bool bf16_;
  std::int64_t batch_, capacity_;
  bool few_;               ///< A list of calls has row_product(), else cuBLASLt's products.
  bool routes_ = false;    ///< The norm before the experts chooses them too.
  bool is_batch_ = false;  ///< A step consists of the stages of a batch.
  std::int32_t splits_ = 1;
  std::vector<DeviceBlock> blocks_;
  DeviceBuffer keys_, values_;                    ///< [L, B, M, capacity, row].
  DeviceBuffer x_, middle_;                       ///< [B, H] f32.
  DeviceBuffer norm_, attended_, block_;          ///< [B, H] c.
  DeviceBuffer qkv_, mixed_, scale_;              ///< [B, (N + 2M) D] c, [B, N D] c, [B] f32.
  DeviceBuffer parts_, stats_, logits_;           ///< Of attend(); [B, V] f32.
  DeviceBuffer workspace_;                        ///< Of dense products.
  DeviceBuffer expert_, share_;                   ///< [B, K] where routes_ or is_batch_.
  DeviceBuffer input_;                            ///< The place, then ids [B].
  std::optional<PersistentStepArgs> one_kernel_;  ///< A step that is one kernel,
  /// and what it alone needs.
  DeviceBuffer layers_, router_logits_, best_, barrier_;
  DeviceBuffer inner_;             ///< [B, K, I] c of one kernel, and of a batch;
  DeviceBuffer expert_parts_;      ///< of this [B, K, H] f32.
  PinnedBytes sent_, told_;        ///< What input_ is copied from; [kRing, B].
  std::array<Event, kRing> done_;  ///< By position.
  std::int64_t next_ = -1;         ///< Position of the next step, as the device has it.
  std::int64_t under_way_ = 0;
  bool warm_ = false;
  std::optional<Graph> graph_;
};

}  // namespace switchyard::models::gpu
