// Losses with a routing that is not the router's.
#include "switchyard/models/ablation.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "core/splitmix64.hpp"
#include "models/evaluation/window_batches.hpp"

namespace switchyard::models {
namespace {

/// The tokens of a call that are of the text.
std::vector<std::size_t> tokens_of(const Batch& batch) {
  std::vector<std::size_t> tokens;
  for (std::size_t t = 0; t < batch.targets.size(); ++t) {
    if (batch.targets[t] >= 0) tokens.push_back(t);
  }
  return tokens;
}

/// Place i of `tokens` takes what place cycle[i] has: all of them are one cycle, so none its own.
std::vector<std::size_t> random_cycle(std::size_t size, std::uint64_t state) {
  std::vector<std::size_t> cycle(size);
  std::iota(cycle.begin(), cycle.end(), std::size_t{0});
  for (std::size_t left = size; left > 1; --left) {
    const std::uint64_t random = splitmix64_mix(state += kSplitMix64Step);
    std::swap(cycle[left - 1], cycle[random % (left - 1)]);
  }
  return cycle;
}

/// @param tokens  Rows that take part.
void shuffle(const std::vector<std::size_t>& tokens, std::uint64_t state, LayerRouting& routing) {
  const std::vector<std::size_t> cycle = random_cycle(tokens.size(), state);
  const auto top_k = static_cast<std::size_t>(routing.top_k);
  const std::vector<std::int32_t> expert = routing.expert;
  const std::vector<float> weight = routing.weight;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (std::size_t k = 0; k < top_k; ++k) {
      const std::size_t from = tokens[cycle[i]] * top_k + k, to = tokens[i] * top_k + k;
      routing.expert[to] = expert[from];
      routing.weight[to] = weight[from];
    }
  }
}

/// @returns whether any token had it.
bool leave_out(std::int32_t expert, AblatedWeight how, LayerRouting& routing) {
  const auto top_k = static_cast<std::size_t>(routing.top_k);
  bool any = false;
  for (std::size_t first = 0; first < routing.expert.size(); first += top_k) {
    double all = 0, left = 0;
    bool has = false;
    for (std::size_t i = first; i < first + top_k; ++i) {
      if (routing.expert[i] < 0) continue;
      all += double{routing.weight[i]};
      if (routing.expert[i] != expert) {
        left += double{routing.weight[i]};
        continue;
      }
      routing.expert[i] = -1;
      routing.weight[i] = 0;
      has = true;
    }
    any = any || has;
    if (!has || how == AblatedWeight::kDrop || left == 0) continue;
    for (std::size_t i = first; i < first + top_k; ++i) {
      routing.weight[i] = static_cast<float>(double{routing.weight[i]} * (all / left));
    }
  }
  return any;
}

class Ablator {
 public:
  Ablator(Model& model, const Text& text, const AblationOptions& options)
      : model_(model),
        text_(text),
        options_(options),
        passes_(count_ablations(model, text, options).passes) {
    out_.windows = sampled_windows(text, model.config().sequence, options.max_tokens);
    out_.bytes.resize(out_.windows.size());
  }

  Ablations run() {
    out_.base = pass([&](LayerRouting& routing, const Call& call) {
      count(routing, call);
      return false;
    });
    out_.shuffled = pass([&](LayerRouting& routing, const Call& call) {
      shuffle(call.tokens, state_of(routing, call), routing);
      return true;
    });
    for (LayerAblation& layer : out_.layers) {
      layer.shuffled = pass([&](LayerRouting& routing, const Call& call) {
        if (routing.layer != layer.layer) return false;
        shuffle(call.tokens, state_of(routing, call), routing);
        return true;
      });
      for (std::size_t e = 0; e < layer.experts.size(); ++e) {
        layer.experts[e].loss = pass([&](LayerRouting& routing, const Call&) {
          return routing.layer == layer.layer &&
                 leave_out(static_cast<std::int32_t>(e), options_.weight, routing);
        });
      }
    }
    return std::move(out_);
  }

 private:
  struct Call {
    std::size_t number;
    std::vector<std::size_t> tokens;  ///< Rows of the routing that are of the text.
  };

