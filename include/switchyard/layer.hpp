#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "switchyard/backward.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/dispatch.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/parameter.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/losses.hpp"
#include "switchyard/routing/metrics.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// What a MoE layer is, whatever runs it.
struct LayerConfig {
  /// Its first experts are those of `experts`; what falls on its zero-computation experts is added
  /// on the token's own rank, behind the shared experts, in f32.
  RouterConfig router{};
  ExpertConfig experts{};
  ExpertConfig shared{};      ///< num_experts = 0: none; else 1 expert of inner S*I for all S.
  bool shared_gated = false;  ///< Multiply the shared output by sigmoid(x . shared_gate).
  std::int32_t reduction_groups = 8;  ///< G, a power of two.
  /// The weight of a token multiplies what its expert takes instead of what it gives: the token
  /// times its weight, rounded once to the compute type, goes to the expert (over the wire too),
  /// whose output is added as it is. For one expert a token.
  /// Source: Llama 4, `Llama4TextMoe` of its modelling code.
  bool weight_on_input = false;
};

/// @throws Error{kInvalidArgument} that names the value which breaks a rule.
void check(const LayerConfig& config);

/// A layer's weights before any backend has taken them: what a checkpoint, or a user, gives.
struct LayerModel {
  LayerConfig config{};
  /// Those of the router may be tensors of the caller, on the layer's backend, and then change
  /// between calls; host memory is also right for CUDA, and is copied there once.
  /// [E, H] f32, bf16 or f16; on a GPU f32 or the compute type. Rules without logits need none. Of
  /// a network [E, D], D = RouterNetwork::features(H). Here and of router_bias E is
  /// RouterConfig::num_logits(): null experts have rows too. A chain has num_gates() of gate,
  /// router_bias and selection_bias, iteration after iteration.
  Parameter gate{};
  /// [E, H] as the gate, of RouterNoise::Kind::kLearned; else none.
  Parameter noise_gate{};
  Parameter router_network{};  ///< [RouterNetwork::size(H)] f32; of a linear network none.
  /// [C, 3, H] f32 of ZeroComputationExperts::constant: of each the two rows of W, then v.
  Parameter constant_experts{};
  Parameter gating_residual{};  ///< [E, E] f32 of RouterConfig::gating_residual; else none.
  Parameter router_bias{};      ///< [E] f32, or none.
  Parameter selection_bias{};   ///< [E] f32, or none: RouteArgs::selection_bias.
  std::shared_ptr<const ExpertSource> experts{};
  std::shared_ptr<const ExpertSource> shared{};  ///< As one expert; null: none.
  /// [H] f32, or none; as the router's.
  Parameter shared_gate{};
};

/// The model with another router: its gate and bias stay, a selection bias where there is use for
/// it. A router with learned noise has zeros for its noise gate, with which its authors begin; null
/// and zero-computation experts that come have zeros for their rows of the gate, constant ones for
/// W and v, and a gating residual for its matrix.
/// @throws Error{kInvalidArgument}: another number of experts that compute, another network, for
///         which there are no parameters, or a rule of RouterConfig is broken.
void use_router(LayerModel& model, const RouterConfig& router);

/// Iteration 0 <= c < num_gates() of a chain as a model of its own, with that gate and the biases.
/// @throws Error{kInvalidArgument}: there is no such iteration.
[[nodiscard]] LayerModel iteration_of(const LayerModel& model, std::int32_t iteration);

/// Device memory in which a call of a layer leaves nothing: rows on their way through experts,
/// there and back. Layers that are given one scratch share it, whatever their shapes, so that a
/// model's layers take the largest's once: they then run one after the other, on one stream or on
/// streams that wait for each other, and on one GPU. It grows with the calls, which moves it: who
/// captures graphs gives max_tokens, or makes the largest call of every layer before.
class LayerScratch {
 public:
  LayerScratch() = default;
  LayerScratch(const LayerScratch&) = delete;
  LayerScratch& operator=(const LayerScratch&) = delete;
  virtual ~LayerScratch() = default;
};

/// Nothing yet, on the GPU that is current.
/// @throws Error{kUnsupported}: this build is without CUDA.
[[nodiscard]] std::shared_ptr<LayerScratch> make_layer_scratch();

