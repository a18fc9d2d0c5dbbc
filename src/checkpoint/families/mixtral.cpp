// Mixtral and its like: softmax over all experts, the chosen renormalised. MiniMax-M2 scores by
// sigmoid, with a selection bias.
#include "checkpoint/families/families.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNames = {.router = "block_sparse_moe.gate.weight",
                               .experts = "block_sparse_moe.experts.",
                               .parts = {"w1", "w3", "w2"}};
constexpr BlockNames kModuleNames = {
    .router = "mlp.gate.weight", .experts = "mlp.experts.", .parts = {"w1", "w3", "w2"}};
constexpr ConfigUse kConfig = {.experts = "num_local_experts", .inner = "intermediate_size"};

// MiniMax as first released could have a shared expert; the class of transformers has none.
constexpr FixedKey kMinimaxFixed[] = {{"shared_intermediate_size", "0"}};
constexpr ConfigUse kMinimaxConfig = {
    .experts = "num_local_experts", .inner = "intermediate_size", .fixed = kMinimaxFixed};

constexpr BlockNames kM2Names = {.router = "block_sparse_moe.gate.weight",
                                 .selection_bias = "block_sparse_moe.e_score_correction_bias",
                                 .experts = "block_sparse_moe.experts.",
                                 .parts = {"w1", "w3", "w2"}};
constexpr BlockNames kM2ModuleNames = {.router = "mlp.gate.weight",
                                       .selection_bias = "mlp.e_score_correction_bias",
                                       .experts = "mlp.experts.",
                                       .parts = {"w1", "w3", "w2"}};
constexpr FixedKey kM2Fixed[] = {{"scoring_func", R"("sigmoid")", true},
                                 {"use_routing_bias", "true", true},
                                 {"shared_intermediate_size", "0"}};
constexpr ConfigUse kM2Config = {
    .experts = "num_local_experts", .inner = "intermediate_size", .fixed = kM2Fixed};

}  // namespace

constinit const Family kMixtral = {
    .name = "mixtral",
    .model_types = {"mixtral"},
    .architecture = "MixtralForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .module_names = &kModuleNames};

constinit const Family kMinimax = {
    .name = "minimax",
    .model_types = {"minimax"},
    .architecture = "MiniMaxForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}}},
    .rms_norm_eps = 1e-5F,
    .config = kMinimaxConfig,
    .names = kNames,
    .module_names = &kModuleNames};

constinit const Family kMinimaxM2 = {
    .name = "minimax-m2",
    .model_types = {"minimax_m2"},
    .architecture = "MiniMaxM2ForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSigmoid, .renormalize = true}}},
    .rms_norm_eps = 1e-6F,
    .config = kM2Config,
    .names = kM2Names,
    .module_names = &kM2ModuleNames};

}  // namespace switchyard