  template <class Change>
  PassLoss pass(const Change& change) {
    PassLoss loss{.nats = std::vector<double>(out_.windows.size())};
    const auto progress = [&](double share) {
      if (options_.progress) {
        options_.progress((static_cast<double>(done_) + share) / static_cast<double>(passes_));
      }
    };
    std::size_t number = 0;
    for_each_batch(text_, out_.windows, model_.config().sequence, options_.sequences, progress,
                   [&](const WindowBatch& batch) {
                     const Call call{number++, tokens_of(batch.batch)};
                     const std::vector<float> nll = evaluate_batch(
                         model_, batch.batch,
                         [&](LayerRouting& routing) { return change(routing, call); });
                     add(nll, batch, loss);
                   });
    ++done_;
    return loss;
  }

  void add(const std::vector<float>& nll, const WindowBatch& batch, PassLoss& loss) {
    const auto length = static_cast<std::size_t>(batch.batch.length);
    for (std::size_t w = 0; w < batch.windows.size(); ++w) {
      double& nats = loss.nats[batch.first + w];
      for (std::size_t t = w * length; t < (w + 1) * length; ++t) nats += double{nll[t]};
      const std::int32_t* const targets = batch.batch.targets.data() + w * length;
      out_.bytes[batch.first + w] = text_.bytes_of({targets, length});
    }
  }

  void count(const LayerRouting& routing, const Call& call) {
    if (out_.layers.empty() || out_.layers.back().layer < routing.layer) {
      out_.layers.push_back({.layer = routing.layer});
      out_.layers.back().experts.resize(static_cast<std::size_t>(routing.num_experts));
    }
    const auto layer = std::find_if(out_.layers.begin(), out_.layers.end(),
                                    [&](const auto& of) { return of.layer == routing.layer; });
    const auto top_k = static_cast<std::size_t>(routing.top_k);
    for (const std::size_t t : call.tokens) {
      for (std::size_t i = t * top_k; i < (t + 1) * top_k; ++i) {
        const std::int32_t e = routing.expert[i];
        if (e >= 0) ++layer->experts[static_cast<std::size_t>(e)].assignments;
      }
    }
  }

  /// The same in the pass of all layers and in that of one.
  [[nodiscard]] std::uint64_t state_of(const LayerRouting& routing, const Call& call) const {
    const auto layer = static_cast<std::uint64_t>(routing.layer);
    return splitmix64_mix(splitmix64_mix(options_.seed + kSplitMix64Step * (layer + 1)) +
                          static_cast<std::uint64_t>(call.number));
  }

  Model& model_;
  const Text& text_;
  const AblationOptions& options_;
  std::int64_t passes_;
  std::int64_t done_ = 0;
  Ablations out_;
};

}  // namespace

const char* to_string(AblatedWeight weight) noexcept {
  return weight == AblatedWeight::kDrop ? "drop" : "renormalise";
}

AblatedWeight parse_ablated_weight(std::string_view name) {
  for (const AblatedWeight weight : {AblatedWeight::kDrop, AblatedWeight::kRenormalise}) {
    if (name == to_string(weight)) return weight;
  }
  fail(ErrorCode::kInvalidArgument,
       "'{}' is nothing that becomes of an ablated expert's weight, want drop or renormalise",
       printable(std::string(name)));
}

AblationCost count_ablations(const Model& model, const Text& text, const AblationOptions& options) {
  const ModelConfig& config = model.config();
  check_vocabulary(config.vocabulary, text);
  require(config.first_dense < config.layers, "the model has no MoE layer, all {} are dense",
          config.layers);
  if (soft_moe_config(config)) {
    fail(
        ErrorCode::kUnsupported,
        "ablations change what a router has decided, and the router {} gives no token to an expert",
        config.router);
  }
  if (layer_config(config).router.is_chain()) {
    fail(ErrorCode::kUnsupported,
         "ablations change what a router has decided, and the router {} decides in each iteration "
         "by "
         "what the one before has made",
         config.router);
  }
  const std::vector<Window> windows = sampled_windows(text, config.sequence, options.max_tokens);
  AblationCost cost{.windows = std::ssize(windows)};
  for (const Window& window : windows) cost.tokens += window.length;
  const std::int64_t experts = layer_config(config).router.num_experts;
  cost.passes = 2 + (config.layers - config.first_dense) * (1 + experts);
  return cost;
}

Ablations ablate(Model& model, const Text& text, const AblationOptions& options) {
  return Ablator(model, text, options).run();
}

}  // namespace switchyard::models