/// How a layer is to be run.
struct LayerOptions {
  Backend backend = Backend::kCpu;
  /// Empty: the experts' storage type. fp8: all else in bf16, but where experts have many rows
  /// these become e4m3 with a scale for each 128 values, and so does the intermediate
  /// (ExpertsArgs::x_scale says how it is multiplied; off by some 4% of the norm, as such a format
  /// is). That is for CUDA, compute capability 9.0, gated experts that are loaded as they are
  /// stored, in e4m3; few rows stay bf16 unless batch_invariant is set, shared experts always.
  std::optional<DType> compute{};
  /// Path of the experts: compact, aligned(n), padded. Padded needs memory for El * C rows of input
  /// and output; without a capacity C is what the fullest expert needs (on CUDA: T * K).
  Layout layout{};
  std::optional<double> capacity_factor{};  ///< Empty: dropless.
  DropPolicy drop_policy = DropPolicy::kToken;
  DType combine_wire = DType::kF32;  ///< Partial sums between ranks.
  /// Tokens on the way to the experts: f32, bf16, f16 or fp8; empty: compute. A rank's own tokens
  /// are rounded alike, also where it is alone: the number of ranks does not show. The router and
  /// the shared experts take them unrounded.
  std::optional<DType> dispatch_wire{};
  /// No choice of path depends on the number of tokens, rows or ranks: without a capacity, a
  /// token's bits do not depend on the rest of the batch. Free on the CPU, which never makes such a
  /// choice. On CUDA the number of ranks does not show in the bits with it.
  bool batch_invariant = false;
  /// The same bits for any number of ranks R that divides LayerConfig::reduction_groups, on a
  /// 16-bit or 8-bit wire too: each group of experts is rounded and sent by itself, so up to
  /// reduction_groups / R times the rows come home.
  bool rank_invariant = false;
  std::int64_t max_tokens = 0;  ///< Most tokens of one call on one rank; 0: grow as needed (R = 1).
  /// Of the experts, shared ones included. kExact: numbers of the compute type, dequantised where
  /// they are stored as codes. kStored, or the format by name (CPU; CUDA of compute capability 8.0
  /// or later; forward alone): the codes and scales as they are stored, shared experts that are not
  /// quantised as numbers, in a half to a quarter of bf16's memory; on a CPU the same bits, and
  /// with batch_invariant on CUDA those of kInt4 and kNvfp4, which each call makes numbers of.
  WeightFormat weights = WeightFormat::kExact;
  /// CPU: threads of this rank; see ThreadPool. 0: as many as the OpenMP runtime of the process
  /// has. Ranks that are threads of one process have threads of their own.
  int num_threads = 1;
  /// Of any router with logits: a forward that saves has their values (SavedForward::losses()),
  /// backward() adds their gradient at the logits. Over ranks, on a CPU, each rank's are of its own
  /// tokens; with LossScope::kGlobal backward() goes by the counts of all ranks. A chain's losses
  /// are sums over its iterations, each of its own routing; kGlobal over ranks alone.
  LossConfig losses{};
  DeviceEngine device_engine = DeviceEngine::kAuto;  ///< CUDA: between ranks.
  std::function<void(double)> progress{};            ///< While weights load; may be empty.
  /// CUDA: memory that other layers use too. Empty: the layer has its own.
  std::shared_ptr<LayerScratch> scratch{};
};

struct ForwardArgs {
  ConstRawMatrix tokens{};  ///< [T, H] f32, bf16 or f16; converted once to the compute type.
  RawMatrix out{};          ///< [T, H] f32, bf16 or f16; no part of tokens.
  /// Skip the router: expert [T, K] and weight [T, K] as given (-1 unused). Empty: route, as a
  /// chain always does.
  Matrix<const std::int32_t> expert{};
  Matrix<const float> weight{};
  RouteRequest request{};  ///< On CUDA top_score is device memory, the record is not.
  /// Told of every stage if given. One thing is not as without it: on CUDA, a few tokens' plan and
  /// experts run one after the other, so that each has its time, where they would be one kernel;
  /// StageRecorder::chose("plan+experts", ...) names what would have run both.
  StageRecorder* recorder = nullptr;
  void* stream = nullptr;  ///< CUDA.
  /// Filled for backward(); null: nothing is kept, and nothing costs more. The output's bits are
  /// the same; on CUDA, where pre-activations are kept, those of a path that all calls can take.
  /// Over ranks on CUDA all give one, and the first forward of each makes memory, collectively.
  SavedForward* saved = nullptr;
  /// Of `saved`: the tokens stay as they are, and where, until its backward() is over. Those of the
  /// compute type, on CUDA on the GPU, are then not copied, and not counted in its bytes().
  bool tokens_stay = false;
  /// CUDA: tokens, out, expert and weight are known to lie on the GPU, so that the driver need not
  /// be asked of each (some microseconds a call). True of host memory: the GPU's error, later.
  bool on_device = false;
};

