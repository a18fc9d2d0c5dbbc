// What all tokenizers have alike, and bytes.
#include "switchyard/models/tokenizer.hpp"

#include <array>

#include "checkpoint/files/mapped_file.hpp"
#include "core/check.hpp"

namespace switchyard::models {
namespace {

class Bytes final : public Tokenizer {
 public:
  Bytes() {
    for (std::size_t i = 0; i < all_.size(); ++i) all_[i] = static_cast<char>(i);
  }
  [[nodiscard]] std::int64_t vocabulary() const override { return kByteVocabulary; }
  void encode(std::span<const std::byte> text, std::vector<std::int32_t>& ids) const override {
    for (const std::byte byte : text) ids.push_back(std::to_integer<std::int32_t>(byte));
  }
  [[nodiscard]] std::string_view bytes_of(std::int32_t id) const override {
    return {&all_[static_cast<std::size_t>(id)], 1};
  }
  [[nodiscard]] const std::string& file() const override { return file_; }

 private:
  std::array<char, kByteVocabulary> all_{};
  std::string file_;
};

}  // namespace

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  encode(std::as_bytes(std::span(text)), ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  for (const std::int32_t id : ids) {
    require(id >= 0 && id < vocabulary(), "token {}, the vocabulary has 0 to {}", id,
            vocabulary() - 1);
    text += bytes_of(id);
  }
  return text;
}

const std::shared_ptr<const Tokenizer>& byte_tokenizer() {
  static const std::shared_ptr<const Tokenizer> bytes = std::make_shared<const Bytes>();
  return bytes;
}

std::shared_ptr<const Tokenizer> load_tokenizer(const std::filesystem::path& path) {
  return parse_tokenizer(read_text(path), path.string());
}

}  // namespace switchyard::models
