// JetMoE: the top_k largest logits, softmax over the chosen; experts in two stacks. The bias that
// the block adds to its output is a bias of each expert here: a token's weights sum to 1. (Where a
// capacity drops an expert, its share of the bias goes too.)
#include "checkpoint/families/families.hpp"

namespace switchyard {
namespace {

constexpr StackNames kStack = {.gate = "input_linear.weight",
                               .down = "output_linear.weight",
                               .form = StackedForm::kRows,
                               .down_form = StackedForm::kRows,
                               .down_bias = "bias"};
constexpr BlockNames kNames = {
    .router = "mlp.router.layer.weight", .experts = "mlp.", .stack = &kStack};
constexpr ConfigUse kConfig = {.experts = "num_local_experts", .inner = "intermediate_size"};

}  // namespace

constinit const Family kJetmoe = {
    .name = "jetmoe",
    .model_types = {"jetmoe"},
    .architecture = "JetMoeForCausalLM",
    .layer = {.router = {.kind = TopKRouter{.score = Score::kTopkSoftmax, .renormalize = true}},
              .experts = {.bias = true}},
    .config = kConfig,
    .names = kNames};

}  // namespace switchyard
