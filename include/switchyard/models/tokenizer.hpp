#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::models {

/// Tokens are bytes: ids 0 to 255.
inline constexpr std::int32_t kByteVocabulary = 256;

/// Between text and the ids that a model reads. Each id stands for the same bytes wherever it is,
/// so that what ids say is their bytes one after the other, whole characters or not.
class Tokenizer {
 public:
  Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;
  virtual ~Tokenizer() = default;

  /// Number of ids; they begin at 0.
  [[nodiscard]] virtual std::int64_t vocabulary() const = 0;
  /// Appends the ids of a text: of any bytes, whether they are UTF-8 or not. A function of the text
  /// alone; several threads may call it.
  virtual void encode(std::span<const std::byte> text, std::vector<std::int32_t>& ids) const = 0;
  /// What an id in [0, vocabulary) stands for. Empty: for no text (unknown, control).
  [[nodiscard]] virtual std::string_view bytes_of(std::int32_t id) const = 0;
  /// The content of its file; empty: tokens are bytes, which need none.
  [[nodiscard]] virtual const std::string& file() const = 0;

  [[nodiscard]] bool is_bytes() const { return file().empty(); }
  /// @param text  Its bytes. @returns the ids.
  [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text) const;
  /// @throws Error{kInvalidArgument} that names an id which is not in the vocabulary.
  [[nodiscard]] std::string decode(std::span<const std::int32_t> ids) const;
};

/// Ids are bytes. There is one, and it is never null.
[[nodiscard]] const std::shared_ptr<const Tokenizer>& byte_tokenizer();

/// Whether this build has sentencepiece (Kudo and Richardson 2018, arXiv:1808.06226), which the
/// rest of this file wants.
[[nodiscard]] bool has_sentencepiece() noexcept;

/// A sentencepiece model by the content of its file. Text goes into it in lines with the line feed
/// that ends each, cut at a character behind 4096 bytes; what is no UTF-8, NUL bytes and U+2581,
/// which sentencepiece takes for a space, become pieces of one byte each. So all text comes back as
/// it was where the model normalises nothing (train_tokenizer()); Text proves it of every text.
/// @param name  Of the file, for messages.
/// @throws Error{kBadFile} that names the file: damaged, or without a piece for every byte
///         (byte_fallback); {kUnsupported}: the build has no sentencepiece.
/// Cost: text some MB/s, of one thread.
[[nodiscard]] std::shared_ptr<const Tokenizer> parse_tokenizer(std::string content,
                                                               const std::string& name);
/// The same from a file. @throws Error{kBadFile}, {kIo}, {kUnsupported}.
[[nodiscard]] std::shared_ptr<const Tokenizer> load_tokenizer(const std::filesystem::path& path);

/// The fewest pieces of a trained vocabulary: the unknown one, all bytes, and one more.
inline constexpr std::int64_t kSmallestVocabulary = 258;

/// Learns a byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) of `vocabulary` pieces from
/// texts: byte fallback, no normalisation, no prefix, no space removed, no tokens of control, runs
/// of spaces and line feeds in pieces. What of the texts is not UTF-8 is not counted. Of one
/// thread: the same texts give the same bytes.
/// @returns the content of a sentencepiece model's file.
/// @throws Error{kInvalidArgument}: a vocabulary that is too small, or larger than the texts have
///         pairs for, both with the number that it may be where that is known; {kUnsupported}.
/// Memory: a few times the texts' bytes.
[[nodiscard]] std::string train_tokenizer(std::span<const std::span<const std::byte>> texts,
                                          std::int64_t vocabulary);

}  // namespace switchyard::models
