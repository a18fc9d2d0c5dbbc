#pragma once

// One layer's experts with made-up weights and rows on a GPU, for the tests of the way back through
// them. Padding is NaN, and so is what its rows would be read from.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "experts/implementations.hpp"
#include "reference/backward.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/device.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/made_experts.hpp"

namespace switchyard::test {

using reference::Bounded;
using Floats = std::vector<float>;
using Ints = std::vector<std::int32_t>;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kStart = 0.75F;  // what gradients are added to
inline constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

inline std::size_t index_at(std::int64_t i) { return static_cast<std::size_t>(i); }

inline std::int64_t width_of(const ExpertConfig& config) {
  return (config.gated ? 2 : 1) * config.inner;
}

struct Problem {
  ExpertConfig config{};
  DType dtype = DType::kBF16;
  Ints rows{};           ///< Of each expert.
  std::int32_t gap = 0;  ///< Padding behind each one's.
  unsigned seed = 7;
};

inline Problem problem(std::int64_t hidden, std::int64_t inner, DType dtype, const Ints& rows) {
  return {.config = {.num_experts = static_cast<std::int32_t>(rows.size()),
                     .hidden = hidden,
                     .inner = inner,
                     .bias = true},
          .dtype = dtype,
          .rows = rows};
}

/// A plan's rows.
struct Rows {
  Ints begin{0}, token;
  Floats weight;
};

/// All gradients; those by row are of the used ones only.
struct Gradients {
  Floats weight, dx, w13, w2, b13, b2;
  bool operator==(const Gradients&) const = default;
};

/// How experts_backward() is called.
struct Way {
  bool keep = true;  ///< The pre-activation, else it is made again.
  bool lends =
      false;  ///< Room for dz, in place of the pre-activation, and for weighted activations.
  bool accumulate = false;
  DType gradients = DType::kF32;  ///< Of weights, and of dx.
  /// Whose kernels, where they take the call; else what the call's choice is.
  const Implementation<ExpertsBackwardArgs>* kernels = nullptr;
};

inline constexpr std::int64_t kTokens = 37;

/// One layer on the host and on the device. The token behind the last is NaN, and the padding's.
class Case {
 public:
  explicit Case(const Problem& p)
      : p_(p),
        random_(p.seed),
        made_(make_experts(p.config, p.dtype, random_)),
        source_(made_.source()),
        x_(values_of_tokens()),
        dout_(values_of_tokens()),
        rows_(rows_for(p.rows)),
        weights_(load_experts({.config = p.config,
                               .source = source_.get(),
                               .dtype = p.dtype,
                               .num_local = p.config.num_experts,
                               .execution = {.backend = Backend::kCuda}})),
        begin(rows_.begin),
        used(p.rows),
        token(rows_.token),
        weight(rows_.weight),
        x(stored_as(p.dtype, x_)),
        dout(stored_as(p.dtype, dout_)),
        z(index_at(max_rows() * width() * element())),
        inner(index_at(max_rows() * p.config.inner * element())),
        dweight(index_at(max_rows())),
        dx(index_at(max_rows() * p.config.hidden * 4)),
        w13(index_at(num_experts() * width() * p.config.hidden * 4)),
        w2(index_at(num_experts() * p.config.inner * p.config.hidden * 4)),
        b13(index_at(num_experts() * width())),
        b2(index_at(num_experts() * p.config.hidden)),
        workspace(index_at(experts_backward_workspace_bytes(p.config, p.dtype, p.config.num_experts,
                                                            max_rows()))) {}

  /// Room for all rows of the plan, as its maker has it.
  [[nodiscard]] std::int64_t max_rows() const { return std::ssize(rows_.token); }

  Rows rows_for(const Ints& counts) {
    Rows rows;
    for (const std::int32_t count : counts) {
      for (std::int32_t i = 0; i < count + p_.gap; ++i) {
        const bool padding = i >= count;
        rows.token.push_back(static_cast<std::int32_t>(padding ? kTokens : random_() % kTokens));
        rows.weight.push_back(padding ? kNan : std::normal_distribution<float>()(random_));
      }
      rows.begin.push_back(static_cast<std::int32_t>(rows.token.size()));
    }
    return rows;
  }

  /// Takes other rows, no more of them than there is room for.
  void set_rows(const Ints& counts) {
    Rows rows = rows_for(counts);
    p_.rows = counts;
    const std::size_t room = rows_.token.size();
    ASSERT_LE(rows.token.size(), room);
    rows.token.resize(room, kTokens);
    rows.weight.resize(room, kNan);
    rows_ = rows;
    begin.set(rows_.begin);
    used.set(p_.rows);
    token.set(rows_.token);
    weight.set(rows_.weight);
  }

  [[nodiscard]] PlanView plan() const {
    return {.num_experts = p_.config.num_experts,
            .expert_begin = begin.vector(),
            .expert_rows = used.vector(),
            .row_token = {token.data(), {max_rows()}},
            .row_weight = {weight.data(), {max_rows()}},
            .token_begin = {nullptr, {kTokens + 2}}};
  }

