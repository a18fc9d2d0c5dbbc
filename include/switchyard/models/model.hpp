#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/assignments.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/models/config.hpp"
#include "switchyard/routing/losses.hpp"
#include "switchyard/tensor.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

/// What a tensor is part of.
enum class Group : std::uint8_t {
  kEmbedding,
  kNorm,
  kAttention,
  kRouter,
  kExperts,
  kDense,
  kHead,
  kAdapters,  ///< ModelConfig::adapters, their router's gate too.
};
inline constexpr Group kAllGroups[] = {Group::kEmbedding, Group::kNorm,    Group::kAttention,
                                       Group::kRouter,    Group::kExperts, Group::kDense,
                                       Group::kHead,      Group::kAdapters};

/// "embedding", "norm", "attention", "router", "experts", "dense", "head", "adapters".
[[nodiscard]] const char* to_string(Group group) noexcept;
/// @throws Error{kInvalidArgument} with all names.
[[nodiscard]] Group parse_group(std::string_view name);

/// A tensor as files have it: rows of one in memory, without a gap.
struct TensorPart {
  std::string name{};  ///< "model.layers.0.mlp.experts.3.gate_proj.weight".
  std::vector<std::int64_t> shape{};
  std::int64_t offset = 0;  ///< In numbers, from ParameterTensor::value (gradient, m, v).
  [[nodiscard]] std::int64_t size() const;
};

/// A tensor of the model, f32, row-major, in memory of the model's that does not move.
struct ParameterTensor {
  std::string name{};  ///< "model.layers.0.self_attn.q_proj.weight", "...mlp.experts.w13".
  std::vector<std::int64_t> shape{};
  float* value = nullptr;
  float* gradient = nullptr;  ///< Null in buffers().
  bool decay = false;         ///< Weight decay is for it: matrices, not norms.
  bool frozen = false;        ///< ModelOptions::frozen has its group: the gradient stays 0.
  bool sharded = false;  ///< Over ranks: it is of this rank's experts, other ranks have theirs.
  Group group = Group::kNorm;
  /// What it is in files: itself, or of experts each expert's matrices. Names are those of
  /// transformers' Qwen3-MoE and OLMoE.
  std::vector<TensorPart> parts{};
  [[nodiscard]] std::int64_t size() const;
};

/// Where a number is not finite.
struct NonFinite {
  std::string tensor{};    ///< Its name, as in files.
  std::int64_t index = 0;  ///< In that tensor, row-major; the first one.
  float value = 0;
};

/// The first number that is infinite or not a number, in order of the tensors; of their values, or
/// (`gradients`) their gradients. Cost: one pass.
[[nodiscard]] std::optional<NonFinite> find_non_finite(std::span<const ParameterTensor> tensors,
                                                       bool gradients, ThreadPool* pool = nullptr);

struct ModelOptions {
  /// CUDA: parameters and all that is computed lie on the current GPU; values and gradients of
  /// parameters() are copies: values are read after parameters_changed(), gradients written by
  /// loss_and_gradients(). In f32; or in bf16, with heads of 32, 64 or 128 numbers.
  Backend backend = Backend::kCpu;
  int num_threads = 1;          ///< As LayerOptions::num_threads; no result depends on it.
  std::uint64_t seed = 0;       ///< Of the initial values, and of what routers draw.
  std::int64_t max_tokens = 0;  ///< Most B*S of a call; 0: memory grows as needed.
  /// Of the experts' products: f32, bf16 or f16; bf16 also of the dense layers' (queries, keys and
  /// values, attention's output, the head), whose operands are rounded. All else is f32. CUDA: of
  /// attention too; router, norms, loss and what is added up stay f32.
  DType compute = DType::kF32;
  /// Pre-activations of experts are made again in the backward: same bits, less memory.
  bool recompute = false;
  /// Groups whose values no step moves: their gradients are not computed (CUDA: are made and left
  /// out), those of all else have the same bits as without.
  std::vector<Group> frozen{};
  /// The ranks that share the experts, each with a Model of its own, all with the same
  /// configuration and seed; null: one rank. Must outlive the model. Over ranks max_tokens is that
  /// of a rank and must be given; what it refuses is said by check_ranks(). CUDA: each is made and
  /// called with its GPU current, ends with all others', and has at most 32768 tokens a call.
  Communicator* communicator = nullptr;
};

/// What a model over ranks must be: each of at most `experts` ranks has experts, a token's experts
/// depend on that token alone, and nothing of a step is a function of how tokens lie on ranks.
/// @throws Error{kInvalidArgument}: more ranks than experts, or than 64; {kUnsupported}, by name:
///         adapters; a router other than top-k, switch, gshard, noisy-top-k, v-moe and hash; a
///         capacity (room is a rank's); losses `importance` and `communication`, which are of all
///         tokens of a call.
void check_ranks(const ModelConfig& config, int num_ranks);

