#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "switchyard/backward.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/parameter.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/losses.hpp"
#include "switchyard/routing/metrics.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

// PERFT: small experts that learn beside a layer whose weights stay as they are. Adapter j is
//   D_j(x) = alpha/r * B_j act(A_j x)      A_j [r, H], B_j [H, r]; act of LoRA: identity
// and a token's output is the frozen layer's plus, by kind,
//   routed    sum over the chosen j of g_j D_j(x), by a router over the adapters of their own
//   embedded  sum over the token's experts e of w_e D_e(x): by the layer's own routing
//   dense     sum over all j of D_j(x)
//   shared    D_0(x): dense with one adapter
// Source: Liu et al. 2024 (arXiv:2411.08212) section 3; LoRA and its scale alpha/r, Hu et al. 2021
//         (arXiv:2106.09685) section 4.1.
//
// An adapter is a plain expert of width r, so routing, plan, experts and combine, forward and back,
// are the layer's own, and so are their errors and bounds.

enum class PerftKind : std::uint8_t { kRouted, kEmbedded, kDense, kShared };

/// "routed", "embedded", "dense", "shared".
[[nodiscard]] const char* to_string(PerftKind kind) noexcept;

struct PerftConfig {
  PerftKind kind = PerftKind::kRouted;
  std::int32_t num_adapters = 1;                  ///< M >= 1; embedded: the layer's E; shared: 1.
  std::int64_t hidden = 0;                        ///< H.
  std::int64_t rank = 16;                         ///< r >= 1.
  float alpha = 32;                               ///< Finite.
  Activation activation = Activation::kIdentity;  ///< Any without a gate.
  /// Routed: the rule over the M adapters, one by logits, without a network, learned noise or a
  /// chain. Embedded: the layer's, no chain, for the shape of its routing. Else unused.
  RouterConfig router{};

  [[nodiscard]] float scale() const { return alpha / static_cast<float>(rank); }
  /// The adapters as experts: A are the rows of kGate, B those of kDown.
  [[nodiscard]] ExpertConfig experts() const {
    return {.num_experts = num_adapters,
            .hidden = hidden,
            .inner = rank,
            .gated = false,
            .activation = activation};
  }
  /// Numbers that learn: 2*M*r*H, and routed H for each logit.
  [[nodiscard]] std::int64_t num_parameters() const {
    const std::int64_t logits = kind == PerftKind::kRouted ? router.num_logits() : 0;
    return (2 * num_adapters * rank + logits) * hidden;
  }
};

/// @throws Error{kInvalidArgument} that names the value which breaks a rule above.
void check(const PerftConfig& config);

/// Adapters as they are spelled: perft[:OPTION=VALUE,...], with the options of adapter_kinds().
/// What is not said is the option's default; hidden is that of `base`, and embedded adapters have
/// its router: the layer's.
/// @throws Error{kInvalidArgument} that names the word which is wrong and says what would be right.
[[nodiscard]] PerftConfig parse_perft(std::string_view spelling, const PerftConfig& base);

struct PerftModel {
  PerftConfig config{};
  /// Routed: [num_logits, H] f32, bf16 or f16; may be a tensor of the caller that changes between
  /// calls. Else none.
  Parameter gate{};
  /// A and B of all M, as those of `config.experts()`: make_memory_source(experts, dtype, A, B).
  std::shared_ptr<const ExpertSource> adapters{};
};

struct PerftOptions {
  Backend backend = Backend::kCpu;  ///< kCuda: all arrays of a call are device memory.
  DType compute = DType::kF32;      ///< Of the adapters' products: f32, bf16, f16.
  int num_threads = 1;              ///< CPU: of this rank; 0: as many as OpenMP has.
  LossConfig losses{};              ///< Of the router of routed adapters, as a layer's.
  /// Most tokens of one call; 0: grow as needed. CUDA: memory is made once, for graphs.
  std::int64_t max_tokens = 0;
};

struct PerftForwardArgs {
  ConstRawMatrix tokens{};  ///< [T, H] f32, bf16 or f16: what the layer was given.
  ConstRawMatrix base{};    ///< [T, H] likewise: the layer's output; empty: zeros. May be `out`.
  RawMatrix out{};          ///< out [T, H] likewise: base + what the adapters add. Not over tokens.
  /// Embedded: the layer's routing, [T, K] with -1 where unused, and its weights.
  Matrix<const std::int32_t> expert{};
  Matrix<const float> weight{};
  Vector<const std::uint8_t> kept{};  ///< Embedded: [T * K], 0: the layer has dropped it; or empty.
  RouteRequest request{};             ///< Routed.
  SavedForward* saved = nullptr;      ///< Filled for backward(), or null.
  StageRecorder* recorder = nullptr;
  void* stream = nullptr;  ///< CUDA.
};

