// `switchyard run`: a layer of a checkpoint on tokens, its result, its times, and a check.
#include "tool/run/run.hpp"

#include <fmt/core.h>

#include "bench/measure/machine.hpp"
#include "models/training/run_directory.hpp"
#include "switchyard/plan.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/output_files.hpp"
#include "tool/progress.hpp"
#include "tool/run/check.hpp"
#include "tool/run/inputs.hpp"
#include "tool/run/stage_table.hpp"
#include "tool/run/weights.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {
namespace {

/// @throws UsageError: a run of train, with its newest checkpoint.
void check_no_run(const Options& options) {
  const std::filesystem::path path = options.checkpoint;
  std::error_code none;
  if (!std::filesystem::is_directory(path, none)) return;
  const std::vector<std::int64_t> steps = models::checkpoint_steps(path);
  if (steps.empty()) return;
  throw UsageError("--checkpoint: {} is a run of train, want one of its checkpoints: {}",
                   options.checkpoint, (path / models::checkpoint_name(steps.back())).string());
}

void check_outputs(const Options& options, const Checkpoint& checkpoint, DType out) {
  check_matrix_output("--output", options.output, out);
  if (!options.routing_output.empty() && !options.routing_output.ends_with(".safetensors")) {
    throw UsageError("--routing-output: {} does not end in .safetensors", options.routing_output);
  }
  const std::vector<NamedFile> outputs = {{"--output", options.output},
                                          {"--routing-output", options.routing_output}};
  for (const NamedFile& output : outputs) check_output_place(output);
  std::vector<NamedFile> inputs = {{"--tokens", matrix_path(options.tokens)},
                                   {"--text", options.text},
                                   {"--routing-input", options.routing_input}};
  for (const auto& file : checkpoint.files()) inputs.push_back({"--checkpoint", file});
  check_outputs_apart(outputs, inputs);
}

template <typename T>
Vector<const T> vector_of(const std::vector<T>& values) {
  return {values.data(), {std::ssize(values)}};
}

/// The routing, and the plan of all kept assignments in the compact layout.
void write_routing_output(const std::string& path, const bench::LayerRunResult& result,
                          const LayerConfig& config) {
  const std::int64_t top_k = config.router.top_k();
  const std::int64_t num_tokens = result.rank_begin.back();
  const RoutingRecord& record = result.record;
  const Matrix<const std::int32_t> expert{record.expert.data(), {num_tokens, top_k}};
  const Matrix<const float> weight{record.weight.data(), {num_tokens, top_k}};
  const Matrix<const std::uint8_t> kept{record.kept.data(), {num_tokens, top_k}};
  Plan owner;
  const PlanView view =
      owner.reserve(num_tokens, top_k, config.router.num_experts, num_tokens * top_k);
  plan({.assignments = DenseAssignments{.expert = expert, .weight = weight},
        .kept = flat(kept),
        .first_expert = 0,
        .layout = {},
        .padded_rows = 0,
        .plan = view,
        .execution = {}});
  const std::vector<std::int64_t> begin(view.expert_begin.data,
                                        view.expert_begin.data + view.expert_begin.shape[0]);
  const std::int64_t rows = begin.back();
  write_routing(path, {.expert = expert,
                       .weight = weight,
                       .kept = kept,
                       .counts = vector_of(record.counts),
                       .counts_kept = vector_of(record.counts_kept),
                       .expert_begin = vector_of(begin),
                       .row_token = {view.row_token.data, {rows}},
                       .row_weight = {view.row_weight.data, {rows}}});
}

}  // namespace

int run_command(const Options& options) { return run_command(options, bench::run_layer); }

int run_command(const Options& options, const LayerRunner& run) {
  const LayerOptions layer_options = tool::layer_options(options);
  const World world = choose_world(options);
  check_no_run(options);
  const Checkpoint checkpoint(options.checkpoint);
  const std::int32_t layer = choose_layer(options, checkpoint);
  LayerModel model = checkpoint.layer(layer);
  if (options.check) check_weights(model, fmt::format("{}: layer {}", options.checkpoint, layer));
  const Tokens tokens = load_tokens(options, checkpoint, layer, model.config.experts.hidden);
  choose_router(options, tokens, model);
  const auto routing = load_routing(options, model.config.router, tokens.view.rows);
  const DType out =
      options.output_dtype.empty() ? tokens.view.dtype : enumerator_of<DType>(options.output_dtype);
  check_outputs(options, checkpoint, out);

  bench::LayerRunArgs args{.model = &model,
                           .options = layer_options,
                           .num_ranks = world.num_ranks,
                           .num_threads = world.num_threads,
                           .timeout = std::chrono::milliseconds(options.timeout_ms),
                           .world = world.launched.get(),
                           .tokens = tokens.view,
                           .request = {.token_ids = {tokens.ids.data(), {std::ssize(tokens.ids)}}},
                           .out = out,
                           .count = {.warmup = static_cast<int>(options.warmup.value_or(1)),
                                     .iterations = static_cast<int>(options.iterations.value_or(3)),
                                     .budget = {}}};
  if (routing) {
    args.expert = {routing->expert.data(), {routing->num_tokens, routing->top_k}};
    args.weight = {routing->weight.data(), {routing->num_tokens, routing->top_k}};
  }
  LoadBar bar;
  args.options.progress = [&bar](double share) { bar.show(share); };
  const bench::LayerRunResult result = run(args);
  bar.clear();
  const bench::Limits limits = limits_of(world, layer_options.backend);
  if (!world.is_first()) return kFine;  // rank 0 reports and writes for all

  RunReport report{.options = options,
                   .family = std::string(checkpoint.family()),
                   .layer = layer,
                   .args = args,
                   .result = result,
                   .engine = world.engine()};
  if (options.check) report.verdict = check_run(args, result);
  if (options.routing_stats) report.routing = routing_stats(args, result);
  const bool wrong = report.verdict && !report.verdict->holds;
  if (!wrong) {  // a result known to be wrong is not left behind
    if (!options.output.empty()) {
      write_matrix(options.output, {result.out.data(), out, tokens.view.rows, tokens.view.cols});
    }
    if (!options.routing_output.empty()) {
      write_routing_output(options.routing_output, result, model.config);
    }
  }
  report.limits = limits;
  print_report(report);
  return wrong ? kCheckFailed : kFine;
}

}  // namespace switchyard::tool
