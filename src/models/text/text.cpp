// Documents in mapped files.
#include "switchyard/models/text.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "core/check.hpp"
#include "core/splitmix64.hpp"

namespace switchyard::models {

struct Text::State {
  std::vector<std::filesystem::path> files{};
  std::vector<std::shared_ptr<const MappedFile>> mappings{};
  std::vector<Document> documents{};
  std::vector<std::int64_t> first_target{0};
  std::int64_t num_bytes = 0, longest = 0, too_short = 0;

  void add(std::string name, std::span<const std::byte> bytes) {
    if (bytes.size() < 2) {
      ++too_short;
      return;
    }
    Document document{std::move(name), bytes};
    num_bytes += document.size();
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
                 "has {} bytes and no document of at least 2: there is nothing to predict",
                 bytes.size());
    files.push_back(path);
    mappings.push_back(mapping);
  }
};

Text::Text(const std::vector<std::filesystem::path>& files) : state_(std::make_unique<State>()) {
  require(!files.empty(), "no file of text is given");
  for (const std::filesystem::path& path : files) state_->open(path);
}

Text::~Text() = default;
Text::Text(Text&&) noexcept = default;
Text& Text::operator=(Text&&) noexcept = default;

std::span<const Document> Text::documents() const { return state_->documents; }
std::int64_t Text::num_bytes() const { return state_->num_bytes; }
std::int64_t Text::num_targets() const { return state_->first_target.back(); }
std::span<const std::int64_t> Text::first_target() const { return state_->first_target; }
std::int64_t Text::longest() const { return state_->longest; }
std::int64_t Text::too_short() const { return state_->too_short; }
const std::vector<std::filesystem::path>& Text::files() const { return state_->files; }

std::uint64_t Text::fingerprint() const {
  std::uint64_t hash = 0;
  for (const Document& document : state_->documents) {
    hash = splitmix64_mix(hash + kSplitMix64Step + static_cast<std::uint64_t>(document.size()));
    hash = hash_bytes(hash, document.bytes);
  }
  return hash;
}

}  // namespace switchyard::models
