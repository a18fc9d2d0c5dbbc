#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "switchyard/models/tokenizer.hpp"

namespace switchyard::models {

/// A text of its own: no window, and no context of an n-gram, reaches from one into another.
struct Document {
  std::string name{};  ///< The file, or "FILE#3": the third document of a file with NUL bytes.
  std::span<const std::byte> bytes{};
  std::span<const std::int32_t> tokens{};  ///< Of the bytes; empty: they are the tokens.

  /// Tokens.
  [[nodiscard]] std::int64_t size() const {
    return tokens.empty() ? std::ssize(bytes) : std::ssize(tokens);
  }
  [[nodiscard]] std::int32_t token(std::int64_t i) const {
    const auto at = static_cast<std::size_t>(i);
    return tokens.empty() ? std::to_integer<std::int32_t>(bytes[at]) : tokens[at];
  }
  /// Tokens that are predicted: all but the first.
  [[nodiscard]] std::int64_t num_targets() const { return size() - 1; }
};

/// The bytes of files, mapped and never copied, as documents of tokens: a file is one, or those
/// between its NUL bytes, which belong to none. Documents of fewer than two tokens have nothing to
/// predict and are left out. Tokens that are not bytes are kept, 4 bytes each.
class Text {
 public:
  /// @param tokenizer  Null: tokens are bytes.
  /// @throws Error{kBadFile} that names the file: there is none, or it has no document of at least
  ///         two tokens; {kInvalidArgument}: no file is given; the tokenizer does not give back a
  ///         document's bytes, by the first that differs (a loss a byte would mean nothing); {kIo}.
  /// Cost: one pass over the bytes, for NUL bytes; and Tokenizer::encode() of all.
  explicit Text(const std::vector<std::filesystem::path>& files,
                std::shared_ptr<const Tokenizer> tokenizer = nullptr);
  ~Text();
  Text(Text&&) noexcept;
  Text& operator=(Text&&) noexcept;

  [[nodiscard]] std::span<const Document> documents() const;
  [[nodiscard]] const Tokenizer& tokenizer() const;
  /// "bytes" or "tokens": what sizes count.
  [[nodiscard]] const char* unit() const;
  /// Bytes of all documents; and their tokens that are predicted.
  [[nodiscard]] std::int64_t num_bytes() const;
  [[nodiscard]] std::int64_t num_targets() const;
  /// Bytes that tokens stand for; those below 0, which stand for none, left out.
  [[nodiscard]] std::int64_t bytes_of(std::span<const std::int32_t> tokens) const;
  /// Predicted tokens of the documents before one; [documents + 1].
  [[nodiscard]] std::span<const std::int64_t> first_target() const;
  /// The most tokens of a document that are predicted.
  [[nodiscard]] std::int64_t longest() const;
  /// Documents that were left out.
  [[nodiscard]] std::int64_t too_short() const;
  [[nodiscard]] const std::vector<std::filesystem::path>& files() const;
  /// A hash of all documents' bytes and ends, the same on every machine: to know a text again, not
  /// to trust it. Cost: one pass, some 4 GB/s.
  [[nodiscard]] std::uint64_t fingerprint() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// That a model's vocabulary is that of a text's tokens.
/// @throws Error{kInvalidArgument} with both numbers.
void check_vocabulary(std::int64_t vocabulary, const Text& text);

/// Sequences of one step: row-major [sequences, length].
struct Batch {
  std::int64_t sequences = 0, length = 0;
  std::vector<std::int32_t> tokens{};   ///< What the model reads.
  std::vector<std::int32_t> targets{};  ///< The token after each; -1 behind a document's end.
};

/// The batch of a step, a pure function of (text, seed, step, sequences, length): nothing is kept
/// between steps, and row b does not depend on how many rows there are. A row's document is drawn
/// by its predicted tokens, with replacement, its first uniformly among those from which `length`
/// tokens can be predicted; of a shorter document it is the first, and what is behind its
/// end has token 0 and target -1. Philox4x32-10, key `seed`, counter (row, step).
/// @throws Error{kInvalidArgument}: every document is shorter than length + 1 tokens; a size is not
///         positive.
void draw_batch(const Text& text, std::uint64_t seed, std::int64_t step, std::int64_t sequences,
                std::int64_t length, Batch& batch);

/// A part of a document that a model reads at once.
struct Window {
  std::int64_t document = 0;  ///< Index.
  std::int64_t first = 0;     ///< Its first token in the document.
  std::int64_t length = 0;    ///< Tokens read, each with a target: the one behind it.
};

/// Windows of at most `length` tokens that do not overlap, document after document: every token of
/// a document but its first is the target of exactly one of them. The last of a document may be
/// short.
/// @throws Error{kInvalidArgument}: length < 1.
[[nodiscard]] std::vector<Window> held_out_windows(const Text& text, std::int64_t length);

/// Of held_out_windows() those at even distances, in their order, where all have more than
/// `max_tokens` tokens; at least one.
/// @throws Error{kInvalidArgument}: length or max_tokens < 1.
[[nodiscard]] std::vector<Window> sampled_windows(const Text& text, std::int64_t length,
                                                  std::int64_t max_tokens);

/// Windows as the rows of a batch of `length` columns, padded as draw_batch() pads.
void fill_batch(const Text& text, std::span<const Window> windows, std::int64_t length,
                Batch& batch);

}  // namespace switchyard::models
