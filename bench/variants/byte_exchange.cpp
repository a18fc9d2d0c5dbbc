// Window: [sizes of two epochs, R x R | bytes]. One buffer for the bytes: the sizes of an exchange
// say that their sender has copied what came in the one before.
#include "bench/variants/byte_exchange.hpp"

#include "comm/exchange_layout.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// R x R sizes, twice.
std::int64_t head_bytes(std::int64_t ranks) { return ExchangeLayout::align(2 * ranks * ranks * 8); }

}  // namespace

ByteExchange::ByteExchange(Communicator& communicator, std::size_t max_bytes)
    : communicator_(communicator),
      max_bytes_(max_bytes),
      window_(communicator.create_window(at(head_bytes(communicator.size())) + max_bytes,
                                         2 * communicator.size())),
      recoveries_(communicator.recoveries()) {}

std::vector<std::vector<std::byte>> ByteExchange::all_to_all(
    const std::vector<std::vector<std::byte>>& send) {
  const std::int64_t ranks = communicator_.size();
  const std::int64_t rank = communicator_.rank();
  if (recoveries_ != communicator_.recoveries()) {
    recoveries_ = communicator_.recoveries();
    epoch_ = 0;
  }
  ++epoch_;
  const std::int64_t table = static_cast<std::int64_t>(epoch_ % 2) * ranks * ranks * 8;
  std::vector<std::uint64_t> own;
  own.reserve(send.size());
  for (const auto& bytes : send) own.push_back(bytes.size());
  for (std::int64_t i = 0; i < ranks; ++i) {
    const auto to = static_cast<int>((rank + i) % ranks);
    window_->put(to, at(table + rank * ranks * 8), own.data(), at(ranks * 8));
    window_->signal(to, communicator_.rank(), epoch_);
  }
  for (int from = 0; from < ranks; ++from) {
    window_->wait(from, epoch_, {.phase = "sizes", .rank = from});
  }
  const auto* sizes = reinterpret_cast<const std::uint64_t*>(window_->local() + table);
  const auto begin = [&](std::int64_t source, std::int64_t to) {
    std::uint64_t bytes = 0;
    for (std::int64_t s = 0; s < source; ++s) bytes += sizes[s * ranks + to];
    return bytes;
  };
  for (std::int64_t to = 0; to < ranks; ++to) {
    require(begin(ranks, to) <= max_bytes_, "rank {} would receive {} bytes, has room for {}", to,
            begin(ranks, to), max_bytes_);
  }
  const std::size_t head = at(head_bytes(ranks));
  for (std::int64_t i = 0; i < ranks; ++i) {
    const std::int64_t to = (rank + i) % ranks;
    window_->put(static_cast<int>(to), head + begin(rank, to), send[at(to)].data(),
                 send[at(to)].size());
    window_->signal(static_cast<int>(to), static_cast<int>(ranks + rank), epoch_);
  }
  std::vector<std::vector<std::byte>> received(at(ranks));
  for (std::int64_t from = 0; from < ranks; ++from) {
    window_->wait(static_cast<int>(ranks + from), epoch_,
                  {.phase = "bytes", .rank = static_cast<int>(from)});
    const std::byte* bytes = window_->local() + head + begin(from, rank);
    received[at(from)].assign(bytes, bytes + sizes[from * ranks + rank]);
  }
  return received;
}

}  // namespace switchyard
