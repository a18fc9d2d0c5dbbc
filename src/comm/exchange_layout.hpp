#pragma once

// Where everything lies in the window of an exchange: the one description that all engines use, on
// the host and on the device. Offsets are bytes from the start of a rank's part; every array starts
// at a multiple of 128 bytes.
//
//   for each of two buffers, taken in turn by epoch (a GPU's layer has one: its graphs know
//   places):
//     counts   [R sources] messages of R + 2 words: epoch, rows to each rank, checksum
//     rows     [N, H] in the wire type of dispatch, sorted by (source rank, token)
//     scales   [N, ceil(H/128)] f32, only on an 8-bit wire
//     ids      [N, K] i32 global expert ids, -1: not here
//     weights  [N, K] f32
//   once (a rank sends results only after it has the counts of the epoch, and these say that their
//   owner has read the results of the epoch before):
//     returned [R owners] messages of R + 2 words: epoch, rows sent to each rank, checksum
//     results  [M, H] in the wire type of combine, sorted by (rank of the experts, token, group);
//              on a GPU that is read by others instead: what this rank's experts have made, at the
//              places of the rows, group by group (M is at least N times the groups)
//     scales   [M, ceil(H/128)] f32, only on an 8-bit wire
//     summed   [most_summed] f32, only in a way back on a GPU: what ranks add up in place
//   on a GPU only
//     flags    32 bytes each, 8 used: the signals of a host's window, rows' per (source, chunk)

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// Values that share one scale on an 8-bit wire.
inline constexpr std::int64_t kScaleBlock = 128;
inline constexpr int kMaxRanks = 64;

[[nodiscard]] constexpr std::int64_t scales_per_row(DType wire, std::int64_t hidden) {
  return wire == DType::kF8E4M3 ? (hidden + kScaleBlock - 1) / kScaleBlock : 0;
}

struct ExchangeLayout {
  static constexpr std::int64_t kAlignment = 128;
  static constexpr std::int64_t kBuffers = 2;

  std::int32_t num_ranks = 1;    ///< R.
  std::int32_t top_k = 1;        ///< K.
  std::int64_t hidden = 0;       ///< H.
  std::int64_t max_rows = 0;     ///< N: rows a rank can receive.
  std::int64_t max_results = 0;  ///< M: partial rows that can come home.
  DType dispatch_wire = DType::kF32;
  DType combine_wire = DType::kF32;
  std::int32_t num_buffers = kBuffers;  ///< 1: all epochs in the same places.
  std::int64_t most_summed = 0;         ///< Values that ranks add up; 0: not a way back.

