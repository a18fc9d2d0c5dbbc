// Bound by the caches: a row's piece is a line or two of each matrix, on pages of their own. f32
// goes from where it lies to where it belongs; other types, and the last columns, through buffers.
#include "experts/cpu/backward/activation.hpp"

#include <algorithm>

#include "core/cpu/memory.hpp"
#include "core/row_ops.hpp"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kRowsAhead = 8;  ///< That are fetched into the cache.

class Columns {
 public:
  explicit Columns(const ActivationBackwardArgs& args)
      : args_(args),
        config_(args.weights->config()),
        kernels_(args.weights->kernels()),
        dtype_(args.weights->dtype()),
        element_(size_of(dtype_)),
        width_(kernels_.panel_cols),
        matrices_(config_.gated ? 2 : 1),
        first_(args.panel * width_),
        cols_(std::min(width_, config_.inner - first_)) {}

  void run() const {
    const std::int64_t rows = args_.preactivation.rows;
    const bool as_they_lie = dtype_ == DType::kF32 && cols_ == width_;
    for (std::int64_t row = 0; row < rows; ++row) {
      fetch(std::min(row + kRowsAhead, rows - 1));
      if (as_they_lie) {
        floats(row);
      } else {
        converted(row);
      }
    }
  }

 private:
  [[nodiscard]] const std::byte* gate(std::int64_t row) const {
    return args_.preactivation.row(row) + first_ * element_;
  }
  [[nodiscard]] const std::byte* up(std::int64_t row) const {
    return gate(row) + config_.inner * element_;
  }
  [[nodiscard]] std::byte* inner(std::int64_t row) const {
    return args_.inner.row(row) + first_ * element_;
  }
  [[nodiscard]] std::byte* dz(std::int64_t row) const {
    return args_.dz.row(row) + matrices_ * first_ * element_;
  }

  void fetch(std::int64_t row) const {
    fetch_lines(gate(row), width_ * element_, kRead);
    if (config_.gated) fetch_lines(up(row), width_ * element_, kRead);
    fetch_lines(inner(row), width_ * element_);
    fetch_lines(dz(row), matrices_ * width_ * element_);
  }

  [[nodiscard]] GradientArgs gradient(std::int64_t row) const {
    return {.gate = nullptr,
            .up = nullptr,
            .dinner = args_.dinner + row * width_,
            .count = width_,
            .weight = args_.weight[row],
            .config = &config_,
            .inner = nullptr,
            .dgate = nullptr,
            .dup = nullptr};
  }

  void floats(std::int64_t row) const {
    GradientArgs g = gradient(row);
    g.gate = reinterpret_cast<const float*>(gate(row));
    g.inner = reinterpret_cast<float*>(inner(row));
    g.dgate = reinterpret_cast<float*>(dz(row));
    if (config_.gated) {
      g.up = reinterpret_cast<const float*>(up(row));
      g.dup = g.dgate + width_ / 2;
      g.taking_turns = true;
    }
    args_.dots[row] = kernels_.gradient(g);
  }

  void converted(std::int64_t row) const {
    constexpr std::int64_t kMost = 64;
    float gates[kMost] = {}, ups[kMost] = {}, products[kMost], dgate[kMost], dup[kMost];
    row_ops::widen(dtype_, gate(row), gates, cols_);
    if (config_.gated) row_ops::widen(dtype_, up(row), ups, cols_);
    GradientArgs g = gradient(row);
    g.gate = gates;
    if (config_.gated) g.up = ups;
    g.inner = products;
    g.dgate = dgate;
    g.dup = dup;
    args_.dots[row] = kernels_.gradient(g);
    row_ops::narrow(dtype_, products, inner(row), width_);
    if (!config_.gated) return row_ops::narrow(dtype_, dgate, dz(row), width_);
    // A panel of the first product has half as many columns of each.
    const std::int64_t half = width_ / 2;
    for (std::int64_t i = 0; i < 2 && 2 * first_ + i * width_ < args_.dz.cols; ++i) {
      std::byte* out = dz(row) + i * width_ * element_;
      row_ops::narrow(dtype_, dgate + i * half, out, half);
      row_ops::narrow(dtype_, dup + i * half, out + half * element_, half);
    }
  }

  const ActivationBackwardArgs& args_;
  const ExpertConfig& config_;
  const Kernels& kernels_;
  const DType dtype_;
  const std::int64_t element_;   ///< Bytes.
  const std::int64_t width_;     ///< Columns of a panel.
  const std::int64_t matrices_;  ///< Gate and up, or gate.
  const std::int64_t first_;     ///< Column.
  const std::int64_t cols_;      ///< That there are, of width_.
};

}  // namespace

void activation_backward(const ActivationBackwardArgs& args) { Columns(args).run(); }

}  // namespace switchyard::cpu
