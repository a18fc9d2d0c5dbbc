// Reading what `run` works on. Everything that a user can get wrong is found here, before the
// weights are touched.
#include "tool/run/inputs.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

#include "checkpoint/files/mapped_file.hpp"
#include "core/check.hpp"
#include "core/half.hpp"
#include "switchyard/error.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {
namespace {

std::vector<std::int32_t> read_bytes(const std::string& path, std::optional<std::int64_t> limit) {
  std::shared_ptr<const MappedFile> file;
  try {
    file = MappedFile::open(path);
  } catch (const Error& error) {
    throw UsageError("--text: {}", message_of(error));
  }
  const auto bytes = file->bytes();
  const auto count = std::min<std::size_t>(
      bytes.size(), static_cast<std::size_t>(limit.value_or(std::ssize(bytes))));
  std::vector<std::int32_t> ids;
  ids.reserve(count);
  for (const std::byte byte : bytes.first(count)) ids.push_back(std::to_integer<int>(byte));
  return ids;
}

/// y = x / sqrt(mean(x^2) + eps) * scale, row by row.
void rms_norm(std::vector<float>& rows, const std::vector<float>& scale, float eps) {
  const std::size_t hidden = scale.size();
  for (std::size_t begin = 0; begin < rows.size(); begin += hidden) {
    float sum = 0;
    for (std::size_t h = 0; h < hidden; ++h) sum += rows[begin + h] * rows[begin + h];
    const float factor = 1.0F / std::sqrt(sum / static_cast<float>(hidden) + eps);
    for (std::size_t h = 0; h < hidden; ++h) rows[begin + h] *= factor * scale[h];
  }
}

Tokens embed_text(const Options& options, const Checkpoint& checkpoint, std::int32_t layer,
                  std::int64_t hidden) {
  const std::vector<std::int32_t> ids = read_bytes(options.text, options.max_tokens);
  for (const std::int32_t id : ids) {
    if (id >= checkpoint.vocabulary()) {
      throw UsageError("--text: {} has the byte {}, but the checkpoint's vocabulary is {}",
                       options.text, id, checkpoint.vocabulary());
    }
  }
  Tokens tokens{.values = checkpoint.embed(ids), .ids = ids};
  const std::vector<float> norm = checkpoint.post_attention_norm(layer);
  if (!norm.empty()) rms_norm(tokens.values, norm, checkpoint.rms_norm_eps());
  tokens.view = {reinterpret_cast<const std::byte*>(tokens.values.data()), DType::kF32,
                 std::ssize(ids), hidden};
  return tokens;
}

void check_finite(const std::string& name, ConstRawMatrix tokens) {
  for (std::int64_t i = 0; i < tokens.rows * tokens.cols; ++i) {
    const float value = load_float(tokens.data, tokens.dtype, i);
    if (!std::isfinite(value)) {
      throw UsageError("--tokens: {}: element [{}, {}] is {}, want finite numbers", name,
                       i / tokens.cols, i % tokens.cols, value);
    }
  }
}

}  // namespace

std::int32_t choose_layer(const Options& options, const Checkpoint& checkpoint) {
  const std::vector<std::int32_t>& layers = checkpoint.moe_layers();
  if (layers.empty()) throw UsageError("--checkpoint: {} has no MoE layer", options.checkpoint);
  if (!options.layer) return layers.front();
  if (*options.layer >= checkpoint.num_layers()) {
    throw UsageError("--layer: {} is out of range, the checkpoint has layers 0 to {}",
                     *options.layer, checkpoint.num_layers() - 1);
  }
  const auto layer = static_cast<std::int32_t>(*options.layer);
  if (std::find(layers.begin(), layers.end(), layer) == layers.end()) {
    throw UsageError("--layer: {} is dense, the first MoE layer is {}", layer, layers.front());
  }
  return layer;
}

Tokens load_tokens(const Options& options, const Checkpoint& checkpoint, std::int32_t layer,
                   std::int64_t hidden) {
  if (options.tokens.empty() == options.text.empty()) {
    throw UsageError("--tokens, --text: {} given, want one of them",
                     options.text.empty() ? "neither is" : "both are");
  }
  if (!options.text.empty()) return embed_text(options, checkpoint, layer, hidden);
  Tokens tokens{.file = MatrixFile::read(options.tokens)};
  tokens.view = tokens.file->view();
  if (tokens.view.cols != hidden) {
    throw UsageError("--tokens: {} is [{}, {}], but the layer's hidden size is {}", options.tokens,
                     tokens.view.rows, tokens.view.cols, hidden);
  }
  tokens.view.rows = std::min(tokens.view.rows, options.max_tokens.value_or(tokens.view.rows));
  check_finite(options.tokens, tokens.view);
  return tokens;
}

void choose_router(const Options& options, const Tokens& tokens, LayerModel& model) {
  if (options.router.empty()) return;
  if (!options.routing_input.empty()) {
    throw UsageError("--router, --routing-input: both are given, but the second skips the router");
  }
  const RouterConfig router = router_of(options.router, model.config.router);
  if (std::holds_alternative<HashRouter>(router.kind) && tokens.ids.empty()) {
    throw UsageError("--router: {} goes by token ids, which --tokens has not; want --text",
                     options.router);
  }
  const auto* choice = std::get_if<ExpertChoiceRouter>(&router.kind);
  if (choice != nullptr && choice->group > 0 && tokens.view.rows % choice->group != 0) {
    throw UsageError("--router: group={} does not divide the {} tokens; see --max-tokens",
                     choice->group, tokens.view.rows);
  }
  for (const auto& [option, given] :
       {std::pair("--routing-output", !options.routing_output.empty()),
        std::pair("--routing-stats", options.routing_stats)}) {
    if (!router.is_chain() || !given) continue;
    throw UsageError("{}, --router: both are given, but {} has iterations={} routings; want one",
                     option, options.router, router.chain.iterations);
  }
  use_router(model, router);
}

std::optional<RoutingInput> load_routing(const Options& options, const RouterConfig& config,
                                         std::int64_t num_tokens) {
  if (options.routing_input.empty()) return std::nullopt;
  RoutingInput routing = read_routing(options.routing_input);
  if (routing.num_tokens != num_tokens || routing.top_k != config.top_k()) {
    throw UsageError("--routing-input: {} is for [T, K] = [{}, {}], want [{}, {}]",
                     options.routing_input, routing.num_tokens, routing.top_k, num_tokens,
                     config.top_k());
  }
  for (std::size_t i = 0; i < routing.expert.size(); ++i) {
    const auto token = static_cast<std::int64_t>(i) / routing.top_k;
    if (routing.expert[i] >= config.num_experts) {
      throw UsageError("--routing-input: {}: token {} has the expert {}, want -1 to {}",
                       options.routing_input, token, routing.expert[i], config.num_experts - 1);
    }
    if (!std::isfinite(routing.weight[i])) {
      throw UsageError("--routing-input: {}: token {} has the weight {}, want finite numbers",
                       options.routing_input, token, routing.weight[i]);
    }
  }
  return routing;
}

}  // namespace switchyard::tool
