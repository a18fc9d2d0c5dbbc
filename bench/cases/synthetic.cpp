// Made-up data. Values come from a table of normal numbers at random places, so that weights of
// many GB take no longer to make than to copy.
#include "bench/cases/synthetic.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/half.hpp"
#include "testkit/random.hpp"

namespace switchyard::bench {

double zipf_of(const std::string& skew) {
  constexpr std::string_view kZipf = "zipf:";
  return skew.starts_with(kZipf) ? std::stod(skew.substr(kZipf.size())) : 0;
}

namespace {

constexpr std::size_t kTableSize = 1 << 16;

std::vector<float> normal_table(std::uint64_t seed, double deviation) {
  Random random(seed);
  std::vector<float> table(kTableSize);
  for (float& value : table) value = static_cast<float>(deviation * random.normal());
  return table;
}

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  return Random(a * kSplitMix64Step ^ b).bits();
}

/// Normal values of one deviation in the types that readers ask for.
class Table {
 public:
  Table(std::uint64_t seed, double deviation, DType stored)
      : f32_(normal_table(seed, deviation)), bf16_(kTableSize), f16_(kTableSize) {
    for (std::size_t i = 0; i < kTableSize; ++i) {
      f32_[i] = round_to(stored, f32_[i]);
      bf16_[i] = float_to_bf16(f32_[i]);
      f16_[i] = float_to_f16(f32_[i]);
    }
  }

  /// `count` values of the row that `key` names.
  void read(std::uint64_t key, std::int64_t count, DType dtype, void* out) const {
    const std::byte* table = reinterpret_cast<const std::byte*>(f32_.data());
    if (dtype == DType::kBF16) table = reinterpret_cast<const std::byte*>(bf16_.data());
    if (dtype == DType::kF16) table = reinterpret_cast<const std::byte*>(f16_.data());
    const auto size = static_cast<std::size_t>(size_of(dtype));
    auto* to = static_cast<std::byte*>(out);
    for (auto left = static_cast<std::size_t>(count); left > 0; key = mix(key, left)) {
      const std::size_t begin = key % (kTableSize / 2);
      const std::size_t step = std::min(left, kTableSize / 2);
      std::copy_n(table + begin * size, step * size, to);
      to += step * size;
      left -= step;
    }
  }

 private:
  std::vector<float> f32_;
  std::vector<std::uint16_t> bf16_, f16_;
};

/// Kept for the process: to make one takes longer than a small case runs, and the cases of a suite
/// share a few.
const Table& table_of(std::uint64_t seed, double deviation, DType stored) {
  static std::mutex mutex;
  static std::map<std::tuple<std::uint64_t, double, DType>, Table> tables;
  const std::lock_guard lock(mutex);
  const auto found = tables.find({seed, deviation, stored});
  if (found != tables.end()) return found->second;
  return tables.try_emplace({seed, deviation, stored}, seed, deviation, stored).first->second;
}

class SyntheticSource final : public ExpertSource {
 public:
  SyntheticSource(const ExpertConfig& config, DType dtype, std::uint64_t seed, bool unit_weights)
      : config_(config),
        dtype_(dtype),
        seed_(seed),
        in_(table_of(seed, unit_weights ? 1 : 1 / std::sqrt(static_cast<double>(config.hidden)),
                     dtype)),
        down_(table_of(seed + 1,
                       unit_weights ? 1 : 1 / std::sqrt(static_cast<double>(config.inner)), dtype)),
        bias_(table_of(seed + 2, 0.1, DType::kF32)) {}

  [[nodiscard]] DType dtype() const override { return dtype_; }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    const bool down = part == ExpertPart::kDown;
    const std::int64_t cols = down ? config_.inner : config_.hidden;
    auto* to = static_cast<std::byte*>(out);
    for (std::int64_t row = first_row; row < first_row + num_rows; ++row) {
      (down ? down_ : in_).read(key_of(expert, part, row), cols, dtype, to);
      to += cols * size_of(dtype);
    }
  }

  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override {
    const std::int64_t count = part == ExpertPart::kDown ? config_.hidden : config_.inner;
    bias_.read(key_of(expert, part, -1), count, DType::kF32, out);
  }

 private:
  [[nodiscard]] std::uint64_t key_of(std::int32_t expert, ExpertPart part, std::int64_t row) const {
    const auto matrix = static_cast<std::uint64_t>(expert) * 4 + static_cast<std::uint64_t>(part);
    return mix(mix(seed_, matrix), static_cast<std::uint64_t>(row));
  }

  ExpertConfig config_;
  DType dtype_;
  std::uint64_t seed_;
  const Table &in_, &down_, &bias_;
};

std::vector<float> normals(std::size_t count, std::uint64_t seed, double deviation) {
  Random random(seed);
  std::vector<float> out(count);
  for (float& value : out) value = static_cast<float>(deviation * random.normal());
  return out;
}

/// log of each expert's weight, in a seeded order of the experts.
std::vector<double> log_weights(std::int32_t num_experts, double exponent, Random& random) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(num_experts));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.bits() % i]);
  std::vector<double> out(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    out[static_cast<std::size_t>(order[i])] = -exponent * std::log(static_cast<double>(i + 1));
  }
  return out;
}

}  // namespace

std::shared_ptr<const ExpertSource> synthetic_experts(const ExpertConfig& config, DType dtype,
                                                      std::uint64_t seed, bool unit_weights) {
  return std::make_shared<SyntheticSource>(config, dtype, seed, unit_weights);
}

