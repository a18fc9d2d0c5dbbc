// Sums over ranks on the host. One place for parts and one for sums are enough: a rank sends parts
// only once it has all sums of the chunk before, for which their owners have read its parts; and
// it sends a sum only once it has the parts of all, which have then read the sums before.
#include "comm/host/rank_sums.hpp"

#include <algorithm>
#include <cstring>

#include "comm/ranks/collectively.hpp"
#include "core/row_ops.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kMostOfChunk = 1 << 16;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

RankSums::RankSums(Communicator& communicator, std::int64_t most)
    : communicator_(communicator),
      num_ranks_(communicator.size()),
      rank_(communicator.rank()),
      chunk_(std::clamp<std::int64_t>((most + num_ranks_ - 1) / num_ranks_, 1, kMostOfChunk)),
      recoveries_(communicator.recoveries()),
      window_(communicator.create_window(index(4 * chunk_ * kKinds * num_ranks_),
                                         kKinds * num_ranks_)) {}

void RankSums::signal_all(Kind kind) {
  for (std::int32_t i = 0; i < num_ranks_; ++i) {
    window_->signal(in_turn(i), kind * num_ranks_ + rank_, chunks_);
  }
}

void RankSums::wait_for_all(const char* phase, Kind kind) {
  for (std::int32_t from = 0; from < num_ranks_; ++from) {
    window_->wait(kind * num_ranks_ + from, chunks_, {.phase = phase, .rank = from});
  }
}

void RankSums::add_up(float* values, std::int64_t count) {
  collectively(communicator_, [&] {
    const std::int64_t most = num_ranks_ * chunk_;
    for (std::int64_t begin = 0; begin < count; begin += most) {
      add_chunk(values + begin, std::min(most, count - begin));
    }
  });
}

/// Each rank adds up a share of the values and tells all.
void RankSums::add_chunk(float* values, std::int64_t count) {
  ++chunks_;
  const std::int64_t share = (count + num_ranks_ - 1) / num_ranks_;
  const auto begin_of = [&](std::int32_t owner) { return std::min(count, owner * share); };
  const auto size_of_share = [&](std::int32_t owner) {
    return begin_of(owner + 1) - begin_of(owner);
  };
  for (std::int32_t i = 0; i < num_ranks_; ++i) {
    const std::int32_t to = in_turn(i);
    window_->put(to, index(place(kParts, rank_)), values + begin_of(to),
                 index(4 * size_of_share(to)));
  }
  signal_all(kParts);
  wait_for_all("parts of a sum over ranks", kParts);
  const std::int64_t own = size_of_share(rank_);
  const auto part = [&](std::int32_t of) {
    return reinterpret_cast<float*>(window_->local() + place(kParts, of));
  };
  for (std::int32_t step = 1; step < num_ranks_; step *= 2) {
    for (std::int32_t r = 0; r + step < num_ranks_; r += 2 * step) {
      row_ops::add(part(r + step), part(r), own);
    }
  }
  for (std::int32_t i = 0; i < num_ranks_; ++i) {
    window_->put(in_turn(i), index(place(kSums, rank_)), part(0), index(4 * own));
  }
  signal_all(kSums);
  wait_for_all("sums over ranks", kSums);
  for (std::int32_t owner = 0; owner < num_ranks_; ++owner) {
    std::memcpy(values + begin_of(owner), window_->local() + place(kSums, owner),
                index(4 * size_of_share(owner)));
  }
}

}  // namespace switchyard