/// What one call said of the routing in one MoE layer.
struct RoutingStats {
  std::int32_t layer = 0;                   ///< In the model.
  std::int64_t tokens = 0;                  ///< Of all calls that were added.
  std::vector<std::int64_t> counts{};       ///< [E] assignments before any was dropped.
  std::vector<std::int64_t> counts_kept{};  ///< [E] after.
  LossValues losses{};                      ///< Without coefficients; the mean of added calls.
};

/// What a step said. Accumulating calls add to it: `add` = true of StepArgs::accumulate.
struct StepStats {
  double nll = 0;            ///< Sum over the targets, nats.
  std::int64_t targets = 0;  ///< That were not -1.
  double loss = 0;  ///< Sum of scale * (mean nats a target + router losses) over the calls.
  std::int32_t calls = 0;
  std::vector<RoutingStats> layers{};  ///< Of each MoE layer, ascending.
};

/// What the router of one MoE layer has decided in an inference call, token after token of [B, S].
struct LayerRouting {
  std::int32_t layer = 0;              ///< In the model.
  std::int32_t num_experts = 0;        ///< E.
  std::int64_t top_k = 0;              ///< K: places of a token, of a chain in all iterations.
  std::vector<std::int32_t> expert{};  ///< [T, K] ids; -1 where a token uses fewer than K.
  std::vector<float> weight{};         ///< [T, K].

  [[nodiscard]] std::int64_t num_tokens() const { return std::ssize(expert) / top_k; }
  [[nodiscard]] DenseAssignments assignments() const {
    return {.expert = {expert.data(), {num_tokens(), top_k}},
            .weight = {weight.data(), {num_tokens(), top_k}}};
  }
};

/// Asked of each MoE layer, ascending, once its router has decided. @returns whether it has written
/// `expert` or `weight` (sizes stay): the layer's output is then that of the routing as it is now,
/// and layers above see what comes of it.
using RoutingHook = std::function<bool(LayerRouting&)>;

struct StepArgs {
  Matrix<const std::int32_t> tokens{};   ///< [B, S] ids.
  Matrix<const std::int32_t> targets{};  ///< [B, S] the id that follows each; -1: none.
  double scale = 1;         ///< Of the gradients: 1 / n for each of n calls that accumulate.
  bool accumulate = false;  ///< Add to the gradients and to `stats`; else both are written anew.
  std::uint64_t step = 0;   ///< What noise and samples of routers are drawn by, besides the seed.
  /// Likewise: tokens of the step before this call's, over ranks before this rank's.
  std::int64_t first_token = 0;
  StepStats* stats = nullptr;  ///< Or null.
};

/// Keys and values of what a sequence has said so far. On a GPU it is of the model that made it,
/// which outlives it, and has memory of its own for steps of one token.
class Cache {
 public:
  Cache();
  ~Cache();
  Cache(Cache&&) noexcept;
  Cache& operator=(Cache&&) noexcept;
  [[nodiscard]] std::int64_t batch() const;
  [[nodiscard]] std::int64_t capacity() const;  ///< Most positions of each sequence.
  [[nodiscard]] std::int64_t length() const;    ///< Positions that are there, of all alike.
  /// Forgets what lies behind the first `length` positions. @throws Error{kInvalidArgument}.
  void truncate(std::int64_t length);

  struct State;  ///< The model's.
  [[nodiscard]] State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

/// Time of the parts of calls since the last reset, seconds.
struct StageTime {
  std::string stage{};  ///< "attention", "experts forward", "head", ...
  double seconds = 0;
  double flops = 0;  ///< Useful ones.
};

class DeviceModel;

/// A decoder-only Mixture-of-Experts language model. One object, one caller at a time. Every sum
/// has a fixed order: same bits for any number of threads, in every run, with recompute or without.
///
/// Over ranks (ModelOptions::communicator) each rank has a share of the experts, by
/// first_expert_of() of combine.hpp, and all else as the others have it. Construction and calls are
/// collective: each rank gives sequences of its own, as many of equal length as it has in forward()
/// and evaluate(), the same number in loss_and_gradients(). Logits have the bits of one rank where
/// R divides 8.
class Model {
 public:
  /// Initial values: matrices N(0, 0.02), those that write to the residual stream (o_proj, w2 and
  /// down) N(0, 0.02 / sqrt(2 L)), norms 1, selection biases 0. Of adapters A has the variance of
  /// LoRA's published code, N(0, 1 / sqrt(3 H)), and B is 0: a model with new adapters has the
  /// logits of the one without, bit for bit. Each tensor's numbers are a Philox
  /// stream keyed by the seed and its name: models that differ elsewhere have equal ones.
  /// @throws Error{kInvalidArgument}, {kOutOfMemory}, {kUnsupported}: a router without a backward,
  /// what a GPU's model does not do, by name, or built without CUDA; as check_ranks(); {kDevice}:
  /// no GPU.
  explicit Model(const ModelConfig& config, const ModelOptions& options = {});
  ~Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;

