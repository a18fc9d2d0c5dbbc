// OLMoE and FlexOlmo: softmax over all experts; `norm_topk_prob` says whether the chosen are
// renormalised.
#include "checkpoint/families/families.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNames = {.router = "mlp.gate.weight", .experts = "mlp.experts."};
constexpr ConfigUse kConfig = {.inner = "intermediate_size", .renormalize = "norm_topk_prob"};
// The block takes the attention's output as it is: norms come after attention and after the block.
constexpr ModelNames kNoNorm = {.norm = nullptr};

}  // namespace

constinit const Family kOlmoe = {
    .name = "olmoe",
    .model_types = {"olmoe"},
    .architecture = "OlmoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = false}}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames};

constinit const Family kFlexOlmo = {
    .name = "flex-olmo",
    .model_types = {"flex_olmo"},
    .architecture = "FlexOlmoForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = false}}},
    .config = kConfig,
    .names = kNames,
    .model = kNoNorm};

}  // namespace switchyard