  /// The forward's rows, which leaves the pre-activation in `z` where `keep`.
  [[nodiscard]] Floats forward(bool keep) const {
    const std::int64_t bytes = experts_workspace_bytes(max_rows(), p_.config.inner, p_.dtype);
    const DeviceArray<std::byte> memory(std::vector<std::byte>(index_at(bytes)));
    const DeviceArray<std::byte> rows(index_at(max_rows() * p_.config.hidden * element()));
    switchyard::experts(
        {.x = matrix(x, kTokens + 1, p_.config.hidden),
         .plan = plan(),
         .weights = weights_.get(),
         .rows = {rows.bytes(), p_.dtype, max_rows(), p_.config.hidden},
         .preactivation = keep ? RawMatrix{z.bytes(), p_.dtype, max_rows(), width()} : RawMatrix{},
         .execution = {
             .backend = Backend::kCuda, .workspace = memory.data(), .workspace_bytes = bytes}});
    return used_rows(loaded_as_floats(p_.dtype, rows.get()), p_.config.hidden);
  }

  [[nodiscard]] ExpertsBackwardArgs args(const Way& way, void* stream = nullptr) const {
    const ExpertConfig& config = p_.config;
    ExpertsBackwardArgs args{
        .x = matrix(x, kTokens + 1, config.hidden),
        .dout = matrix(dout, kTokens + 1, config.hidden),
        .plan = plan(),
        .weights = weights_.get(),
        .drow_weight = {dweight.data(), {max_rows()}},
        .dx_rows = {dx.bytes(), way.gradients, max_rows(), config.hidden},
        .gradients = {.w13 = {w13.bytes(), way.gradients, num_experts() * width(), config.hidden},
                      .w2 = {w2.bytes(), way.gradients, num_experts() * config.hidden,
                             config.inner}},
        .accumulate = way.accumulate,
        .execution = {.backend = Backend::kCuda,
                      .stream = stream,
                      .workspace = workspace.data(),
                      .workspace_bytes = workspace_bytes(way)}};
    if (way.keep) args.preactivation = {z.bytes(), p_.dtype, max_rows(), width()};
    if (way.lends) {
      args.dpreactivation = {z.bytes(), p_.dtype, max_rows(), width()};
      args.weighted_activation = {inner.bytes(), p_.dtype, max_rows(), config.inner};
    }
    if (config.bias) {
      args.gradients.b13 = {b13.data(), {num_experts(), width()}};
      args.gradients.b2 = {b2.data(), {num_experts(), config.hidden}};
    }
    return args;
  }

  [[nodiscard]] std::int64_t workspace_bytes(const Way& way) const {
    return experts_backward_workspace_bytes(
        p_.config, p_.dtype, p_.config.num_experts, max_rows(),
        {.dpreactivation = way.lends, .weighted_activation = way.lends});
  }

  /// What lies behind the workspace that a call was given.
  void expect_rest_untouched(const Way& way) const {
    const std::vector<std::byte> all = workspace.get();
    EXPECT_TRUE(std::all_of(all.begin() + workspace_bytes(way), all.end(),
                            [](std::byte b) { return b == std::byte{0xff}; }));
  }

  /// What the outputs hold before a call.
  void reset(const Way& way) const {
    const float start = way.accumulate ? kStart : kNan;
    const auto fill = [&](const DeviceArray<std::byte>& out, std::int64_t count) {
      out.set(stored_as(way.gradients, Floats(index_at(count), start)));
    };
    fill(w13, num_experts() * width() * p_.config.hidden);
    fill(w2, num_experts() * p_.config.inner * p_.config.hidden);
    b13.set(Floats(b13.size(), start));
    b2.set(Floats(b2.size(), start));
    dweight.fill(0xff);
    dx.fill(0xff);
    workspace.fill(0xff);
    inner.fill(0xff);
    if (!way.keep) z.fill(0xff);
  }

  [[nodiscard]] Gradients gradients(const Way& way) const {
    const auto loaded = [&](const DeviceArray<std::byte>& from, std::int64_t count) {
      std::vector<std::byte> bytes = from.get();
      bytes.resize(index_at(count * size_of(way.gradients)));
      return loaded_as_floats(way.gradients, bytes);
    };
    return {.weight = used_rows(dweight.get(), 1),
            .dx = used_rows(loaded(dx, max_rows() * p_.config.hidden), p_.config.hidden),
            .w13 = loaded(w13, num_experts() * width() * p_.config.hidden),
            .w2 = loaded(w2, num_experts() * p_.config.inner * p_.config.hidden),
            .b13 = p_.config.bias ? b13.get() : Floats{},
            .b2 = p_.config.bias ? b2.get() : Floats{}};
  }

  static void call(const ExpertsBackwardArgs& args, const Way& way) {
    if (way.kernels != nullptr && !way.kernels->reject(args)) {
      way.kernels->run(args);
    } else {
      experts_backward(args);
    }
  }

