#pragma once

// The model once more, in double and in plain loops over names, from the formulas of
// docs/models.md: nothing of src/models. Its experts are the reference's, which links nothing of
// the library. Router: softmax over all experts, the K best, renormalised or not. Adapters as
// include/switchyard/perft.hpp has their formulas, without an activation.

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "reference/expert.hpp"
#include "switchyard/models/model.hpp"
#include "tests/models/double_soft_moe.hpp"

namespace switchyard::test {

using Doubles = std::vector<double>;
using Ids = std::vector<std::int32_t>;

namespace in_double {

/// y [rows, out] = x [rows, in] W [out, in]^T.
inline Doubles linear(const Doubles& x, const Doubles& w, std::size_t in) {
  const std::size_t rows = x.size() / in, out = w.size() / in;
  Doubles y(rows * out);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t o = 0; o < out; ++o) {
      for (std::size_t i = 0; i < in; ++i) y[r * out + o] += x[r * in + i] * w[o * in + i];
    }
  }
  return y;
}

inline Doubles rms_norm(const Doubles& x, const Doubles& weight, double epsilon) {
  Doubles y = x;
  const std::size_t size = weight.size();
  for (std::size_t first = 0; first < x.size(); first += size) {
    double squares = 0;
    for (std::size_t i = 0; i < size; ++i) squares += x[first + i] * x[first + i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + epsilon);
    for (std::size_t i = 0; i < size; ++i) y[first + i] *= scale * weight[i];
  }
  return y;
}

/// x [B*S, heads, dim] by positions.
inline Doubles rope(const Doubles& x, std::size_t positions, std::size_t heads, std::size_t dim,
                    double theta) {
  Doubles y = x;
  for (std::size_t row = 0; row < x.size() / (heads * dim); ++row) {
    for (std::size_t n = 0; n < heads; ++n) {
      for (std::size_t i = 0; i < dim / 2; ++i) {
        const double angle = static_cast<double>(row % positions) *
                             std::pow(theta, -2.0 * static_cast<double>(i) / double(dim));
        const std::size_t a = (row * heads + n) * dim + i, b = a + dim / 2;
        y[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
        y[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
      }
    }
  }
  return y;
}

struct AttentionSizes {
  std::size_t batch, positions, heads, kv_heads, dim;
};
inline Doubles attention(const Doubles& q, const Doubles& k, const Doubles& v,
                         const AttentionSizes& s) {
  Doubles out(q.size());
  for (std::size_t b = 0; b < s.batch; ++b) {
    for (std::size_t n = 0; n < s.heads; ++n) {
      const std::size_t m = n / (s.heads / s.kv_heads);
      for (std::size_t i = 0; i < s.positions; ++i) {
        const double* const qi = &q[((b * s.positions + i) * s.heads + n) * s.dim];
        Doubles score(i + 1);
        for (std::size_t j = 0; j <= i; ++j) {
          const double* const kj = &k[((b * s.positions + j) * s.kv_heads + m) * s.dim];
          score[j] = std::inner_product(qi, qi + s.dim, kj, 0.0) / std::sqrt(double(s.dim));
        }
        const double most = *std::max_element(score.begin(), score.end());
        double sum = 0;
        for (double& x : score) sum += x = std::exp(x - most);
        double* const to = &out[((b * s.positions + i) * s.heads + n) * s.dim];
        for (std::size_t j = 0; j <= i; ++j) {
          const double* const vj = &v[((b * s.positions + j) * s.kv_heads + m) * s.dim];
          for (std::size_t d = 0; d < s.dim; ++d) to[d] += score[j] / sum * vj[d];
        }
      }
    }
  }
  return out;
}

/// x [rows, in] through gate, up [inner, in] and down [in, inner], as the reference has an expert.
inline Doubles swiglu(const Doubles& x, const Doubles& gate, const Doubles& up, const Doubles& down,
                      std::size_t in) {
  ExpertConfig config;
  config.hidden = static_cast<std::int64_t>(in);
  config.inner = static_cast<std::int64_t>(gate.size() / in);
  reference::ExpertMatrices matrices;
  matrices.gate = gate, matrices.up = up, matrices.down = down;
  Doubles y;
  for (std::size_t first = 0; first < x.size(); first += in) {
    const auto row = reference::expert_row(config, matrices, std::span(x).subspan(first, in), {});
    for (const reference::Bounded& value : row) y.push_back(value.value);
  }
  return y;
}

/// Softmax of each row of `size`, in place.
inline void softmax(Doubles& rows, std::size_t size) {
  for (auto row = rows.begin(); row != rows.end(); row += std::ptrdiff_t(size)) {
    double sum = 0;
    for (std::size_t i = 0; i < size; ++i)
      sum += row[std::ptrdiff_t(i)] = std::exp(row[std::ptrdiff_t(i)]);
    for (std::size_t i = 0; i < size; ++i) row[std::ptrdiff_t(i)] /= sum;
  }
}

/// The `top_k` largest of p, the largest first, the lower index first of equal ones.
inline std::vector<std::size_t> largest(std::span<const double> p, std::size_t top_k) {
  std::vector<std::size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return p[a] > p[b]; });
  order.resize(top_k);
  return order;
}

/// Each row's -ln softmax(logits)[target], 0 where it is -1.
inline Doubles nll(const Doubles& logits, const Ids& targets, std::size_t vocabulary) {
  Doubles out(targets.size());
  for (std::size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] < 0) continue;
    const double* const x = &logits[row * vocabulary];
    const double most = *std::max_element(x, x + vocabulary);
    double sum = 0;
    for (std::size_t i = 0; i < vocabulary; ++i) sum += std::exp(x[i] - most);
    out[row] = most + std::log(sum) - x[targets[row]];
  }
  return out;
}

}  // namespace in_double

class DoubleModel {
 public:
  DoubleModel(const models::Model& model, bool renormalize = true)
      : config_(model.config()), renormalize_(renormalize) {
    for (const models::ParameterTensor& tensor : model.parameters()) {
      for (const models::TensorPart& part : tensor.parts) {
        const float* const from = tensor.value + part.offset;
        values_[part.name] = Doubles(from, from + part.size());
      }
    }
  }

  [[nodiscard]] Doubles& at(const std::string& name) { return values_.at(name); }

  /// [B*S, V]; the router losses of all layers are left in router_losses.
  Doubles logits(const Ids& tokens, std::size_t positions) {
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    Doubles x;
    const Doubles& table = at("model.embed_tokens.weight");
    for (const std::int32_t id : tokens) {
      const auto row = table.begin() + static_cast<std::ptrdiff_t>(id) * config_.hidden;
      x.insert(x.end(), row, row + config_.hidden);
    }
    router_losses = 0;
    for (std::int32_t l = 0; l < config_.layers; ++l) {
      const std::string prefix = "model.layers." + std::to_string(l) + ".";
      add(x,
          attention(norm(x, prefix + "input_layernorm.weight"), prefix + "self_attn.", positions));
      const Doubles read = norm(x, prefix + "post_attention_layernorm.weight");
      const auto soft = config_.is_dense(l) ? std::nullopt : models::soft_moe_config(config_);
      add(x, config_.is_dense(l) ? mlp(read, prefix + "mlp.")
             : soft              ? mixed(*soft, read, prefix + "mlp.", positions)
                                 : experts(l, read, prefix + "mlp."));
    }
    const char* const head = config_.tied ? "model.embed_tokens.weight" : "lm_head.weight";
    return in_double::linear(norm(x, "model.norm.weight"), at(head), hidden);
  }

  /// Mean nats a target plus the router's losses.
  double loss(const Ids& tokens, const Ids& targets, std::size_t positions) {
    const Doubles each = in_double::nll(logits(tokens, positions), targets,
                                        static_cast<std::size_t>(config_.vocabulary));
    const auto count = std::count_if(targets.begin(), targets.end(), [](int t) { return t >= 0; });
    return std::accumulate(each.begin(), each.end(), 0.0) / static_cast<double>(count) +
           router_losses;
  }

  double router_losses = 0;

  /// Of each token its experts with their weights, best first.
  using Choices = std::vector<std::vector<std::pair<std::size_t, double>>>;
  /// Sees, and may change, what the router of a layer has chosen; or empty.
  std::function<void(std::int32_t layer, Choices&)> on_choices{};

 private:
  static void add(Doubles& x, const Doubles& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  Doubles norm(const Doubles& x, const std::string& name) {
    return in_double::rms_norm(x, at(name), double{config_.norm_epsilon});
  }
  Doubles mlp(const Doubles& x, const std::string& prefix) {
    return in_double::swiglu(x, at(prefix + "gate_proj.weight"), at(prefix + "up_proj.weight"),
                             at(prefix + "down_proj.weight"),
                             static_cast<std::size_t>(config_.hidden));
  }
  Doubles attention(const Doubles& x, const std::string& prefix, std::size_t positions) {
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    const auto dim = static_cast<std::size_t>(config_.head_dim);
    const auto heads = static_cast<std::size_t>(config_.heads);
    const auto kv_heads = static_cast<std::size_t>(config_.kv_heads);
    Doubles q = in_double::linear(x, at(prefix + "q_proj.weight"), hidden);
    Doubles k = in_double::linear(x, at(prefix + "k_proj.weight"), hidden);
    const Doubles v = in_double::linear(x, at(prefix + "v_proj.weight"), hidden);
    if (config_.qk_norm != models::QkNorm::kNone) {
      q = norm(q, prefix + "q_norm.weight");
      k = norm(k, prefix + "k_norm.weight");
    }
    const double theta = double{config_.rope_theta};
    const Doubles mixed =
        in_double::attention(in_double::rope(q, positions, heads, dim, theta),
                             in_double::rope(k, positions, kv_heads, dim, theta), v,
                             {.batch = x.size() / hidden / positions,
                              .positions = positions,
                              .heads = heads,
                              .kv_heads = kv_heads,
                              .dim = dim});
    return in_double::linear(mixed, at(prefix + "o_proj.weight"), heads * dim);
  }
  /// What x goes through, by the gate `logits` come of, with shared experts. @param weights  [T, E]
  /// out.
  Doubles routed(std::int32_t layer, const Doubles& x, const std::string& prefix,
                 const Doubles& logits, std::size_t top_k, bool renormalize, Doubles& weights) {
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    const auto count = static_cast<std::size_t>(config_.experts);
    const std::size_t tokens = x.size() / hidden;
    Choices choices(tokens);
    Doubles out(x.size()), load(count), mean(count);
    weights.assign(tokens * count, 0);
    double z = 0;
    for (std::size_t t = 0; t < tokens; ++t) {
      Doubles p(logits.begin() + std::ptrdiff_t(t * count),
                logits.begin() + std::ptrdiff_t((t + 1) * count));
      double sum = 0;
      for (double& e : p) sum += e = std::exp(e);
      z += std::log(sum) * std::log(sum);
      for (double& e : p) e /= sum;
      const std::vector<std::size_t> order = in_double::largest(p, top_k);
      double chosen = 0;
      for (std::size_t k = 0; k < top_k; ++k) chosen += p[order[k]];
      for (std::size_t k = 0; k < top_k; ++k) {
        const std::size_t e = order[k];
        choices[t].emplace_back(e, renormalize ? p[e] / chosen : p[e]);
        load[e] += 1.0 / static_cast<double>(tokens * top_k);
      }
      for (std::size_t e = 0; e < count; ++e) mean[e] += p[e] / static_cast<double>(tokens);
    }
    if (on_choices) on_choices(layer, choices);
    for (std::size_t t = 0; t < tokens; ++t) {
      const Doubles row(x.begin() + std::ptrdiff_t(t * hidden),
                        x.begin() + std::ptrdiff_t((t + 1) * hidden));
      for (const auto& [e, weight] : choices[t]) {
        const Doubles y = mlp(row, prefix + "experts." + std::to_string(e) + ".");
        for (std::size_t i = 0; i < hidden; ++i) out[t * hidden + i] += weight * y[i];
        weights[t * count + e] += weight;
      }
    }
    router_losses += config_.losses.z * z / static_cast<double>(tokens) +
                     config_.losses.balance * static_cast<double>(count) *
                         std::inner_product(load.begin(), load.end(), mean.begin(), 0.0);
    if (config_.shared_inner > 0) add(out, shared(x, prefix));
    return out;
  }
  Doubles shared(const Doubles& x, const std::string& prefix) {
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    Doubles y = mlp(x, prefix + "shared_expert.");
    if (!config_.shared_gated) return y;
    const Doubles gate = in_double::linear(x, at(prefix + "shared_expert_gate.weight"), hidden);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] /= 1 + std::exp(-gate[i / hidden]);
    return y;
  }
  Doubles mixed(const SoftMoeConfig& soft, const Doubles& x, const std::string& prefix,
                std::size_t positions) {
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    const in_double::SoftMoe of{.hidden = hidden,
                                .experts = static_cast<std::size_t>(config_.experts),
                                .slots = static_cast<std::size_t>(soft.slots),
                                .group = soft.causal ? std::size_t(soft.group) : positions,
                                .normalize = soft.normalize,
                                .causal = soft.causal,
                                .scale = at(prefix + "phi.scale")[0]};
    Doubles out;
    for (std::size_t first = 0; first < x.size(); first += positions * hidden) {
      const Doubles sequence(x.begin() + std::ptrdiff_t(first),
                             x.begin() + std::ptrdiff_t(first + positions * hidden));
      const Doubles y = in_double::soft_moe(
          sequence, at(prefix + "phi.weight"), of, [&](std::size_t e, const Doubles& row) {
            return mlp(row, prefix + "experts." + std::to_string(e) + ".");
          });
      out.insert(out.end(), y.begin(), y.end());
    }
    return out;
  }
  /// x_c = experts by gate c of x_(c-1), with x_(c-1); x_0 behind the last one.
  Doubles chain(std::int32_t layer, const Doubles& x, const std::string& prefix,
                const ChainConfig& chain) {
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    const auto iterations = static_cast<std::size_t>(chain.iterations);
    const Doubles& gates = at(prefix + "gate.iterations.weight");
    const std::size_t each = gates.size() / iterations;
    const bool renormalize = models::layer_config(config_).router.as_top_k().renormalize;
    Doubles now = x, weights;
    for (std::size_t c = 0; c < iterations; ++c) {
      const Doubles gate(gates.begin() + std::ptrdiff_t(c * each),
                         gates.begin() + std::ptrdiff_t((c + 1) * each));
      Doubles next =
          routed(layer, now, prefix, in_double::linear(now, gate, hidden),
                 static_cast<std::size_t>(config_.top_k) / iterations, renormalize, weights);
      if (chain.inner_residual) add(next, now);
      now = next;
    }
    if (chain.outer_residual) add(now, x);
    return now;
  }
  Doubles experts(std::int32_t layer, const Doubles& x, const std::string& prefix) {
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    const ChainConfig of = models::layer_config(config_).router.chain;
    Doubles weights;
    Doubles out =
        of.iterations > 0
            ? chain(layer, x, prefix, of)
            : routed(layer, x, prefix, in_double::linear(x, at(prefix + "gate.weight"), hidden),
                     static_cast<std::size_t>(config_.top_k), renormalize_, weights);
    if (config_.adapters) add(out, adapters(x, prefix + "adapters.", weights));
    return out;
  }

