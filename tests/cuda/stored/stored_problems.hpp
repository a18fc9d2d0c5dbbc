#pragma once

// Experts with weights as they are stored, their rows, and the ways to run them on a GPU.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "experts/gpu/grouped/coded/product.hpp"
#include "experts/gpu/weights.hpp"
#include "experts/implementations.hpp"
#include "reference/expert.hpp"
#include "reference/layer.hpp"
#include "switchyard/device.hpp"
#include "switchyard/experts.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/made_experts.hpp"
#include "testkit/quantised_source.hpp"

namespace switchyard::test {

/// A format and the rest of it, of int4.
struct Kind {
  WeightFormat format = WeightFormat::kMxfp4;
  Int4Form int4{};
};
inline constexpr Kind kKinds[] = {
    {WeightFormat::kMxfp4},
    {WeightFormat::kE4M3},
    {WeightFormat::kInt4, {.group = 32, .scale = DType::kBF16}},
    {WeightFormat::kInt4, {.group = 32, .scale = DType::kF16, .zero_points = true}},
    {WeightFormat::kNvfp4}};

/// Whether there are kernels that multiply the codes.
inline bool is_multiplied(WeightFormat format) {
  return format == WeightFormat::kMxfp4 || format == WeightFormat::kE4M3;
}

/// Experts and rows: `rows[e]` of expert e, each a token with one expert.
struct Problem {
  std::string name;
  Kind kind{};
  std::int64_t hidden = 64;
  std::int64_t inner = 96;
  std::vector<std::int32_t> rows;
  bool gated = true;
  Activation activation = Activation::kSilu;
  bool bias = false;
  bool sparse = false;  ///< Of every 128 values of a row one alone is not zero.
};

class StoredProblem {
 public:
  /// @param format  kStored, or exact: the same numbers.
  explicit StoredProblem(const Problem& p, WeightFormat format = WeightFormat::kStored)
      : p_(p),
        config_{.num_experts = static_cast<std::int32_t>(p.rows.size()),
                .hidden = p.hidden,
                .inner = p.inner,
                .gated = p.gated,
                .activation = p.activation,
                .bias = p.bias},
        source_(config_, p.kind.format, 11, 1.0F, p.kind.int4) {
    for (const std::int32_t rows : p.rows) {
      for (std::int32_t i = 0; i < rows; ++i) {
        row_expert_.push_back(static_cast<std::int32_t>(begin_.size() - 1));
      }
      begin_.push_back(static_cast<std::int32_t>(row_expert_.size()));
    }
    std::mt19937 random(5);
    x_ = random_floats(num_rows() * p.hidden, random);
    if (p.sparse) {
      for (std::size_t first = 0; first < x_.size(); first += 128) {
        const std::size_t kept = first + random() % 128;
        for (std::size_t i = first; i < std::min(x_.size(), first + 128); ++i) {
          // None so small that it would lose bits beside the row's largest.
          x_[i] = i != kept ? 0 : std::copysign(0.25F + 0.75F * std::abs(x_[i]), x_[i]);
        }
      }
    }
    weights_ = load_experts({.config = config_,
                             .source = &source_,
                             .dtype = DType::kBF16,
                             .num_local = config_.num_experts,
                             .format = format,
                             .execution = {.backend = Backend::kCuda}});
  }

  [[nodiscard]] std::int64_t num_rows() const { return std::ssize(row_expert_); }
  [[nodiscard]] const ExpertWeights& weights() const { return *weights_; }
  [[nodiscard]] const QuantisedSource& source() const { return source_; }

  /// Row after row, by the reference.
  /// @param splits  Rows may be split into two numbers a value.
  [[nodiscard]] std::vector<reference::Bounded> want(bool splits = false) const {
    const reference::Precision precision{.compute = DType::kBF16,
                                         .may_scale_sums = p_.kind.format == WeightFormat::kE4M3,
                                         .may_split_rows = splits};
    std::vector<reference::Bounded> all;
    each_row(precision, [&](std::int64_t row, const reference::ExpertMatrices& matrices) {
      for (const reference::Bounded& value :
           reference::expert_row(config_, matrices, row_of(x_, row, p_.hidden), precision)) {
        all.push_back(reference::convert(DType::kBF16, value));
      }
    });
    return all;
  }

  /// Their sums, of one row with the weight that a token gives it.
  [[nodiscard]] static std::vector<reference::Bounded> weighted(
      std::vector<reference::Bounded> rows) {
    for (reference::Bounded& value : rows) value = reference::multiply(value, {kWeight, 0});
    return rows;
  }

