#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/cpu_isa.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::verify {

/// What the numbers of a case are like.
enum class Data : std::uint8_t {
  kPlain,  ///< Uniform, of a size that keeps activations around 1.
  kTies,   ///< Small whole numbers, and experts that share a row of the gate.
  kLarge,  ///< Tokens and logits large: softmax saturates, activations hit their limits.
  kSmall,  ///< Tokens and weights so small that sums round and 16-bit types go subnormal.
  kZero,   ///< Tokens of zero: every score is equal.
  kNan,    ///< One token is NaN: an error that names it.
};

/// Who gets which token when the router is skipped.
enum class Given : std::uint8_t {
  kNothing,  ///< The layer routes.
  kRandom,   ///< Any ids, repeated within a token or -1 at times.
  kOne,      ///< Every token to one expert.
  kNone,     ///< No assignment at all.
  kBadId,    ///< One id outside [-1, E): an error.
};

/// How the tokens lie on the ranks.
enum class Split : std::uint8_t { kEven, kFirst, kLast, kUneven };

/// What runs a second time and must give the same bits.
enum class Again : std::uint8_t {
  kNothing,
  kCall,     ///< The same layer.
  kThreads,  ///< Another number of threads.
  kRanks,    ///< One rank (batch_invariant, dropless, R divides G, and no rounding by the wire).
  kAlone,    ///< One token alone (batch_invariant, dropless; across ranks as kRanks).
};

/// A layer, how it runs and on what: all that a check needs, made from few numbers.
struct Case {
  std::uint64_t seed = 0;  ///< Of weights and tokens.
  Data data = Data::kPlain;
  LayerConfig layer{};
  /// Another router as it is spelled, in the place of the top-k router `base`, or "": layer.router
  /// is what comes of both. Of adapters, which stand beside the layer, layer.router is `base`.
  std::string router{};
  TopKRouter base{};
  /// Of the layer's experts the last so many return their input; the router is not moe++, which has
  /// zero-computation experts of its own beside them.
  std::int32_t identity_experts = 0;
  bool training = false;  ///< The router's noise is drawn.
  bool router_bias = false;
  bool selection_bias = false;
  DType stored = DType::kF32;  ///< The weights in their source.
  DType compute = DType::kF32;
  /// How the layer computes with its weights; formats with codes: the source has them so, too.
  WeightFormat weights = WeightFormat::kExact;
  bool fp8_rows = false;  ///< CUDA, kE4M3: LayerOptions::compute is fp8, with `compute` bf16.
  DType tokens = DType::kF32;
  DType output = DType::kF32;
  std::int64_t num_tokens = 0;  ///< T, over all ranks.
  Split split = Split::kEven;
  Given given = Given::kNothing;
  Layout layout{};
  double capacity_factor = 0;  ///< 0: dropless.
  DropPolicy drop_policy = DropPolicy::kToken;
  int ranks = 1;
  int threads = 1;
  DType wire = DType::kF32;
  DType dispatch_wire = DType::kF32;  ///< `compute`: none is asked for.
  bool batch_invariant = false;
  bool rank_invariant = false;
  Again again = Again::kNothing;
  int again_threads = 1;
  CpuIsa isa = CpuIsa::kPortable;  ///< What the CPU's kernels are forced to.
};

/// First token of each rank, and T: [R+1].
[[nodiscard]] std::vector<std::int64_t> rank_begin(const Case& test);

/// Case number `index` of a seed, but for its `isa`. Ranks and threads are taken from the lists.
[[nodiscard]] Case make_case(std::uint64_t seed, std::uint64_t index, const std::vector<int>& ranks,
                             const std::vector<int>& threads, Backend backend);

[[nodiscard]] inline std::optional<DType> dispatch_wire_of(const Case& test) {
  return test.dispatch_wire == test.compute ? std::nullopt : std::optional(test.dispatch_wire);
}

/// Whether the layer routes, by logits.
[[nodiscard]] inline bool routes_by_logits(const Case& test) {
  return test.given == Given::kNothing && test.layer.router.has_logits();
}

/// Whether a token's experts do not depend on the other tokens of its call.
[[nodiscard]] bool routes_token_by_token(const Case& test);

/// Whether a selection bias is something to the case's router.
[[nodiscard]] bool may_have_selection_bias(const Case& test);
/// Whether a layer may reroute, as far as its router goes, or is not asked to.
[[nodiscard]] bool may_reroute(const Case& test);

/// Gives the layer's weights another format, and changes what does not go with it: on CUDA codes
/// are computed with in bf16.
void use_weights(Case& test, WeightFormat weights, Backend backend);

/// The form of weights of kInt4, by the case's seed; and the values of a row that share a scale,
/// which sizes are multiples of: 1 where blocks are cut off or there are none.
[[nodiscard]] Int4Form int4_form_of(const Case& test);
[[nodiscard]] std::int64_t scale_group_of(const Case& test);

/// Lets a layer with weights of kE4M3 on CUDA multiply rows of e4m3, and changes what does not go
/// with it.
void use_fp8_rows(Case& test, std::uint64_t seed, std::uint64_t index);

/// Lets the layer route by another router, and changes what does not go with it. Where the backend
/// does not take this one for so many experts it is "hash".
void use_router(Case& test, const std::string& router, Backend backend);
/// Of some cases on a CPU: their router's logits are made by a network, where it has any.
void use_network(Case& test, std::uint64_t seed, std::uint64_t index, Backend backend);

/// Of some cases: a token's weight goes on its expert's input, or some experts return it.
void use_places(Case& test, std::uint64_t seed, std::uint64_t index);
/// Takes of these what does not go with the case's router.
void fit_places(Case& test);

/// Some routers by name, each of them and in turn for ever.
[[nodiscard]] std::string router_number(std::uint64_t index);

/// Whether a spelling is of adapters and not of a layer's router.
[[nodiscard]] inline bool is_perft(std::string_view router) {
  return router.substr(0, router.find(':')) == "perft";
}

/// Experts of the layer's router but those that moe++ puts beside them.
[[nodiscard]] inline std::int32_t base_experts(const Case& test) {
  const RouterConfig& router = test.layer.router;
  return test.identity_experts > 0 ? router.num_experts : router.num_computing();
}

/// Sets layer.router by `router`, `base` and `identity_experts`. @throws Error{kInvalidArgument}:
/// it is not one.
void set_router(Case& test);

[[nodiscard]] nlohmann::json to_json(const Case& test);
/// @throws Error{kInvalidArgument} that names the member which is missing or wrong.
[[nodiscard]] Case case_from_json(const nlohmann::json& json);
/// The text behind `--case`. @throws as case_from_json.
[[nodiscard]] Case parse_case(const std::string& text);

}  // namespace switchyard::verify
