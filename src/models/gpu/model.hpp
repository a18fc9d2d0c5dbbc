#pragma once

// A model on a GPU. model.cpp has its forward and backward, as lists of calls; calls.cpp what is
// asked of it, and its steps as graphs.

#include <array>
#include <optional>
#include <vector>

#include "core/gpu/dense/products.hpp"
#include "layer/gpu/scratch.hpp"
#include "models/device_model.hpp"
#include "models/gpu/block.hpp"
#include "models/gpu/generation/cache.hpp"
#include "models/gpu/graph.hpp"
#include "models/over_ranks.hpp"

namespace switchyard::models::gpu {

/// What a call is told, with its tokens behind it: copied to the GPU as one piece.
struct CallInputs {
  StepInputs optimizer{};
  float scale = 0;  ///< Of the logits' gradient.
  float unused[3] = {};
};

/// What a call leaves; behind it the records of the MoE layers, as BlockRecord has them.
struct CallRecord {
  double nll;  ///< Sum over the targets.
  StepFactors factors;
};

/// A call's shape, and what is asked of it.
struct Call {
  std::int64_t batch = 0, positions = 0;
  bool training = false;
  bool accumulate = false;
  double scale = 1;  ///< Of the routers' losses.
  std::uint64_t step = 0;
  std::int64_t first_token = 0;
  GpuCache* cache = nullptr;  ///< Keys and values go there; null: sequences begin.
  std::int64_t before = 0;    ///< Positions that are there.

  [[nodiscard]] std::int64_t size() const { return batch * positions; }
};

/// What a layer leaves for its backward; docs/models.md has the letters. c: the compute type.
struct LayerRooms {
  DeviceBuffer x;         ///< [T, H] f32, the residual stream before it.
  DeviceBuffer norm1;     ///< [T, H] c.
  DeviceBuffer scale1;    ///< [T] f32.
  DeviceBuffer qkv;       ///< [T, (N + 2M) D] c.
  DeviceBuffer qk_scale;  ///< [T, N + M] f32.
  DeviceBuffer turned;    ///< [T, (N + M) D] c.
  DeviceBuffer mixed;     ///< [T, N D] c.
  DeviceBuffer lse;       ///< [B, N, S] f32.
  DeviceBuffer middle;    ///< [T, H] f32, the stream between attention and experts.
  DeviceBuffer norm2;     ///< [T, H] c.
  DeviceBuffer scale2;    ///< [T] f32.
};

class GpuModel final : public DeviceModel {
 public:
  GpuModel(const ModelConfig& config, const ModelOptions& options, const Parameters& parameters);
  ~GpuModel() override;

  void values_changed() override { stale_ = true; }
  void forward(Matrix<const std::int32_t> tokens, Matrix<float> logits) override;
  double evaluate(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                  Matrix<float> nll) override;
  double loss_and_gradients(const StepArgs& args, std::int64_t targets) override;
  void serve_experts() override;
  void update_routers(const StepStats& stats) override;
  // generation/cache.cpp
  std::unique_ptr<DeviceCache> make_cache(std::int64_t batch, std::int64_t positions) override;
  void decode(Matrix<const std::int32_t> tokens, DeviceCache& cache, std::int64_t length,
              Matrix<float> logits) override;
  void start_token(const std::int32_t* tokens, DeviceCache& cache, std::int64_t position) override;
  std::span<const std::int32_t> finish_token(DeviceCache& cache) override;

  void upload_moments(AdamW& optimizer) override;
  void download_moments(AdamW& optimizer) override;
  void download_values() override;
  void download_gradients() override;
  void start_step(const DeviceStepArgs& args) override;
  DeviceStepResult finish_step() override;

 private:
  // model.cpp
  void reserve(const Call& call);
  /// Over ranks: the dense products of such a call, so that what loads at the first of a shape
  /// finds no kernel that waits for another rank.
  void rehearse(const Call& call);
  void run(const Call& call);
  void attention_forward(const Call& call, std::int32_t l, LayerRooms& rooms);
  void block_forward(const Call& call, std::int32_t l, LayerRooms& rooms);
  /// Attention over what is cached too.
  void attend_cached(const Call& call, std::int32_t l, LayerRooms& rooms);
  /// Into logits(), of rows of the last norm.
  void head_forward(const std::byte* normed, std::int64_t rows);
  /// Losses of all rows, and with a backward what begins it.
  void losses(const Call& call);
  void backward(const Call& call);
  void block_backward(const Call& call, std::int32_t l);
  void attention_backward(const Call& call, std::int32_t l);
  void norm_backward(const Call& call, const DeviceBuffer& x, const DeviceBuffer& scale,
                     std::int64_t weight, bool first, bool typed);
  [[nodiscard]] RopeArgs rope_args(const Call& call, std::int32_t l, const LayerRooms& rooms) const;
  [[nodiscard]] AttentionArgs attention_args(const Call& call, const LayerRooms& rooms) const;
  [[nodiscard]] LayerRooms& rooms_of(const Call& call, std::int32_t l) {
    return rooms_[static_cast<std::size_t>(call.training ? l : 0)];
  }
  /// The gradient of the stream as products take it.
  [[nodiscard]] Dense dstream_typed() const {
    return {bf16_ ? dstream_typed_.data() : rooms_.back().x.data(), bf16_};
  }
  [[nodiscard]] RawMatrix rows(std::byte* data, std::int64_t count) const {
    return {data, options_.compute, count, config_.hidden};
  }
  [[nodiscard]] Dense typed(const DeviceBuffer& buffer) const { return typed(buffer.data()); }
  [[nodiscard]] Dense typed(std::byte* data) const { return {data, bf16_}; }
  // Where the MoE layers' experts have their inner rows: nothing here is needed while such a
  // layer's call runs. c: the compute type.
  [[nodiscard]] CudaScratch& scratch() const {
    return static_cast<CudaScratch&>(*scratch_.training);
  }
  [[nodiscard]] std::byte* room() const { return scratch().inner_rows(); }
  [[nodiscard]] float* logits() const { return reinterpret_cast<float*>(room()); }  ///< A piece.
  [[nodiscard]] std::byte* dlogits() const { return room() + dlogits_at_; }
  [[nodiscard]] std::byte* norm() const { return room() + norm_at_; }  ///< [T, H] c, the last.
  [[nodiscard]] std::byte* attended() const { return room() + attended_at_; }  ///< [T, H] c.
  [[nodiscard]] std::byte* dqkv() const { return room(); }        ///< [T, (N + 2M) D] c.
  [[nodiscard]] std::byte* dmixed() const { return attended(); }  ///< [T, N D] c.
  /// Of dense products, likewise in the layers' rows.
  [[nodiscard]] void* workspace() const {
    return scratch().runner.rows().reserve(DenseProducts::kWorkspace);
  }
  [[nodiscard]] std::byte* dnorm() const { return block_.data(); }  ///< [T, H] c.
  /// The stream's gradient takes the place of the stream behind the last layer, which the backward
  /// reads once.
  [[nodiscard]] float* dstream() const { return reinterpret_cast<float*>(rooms_.back().x.data()); }
  [[nodiscard]] std::int64_t piece_of_logits() const;

  [[nodiscard]] GpuCache& own(DeviceCache& cache) const;
  [[nodiscard]] StepTools step_tools();

  // calls.cpp
  void upload_if_stale();
  /// All rows of `logits`, by pieces; waits, and checks what was computed.
  void logits_to_host(const std::byte* normed, Matrix<float> logits);
  /// @param targets  Of the call, of all ranks.
  [[nodiscard]] CallInputs inputs_of(std::int64_t targets, double scale) const;
  [[nodiscard]] static std::size_t input_bytes(std::int64_t tokens) {
    return sizeof(CallInputs) + static_cast<std::size_t>(8 * tokens);
  }
  /// Into the next pinned slot and on to the GPU.
  void send(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
            const CallInputs& inputs);
  void enqueue(const Call& call, bool update);
  void enqueue_or_replay(const Call& call, bool update);
  void update();
  void fetch_record(std::size_t slot);
  /// Over ranks collective. @returns Nats of the call, of all ranks.
  double read_record(std::size_t slot, const Call& call, StepStats& stats) const;
  [[nodiscard]] CallSums said_in(std::byte* record, const Call& call) const;
  void check_blocks();
  [[nodiscard]] std::int64_t record_bytes() const;
  [[nodiscard]] BlockRecord record_of(std::byte* base, std::size_t index) const;
  [[nodiscard]] const std::int32_t* device_tokens() const;
  [[nodiscard]] const std::int32_t* device_targets(const Call& call) const {
    return device_tokens() + call.size();
  }
  [[nodiscard]] CallRecord* device_record() const {
    return reinterpret_cast<CallRecord*>(record_.data());
  }
  [[nodiscard]] const CallInputs* device_inputs() const {
    return reinterpret_cast<const CallInputs*>(inputs_.data());
  }

  ModelConfig config_;
  ModelOptions options_;
  const Parameters* host_;
  Communicator* ranks_;  ///< Null: one rank.
  bool bf16_;
  Stream stream_;
  DeviceParameters parameters_;
  DenseProducts products_{256, false};
  BlockScratch scratch_;
  std::vector<DeviceBlock> blocks_;
  std::vector<LayerRooms> rooms_;  ///< L, and the stream behind the last one.
  DeviceBuffer cosine_, sine_;
  DeviceBuffer scale_, block_;  ///< [T] f32, of the last norm; [T, H] c.
  std::int64_t dlogits_at_ = 0, norm_at_ = 0, attended_at_ = 0;
  DeviceBuffer nll_, dstream_typed_, delta_, parts_;
  DeviceBuffer inputs_, record_;
  std::int64_t reserved_tokens_ = 0;
  bool reserved_training_ = false;
  bool stale_ = true;

  AdamWConfig adamw_;
  /// What is on its way: a step's calls take slots in turn.
  struct Slot {
    PinnedBytes inputs, record;
    Event done;
    Call call;
    std::int64_t targets = 0;
    bool busy = false;
  };
  static constexpr std::size_t kSlots = 4;
  std::array<Slot, kSlots> slots_;
  std::size_t next_slot_ = 0, step_slot_ = 0;
  StepStats step_stats_;
  /// [whether it accumulates][whether the optimiser follows].
  struct Captured {
    std::optional<Graph> graph;
    Call call;
    bool warm = false;
  };
  std::array<std::array<Captured, 2>, 2> graphs_;
};

}  // namespace switchyard::models::gpu
