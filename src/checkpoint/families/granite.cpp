// Granite MoE: the top_k largest logits, softmax over the chosen; experts in two stacks. With a
// shared expert beside the block, also of the hybrid models' MoE layers.
#include "checkpoint/families/families.hpp"

namespace switchyard {
namespace {

constexpr StackNames kStack = {.gate = "input_linear.weight",
                               .down = "output_linear.weight",
                               .form = StackedForm::kRows,
                               .down_form = StackedForm::kRows};
constexpr StackNames kSharedStack = {.gate = "input_linear.weight",
                                     .down = "output_linear.weight",
                                     .form = StackedForm::kRows,
                                     .down_form = StackedForm::kRows,
                                     .flat = true};
constexpr BlockNames kNames = {.router = "block_sparse_moe.router.layer.weight",
                               .experts = "block_sparse_moe.",
                               .stack = &kStack};
constexpr BlockNames kModuleNames = {.router = "block_sparse_moe.router.weight",
                                     .experts = "block_sparse_moe.experts."};
constexpr BlockNames kSharedNames = {.router = "block_sparse_moe.router.layer.weight",
                                     .experts = "block_sparse_moe.",
                                     .stack = &kStack,
                                     .shared = "shared_mlp.",
                                     .shared_stack = &kSharedStack};
constexpr BlockNames kSharedModuleNames = {.router = "block_sparse_moe.router.weight",
                                           .experts = "block_sparse_moe.experts.",
                                           .shared = "shared_mlp.",
                                           .shared_stack = &kSharedStack};
constexpr ConfigUse kConfig = {.experts = "num_local_experts", .inner = "intermediate_size"};
constexpr ConfigUse kSharedConfig = {.experts = "num_local_experts",
                                     .inner = "intermediate_size",
                                     .shared_width = SharedWidth::kOwn,
                                     .shared = "shared_intermediate_size"};
constexpr LayerConfig kLayer = {
    .router = {.kind = TopKRouter{.score = Score::kTopkSoftmax, .renormalize = true}}};

}  // namespace

constinit const Family kGraniteMoe = {.name = "granite-moe",
                                      .model_types = {"granitemoe"},
                                      .architecture = "GraniteMoeForCausalLM",
                                      .layer = kLayer,
                                      .config = kConfig,
                                      .names = kNames,
                                      .module_names = &kModuleNames};

constinit const Family kGraniteMoeShared = {.name = "granite-moe-shared",
                                            .model_types = {"granitemoeshared", "granitemoehybrid"},
                                            .architecture = "GraniteMoeSharedForCausalLM",
                                            .layer = kLayer,
                                            .config = kSharedConfig,
                                            .names = kSharedNames,
                                            .module_names = &kSharedModuleNames};

}  // namespace switchyard
