// In a build without sentencepiece tokens are bytes.
#include "core/check.hpp"
#include "switchyard/models/tokenizer.hpp"

namespace switchyard::models {
namespace {

constexpr const char* kMissing =
    "this build has no sentencepiece: install it (Debian and Ubuntu: libsentencepiece-dev) and "
    "build anew";

}  // namespace

bool has_sentencepiece() noexcept { return false; }

// By value as where it is kept. NOLINTNEXTLINE(performance-unnecessary-value-param)
std::shared_ptr<const Tokenizer> parse_tokenizer(std::string /*content*/, const std::string& name) {
  fail(ErrorCode::kUnsupported, "{}: {}", name, kMissing);
}

std::string train_tokenizer(std::span<const std::span<const std::byte>> /*texts*/,
                            std::int64_t vocabulary) {
  fail(ErrorCode::kUnsupported, "a vocabulary of {} pieces: {}", vocabulary, kMissing);
}

}  // namespace switchyard::models