/// What is empty is not wanted. There are no gradients of the layer: it is frozen.
struct PerftBackwardArgs {
  SavedForward* saved = nullptr;             ///< Of a forward of these adapters; used up.
  ConstRawMatrix dout{};                     ///< [T, H] f32, bf16 or f16.
  Vector<const std::int64_t> loss_counts{};  ///< As of BackwardArgs.
  double loss_scale = 1;                     ///< As of BackwardArgs.
  /// [T, H] f32, bf16 or f16: the tokens' gradient through the layer, which is added to dtokens;
  /// empty: zeros. May be `dtokens`.
  ConstRawMatrix base{};
  RawMatrix dtokens{};  ///< out [T, H] f32, bf16 or f16: one rounding.
  /// out, embedded: [T, K] of the layer's weights, 0 where unused or dropped. What it makes of the
  /// layer's logits is route_backward()'s, and goes through the frozen gate to the tokens as
  /// BackwardArgs::dlogits.
  Matrix<float> dweight{};
  RawMatrix da{};           ///< out [M * r, H] f32, or the compute type.
  RawMatrix db{};           ///< out [M * H, r] likewise.
  RawMatrix dgate{};        ///< out [num_logits, H] f32, bf16 or f16; routed.
  bool accumulate = false;  ///< Of da, db and dgate.
  StageRecorder* recorder = nullptr;
  void* stream = nullptr;  ///< CUDA.
};

/// The adapters of one layer. Over ranks every rank holds all of them: a rank's tokens meet the
/// adapters where they are, nothing of them travels, and the forward is that of one rank. One
/// object per rank, one thread at a time.
/// On CUDA calls only enqueue, and forward and backward of one rank can be captured in a graph
/// where max_tokens is given, once a forward of as many tokens was made with the same SavedForward.
/// All arrays lie on the device that is current, those of numbers 16 bytes aligned, and H is a
/// multiple of 16 bytes of the compute type; any rank. Adapters from make_device_source(), of any
/// dtype, are read anew by every forward, and a backward goes by what the last forward has read.
/// Dense adapters are one product of width M*r there. Over ranks a backward waits on the host.
class PerftAdapters {
 public:
  /// @param communicator  The ranks whose tokens these adapters learn from; null: one rank. Must
  ///        outlive this.
  /// @throws Error{kInvalidArgument}: a rule of PerftConfig, sizes of gate or losses;
  ///         {kUnsupported} by name: no CUDA in this build, an H or a router that its kernels do
  ///         not take; {kOutOfMemory}.
  explicit PerftAdapters(const PerftModel& model, const PerftOptions& options = {},
                         Communicator* communicator = nullptr);
  ~PerftAdapters();
  PerftAdapters(PerftAdapters&&) noexcept;
  PerftAdapters& operator=(PerftAdapters&&) noexcept;

  /// out = base + what the adapters add, summed in fp32 as a layer's experts are, rounded once. Not
  /// collective. Reports a layer's stages and "perft_sum".
  /// @throws Error{kInvalidArgument}: shapes, dtypes, ids out of range, NaN logits, a routing that
  ///         the kind does not take. On CUDA what kernels find wrong is thrown by check(), or by
  ///         the next call.
  /// Cost: 4*r*H operations for each of a token's adapters, routed 2*M*H more.
  void forward(const PerftForwardArgs& args);
  /// Gradients of the forward that filled args.saved. Over ranks collective: da, db and dgate are
  /// sums over all ranks, in f32 by the fixed tree of ranks, with the same bits on each, whichever
  /// of them a rank asks for.
  /// @throws Error{kInvalidArgument} as MoeLayer::backward(), and where a gradient is asked for
  ///         that the kind has not, or losses of LossScope::kGlobal have no counts of all ranks;
  ///         {kTimeout} that names a rank: then call recover() on the communicator, collectively.
  /// Cost: twice the forward's operations; over ranks num_parameters() sums.
  void backward(const PerftBackwardArgs& args);
  /// Reads A and B again from their source, after an optimiser's step. Cost: one pass over them;
  /// CUDA: none where they lie on the device.
  void reload();
  /// CUDA: waits for the last call's stream and throws what its kernels found wrong, once.
  void check();
  /// Of the last forward's routing among the adapters, of this rank's tokens.
  /// @throws Error{kInvalidArgument}: not routed, or there was no forward.
  [[nodiscard]] metrics::Routing stats();

  [[nodiscard]] const PerftConfig& config() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard
