// Bound by memory: a row's piece is some lines of each matrix, on pages of their own; several
// panels at a time make them neighbours. f32 goes from where it lies to where it belongs; other
// types, and the last columns, through buffers.
#include "experts/cpu/backward/activation.hpp"

#include <algorithm>

#include "core/cpu/memory.hpp"
#include "core/row_ops.hpp"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kRowsAhead = 8;      ///< That are fetched into the cache.
constexpr std::int64_t kMostColumns = 256;  ///< That are converted in one go.

/// A panel's part of a row.
struct Piece {
  std::int64_t row;
  std::int64_t panel;  ///< Of those at hand.
  std::int64_t first;  ///< Column.
};

class Columns {
 public:
  explicit Columns(const ActivationBackwardArgs& args)
      : args_(args),
        config_(args.weights->config()),
        kernels_(args.weights->kernels()),
        dtype_(args.weights->dtype()),
        element_(size_of(dtype_)),
        width_(kernels_.panel_cols),
        matrices_(config_.gated ? 2 : 1) {}

  void run() const {
    const std::int64_t rows = args_.preactivation.rows;
    const std::int64_t cols = args_.panels * width_;
    const bool at_once = dtype_ != DType::kF32 && config_.gated && cols <= kMostColumns &&
                         args_.panel * width_ + cols <= config_.inner;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t p = 0; p < args_.panels; ++p) {
        const Piece piece{row, p, (args_.panel + p) * width_};
        fetch({std::min(row + kRowsAhead, rows - 1), p, piece.first});
        if (at_once) continue;
        if (dtype_ == DType::kF32 && cols_from(piece.first) == width_) {
          floats(piece);
        } else {
          converted(piece);
        }
      }
      if (at_once) converted_row(row, cols);
    }
  }

 private:
  /// That there are, of width_.
  [[nodiscard]] std::int64_t cols_from(std::int64_t first) const {
    return std::min(width_, config_.inner - first);
  }
  [[nodiscard]] const std::byte* gate(const Piece& at) const {
    return args_.preactivation.row(at.row) + at.first * element_;
  }
  [[nodiscard]] const std::byte* up(const Piece& at) const {
    return gate(at) + config_.inner * element_;
  }
  [[nodiscard]] std::byte* inner(const Piece& at) const {
    return args_.inner.row(at.row) + at.first * element_;
  }
  [[nodiscard]] std::byte* dz(const Piece& at) const {
    return args_.dz.row(at.row) + matrices_ * at.first * element_;
  }

  /// Ten lines of f32: a core waits for no more than some 16 at once.
  void fetch(const Piece& at) const {
    const std::int64_t bytes = width_ * element_;
    fetch_lines(gate(at), bytes, kRead);
    if (config_.gated) fetch_lines(up(at), bytes, kRead);
    fetch_lines(inner(at), bytes);
    fetch_lines(dz(at), matrices_ * bytes);
  }

  [[nodiscard]] GradientArgs gradient(const Piece& at) const {
    return {.gate = nullptr,
            .up = nullptr,
            .dinner = args_.dinner + (at.panel * args_.places + at.row) * width_,
            .count = width_,
            .weight = args_.weight[at.row],
            .config = &config_,
            .inner = nullptr,
            .dgate = nullptr,
            .dup = nullptr};
  }
  [[nodiscard]] float& dot(const Piece& at) const {
    return args_.dots[at.panel * args_.dots_stride + at.row];
  }

  void floats(const Piece& at) const {
    GradientArgs g = gradient(at);
    g.gate = reinterpret_cast<const float*>(gate(at));
    g.inner = reinterpret_cast<float*>(inner(at));
    g.dgate = reinterpret_cast<float*>(dz(at));
    if (config_.gated) {
      g.up = reinterpret_cast<const float*>(up(at));
      g.dup = g.dgate + width_ / 2;
      g.taking_turns = true;
    }
    dot(at) = kernels_.gradient(g);
  }

  void converted(const Piece& at) const {
    constexpr std::int64_t kMost = 64;
    const std::int64_t cols = cols_from(at.first);
    float gates[kMost] = {}, ups[kMost] = {}, products[kMost], dgate[kMost], dup[kMost];
    row_ops::widen(dtype_, gate(at), gates, cols);
    if (config_.gated) row_ops::widen(dtype_, up(at), ups, cols);
    GradientArgs g = gradient(at);
    g.gate = gates;
    if (config_.gated) g.up = ups;
    g.inner = products;
    g.dgate = dgate;
    g.dup = dup;
    dot(at) = kernels_.gradient(g);
    row_ops::narrow(dtype_, products, inner(at), width_);
    if (!config_.gated) return row_ops::narrow(dtype_, dgate, dz(at), width_);
    // A panel of the first product has half as many columns of each.
    const std::int64_t half = width_ / 2;
    for (std::int64_t i = 0; i < 2 && 2 * at.first + i * width_ < args_.dz.cols; ++i) {
      std::byte* out = dz(at) + i * width_ * element_;
      row_ops::narrow(dtype_, dgate + i * half, out, half);
      row_ops::narrow(dtype_, dup + i * half, out + half * element_, half);
    }
  }

  /// Whole panels of a gated expert: each matrix is converted in one go.
  void converted_row(std::int64_t row, std::int64_t cols) const {
    float gates[kMostColumns], ups[kMostColumns], products[kMostColumns], dz_row[2 * kMostColumns];
    const Piece all{row, 0, args_.panel * width_};
    row_ops::widen(dtype_, gate(all), gates, cols);
    row_ops::widen(dtype_, up(all), ups, cols);
    for (std::int64_t p = 0; p < args_.panels; ++p) {
      const Piece at{row, p, all.first + p * width_};
      GradientArgs g = gradient(at);
      g.gate = gates + p * width_;
      g.up = ups + p * width_;
      g.inner = products + p * width_;
      g.dgate = dz_row + 2 * p * width_;
      g.dup = g.dgate + width_ / 2;
      g.taking_turns = true;
      dot(at) = kernels_.gradient(g);
    }
    row_ops::narrow(dtype_, products, inner(all), cols);
    row_ops::narrow(dtype_, dz_row, dz(all), 2 * cols);
  }

  const ActivationBackwardArgs& args_;
  const ExpertConfig& config_;
  const Kernels& kernels_;
  const DType dtype_;
  const std::int64_t element_;   ///< Bytes.
  const std::int64_t width_;     ///< Columns of a panel.
  const std::int64_t matrices_;  ///< Gate and up, or gate.
};

}  // namespace

void activation_backward(const ActivationBackwardArgs& args) { Columns(args).run(); }

}  // namespace switchyard::cpu
