// Messages of counts: small, the same to every rank, with the epoch and a checksum, so that memory
// that somebody has damaged becomes an error instead of a wrong place.
#include "comm/host/exchange.hpp"

#include <span>

#include "core/check.hpp"

namespace switchyard {
namespace {

/// Mixes all words (the multiplier is that of splitmix64): any single changed bit changes it.
std::uint64_t checksum(std::span<const std::uint64_t> words) {
  std::uint64_t sum = 0;
  for (const std::uint64_t word : words) {
    sum = (sum ^ word) * 0xbf58476d1ce4e5b9ULL;
    sum ^= sum >> 31;
  }
  return sum;
}

}  // namespace

Exchange::Exchange(Communicator& communicator, const ExchangeLayout& layout)
    : communicator_(communicator),
      layout_(layout),
      window_(communicator.create_window(static_cast<std::size_t>(layout.bytes()),
                                         layout.num_signals())),
      message_(static_cast<std::size_t>(layout.message_words())) {}

void Exchange::publish(const char* phase, std::uint64_t epoch,
                       const std::vector<std::int64_t>& counts, std::int64_t offset, int signal) {
  require(counts.size() + 2 == message_.size(), "{}: {} counts for {} ranks", phase, counts.size(),
          layout_.num_ranks);
  message_.front() = epoch;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    message_[i + 1] = static_cast<std::uint64_t>(counts[i]);
  }
  message_.back() = checksum(std::span(message_).first(message_.size() - 1));
  for (std::int32_t i = 0; i < layout_.num_ranks; ++i) {
    const std::int32_t to = in_turn(i);
    window_->put(to, static_cast<std::size_t>(offset), message_.data(),
                 static_cast<std::size_t>(layout_.message_bytes()));
    window_->signal(to, signal, epoch);
  }
}

void Exchange::read(const char* phase, std::uint64_t epoch, std::int32_t from, std::int64_t offset,
                    int signal, std::int64_t limit, std::int64_t* counts) {
  window_->wait(signal, epoch, {.phase = phase, .rank = from});
  const std::span words(at<const std::uint64_t>(offset), message_.size());
  const auto refuse = [&](const std::string& what) {
    fail(ErrorCode::kCommunication, "{}: the message of rank {} to rank {} {}", phase, from,
         communicator_.rank(), what);
  };
  if (words.back() != checksum(words.first(words.size() - 1))) refuse("is damaged");
  if (words.front() != epoch) {
    refuse(fmt::format("is of exchange {}, expected {}", words.front(), epoch));
  }
  for (std::int32_t to = 0; to < layout_.num_ranks; ++to) {
    const auto count = static_cast<std::int64_t>(words[static_cast<std::size_t>(to) + 1]);
    if (count < 0 || count > limit) {
      refuse(fmt::format("has {} rows for rank {}, at most {} are possible", count, to, limit));
    }
    counts[to] = count;
  }
}

}  // namespace switchyard