  [[nodiscard]] Gradients run(const Way& way) const {
    reset(way);
    if (way.keep) static_cast<void>(forward(true));
    call(args(way), way);
    return gradients(way);
  }

  void expect_reference(const Gradients& got, const Way& way) const {
    const ExpertConfig& config = p_.config;
    const reference::Precision precision{
        .compute = p_.dtype, .may_round_inner_gradient = true, .may_split_products = true};
    reference::ExpertGradient want;
    std::vector<Bounded> weight_of_rows;
    std::vector<Bounded> dx_of_rows;
    const auto append = [](std::vector<Bounded>& to, const std::vector<Bounded>& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    const auto row = [&](const Floats& values, std::int64_t token_of_row) {
      const auto first = values.begin() + token_of_row * config.hidden;
      return std::vector<double>(first, first + config.hidden);
    };
    for (std::int32_t e = 0; e < config.num_experts; ++e) {
      const auto matrices = reference::read_expert(config, *source_, e, precision);
      reference::ExpertBackward expert(config, matrices, precision);
      for (std::int32_t i = 0; i < p_.rows[index_at(e)]; ++i) {
        const std::size_t r = index_at(rows_.begin[index_at(e)] + i);
        const auto back = expert.add(row(x_, rows_.token[r]), row(dout_, rows_.token[r]),
                                     {double{rows_.weight[r]}, 0});
        weight_of_rows.push_back(back.weight);
        append(dx_of_rows, back.dx);
      }
      const reference::ExpertGradient of_expert = expert.gradient();
      append(want.w13, of_expert.w13);
      append(want.w2, of_expert.w2);
      append(want.b13, of_expert.b13);
      append(want.b2, of_expert.b2);
    }
    const double start = way.accumulate ? double{kStart} : 0;
    expect_within("drow_weight", weight_of_rows, got.weight, DType::kF32, 0);
    expect_within("dx", dx_of_rows, got.dx, way.gradients, 0);
    expect_within("dw13", want.w13, got.w13, way.gradients, start);
    expect_within("dw2", want.w2, got.w2, way.gradients, start);
    expect_within("db13", want.b13, got.b13, DType::kF32, start);
    expect_within("db2", want.b2, got.b2, DType::kF32, start);
  }

 private:
  [[nodiscard]] std::int64_t width() const { return width_of(p_.config); }
  [[nodiscard]] std::int64_t element() const { return size_of(p_.dtype); }
  [[nodiscard]] std::int64_t num_experts() const { return p_.config.num_experts; }
  [[nodiscard]] ConstRawMatrix matrix(const DeviceArray<std::byte>& from, std::int64_t count,
                                      std::int64_t cols) const {
    return {from.bytes(), p_.dtype, count, cols};
  }

  [[nodiscard]] Floats values_of_tokens() {
    Floats values = random_floats(kTokens * p_.config.hidden, random_);
    for (float& value : values) value = round_to(p_.dtype, value);
    values.resize(index_at((kTokens + 1) * p_.config.hidden), kNan);
    return values;
  }

  /// The used ones of `values` [rows of the layout, cols]; all others are as they were, NaN.
  [[nodiscard]] Floats used_rows(const Floats& values, std::int64_t cols) const {
    Floats out;
    std::size_t expert = 0;
    for (std::int64_t row = 0; row < max_rows(); ++row) {
      while (expert + 1 < p_.rows.size() && row >= rows_.begin[expert + 1]) ++expert;
      const auto first = values.begin() + row * cols;
      if (row - rows_.begin[expert] < p_.rows[expert]) {
        out.insert(out.end(), first, first + cols);
      } else {
        EXPECT_TRUE(std::all_of(first, first + cols, [](float v) { return std::isnan(v); }))
            << "row " << row << " of padding is written";
      }
    }
    return out;
  }

  static void expect_within(const char* name, const std::vector<Bounded>& want,
                            const Floats& values, DType dtype, double start) {
    ASSERT_EQ(want.size(), values.size()) << name;
    std::int64_t wrong = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const Bounded sum = start == 0 ? want[i] : reference::add(want[i], {start, 0});
      if (reference::admits(sum, dtype, double{values[i]})) continue;
      if (++wrong > 3) continue;
      ADD_FAILURE() << name << " " << i << " is " << values[i] << ", want " << sum.value << " +- "
                    << sum.error;
    }
    EXPECT_EQ(wrong, 0) << name << ": of " << want.size();
  }

  Problem p_;
  std::mt19937 random_;
  MadeExperts made_;
  std::unique_ptr<ExpertSource> source_;
  Floats x_, dout_;
  Rows rows_;
  std::unique_ptr<ExpertWeights> weights_;

 public:
  DeviceArray<std::int32_t> begin, used, token;
  DeviceArray<float> weight;
  DeviceArray<std::byte> x, dout, z, inner;
  DeviceArray<float> dweight;
  DeviceArray<std::byte> dx, w13, w2;
  DeviceArray<float> b13, b2;
  DeviceArray<std::byte> workspace;
};

}  // namespace switchyard::test
