// Qwen: softmax over all experts; `norm_topk_prob` says whether the chosen are renormalised, which
// Qwen3-VL and Qwen3.5 always do. Qwen2-MoE, Qwen3-Next and Qwen3.5 have a shared expert with a
// sigmoid gate of its own.
#include "checkpoint/families/families.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNames = {.router = "mlp.gate.weight", .experts = "mlp.experts."};
constexpr BlockNames kSharedNames = {.router = "mlp.gate.weight",
                                     .experts = "mlp.experts.",
                                     .shared = "mlp.shared_expert.",
                                     .shared_gate = "mlp.shared_expert_gate.weight"};
// Stacked in either form: transposed as released, not so as transformers 5 writes them.
constexpr StackNames kStack{};
constexpr BlockNames kStackedNames = {
    .router = "mlp.gate.weight", .experts = "mlp.experts.", .stack = &kStack};

constexpr ConfigUse kConfig = {.renormalize = "norm_topk_prob", .moe_layers = MoeLayers::kEveryNth};
constexpr ConfigUse kSharedConfig = {.renormalize = "norm_topk_prob",
                                     .shared_width = SharedWidth::kOwn,
                                     .shared = "shared_expert_intermediate_size",
                                     .moe_layers = MoeLayers::kEveryNth};
constexpr ConfigUse kNextConfig = {.renormalize = "norm_topk_prob",
                                   .renormalize_absent = true,
                                   .shared_width = SharedWidth::kOwn,
                                   .shared = "shared_expert_intermediate_size",
                                   .moe_layers = MoeLayers::kEveryNth};
constexpr FixedKey kAlwaysRenormalized[] = {{"norm_topk_prob", "true"}};
constexpr ConfigUse kVlConfig = {
    .experts = "num_experts", .moe_layers = MoeLayers::kEveryNth, .fixed = kAlwaysRenormalized};
constexpr ConfigUse k35Config = {.shared_width = SharedWidth::kOwn,
                                 .shared = "shared_expert_intermediate_size",
                                 .fixed = kAlwaysRenormalized};
// Their norms multiply by 1 + weight.
constexpr ModelNames kOffsetNorm = {.norm_offset = 1.0F};

}  // namespace

constinit const Family kQwen3Moe = {
    .name = "qwen3-moe",
    .model_types = {"qwen3_moe"},
    .architecture = "Qwen3MoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}}},
    .config = kConfig,
    .names = kNames,
    .has_fp8 = true};

constinit const Family kQwen2Moe = {
    .name = "qwen2-moe",
    .model_types = {"qwen2_moe"},
    .architecture = "Qwen2MoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = false}},
              .shared_gated = true},
    .config = kSharedConfig,
    .names = kSharedNames};

constinit const Family kQwen3Next = {
    .name = "qwen3-next",
    .model_types = {"qwen3_next"},
    .architecture = "Qwen3NextForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}},
              .shared_gated = true},
    .config = kNextConfig,
    .names = kSharedNames,
    .model = kOffsetNorm};

constinit const Family kQwen35Moe = {
    .name = "qwen3.5-moe",
    .model_types = {"qwen3_5_moe_text"},
    .architecture = "Qwen3_5MoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}},
              .shared_gated = true},
    .config = k35Config,
    .names = kSharedNames,
    .model = kOffsetNorm};

constinit const Family kQwen3VlMoe = {
    .name = "qwen3-vl-moe",
    .model_types = {"qwen3_vl_moe_text"},
    .architecture = "Qwen3VLMoeForConditionalGeneration",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}}},
    .config = kVlConfig,
    .names = kStackedNames};

}  // namespace switchyard