  [[nodiscard]] static constexpr std::int64_t align(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  [[nodiscard]] constexpr std::int64_t message_words() const { return std::int64_t{num_ranks} + 2; }
  [[nodiscard]] constexpr std::int64_t message_bytes() const { return 8 * message_words(); }
  [[nodiscard]] constexpr std::int64_t row_bytes() const { return hidden * size_of(dispatch_wire); }
  [[nodiscard]] constexpr std::int64_t row_scales() const {
    return scales_per_row(dispatch_wire, hidden);
  }
  [[nodiscard]] constexpr std::int64_t result_bytes() const {
    return hidden * size_of(combine_wire);
  }
  [[nodiscard]] constexpr std::int64_t result_scales() const {
    return scales_per_row(combine_wire, hidden);
  }

  // Offsets. `epoch` counts dispatches from 1.
  [[nodiscard]] static constexpr std::int64_t buffer_of(std::uint64_t epoch) {
    return static_cast<std::int64_t>(epoch % static_cast<std::uint64_t>(kBuffers));
  }
  /// The same for any number of buffers.
  [[nodiscard]] constexpr std::int64_t buffer_in_turn(std::uint64_t epoch) const {
    return num_buffers == 1 ? 0 : buffer_of(epoch);
  }
  [[nodiscard]] constexpr std::int64_t counts(std::int64_t buffer, std::int64_t source) const {
    return buffer * buffer_bytes() + source * message_bytes();
  }
  [[nodiscard]] constexpr std::int64_t row(std::int64_t buffer, std::int64_t i) const {
    return buffer * buffer_bytes() + rows_begin() + i * row_bytes();
  }
  [[nodiscard]] constexpr std::int64_t scales(std::int64_t buffer, std::int64_t i) const {
    return buffer * buffer_bytes() + scales_begin() + i * row_scales() * 4;
  }
  [[nodiscard]] constexpr std::int64_t ids(std::int64_t buffer, std::int64_t i) const {
    return buffer * buffer_bytes() + ids_begin() + i * top_k * 4;
  }
  [[nodiscard]] constexpr std::int64_t weights(std::int64_t buffer, std::int64_t i) const {
    return buffer * buffer_bytes() + weights_begin() + i * top_k * 4;
  }
  [[nodiscard]] constexpr std::int64_t returned(std::int64_t owner) const {
    return num_buffers * buffer_bytes() + owner * message_bytes();
  }
  [[nodiscard]] constexpr std::int64_t result(std::int64_t i) const {
    return returned(0) + align(num_ranks * message_bytes()) + i * result_bytes();
  }
  [[nodiscard]] constexpr std::int64_t result_scale(std::int64_t i) const {
    return result(0) + align(max_results * result_bytes()) + i * result_scales() * 4;
  }
  [[nodiscard]] constexpr std::int64_t summed() const {
    return result_scale(0) + align(max_results * result_scales() * 4);
  }
  [[nodiscard]] constexpr std::int64_t bytes() const { return summed() + align(most_summed * 4); }

  // Signals: the epoch whose data has landed, one of each kind per rank.
  [[nodiscard]] constexpr int counts_signal(int source) const { return source; }
  [[nodiscard]] constexpr int rows_signal(int source) const { return num_ranks + source; }
  [[nodiscard]] constexpr int results_signal(int owner) const { return 2 * num_ranks + owner; }
  [[nodiscard]] constexpr int num_signals() const { return 3 * num_ranks; }

  // Flags of a GPU's window, by offset.
  static constexpr std::int64_t kFlagBytes = 32;  // a sector each: polling one disturbs no other
  static constexpr std::int64_t kRowChunks = 16;  // at most; tokens of a source become ready so
  [[nodiscard]] constexpr std::int64_t counts_flag(std::int64_t source) const {
    return flag(source);
  }
  [[nodiscard]] constexpr std::int64_t results_flag(std::int64_t owner) const {
    return flag(num_ranks + owner);
  }
  [[nodiscard]] constexpr std::int64_t abort_flag() const { return flag(2 * num_ranks); }
  [[nodiscard]] constexpr std::int64_t rows_flag(std::int64_t source, std::int64_t chunk) const {
    return flag(2 * num_ranks + 1 + source * kRowChunks + chunk);
  }
  /// The owner's sums lie in its own window, to be read there.
  [[nodiscard]] constexpr std::int64_t partials_flag(std::int64_t owner) const {
    return rows_flag(num_ranks, 0) + owner * kFlagBytes;
  }
  /// Of a way back: the owner's gradients of weights lie in its own window; behind the flag's word
  /// stand which forward it goes back through, and which sums it asks for.
  [[nodiscard]] constexpr std::int64_t weights_flag(std::int64_t owner) const {
    return partials_flag(num_ranks + owner);
  }
  /// Of a way back: the rank's parts of sums lie in its own window;
  [[nodiscard]] constexpr std::int64_t parts_flag(std::int64_t rank) const {
    return weights_flag(num_ranks + rank);
  }
  /// its share of the sums lies in everybody's.
  [[nodiscard]] constexpr std::int64_t sums_flag(std::int64_t rank) const {
    return parts_flag(num_ranks + rank);
  }
  [[nodiscard]] constexpr std::int64_t flags_begin() const { return align(bytes()); }
  [[nodiscard]] constexpr std::int64_t bytes_with_flags() const {
    return align(most_summed == 0 ? partials_flag(num_ranks) : sums_flag(num_ranks));
  }

 private:
  [[nodiscard]] constexpr std::int64_t flag(std::int64_t i) const {
    return flags_begin() + i * kFlagBytes;
  }
  [[nodiscard]] constexpr std::int64_t rows_begin() const {
    return align(num_ranks * message_bytes());
  }
  [[nodiscard]] constexpr std::int64_t scales_begin() const {
    return rows_begin() + align(max_rows * row_bytes());
  }
  [[nodiscard]] constexpr std::int64_t ids_begin() const {
    return scales_begin() + align(max_rows * row_scales() * 4);
  }
  [[nodiscard]] constexpr std::int64_t weights_begin() const {
    return ids_begin() + align(max_rows * top_k * 4);
  }
  [[nodiscard]] constexpr std::int64_t buffer_bytes() const {
    return weights_begin() + align(max_rows * top_k * 4);
  }
};

/// The same places, worked out once: where a few hundred instructions for an address would count.
struct ExchangePlaces {
  std::int64_t buffer = 0;  ///< Bytes from one buffer to the next; 0 where there is one.
  std::int64_t counts_begin = 0, message_bytes = 0;
  std::int64_t rows_begin = 0, row_bytes = 0;
  std::int64_t scales_begin = 0, scale_bytes = 0;
  std::int64_t ids_begin = 0, weights_begin = 0, meta_bytes = 0;
  std::int64_t results_begin = 0, result_bytes = 0;
  std::int64_t result_scales_begin = 0, result_scale_bytes = 0;
  std::int64_t flags_begin = 0;
  std::int32_t num_ranks = 1;

