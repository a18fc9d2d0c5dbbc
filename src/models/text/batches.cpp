// Windows of documents as batches: drawn for training, one after the other for evaluation.
#include <algorithm>

#include "core/check.hpp"
#include "core/philox.hpp"
#include "switchyard/models/text.hpp"

namespace switchyard::models {
namespace {

__extension__ using Uint128 = unsigned __int128;

/// Uniform in [0, count), of 64 bits: off by less than count / 2^64.
std::int64_t draw(std::uint32_t high, std::uint32_t low, std::int64_t count) {
  const std::uint64_t bits = std::uint64_t{high} << 32 | low;
  return static_cast<std::int64_t>((Uint128{bits} * static_cast<std::uint64_t>(count)) >> 64);
}

Window draw_window(const Text& text, std::uint64_t seed, std::int64_t step, std::int64_t row,
                   std::int64_t length) {
  const auto at = static_cast<std::uint64_t>(step);
  const PhiloxWords words =
      philox4x32({{low_word(static_cast<std::uint64_t>(row)), low_word(at), high_word(at), 0}},
                 {low_word(seed), high_word(seed)});
  const auto ends = text.first_target().subspan(1);
  const std::int64_t target = draw(words.word[0], words.word[1], text.num_targets());
  const std::int64_t document = std::upper_bound(ends.begin(), ends.end(), target) - ends.begin();
  const std::int64_t targets = text.documents()[static_cast<std::size_t>(document)].num_targets();
  const std::int64_t starts = std::max<std::int64_t>(1, targets - length + 1);
  return {.document = document,
          .first = draw(words.word[2], words.word[3], starts),
          .length = std::min(length, targets)};
}

}  // namespace

void draw_batch(const Text& text, std::uint64_t seed, std::int64_t step, std::int64_t sequences,
                std::int64_t length, Batch& batch) {
  require(sequences >= 1 && length >= 1, "a batch of {} sequences of {} {}", sequences, length,
          text.unit());
  require(step >= 0, "step {} of a batch", step);
  require(text.longest() >= length,
          "sequences of {} {} want a document of {}, the longest of the text has {}", length,
          text.unit(), length + 1, text.longest() + 1);
  std::vector<Window> windows;
  windows.reserve(static_cast<std::size_t>(sequences));
  for (std::int64_t row = 0; row < sequences; ++row) {
    windows.push_back(draw_window(text, seed, step, row, length));
  }
  fill_batch(text, windows, length, batch);
}

std::vector<Window> held_out_windows(const Text& text, std::int64_t length) {
  require(length >= 1, "windows of {} {}", length, text.unit());
  std::vector<Window> windows;
  for (std::int64_t document = 0; document < std::ssize(text.documents()); ++document) {
    const std::int64_t targets = text.documents()[static_cast<std::size_t>(document)].num_targets();
    for (std::int64_t first = 0; first < targets; first += length) {
      windows.push_back({document, first, std::min(length, targets - first)});
    }
  }
  return windows;
}

std::vector<Window> sampled_windows(const Text& text, std::int64_t length,
                                    std::int64_t max_tokens) {
  require(max_tokens >= 1, "max_tokens={}, want at least 1", max_tokens);
  std::vector<Window> all = held_out_windows(text, length);
  std::int64_t tokens = 0;
  for (const Window& window : all) tokens += window.length;
  if (tokens <= max_tokens) return all;
  const std::int64_t size = std::ssize(all);
  const std::int64_t taken = std::clamp<std::int64_t>(max_tokens / length, 1, size);
  std::vector<Window> windows;
  windows.reserve(static_cast<std::size_t>(taken));
  for (std::int64_t i = 0; i < taken; ++i) {
    windows.push_back(all[static_cast<std::size_t>(i * size / taken)]);
  }
  return windows;
}

void fill_batch(const Text& text, std::span<const Window> windows, std::int64_t length,
                Batch& batch) {
  batch.sequences = std::ssize(windows);
  batch.length = length;
  const auto size = static_cast<std::size_t>(batch.sequences * length);
  batch.tokens.assign(size, 0);
  batch.targets.assign(size, -1);
  auto row = std::int64_t{0};
  for (const Window& window : windows) {
    const Document& document = text.documents()[static_cast<std::size_t>(window.document)];
    const auto place = static_cast<std::size_t>(row++ * length);
    for (std::int64_t i = 0; i < window.length; ++i) {
      const auto at = place + static_cast<std::size_t>(i);
      batch.tokens[at] = document.token(window.first + i);
      batch.targets[at] = document.token(window.first + i + 1);
    }
  }
}

}  // namespace switchyard::models