LayerModel synthetic_layer(const LayerConfig& config, bool router_bias, bool selection_bias,
                           DType dtype, std::uint64_t seed) {
  const auto gates = static_cast<std::size_t>(config.router.num_gates());
  const auto num_experts = gates * static_cast<std::size_t>(config.router.num_experts);
  const auto hidden = static_cast<std::size_t>(config.experts.hidden);
  const auto columns = gates * static_cast<std::size_t>(config.router.num_logits());
  LayerModel model{.config = config};
  const auto features =
      static_cast<std::size_t>(config.router.network.features(config.experts.hidden));
  std::vector<float> gate =
      normals(columns * features, seed + 10, 1 / std::sqrt(static_cast<double>(features)));
  for (float& value : gate) value = round_to(dtype, value);  // as checkpoints have it
  model.gate = std::move(gate);
  if (!config.router.network.is_linear()) {
    const auto size = static_cast<std::size_t>(config.router.network.size(config.experts.hidden));
    model.router_network = normals(size, seed + 15, 1 / std::sqrt(static_cast<double>(hidden)));
  }
  if (config.router.noise.kind == RouterNoise::Kind::kLearned) {
    model.noise_gate =
        normals(columns * hidden, seed + 14, 1 / std::sqrt(static_cast<double>(hidden)));
  }
  if (const std::int32_t constant = config.router.zero_computation.constant; constant > 0) {
    model.constant_experts = normals(3 * static_cast<std::size_t>(constant) * hidden, seed + 16,
                                     1 / std::sqrt(static_cast<double>(hidden)));
  }
  if (router_bias) model.router_bias = normals(columns, seed + 11, 0.1);
  if (selection_bias) model.selection_bias = normals(num_experts, seed + 12, 0.01);
  model.experts = synthetic_experts(config.experts, dtype, seed + 13);
  if (config.shared.num_experts > 0) {
    model.shared = synthetic_experts(config.shared, dtype, seed + 20);
    if (config.shared_gated) model.shared_gate = normals(hidden, seed + 21, 0.1);
  }
  return model;
}

std::vector<std::byte> synthetic_tokens(std::int64_t num_tokens, std::int64_t hidden, DType dtype,
                                        std::uint64_t seed) {
  const Table& table = table_of(seed + 30, 1, dtype);
  const std::int64_t row_bytes = hidden * size_of(dtype);
  std::vector<std::byte> out(static_cast<std::size_t>(num_tokens * row_bytes));
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    table.read(mix(seed + 31, static_cast<std::uint64_t>(token)), hidden, dtype,
               out.data() + token * row_bytes);
  }
  return out;
}

std::vector<std::int32_t> synthetic_token_ids(std::int64_t num_tokens, std::uint64_t seed) {
  constexpr double kVocabulary = 32768;
  Random random(seed + 50);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(num_tokens));
  for (std::int32_t& id : ids) {
    const double unit = static_cast<double>(random.bits() >> 11) * 0x1p-53;
    id = static_cast<std::int32_t>(std::exp(unit * std::log(kVocabulary + 1))) - 1;
  }
  return ids;
}

SyntheticRouting synthetic_routing(std::int64_t num_tokens, std::int32_t num_experts,
                                   std::int32_t top_k, std::string_view skew, std::uint64_t seed) {
  Random random(seed + 40);
  double parameter = 0;
  const std::size_t colon = skew.find(':');
  if (colon != std::string_view::npos) {
    std::from_chars(skew.data() + colon + 1, skew.data() + skew.size(), parameter);
  }
  const bool hot = skew.starts_with("hot");
  const std::vector<double> weights = log_weights(num_experts, hot ? 0 : parameter, random);
  const auto hot_expert = static_cast<std::size_t>(random.bits() % weights.size());
  SyntheticRouting out;
  std::vector<std::pair<double, std::int32_t>> keys(weights.size());
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::size_t e = 0; e < keys.size(); ++e) {  // log weight + Gumbel noise
      keys[e] = {-(weights[e] - std::log(-std::log(random.uniform()))),
                 static_cast<std::int32_t>(e)};
    }
    if (hot) {
      const bool chosen = random.uniform() < parameter;
      keys[hot_expert].first = chosen ? -HUGE_VAL : HUGE_VAL;
    }
    std::partial_sort(keys.begin(), keys.begin() + top_k, keys.end());
    for (std::int32_t k = 0; k < top_k; ++k) {
      out.expert.push_back(keys[static_cast<std::size_t>(k)].second);
      out.weight.push_back(1.0F / static_cast<float>(top_k));
    }
  }
  return out;
}

SyntheticRouting published_routing(std::int64_t num_tokens, std::int32_t num_experts,
                                   std::int32_t top_k, std::uint64_t seed) {
  Random random(seed + 50);
  SyntheticRouting out;
  for (std::int64_t i = 0; i < num_tokens * top_k; ++i) {
    const auto expert = random.bits() % static_cast<std::uint64_t>(num_experts);
    out.expert.push_back(static_cast<std::int32_t>(expert));
    out.weight.push_back(static_cast<float>(random.normal()));
  }
  return out;
}

std::vector<std::int64_t> counts_of(const SyntheticRouting& routing, std::int32_t num_experts) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts));
  for (const std::int32_t expert : routing.expert) ++counts[static_cast<std::size_t>(expert)];
  return counts;
}

}  // namespace switchyard::bench
