// One value, many names. A row holds what means the same in every family that is read here;
// "intermediate_size" is in none, for it is the experts' width in some and that of dense layers in
// others.
#include "checkpoint/config_keys.hpp"

#include <algorithm>
#include <array>

namespace switchyard {
namespace {

using Spellings = std::array<std::string_view, 6>;

// Sources. "written": what save_pretrained of transformers writes, by its attribute_map (releases
// 4.36 to 5.23); "released": config.json of the models' own release, where that differs.
constexpr std::array<Spellings, 12> kSynonyms = {{
    // num_experts: written for qwen2_moe, qwen3_moe up to 4.57, qwen3_next, olmoe, flex_olmo,
    // hunyuan_v1_moe, lfm2_moe, afmoe. num_local_experts: mixtral, minimax, phimoe, gpt_oss,
    // granitemoe, jetmoe, llama4_text; qwen3_moe and qwen3_vl_moe_text since 5.0. n_routed_experts:
    // deepseek and its kin, longcat_flash. moe_num_experts: ernie4_5_moe, dbrx.
    {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"},
    // experts_per_token: gpt-oss as first released. moe_k: ernie4_5_moe. moe_topk: hunyuan_v1_moe,
    // longcat_flash. moe_top_k: dbrx.
    {"num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", "moe_top_k"},
    // expert_ffn_hidden_size: longcat_flash.
    {"moe_intermediate_size", "expert_ffn_hidden_size"},
    // n_shared_experts: deepseek and its kin. num_shared_experts: afmoe. moe_num_shared_experts:
    // ernie4_5_moe. num_shared_expert: hunyuan_v1_moe as released.
    {"n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"},
    // shared_intermediate_size: granitemoeshared, granitemoehybrid.
    {"shared_expert_intermediate_size", "shared_intermediate_size"},
    // route_norm: afmoe as released.
    {"norm_topk_prob", "route_norm"},
    // route_scale: afmoe.
    {"routed_scaling_factor", "route_scale"},
    // score_func: afmoe as released.
    {"scoring_func", "score_func"},
    // num_dense_layers: lfm2_moe, afmoe.
    {"first_k_dense_replace", "num_dense_layers"},
    // activation_function: jetmoe.
    {"hidden_act", "activation_function"},
    // norm_eps: lfm2_moe. layernorm_epsilon: mimo_v2_flash as released.
    {"rms_norm_eps", "norm_eps", "layernorm_epsilon"},
    // d_model: dbrx.
    {"hidden_size", "d_model"},
}};

}  // namespace

std::span<const std::string_view> spellings_of(std::string_view key) {
  for (const Spellings& row : kSynonyms) {
    const auto end = std::find(row.begin(), row.end(), std::string_view());
    if (std::find(row.begin(), end, key) != end) return {row.begin(), end};
  }
  return {};
}

}  // namespace switchyard
