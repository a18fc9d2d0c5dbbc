#pragma once

// Products on the way back: the rows of one expert times some neighbouring panels. Neighbours in
// memory, and sums that stay in the second-level cache until they are used.

#include <algorithm>
#include <cstdint>

#include "experts/cpu/backward/operands.hpp"
#include "experts/cpu/packed_rows.hpp"
#include "experts/cpu/row_parts.hpp"

namespace switchyard::cpu {

/// Panels that a product is made with, and its result: [panels, places, panel_cols].
struct Tile {
  std::byte* panels;
  float* product;
};

/// A part's rows of a matrix [n, cols].
template <class M>
[[nodiscard]] M rows_of(M all, const RowPart& part) {
  all.data = all.row(part.first_row);
  all.rows = part.blocks.rows();
  return all;
}

/// Panels [first, first + count) of the transpose of what lies in panels.
struct TurnedPanels {
  const std::byte* panels;
  PanelShape shape;
  std::int64_t first;
  std::int64_t count;
};

inline constexpr std::int64_t kMostPanelsAtOnce = 4;

/// Of `count` panels those that a task has: enough tasks for an even end.
[[nodiscard]] inline std::int64_t panels_at_once(std::int64_t count, std::int64_t threads) {
  return std::clamp<std::int64_t>(count / (3 * threads), 1, kMostPanelsAtOnce);
}

class PanelProducts {
 public:
  PanelProducts() = default;
  /// @param depth  The largest of the products.
  PanelProducts(const Kernels& kernels, const RowBlocks& blocks, std::int64_t depth)
      : kernels_(&kernels),
        parts_(blocks),
        panels_room_(kMostPanelsAtOnce * panel_bytes(kernels, depth)) {}

  /// Bytes of a worker.
  [[nodiscard]] std::int64_t room() const {
    const std::int64_t places = parts_.most_places(kernels_->max_rows);
    return panels_room_ + kMostPanelsAtOnce * places * kernels_->panel_cols * 4;
  }
  [[nodiscard]] Tile tile(std::byte* room) const {
    return {room, reinterpret_cast<float*>(room + panels_room_)};
  }

  /// body(RowPart) for some rows after the others.
  template <typename Body>
  void for_parts(const Body& body) const {
    for (std::int64_t i = 0; i < parts_.count(); ++i) body(parts_[i]);
  }

  /// To tile.panels.
  void turn(const TurnedPanels& turned, std::int64_t depth, const Tile& tile) const {
    for (std::int64_t p = 0; p < turned.count; ++p) {
      transpose_panels({.kernels = kernels_,
                        .panels = turned.panels,
                        .shape = turned.shape,
                        .first = (turned.first + p) * kernels_->panel_cols,
                        .out = tile.panels + p * panel_bytes(*kernels_, depth)});
    }
  }

  /// out = rows of `a` times the panels, or to `to`.
  void multiply(const PackedRows& a, const RowPart& part, const std::byte* panels,
                std::int64_t count, float* out, const OutputRows& to = {}) const {
    kernels_->product({.a = a.ready(part.first_row),
                       .blocks = part.blocks,
                       .steps = a.steps(),
                       .weights = panels,
                       .panel_bytes = panel_bytes(*kernels_, a.depth()),
                       .panels = count,
                       .out = out,
                       .to = to});
  }

 private:
  const Kernels* kernels_ = nullptr;
  RowParts parts_;
  std::int64_t panels_room_ = 0;
};

}  // namespace switchyard::cpu