  /// One expert a token. Streaming gives sums, the others rows.
  [[nodiscard]] std::vector<float> run(const Implementation<ExpertsArgs>& way,
                                       bool batch_invariant = false) const {
    const bool sums = &way == &kExpertsCudaStreaming;
    const std::int64_t rows = num_rows();
    const std::int64_t bytes = experts_workspace_bytes(rows, *weights_);
    DeviceArray<std::byte> workspace(
        std::vector<std::byte>(static_cast<std::size_t>(bytes), std::byte{0}));
    DeviceArray<std::byte> x(stored_as(DType::kBF16, x_));
    std::vector<std::int32_t> in_turn;
    for (std::int32_t i = 0; i <= rows; ++i) in_turn.push_back(i);
    const DeviceArray<std::int32_t> begin(begin_);
    const DeviceArray<std::int32_t> used(p_.rows);
    const DeviceArray<std::int32_t> order(in_turn);
    const DeviceArray<float> weight(std::vector<float>(static_cast<std::size_t>(rows), kWeight));
    DeviceArray<std::byte> out(static_cast<std::size_t>(rows * p_.hidden * (sums ? 4 : 2)));
    ExpertsArgs args{
        .x = {x.bytes(), DType::kBF16, rows, p_.hidden},
        .weights = weights_.get(),
        .execution = {
            .backend = Backend::kCuda, .workspace = workspace.data(), .workspace_bytes = bytes}};
    args.execution.batch_invariant = batch_invariant;
    args.plan.num_experts = config_.num_experts;
    args.plan.expert_begin = begin.vector();
    args.plan.expert_rows = used.vector();
    args.plan.row_token = {order.vector().data, {rows}};
    args.plan.row_weight = weight.vector();
    args.plan.token_begin = order.vector();
    args.plan.token_row = {order.vector().data, {rows}};
    if (sums) {
      args.reduced = {
          .sums = {out.bytes(), DType::kF32, rows, p_.hidden},
          .subtree = {.order = {.num_experts = config_.num_experts, .groups = 1}, .num_groups = 1}};
    } else {
      args.rows = {out.bytes(), DType::kBF16, rows, p_.hidden};
    }
    way.run(args);
    return loaded_as_floats(sums ? DType::kF32 : DType::kBF16, out.get());
  }

  /// By the grouped products with codes alone, each row of another token than its own.
  [[nodiscard]] std::vector<float> run_products(bool ordered) const {
    const Products products(*this, ordered);
    launch_coded_gate_up(products.params, nullptr);
    launch_coded_down(products.params, nullptr);
    return loaded_as_floats(DType::kBF16, products.y.get());
  }

  /// What the first product with codes of MXFP4 writes, against exact sums; "" or the first miss.
  [[nodiscard]] std::string check_act() const {
    const Products products(*this, true);
    launch_coded_gate_up(products.params, nullptr);
    const reference::Precision precision{.compute = DType::kBF16};
    std::vector<reference::Bounded> all;
    each_row(precision, [&](std::int64_t row, const reference::ExpertMatrices& matrices) {
      const std::vector<double> x = row_of(x_, num_rows() - 1 - row, p_.hidden);
      for (std::int64_t i = 0; i < p_.inner; ++i) {
        const auto gate = reference::dot(matrices.gate, i, x, {}, matrices.gate_bias);
        const auto up = p_.gated ? reference::dot(matrices.up, i, x, {}, matrices.up_bias)
                                 : reference::Bounded{};
        all.push_back(reference::convert(DType::kBF16, reference::inner_value(config_, gate, up)));
      }
    });
    return reference::check_output(all, p_.inner, DType::kBF16,
                                   loaded_as_floats(DType::kBF16, products.act.get()));
  }
  /// What the second one makes of rows of which one value of 128 is not zero, likewise.
  [[nodiscard]] std::string check_down() const {
    const Products products(*this, true);
    std::vector<float> act(static_cast<std::size_t>(num_rows() * p_.inner));
    for (std::int64_t i = 0; i < std::ssize(act); ++i) {
      const std::int64_t column = i % p_.inner;
      const bool is_kept = column % 128 == (i / p_.inner * 7 + column / 128 * 5) % 32;
      act[static_cast<std::size_t>(i)] = is_kept ? 0.37F * static_cast<float>(i % 11 - 5) : 0;
    }
    products.act.set(stored_as(DType::kBF16, act));
    launch_coded_down(products.params, nullptr);
    const reference::Precision precision{.compute = DType::kBF16};
    std::vector<reference::Bounded> all;
    each_row(precision, [&](std::int64_t row, const reference::ExpertMatrices& matrices) {
      const std::vector<double> of = row_of(act, row, p_.inner);
      for (std::int64_t h = 0; h < p_.hidden; ++h) {
        all.push_back(reference::convert(
            DType::kBF16, reference::dot(matrices.down, h, of, {}, matrices.down_bias)));
      }
    });
    return reference::check_output(all, p_.hidden, DType::kBF16,
                                   loaded_as_floats(DType::kBF16, products.y.get()));
  }

  static constexpr float kWeight = 0.75F;

 private:
  /// The memory and parameters of both products; row r is token num_rows() - 1 - r.
  struct Products {
    DeviceArray<std::byte> x, in_order, act, y;
    DeviceArray<float> row_scales;
    DeviceArray<std::int32_t> token, begin, used;
    CodedGroupedParams params{};

