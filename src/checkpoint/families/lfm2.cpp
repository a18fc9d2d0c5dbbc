// LFM2-MoE: sigmoid, with a selection bias unless `use_expert_bias` is false. Its code adds 1e-6 to
// the sum that it divides by, which is left out here: a weight differs by 1e-6 of the sum of K
// sigmoids, less than f32 rounding does but for logits below about -4.
#include "checkpoint/families/families.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNames = {.router = "feed_forward.gate.weight",
                               .selection_bias = "feed_forward.expert_bias",
                               .experts = "feed_forward.experts.",
                               .parts = {"w1", "w3", "w2"}};
constexpr ConfigUse kConfig = {.renormalize = "norm_topk_prob",
                               .renormalize_absent = true,
                               .scale = "routed_scaling_factor",
                               .moe_layers = MoeLayers::kDenseFirst,
                               .dense_first = "num_dense_layers",
                               .dense_first_absent = 2};
constexpr ModelNames kModel = {.norm = "ffn_norm.weight"};

void read(const ConfigReader& json, ModelConfig& config) {
  config.selection_bias = json.flag_or("use_expert_bias", true);
}

}  // namespace

constinit const Family kLfm2Moe = {
    .name = "lfm2-moe",
    .model_types = {"lfm2_moe"},
    .architecture = "Lfm2MoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSigmoid, .renormalize = true}}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .model = kModel,
    .read_more = read};

}  // namespace switchyard
