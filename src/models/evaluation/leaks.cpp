// Whether logits depend on what they must not see.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "core/check.hpp"
#include "switchyard/models/evaluate.hpp"

namespace switchyard::models {
namespace {

/// Another token, for every token; which one, `salt` says.
std::int32_t other(std::int64_t token, std::int64_t salt, std::int64_t vocabulary) {
  return static_cast<std::int32_t>((token + 1 + (100 + salt) % (vocabulary - 1)) % vocabulary);
}

/// The sequence that is looked at: others lie before and behind it.
constexpr std::int64_t kLooked = 1;

/// Numbers [first, first + count) of both, by bits.
void compare(const std::vector<float>& before, const std::vector<float>& after, std::int64_t first,
             std::int64_t count, LeakProbe& probe) {
  const auto part = [&](const std::vector<float>& logits) {
    return std::span(logits).subspan(static_cast<std::size_t>(first),
                                     static_cast<std::size_t>(count));
  };
  const std::span<const float> old_part = part(before);
  const std::span<const float> new_part = part(after);
  probe.same = std::memcmp(old_part.data(), new_part.data(), old_part.size_bytes()) == 0;
  for (std::size_t i = 0; i < old_part.size(); ++i) {
    const double change =
        std::abs(static_cast<double>(new_part[i]) - static_cast<double>(old_part[i]));
    probe.largest_change = std::max(probe.largest_change, change);
  }
}

/// The tokens with those replaced that a probe is about.
std::vector<std::int32_t> replaced_tokens(std::vector<std::int32_t> tokens, std::int64_t length,
                                          std::int64_t vocabulary, const LeakProbe& probe) {
  for (std::int64_t i = 0; i < std::ssize(tokens); ++i) {
    const bool is_looked = i / length == kLooked;
    const bool is_later = is_looked && i % length > probe.position;
    if (probe.replaced == LeakProbe::Replaced::kLaterTokens ? is_later : !is_looked) {
      std::int32_t& token = tokens[static_cast<std::size_t>(i)];
      token = other(token, probe.position, vocabulary);
    }
  }
  return tokens;
}

}  // namespace

const char* to_string(LeakProbe::Replaced replaced) noexcept {
  return replaced == LeakProbe::Replaced::kLaterTokens ? "later tokens" : "other sequences";
}

std::vector<LeakProbe> audit_leaks(Model& model, const Text& text, std::int64_t sequences) {
  const ModelConfig& config = model.config();
  const std::int64_t length = config.sequence;
  require(sequences >= 2 && sequences <= 64, "{} sequences of a leak audit, want 2 to 64",
          sequences);
  check_vocabulary(config.vocabulary, text);
  std::vector<Window> windows;
  for (const Window& window : held_out_windows(text, length)) {
    if (window.length == length && std::ssize(windows) < sequences) windows.push_back(window);
  }
  require(windows.size() >= 2, "a leak audit wants two windows of {} {}, the text has {} of them",
          length, text.unit(), windows.size());
  Batch batch;
  fill_batch(text, windows, length, batch);
  const auto logits_of = [&](const std::vector<std::int32_t>& tokens) {
    std::vector<float> logits(tokens.size() * static_cast<std::size_t>(config.vocabulary));
    model.forward({tokens.data(), {batch.sequences, length}},
                  {logits.data(), {std::ssize(tokens), config.vocabulary}});
    return logits;
  };
  const std::vector<float> before = logits_of(batch.tokens);
  std::vector<LeakProbe> probes;
  for (const auto replaced :
       {LeakProbe::Replaced::kLaterTokens, LeakProbe::Replaced::kOtherSequences}) {
    for (const std::int64_t quarter : {1, 2, 3}) {
      LeakProbe probe{.replaced = replaced, .position = quarter * length / 4};
      const std::vector<float> after =
          logits_of(replaced_tokens(batch.tokens, length, config.vocabulary, probe));
      compare(before, after, kLooked * length * config.vocabulary,
              (probe.position + 1) * config.vocabulary, probe);
      probes.push_back(probe);
    }
  }
  return probes;
}

}  // namespace switchyard::models