  [[nodiscard]] const ModelConfig& config() const;
  [[nodiscard]] const ModelOptions& options() const;
  /// All that is trained, in an order that the configuration alone decides. Values lie in one piece
  /// of memory, gradients in another: the first tensor's pointers are their beginnings, and
  /// num_parameters() numbers follow.
  [[nodiscard]] std::span<const ParameterTensor> parameters() const;
  [[nodiscard]] std::int64_t num_parameters() const;
  /// What update_routers() changes and a checkpoint must keep, without gradients: selection biases
  /// (`...mlp.gate.e_score_correction_bias`, thresholds too), the ReLU router's penalty
  /// (`...mlp.gate.l1_coefficient`). May be empty.
  [[nodiscard]] std::span<const ParameterTensor> buffers() const;
  /// To be called after values of parameters() or buffers() were written, by an optimiser or a
  /// file: packs them anew at the next call. Cost: one pass over all of them.
  void parameters_changed();
  /// What chooses experts in all layers as a new model of that seed has it: gates, their networks
  /// and noise gates, selection biases and thresholds. All else stays, a shared expert's gate too.
  void reset_routers(std::uint64_t seed);

  /// Logits behind every position. @param logits  out [B*S, V].
  /// @throws Error{kInvalidArgument}: shapes, S beyond ModelConfig::sequence, an id not in [0, V)
  ///         (by row and column); NaN in a router's logits.
  void forward(Matrix<const std::int32_t> tokens, Matrix<float> logits);
  /// nll [B, S] out: -ln of the probability of each target in nats; 0 where it is -1.
  /// @returns their sum, in double and in order. Routers as in inference; nothing is dropped.
  double evaluate(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                  Matrix<float> nll);
  /// The same, with `hook` between each MoE layer's router and its experts: the same bits where it
  /// changes nothing. Cost: what it changes is computed twice, that layer's experts alone.
  /// @throws Error{kUnsupported}: on a GPU, over ranks, of Soft-MoE, a hook that changes the
  /// routing
  ///         of a chain;
  ///         {kInvalidArgument}: also a hook that has changed a size or written an id that is none;
  ///         what it throws itself.
  double evaluate(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                  Matrix<float> nll, const RoutingHook& hook);
  /// Forward and backward of L = scale * (mean nats a target + router losses). Over ranks L, the
  /// value and `stats` are of all ranks' sequences; gradients of sharded tensors and of routers and
  /// shared experts too, those of all others are this rank's part until sum_gradients().
  /// @returns the mean nats a target (0 without any), without router losses and scale.
  /// @throws Error{kInvalidArgument}: as forward; over ranks also kTimeout, kCommunication.
  double loss_and_gradients(const StepArgs& args);
  /// Behind the last of a step's calls, before the optimiser: adds up over ranks, by their tree,
  /// what each has made of gradients by itself. On one rank nothing. Same bits on all ranks.
  void sum_gradients();
  /// What follows the optimiser's step: selection biases (ModelConfig::bias_rate), thresholds and
  /// penalties of the routers that have them, by the step's statistics and the last call's logits.
  /// Beside adapters nothing: all of these stay as they are.
  void update_routers(const StepStats& stats);

  /// On a GPU its keys and values are of the compute type, and lie there.
  /// @throws Error{kInvalidArgument}: positions beyond ModelConfig::sequence.
  [[nodiscard]] Cache make_cache(std::int64_t batch, std::int64_t positions) const;
  /// n >= 1 more tokens of every sequence: a prompt at once, or token by token.
  /// @param tokens  [B, n].
  /// @param logits  out [B, V]: behind the last of them; or [B*n, V]: behind each.
  /// The same bits as forward() of the whole sequences, however they are cut; on a GPU the same
  /// within roundings: a token alone goes by other kernels than many, and there from its second
  /// step on as one graph.
  /// @throws Error{kInvalidArgument}: shapes, the cache is full, or another model's;
  ///         {kUnsupported}: the router is not causal (expert choice, soft-moe of sequences), which
  ///         it names; over ranks.
  void decode(Matrix<const std::int32_t> tokens, Cache& cache, Matrix<float> logits);

  /// The library's: null on a CPU.
  [[nodiscard]] DeviceModel* device();
  /// Who works in loops: for an optimiser.
  [[nodiscard]] ThreadPool& pool();
  /// Where time went, by stage in the order of their first call; counted from now on if `reset`.
  [[nodiscard]] std::vector<StageTime> stage_times(bool reset = false);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard::models
