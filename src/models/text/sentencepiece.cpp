// Byte-pair encodings by libsentencepiece, kept lossless.
#include <fmt/core.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <array>
#include <unordered_map>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "core/check.hpp"
#include "core/utf8.hpp"
#include "switchyard/models/tokenizer.hpp"

namespace switchyard::models {
namespace {

constexpr std::size_t kLongestLine = 4096;
constexpr std::string_view kSpace = "\xe2\x96\x81";  // how sentencepiece writes it in pieces
constexpr std::uint32_t kSpaceCode = 0x2581;

/// Bytes at the beginning that sentencepiece gives back as they are: a line with its end, or less.
std::size_t plain_bytes(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Utf8Character character = first_character(text.substr(at));
    const bool plain = character.bytes > 0 && character.code != 0 && character.code != kSpaceCode;
    if (!plain || at + character.bytes > kLongestLine) break;
    at += character.bytes;
    if (character.code == '\n') break;
  }
  return at;
}

std::string_view view_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// ": words", without the place in the library's sources: "Internal: ./src/x.cc(580) [condition]
/// words".
std::string words_of(const sentencepiece::util::Status& status) {
  const std::string all = status.ToString();
  const std::size_t condition = all.find(") [");
  const std::size_t end = all.rfind("] ");
  const bool has_words =
      condition != std::string::npos && end != std::string::npos && end + 2 < all.size();
  if (condition == std::string::npos) return ": " + all;
  return has_words ? ": " + all.substr(end + 2) : "";
}

class SentencePiece final : public Tokenizer {
 public:
  SentencePiece(std::string content, const std::string& name) : file_(std::move(content)) {
    require_file(!file_.empty(), name, "is empty, want a sentencepiece model");
    const auto status = processor_.LoadFromSerializedProto(file_);
    require_file(status.ok(), name, "is no sentencepiece model, or damaged{}", words_of(status));
    byte_ids_.fill(-1);
    for (std::int32_t id = 0; id < processor_.GetPieceSize(); ++id) {
      pieces_.push_back(text_of(id));
      if (processor_.IsByte(id)) byte_ids_.at(static_cast<unsigned char>(pieces_.back()[0])) = id;
    }
    for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
      require_file(byte_ids_[byte] >= 0, name,
                   "has no piece for the byte 0x{:02x}: want a model with byte_fallback", byte);
    }
  }

  [[nodiscard]] std::int64_t vocabulary() const override { return std::ssize(pieces_); }

  void encode(std::span<const std::byte> text, std::vector<std::int32_t>& ids) const override {
    std::vector<int> of_line;
    for (std::string_view rest = view_of(text); !rest.empty();) {
      const std::size_t plain = plain_bytes(rest);
      if (plain == 0) {
        ids.push_back(byte_ids_[static_cast<unsigned char>(rest.front())]);
        rest.remove_prefix(1);
        continue;
      }
      const auto status = processor_.Encode({rest.data(), plain}, &of_line);
      require(status.ok(), "sentencepiece{}", words_of(status));
      ids.insert(ids.end(), of_line.begin(), of_line.end());
      rest.remove_prefix(plain);
    }
  }

  [[nodiscard]] std::string_view bytes_of(std::int32_t id) const override {
    return pieces_[static_cast<std::size_t>(id)];
  }
  [[nodiscard]] const std::string& file() const override { return file_; }

 private:
  [[nodiscard]] std::string text_of(std::int32_t id) const {
    if (processor_.IsControl(id) || processor_.IsUnknown(id)) return {};
    const std::string& stored = processor_.IdToPiece(id);
    if (processor_.IsByte(id)) {  // "<0x0A>"
      return {static_cast<char>(std::stoi(stored.substr(1, 4), nullptr, 16))};
    }
    std::string piece;
    for (std::size_t at = 0; at < stored.size();) {
      const bool is_space = stored.compare(at, kSpace.size(), kSpace) == 0;
      piece += is_space ? ' ' : stored[at];
      at += is_space ? kSpace.size() : 1;
    }
    return piece;
  }

  std::string file_;
  sentencepiece::SentencePieceProcessor processor_;
  std::vector<std::string> pieces_;
  std::array<std::int32_t, kByteVocabulary> byte_ids_{};
};

/// Texts as the trainer reads them: by the lines that encode() makes.
class TrainingLines final : public sentencepiece::SentenceIterator {
 public:
  explicit TrainingLines(std::span<const std::span<const std::byte>> texts) : texts_(texts) {
    Next();
  }
  [[nodiscard]] bool done() const override { return done_; }
  void Next() override {
    while (true) {
      while (rest_.empty()) {
        done_ = texts_.empty();
        if (done_) return;
        rest_ = view_of(texts_.front());
        texts_ = texts_.subspan(1);
      }
      const std::size_t plain = plain_bytes(rest_);
      line_ = rest_.substr(0, plain);
      rest_.remove_prefix(plain == 0 ? 1 : plain);
      if (plain > 0) return;
    }
  }
  [[nodiscard]] const std::string& value() const override { return line_; }
  [[nodiscard]] sentencepiece::util::Status status() const override { return {}; }

 private:
  std::span<const std::span<const std::byte>> texts_;
  std::string_view rest_;
  std::string line_;
  bool done_ = false;
};

}  // namespace

bool has_sentencepiece() noexcept { return true; }

std::shared_ptr<const Tokenizer> parse_tokenizer(std::string content, const std::string& name) {
  return std::make_shared<const SentencePiece>(std::move(content), name);
}

std::string train_tokenizer(std::span<const std::span<const std::byte>> texts,
                            std::int64_t vocabulary) {
  require(vocabulary >= kSmallestVocabulary && vocabulary <= (1 << 24),
          "a vocabulary of {} pieces, want {} to {}", vocabulary, kSmallestVocabulary, 1 << 24);
  const std::unordered_map<std::string, std::string> settings = {
      {"model_type", "bpe"},
      {"vocab_size", fmt::format("{}", vocabulary)},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"bos_id", "-1"},
      {"eos_id", "-1"},
      {"max_sentence_length", fmt::format("{}", 2 * kLongestLine)},
      {"hard_vocab_limit", "false"},
      {"num_threads", "1"},
      {"minloglevel", "2"}};
  TrainingLines lines(texts);
  std::string content;
  const auto status = sentencepiece::SentencePieceTrainer::Train(settings, &lines, &content);
  const std::string words = words_of(status);
  // "... smaller than required_chars. 270 vs 347. ..."
  const std::size_t versus =
      words.find("required_chars") == std::string::npos ? std::string::npos : words.find(" vs ");
  require(versus == std::string::npos,
          "a vocabulary of {} pieces: bytes and characters of the text want {}", vocabulary,
          versus == std::string::npos
              ? ""
              : words.substr(versus + 4, words.find('.', versus) - versus - 4));
  require(status.ok(), "a vocabulary of {} pieces: sentencepiece{}", vocabulary, words);
  const std::int64_t made = parse_tokenizer(content, "the trained tokenizer")->vocabulary();
  require(made == vocabulary, "a vocabulary of {} pieces: the text has pairs for {}", vocabulary,
          made);
  return content;
}

}  // namespace switchyard::models