  constexpr ExchangePlaces() = default;
  explicit constexpr ExchangePlaces(const ExchangeLayout& layout)
      : buffer(layout.num_buffers == 1 ? 0 : layout.row(1, 0) - layout.row(0, 0)),
        counts_begin(layout.counts(0, 0)),
        message_bytes(layout.message_bytes()),
        rows_begin(layout.row(0, 0)),
        row_bytes(layout.row_bytes()),
        scales_begin(layout.scales(0, 0)),
        scale_bytes(4 * layout.row_scales()),
        ids_begin(layout.ids(0, 0)),
        weights_begin(layout.weights(0, 0)),
        meta_bytes(4 * std::int64_t{layout.top_k}),
        results_begin(layout.result(0)),
        result_bytes(layout.result_bytes()),
        result_scales_begin(layout.result_scale(0)),
        result_scale_bytes(4 * layout.result_scales()),
        flags_begin(layout.flags_begin()),
        num_ranks(layout.num_ranks) {}

  [[nodiscard]] constexpr std::int64_t counts(std::int64_t turn, std::int64_t source) const {
    return counts_begin + turn * buffer + source * message_bytes;
  }
  [[nodiscard]] constexpr std::int64_t row(std::int64_t turn, std::int64_t i) const {
    return rows_begin + turn * buffer + i * row_bytes;
  }
  [[nodiscard]] constexpr std::int64_t scales(std::int64_t turn, std::int64_t i) const {
    return scales_begin + turn * buffer + i * scale_bytes;
  }
  [[nodiscard]] constexpr std::int64_t ids(std::int64_t turn, std::int64_t i) const {
    return ids_begin + turn * buffer + i * meta_bytes;
  }
  [[nodiscard]] constexpr std::int64_t weights(std::int64_t turn, std::int64_t i) const {
    return weights_begin + turn * buffer + i * meta_bytes;
  }
  [[nodiscard]] constexpr std::int64_t result(std::int64_t i) const {
    return results_begin + i * result_bytes;
  }
  [[nodiscard]] constexpr std::int64_t result_scale(std::int64_t i) const {
    return result_scales_begin + i * result_scale_bytes;
  }
  [[nodiscard]] constexpr std::int64_t counts_flag(std::int64_t source) const {
    return flags_begin + source * ExchangeLayout::kFlagBytes;
  }
  [[nodiscard]] constexpr std::int64_t results_flag(std::int64_t owner) const {
    return flags_begin + (num_ranks + owner) * ExchangeLayout::kFlagBytes;
  }
  [[nodiscard]] constexpr std::int64_t abort_flag() const {
    return flags_begin + 2 * num_ranks * ExchangeLayout::kFlagBytes;
  }
  [[nodiscard]] constexpr std::int64_t rows_flag(std::int64_t source, std::int64_t chunk) const {
    return abort_flag() +
           (1 + source * ExchangeLayout::kRowChunks + chunk) * ExchangeLayout::kFlagBytes;
  }
};

namespace exchange_layout_check {
inline constexpr ExchangeLayout kLayout{.num_ranks = 3,
                                        .top_k = 2,
                                        .hidden = 65,
                                        .max_rows = 5,
                                        .max_results = 7,
                                        .dispatch_wire = DType::kF8E4M3,
                                        .combine_wire = DType::kBF16};
static_assert(kLayout.counts(0, 0) == 0);
static_assert(kLayout.counts(0, 1) == 40);
static_assert(kLayout.row(0, 0) == 128);     // 3 messages of 40 bytes
static_assert(kLayout.scales(0, 0) == 512);  // 325 bytes of rows
static_assert(kLayout.ids(0, 0) == 640);     // 20 bytes of scales
static_assert(kLayout.weights(0, 0) == 768);
static_assert(kLayout.counts(1, 0) == 896);
static_assert(kLayout.row(1, 1) - kLayout.row(0, 1) == 896);
static_assert(kLayout.returned(0) == 2 * 896);
static_assert(kLayout.result(0) == 2 * 896 + 128);
static_assert(kLayout.bytes() == 2 * 896 + 128 + 1024);  // 910 bytes of results, no scales
static_assert(kLayout.results_signal(2) + 1 == kLayout.num_signals());
static_assert(kLayout.flags_begin() == 2 * 896 + 128 + 1024);
static_assert(kLayout.rows_flag(0, 0) == kLayout.abort_flag() + 32);
static_assert(kLayout.bytes_with_flags() == kLayout.flags_begin() + 1920);  // 58 flags
inline constexpr ExchangeLayout kWayBack = [] {
  ExchangeLayout layout = kLayout;
  layout.most_summed = 33;
  return layout;
}();
static_assert(kWayBack.summed() == kLayout.bytes());
static_assert(kWayBack.flags_begin() == kLayout.flags_begin() + 256);
static_assert(kWayBack.bytes_with_flags() == kWayBack.flags_begin() + 2176);  // 67 flags
inline constexpr ExchangeLayout kOnePlace = [] {
  ExchangeLayout layout = kLayout;
  layout.num_buffers = 1;
  return layout;
}();
static_assert(kLayout.buffer_in_turn(7) == 1 && kLayout.buffer_in_turn(8) == 0);
static_assert(kOnePlace.buffer_in_turn(7) == 0 && kOnePlace.buffer_in_turn(8) == 0);
static_assert(kOnePlace.returned(0) == 896);
inline constexpr ExchangePlaces kPlaces{kLayout};
static_assert(kPlaces.counts(1, 2) == kLayout.counts(1, 2) &&
              kPlaces.row(1, 3) == kLayout.row(1, 3));
static_assert(kPlaces.scales(1, 3) == kLayout.scales(1, 3) &&
              kPlaces.ids(1, 3) == kLayout.ids(1, 3));
static_assert(kPlaces.weights(1, 3) == kLayout.weights(1, 3));
static_assert(kPlaces.result(4) == kLayout.result(4));
static_assert(kPlaces.result_scale(4) == kLayout.result_scale(4));
static_assert(kPlaces.counts_flag(2) == kLayout.counts_flag(2));
static_assert(kPlaces.results_flag(2) == kLayout.results_flag(2));
static_assert(kPlaces.abort_flag() == kLayout.abort_flag());
static_assert(kPlaces.rows_flag(2, 3) == kLayout.rows_flag(2, 3));
static_assert(ExchangePlaces{kOnePlace}.row(0, 1) == kOnePlace.row(0, 1));
}  // namespace exchange_layout_check

}  // namespace switchyard
