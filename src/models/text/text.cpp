// Documents in mapped files.
#include "switchyard/models/text.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "core/check.hpp"
#include "core/splitmix64.hpp"

namespace switchyard::models {

namespace {

/// That ids say the bytes they came from, and each of them something.
void require_lossless(const Tokenizer& tokenizer, const std::string& name, std::string_view text,
                      std::span<const std::int32_t> ids) {
  std::size_t at = 0;
  for (const std::int32_t id : ids) {
    const std::string_view piece = tokenizer.bytes_of(id);
    if (piece.empty() || text.substr(at, piece.size()) != piece) break;
    at += piece.size();
  }
  std::size_t told = 0;  // by all ids, for a text that comes back with something behind it
  for (const std::int32_t id : ids) told += tokenizer.bytes_of(id).size();
  require(at == text.size() && told == at,
          "{}: the tokenizer does not give back its bytes, from byte {} of {} on: want one that is "
          "lossless (byte_fallback, normalization_rule_name identity, neither add_dummy_prefix nor "
          "remove_extra_whitespaces)",
          name, at, text.size());
}

}  // namespace

struct Text::State {
  std::shared_ptr<const Tokenizer> tokenizer = byte_tokenizer();
  std::vector<std::filesystem::path> files{};
  std::vector<std::shared_ptr<const MappedFile>> mappings{};
  std::vector<Document> documents{};
  std::vector<std::vector<std::int32_t>> tokens{};  ///< Of documents, but where they are bytes.
  std::vector<std::int64_t> first_target{0};
  std::int64_t num_bytes = 0, longest = 0, too_short = 0;

  [[nodiscard]] const char* unit() const { return tokenizer->is_bytes() ? "bytes" : "tokens"; }

  void add(std::string name, std::span<const std::byte> bytes) {
    Document document{std::move(name), bytes};
    std::vector<std::int32_t> ids;
    if (!tokenizer->is_bytes()) {
      tokenizer->encode(bytes, ids);
      const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      require_lossless(*tokenizer, document.name, text, ids);
      ids.shrink_to_fit();
      document.tokens = ids;
    }
    if (document.size() < 2) {
      ++too_short;
      return;
    }
    tokens.push_back(std::move(ids));  // which stay where they are
    num_bytes += std::ssize(bytes);
    longest = std::max(longest, document.num_targets());
    first_target.push_back(first_target.back() + document.num_targets());
    documents.push_back(std::move(document));
  }

  /// The documents between NUL bytes. Two of them beside each other, or one at an end, enclose
  /// nothing, which is no document.
  void split(const std::string& name, std::span<const std::byte> bytes) {
    std::int64_t number = 0;
    while (!bytes.empty()) {
      const void* found = std::memchr(bytes.data(), 0, bytes.size());
      const auto length =
          found == nullptr
              ? bytes.size()
              : static_cast<std::size_t>(static_cast<const std::byte*>(found) - bytes.data());
      if (length > 0) add(fmt::format("{}#{}", name, ++number), bytes.first(length));
      bytes = bytes.subspan(std::min(length + 1, bytes.size()));
    }
  }

  void open(const std::filesystem::path& path) {
    const auto mapping = MappedFile::open(path);
    const std::span<const std::byte> bytes = mapping->bytes();
    read_ahead(bytes);
    const std::size_t before = documents.size();
    if (!bytes.empty() && std::memchr(bytes.data(), 0, bytes.size()) != nullptr) {
      split(path.string(), bytes);
    } else if (!bytes.empty()) {
      add(path.string(), bytes);
    }
    give_back(bytes);
    require_file(documents.size() > before, path.string(),
                 "has {} bytes and no document of at least 2 {}: there is nothing to predict",
                 bytes.size(), unit());
    files.push_back(path);
    mappings.push_back(mapping);
  }
};

Text::Text(const std::vector<std::filesystem::path>& files,
           std::shared_ptr<const Tokenizer> tokenizer)
    : state_(std::make_unique<State>()) {
  if (tokenizer) state_->tokenizer = std::move(tokenizer);
  require(!files.empty(), "no file of text is given");
  for (const std::filesystem::path& path : files) state_->open(path);
}

Text::~Text() = default;
Text::Text(Text&&) noexcept = default;
Text& Text::operator=(Text&&) noexcept = default;

std::span<const Document> Text::documents() const { return state_->documents; }
const Tokenizer& Text::tokenizer() const { return *state_->tokenizer; }
const char* Text::unit() const { return state_->unit(); }
std::int64_t Text::num_bytes() const { return state_->num_bytes; }
std::int64_t Text::num_targets() const { return state_->first_target.back(); }
std::span<const std::int64_t> Text::first_target() const { return state_->first_target; }
std::int64_t Text::longest() const { return state_->longest; }
std::int64_t Text::too_short() const { return state_->too_short; }
const std::vector<std::filesystem::path>& Text::files() const { return state_->files; }

std::int64_t Text::bytes_of(std::span<const std::int32_t> tokens) const {
  std::int64_t bytes = 0;
  for (const std::int32_t token : tokens) {
    if (token >= 0) bytes += std::ssize(state_->tokenizer->bytes_of(token));
  }
  return bytes;
}

void check_vocabulary(std::int64_t vocabulary, const Text& text) {
  const std::int64_t tokens = text.tokenizer().vocabulary();
  require(vocabulary == tokens, "the model has a vocabulary of {}, text is {}: want {}", vocabulary,
          text.tokenizer().is_bytes() ? "bytes" : fmt::format("tokens of {} pieces", tokens),
          tokens);
}

std::uint64_t Text::fingerprint() const {
  std::uint64_t hash = 0;
  for (const Document& document : state_->documents) {
    hash = splitmix64_mix(hash + kSplitMix64Step + document.bytes.size());
    hash = hash_bytes(hash, document.bytes);
  }
  return hash;
}

}  // namespace switchyard::models