  /// @param of_layer  [T, E] weights of the layer's experts, 0 where not chosen.
  Doubles adapters(const Doubles& x, const std::string& prefix, const Doubles& of_layer) {
    const models::AdapterConfig& which = *config_.adapters;
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    const auto count = static_cast<std::size_t>(which.num_adapters);
    const std::size_t tokens = x.size() / hidden;
    Doubles weight(tokens * count, 1.0);
    if (which.kind == PerftKind::kEmbedded) weight = of_layer;
    if (which.kind == PerftKind::kRouted) {
      Doubles p = in_double::linear(x, at(prefix + "gate.weight"), hidden);
      in_double::softmax(p, count);
      for (std::size_t t = 0; t < tokens; ++t) {
        double* const row = &weight[t * count];
        const std::span<const double> scores(&p[t * count], count);
        std::fill_n(row, count, 0.0);
        double sum = 0;
        for (const std::size_t j : in_double::largest(scores, std::size_t(which.top_k))) {
          sum += row[j] = scores[j];
        }
        for (std::size_t j = 0; j < count && which.renormalize; ++j) row[j] /= sum;
      }
    }
    Doubles out(x.size());
    const double scale = double{which.alpha} / static_cast<double>(which.rank);
    for (std::size_t j = 0; j < count; ++j) {
      const std::string name = prefix + std::to_string(j) + ".lora_";
      const Doubles narrow = in_double::linear(x, at(name + "A.weight"), hidden);
      const Doubles wide =
          in_double::linear(narrow, at(name + "B.weight"), static_cast<std::size_t>(which.rank));
      for (std::size_t i = 0; i < x.size(); ++i) {
        out[i] += scale * weight[i / hidden * count + j] * wide[i];
      }
    }
    return out;
  }

  models::ModelConfig config_;
  bool renormalize_;
  std::map<std::string, Doubles> values_;
};

}  // namespace switchyard::test