/// A Mixture-of-Experts layer: route, plan, dispatch, experts, combine, shared experts. Plans and
/// buffers are made once and reused. With RouterConfig::chain all of that in each iteration. One
/// object per rank; calls are collective over the ranks, and so is the end of the objects on GPUs.
/// One thread at a time, which debug builds check: the C interface's handles take a lock.
class MoeLayer {
 public:
  /// @param communicator  The ranks that share the experts; null: one rank. Must outlive the layer.
  /// On CUDA as many as DeviceExpertParallel takes, each on the device that is current here and in
  /// every call, with a deadline on the device as the communicator has it now. Ranks may share a
  /// GPU for tests: with CUDA_MODULE_LOADING=EAGER, and no more tokens than leave room for all that
  /// must run at once.
  /// @throws Error{kInvalidArgument}, {kUnsupported}, {kOutOfMemory}, {kCommunication}.
  MoeLayer(const LayerModel& model, const LayerOptions& options,
           Communicator* communicator = nullptr);
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;

  /// out = sum of the experts' weighted outputs + shared experts, per token (no norm, no residual).
  /// @throws Error{kInvalidArgument}: shapes, dtypes, ids out of range, NaN logits; {kTimeout}:
  /// then call recover() on the communicator, collectively. On CUDA only enqueues, unless tokens or
  /// output lie in host memory: what kernels find wrong is thrown by check() or by the next call.
  /// Can be captured in a graph where max_tokens is given; not the first call after a recovery.
  /// Ranks give device memory with a stream, each its own.
  void forward(const ForwardArgs& args);
  /// Gradients of the forward that filled args.saved, which is used up.
  /// Over ranks collective: all ranks go back through the same forward, which has not timed out,
  /// and behind a recovery through none before it. On a CPU the first one makes a window.
  /// @throws Error{kInvalidArgument}: nothing was saved, it was used already, it is another
  ///         layer's, or the experts were reloaded or the ranks have recovered since; shapes,
  ///         dtypes; {kUnsupported}: over nccl-pairs, of weights that are not exact; {kTimeout}
  ///         that names a rank, {kCommunication}: ranks go back through different forwards or for
  ///         different parameters; then call recover(), collectively. On CUDA it only enqueues, all
  ///         memory is the device's, and it can be captured in a graph with its forward, once a
  ///         forward of as many tokens was made with the same SavedForward.
  /// Cost: twice the forward's operations (recomputed: up to 2.7 times).
  void backward(const BackwardArgs& args);
  /// Reads the experts' weights again from the sources that the layer was made of, shared ones too:
  /// for tensors of the caller that an optimiser has changed. CPU: they are packed anew. CUDA:
  /// graphs of the layer are void, unless weights are used where they lie and nothing is read;
  /// over ranks it is collective.
  /// @throws what the source throws; then the layer has no experts until a reload succeeds.
  /// Cost: one pass over all weights, as loading, on a CPU without fresh memory.
  void reload_experts();
  /// CUDA: waits for the last forward's stream and throws what its kernels found wrong, once.
  /// @throws Error{kInvalidArgument}, as forward does on the CPU.
  void check();
  [[deprecated("its name is check()")]] void status() { check(); }

  /// Statistics of the last forward's routing, of a chain its last iteration's, of this rank's
  /// tokens, computed now; a forward costs no more for it. CUDA: waits as check() does, and copies
  /// what was decided to the host. Drops are there with a capacity, entropies where the router has
  /// logits.
  /// @throws Error{kInvalidArgument}: there was no forward, it has failed, its routing was given,
  ///         or (CUDA) it has saved, where SavedForward has what was decided; as check().
  [[nodiscard]] metrics::Routing stats();

  [[nodiscard]] const LayerConfig& config() const;
  [[nodiscard]] DType compute_dtype() const;
  /// Of the experts that this rank holds, without the shared ones: to be read back, as long as the
  /// layer lives.
  [[nodiscard]] const ExpertWeights& weights() const;
  /// Of the last forward (CUDA: that check() has waited for), of a chain all its iterations; empty
  /// on one rank.
  [[nodiscard]] const Traffic& traffic() const;
  /// Rows of the layout in the last forward, as traffic(): used, and worked on.
  [[nodiscard]] std::int64_t rows_used() const;
  [[nodiscard]] std::int64_t rows_executed() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
