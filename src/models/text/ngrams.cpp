// Witten-Bell floors, an order at a time: only contexts that the held-out text has are counted, so
// that tables stay as small as it is, and mostly in the caches.
#include "switchyard/models/ngrams.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/splitmix64.hpp"

namespace switchyard::models {
namespace {

/// What follows one context in the text that is counted.
struct Followers {
  std::int64_t count = 0;
  std::array<std::uint64_t, 4> seen{};  ///< A bit for each byte.

  void add(unsigned byte) {
    ++count;
    seen[byte / 64] |= std::uint64_t{1} << byte % 64;
  }
  [[nodiscard]] std::int64_t types() const {
    int types = 0;
    for (const std::uint64_t word : seen) types += std::popcount(word);
    return types;
  }
};

/// Numbers of keys, in the order in which they came: open addressing, at most half full. Keys lie
/// with their numbers, so that most look-ups touch one line of a cache.
class Keys {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;

  Keys() : slots_(1 << 10) {}

  /// The number of a key, a new one for a new key.
  std::uint32_t number(std::uint64_t key) {
    Slot& slot = slots_[slot_of(slots_, key)];
    if (slot.number != kNone) return slot.number;
    require(size_ < kNone, "a held-out text of more than {} different contexts", kNone);
    const std::uint32_t number = size_++;
    slot = {key, number};
    if (2 * std::size_t{size_} > slots_.size()) grow();
    return number;
  }
  /// kNone: it is not there.
  [[nodiscard]] std::uint32_t find(std::uint64_t key) const {
    return slots_[slot_of(slots_, key)].number;
  }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  struct Slot {
    std::uint64_t key = 0;
    std::uint32_t number = kNone;
  };

  /// Where the key is, or would be.
  static std::size_t slot_of(const std::vector<Slot>& slots, std::uint64_t key) {
    const std::size_t mask = slots.size() - 1;
    std::size_t slot = splitmix64_mix(key + kSplitMix64Step) & mask;
    while (slots[slot].number != kNone && slots[slot].key != key) slot = (slot + 1) & mask;
    return slot;
  }
  void grow() {
    std::vector<Slot> wider(2 * slots_.size());
    for (const Slot& slot : slots_) {
      if (slot.number != kNone) wider[slot_of(wider, slot.key)] = slot;
    }
    slots_ = std::move(wider);
  }

  std::vector<Slot> slots_;
  std::uint32_t size_ = 0;
};

/// body(context, byte, i) for each byte i of a document that has `length` bytes before it; the
/// context is these, the latest lowest.
template <typename Body>
void for_each_context(const Document& document, int length, const Body& body) {
  const std::uint64_t mask = (std::uint64_t{1} << 8 * length) - 1;
  std::uint64_t context = 0;
  for (std::int64_t i = 0; i < document.size(); ++i) {
    const auto byte = std::to_integer<std::uint64_t>(document.bytes[static_cast<std::size_t>(i)]);
    if (i >= length) body(context & mask, byte, i);
    context = context << 8 | byte;
  }
}

/// One order for every byte that is predicted: `p` [targets] goes from order n - 1 to n.
void add_order(const Text& train, std::span<const Document> held_out, int order,
               std::vector<double>& p) {
  const int length = order - 1;
  Keys contexts;
  Keys ngrams;
  for (const Document& document : held_out) {
    for_each_context(document, length, [&](std::uint64_t context, std::uint64_t byte, auto i) {
      if (i < 1) return;
      contexts.number(context);
      ngrams.number(context << 8 | byte);
    });
  }
  std::vector<Followers> followers(contexts.size());
  std::vector<std::int64_t> counts(ngrams.size());
  for (const Document& document : train.documents()) {
    for_each_context(document, length, [&](std::uint64_t context, std::uint64_t byte, auto) {
      const std::uint32_t at = contexts.find(context);
      if (at == Keys::kNone) return;
      followers[at].add(static_cast<unsigned>(byte));
      const std::uint32_t ngram = ngrams.find(context << 8 | byte);
      if (ngram != Keys::kNone) ++counts[ngram];
    });
  }
  std::int64_t target = -1;  // of byte 0, which is none
  for (const Document& document : held_out) {
    for_each_context(document, length, [&](std::uint64_t context, std::uint64_t byte, auto i) {
      if (i < 1) return;
      const Followers& followed = followers[contexts.find(context)];
      if (followed.count == 0) return;
      const auto types = static_cast<double>(followed.types());
      double& probability = p[static_cast<std::size_t>(target + i)];
      const auto count = static_cast<double>(counts[ngrams.find(context << 8 | byte)]);
      probability = (count + types * probability) / (static_cast<double>(followed.count) + types);
    });
    target += document.num_targets();
  }
}

}  // namespace

std::vector<std::vector<double>> witten_bell_nats(const Text& train,
                                                  std::span<const Document> held_out,
                                                  int max_order) {
  require(max_order >= 1 && max_order <= kMaxNgramOrder, "order {} of n-grams, want 1 to {}",
          max_order, kMaxNgramOrder);
  std::int64_t targets = 0;
  bool are_bytes = train.tokenizer().is_bytes();
  for (const Document& document : held_out) {
    targets += document.num_targets();
    are_bytes = are_bytes && document.tokens.empty();
  }
  require(are_bytes, "floors of n-grams are of bytes: want texts without a tokenizer");
  std::vector<double> p(static_cast<std::size_t>(targets), 1.0 / kByteVocabulary);
  std::vector<std::vector<double>> nats;
  for (int order = 1; order <= max_order; ++order) {
    add_order(train, held_out, order, p);
    auto probability = p.begin();
    nats.emplace_back();
    for (const Document& document : held_out) {
      double& sum = nats.back().emplace_back();
      for (std::int64_t i = 0; i < document.num_targets(); ++i) sum -= std::log(*probability++);
    }
  }
  return nats;
}

std::vector<double> witten_bell_floors(const Text& train, const Text& held_out, int max_order) {
  std::vector<double> floors;
  for (const std::vector<double>& of : witten_bell_nats(train, held_out.documents(), max_order)) {
    floors.push_back(std::accumulate(of.begin(), of.end(), 0.0) /
                     static_cast<double>(held_out.num_targets()));
  }
  return floors;
}

}  // namespace switchyard::models