    Products(const StoredProblem& of, bool ordered)
        : x(stored_as(DType::kBF16, of.x_)),
          in_order(room(of, of.p_.hidden)),
          act(room(of, of.p_.inner)),
          y(room(of, of.p_.hidden)),
          row_scales(static_cast<std::size_t>(of.num_rows())),
          token(backwards(of.num_rows())),
          begin(of.begin_),
          used(of.p_.rows) {
      const auto& weights = static_cast<const CudaExpertWeights&>(*of.weights_);
      params = {
          .format = weights.format(),
          .x = x.data(),
          .row_token = token.data(),
          .ordered = ordered ? in_order.data() : nullptr,
          .row_scales = weights.format() == WeightFormat::kMxfp4 ? row_scales.data() : nullptr,
          .num_tokens = of.num_rows(),
          .w13 = weights.w13(),
          .scales13 = weights.scales13(),
          .b13 = weights.b13(),
          .act = act.data(),
          .w2 = weights.w2(),
          .scales2 = weights.scales2(),
          .b2 = weights.b2(),
          .y = y.data(),
          .expert_begin = begin.data(),
          .expert_rows = used.data(),
          .num_experts = of.config_.num_experts,
          .max_rows = of.num_rows(),
          .hidden = of.p_.hidden,
          .inner = of.p_.inner,
          .gated = of.p_.gated,
          .activation = of.p_.activation};
    }
    /// NaN.
    static std::vector<std::byte> room(const StoredProblem& of, std::int64_t columns) {
      return std::vector<std::byte>(static_cast<std::size_t>(2 * of.num_rows() * columns),
                                    std::byte{0xff});
    }
    static std::vector<std::int32_t> backwards(std::int64_t rows) {
      std::vector<std::int32_t> tokens(static_cast<std::size_t>(rows));
      std::iota(tokens.rbegin(), tokens.rend(), 0);
      return tokens;
    }
  };

  /// Calls `body(row, matrices of its expert)`, which are read once for each expert.
  template <typename Body>
  void each_row(const reference::Precision& precision, Body&& body) const {
    std::int32_t read = -1;
    reference::ExpertMatrices matrices;
    for (std::int64_t row = 0; row < num_rows(); ++row) {
      const std::int32_t expert = row_expert_[static_cast<std::size_t>(row)];
      if (expert != read) matrices = reference::read_expert(config_, source_, expert, precision);
      read = expert;
      body(row, matrices);
    }
  }

  /// As computed with.
  [[nodiscard]] static std::vector<double> row_of(const std::vector<float>& values,
                                                  std::int64_t row, std::int64_t columns) {
    const auto from = values.begin() + row * columns;
    return reference::as_computed(std::vector<float>(from, from + columns), DType::kBF16);
  }

  Problem p_;
  ExpertConfig config_;
  QuantisedSource source_;
  std::vector<std::int32_t> begin_{0}, row_expert_;
  std::vector<float> x_;
  std::unique_ptr<ExpertWeights> weights_;
};

inline std::vector<Problem> problems(const Kind& kind) {
  std::vector<Problem> list = {
      {.name = "one row", .rows = {0, 1, 0}},
      {.name = "an expert with none, odd counts", .rows = {3, 0, 9, 1, 17}},
      {.name = "half a unit at the end", .hidden = 96, .inner = 32, .rows = {2, 5}},
      {.name = "many turns", .hidden = 2880, .inner = 288, .rows = {1, 8, 2}},
      {.name = "long inner sums", .hidden = 256, .inner = 2880, .rows = {4, 12}},
      {.name = "rows of many blocks", .hidden = 7168, .inner = 64, .rows = {3, 1}},
      {.name = "more than 64 blocks of scales", .hidden = 9216, .inner = 32, .rows = {2}},
      // On 132 SMs most own 5 groups of 8 rows: a full tile of 4 and one of 1.
      {.name = "tiles of unequal rows", .hidden = 5120, .inner = 160, .rows = {9, 2, 30}},
      {.name = "passes of 32 and 64", .hidden = 320, .inner = 160, .rows = {70, 33, 1}},
      {.name = "two tiles a warp, partial turns",
       .hidden = 2336,
       .inner = 480,
       .rows = {40, 33, 1, 64, 9, 17, 8, 28}},
      {.name = "passes of an expert side by side",
       .hidden = 544,
       .inner = 288,
       .rows = {65, 0, 193, 128, 5, 48}},
      {.name = "gpt-oss in small",
       .hidden = 288,
       .inner = 288,
       .rows = {2, 1, 4},
       .activation = Activation::kClampedSwiglu,
       .bias = true},
      {.name = "plain", .hidden = 128, .inner = 160, .rows = {5, 3}, .gated = false, .bias = true},
  };
  if (kind.format == WeightFormat::kE4M3) {
    list.push_back({.name = "no multiples of 32", .hidden = 200, .inner = 136, .rows = {6, 2}});
    list.push_back({.name = "smallest", .hidden = 8, .inner = 8, .rows = {1}});
  } else {
    list.push_back({.name = "smallest", .hidden = 32, .inner = 32, .rows = {1}});
  }
  for (Problem& p : list) p.kind = kind;
  return list;
}

}  // namespace switchyard::test
