// Phi-3.5-MoE: a sparse mixer of two experts, Mixtral's names.
#include "checkpoint/families/families.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNames = {.router = "block_sparse_moe.gate.weight",
                               .experts = "block_sparse_moe.experts.",
                               .parts = {"w1", "w3", "w2"}};
constexpr BlockNames kModuleNames = {
    .router = "mlp.router.weight", .experts = "mlp.experts.", .parts = {"w1", "w3", "w2"}};
// Its code takes two experts whatever the first key says. The second is half of kMixerMargin:
// though it is called noise, it decides who is near enough when nothing is trained too.
constexpr FixedKey kFixed[] = {{"num_experts_per_tok", "2"}, {"router_jitter_noise", "0.01", true}};
constexpr ConfigUse kConfig = {
    .experts = "num_local_experts", .inner = "intermediate_size", .fixed = kFixed};
// The norm before the block takes the mean away and has a bias.
constexpr ModelNames kModel = {.norm = nullptr};

}  // namespace

constinit const Family kPhimoe = {
    .name = "phimoe",
    .model_types = {"phimoe"},
    .architecture = "PhimoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSparseMixer, .renormalize = false}}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .module_names = &kModuleNames,
    .model = kModel};

}  // namespace switchyard
