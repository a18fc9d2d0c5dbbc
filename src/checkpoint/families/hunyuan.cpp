// Hunyuan-A13B: softmax over all experts, the chosen renormalised, and a shared expert of the same
// width. Released configurations give sizes once for each layer: all layers are then alike.
#include "checkpoint/families/families.hpp"
#include "checkpoint/files/file_error.hpp"

namespace switchyard {
namespace {

constexpr BlockNames kNames = {
    .router = "mlp.gate.wg.weight", .experts = "mlp.experts.", .shared = "mlp.shared_mlp."};
constexpr FixedKey kFixed[] = {{"norm_topk_prob", "true"},
                               {"use_mixed_mlp_moe", "true"},
                               {"moe_drop_tokens", "false"},
                               {"mlp_bias", "false"}};
constexpr ConfigUse kConfig = {.top_k = "moe_topk",
                               .inner = "intermediate_size",
                               .shared_width = SharedWidth::kInner,
                               .fixed = kFixed};

void read(const ConfigReader& json, ModelConfig& config) {
  const std::int64_t inner = config.layer.experts.inner;
  const std::int64_t own = json.whole_or("moe_intermediate_size", 1, kMaxWidth, inner);
  require_file(own == inner, json.file(),
               "moe_intermediate_size={}: only that of intermediate_size={} is supported here", own,
               inner);
  const std::int64_t shared = json.whole_or("num_shared_expert", 0, 1024, 1);
  require_file(shared == 1, json.file(), "num_shared_expert={}: only 1 is supported here", shared);
  const std::int64_t dense = json.whole_or("moe_layer_num_skipped", 0, config.num_layers, 0);
  require_file(dense == 0, json.file(), "moe_layer_num_skipped={}: only 0 is supported here",
               dense);
}

}  // namespace

constinit const Family kHunyuanV1Moe = {
    .name = "hunyuan-v1-moe",
    .model_types = {"hunyuan_v1_moe"},
    .architecture = "HunYuanMoEV1ForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kSoftmax, .renormalize = true}}},
    .rms_norm_eps = 1e-5F,
    .config = kConfig,
    .names = kNames,
    .read_more = read};

}  // namespace switchyard
