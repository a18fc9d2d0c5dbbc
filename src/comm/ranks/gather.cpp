// Broadcast, sum and gather. Rare and small, so plain: every call makes a window of its own.
#include "comm/ranks/gather.hpp"

#include <algorithm>
#include <cstring>

#include "core/check.hpp"

namespace switchyard {
namespace {

/// The value of each rank, on all ranks.
std::vector<std::uint64_t> exchange(Communicator& communicator, std::uint64_t value) {
  const int ranks = communicator.size();
  const auto window =
      communicator.create_window(static_cast<std::size_t>(ranks) * sizeof value, ranks);
  for (int to = 0; to < ranks; ++to) {
    const auto place = static_cast<std::size_t>(communicator.rank()) * sizeof value;
    window->put(to, place, &value, sizeof value);
    window->signal(to, communicator.rank(), 1);
  }
  std::vector<std::uint64_t> values(static_cast<std::size_t>(ranks));
  for (int from = 0; from < ranks; ++from) {
    window->wait(from, 1, {.phase = "gather sizes", .rank = from});
  }
  std::memcpy(values.data(), window->local(), values.size() * sizeof value);
  communicator.barrier("gather sizes");
  return values;
}

}  // namespace

double from_first(Communicator& communicator, double value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  bits = exchange(communicator, bits).front();
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

namespace {

template <typename T>
std::vector<T> sum(Communicator& communicator, const std::vector<T>& values) {
  for (const std::uint64_t size : exchange(communicator, values.size())) {
    if (size == values.size()) continue;
    fail(ErrorCode::kCommunication, "ranks add up {} and {} values", values.size(), size);
  }
  const int ranks = communicator.size();
  const std::size_t bytes = values.size() * sizeof(T);
  const auto window = communicator.create_window(
      std::max<std::size_t>(static_cast<std::size_t>(ranks) * bytes, 1), ranks);
  for (int to = 0; to < ranks; ++to) {
    const auto place = static_cast<std::size_t>(communicator.rank()) * bytes;
    if (bytes > 0) window->put(to, place, values.data(), bytes);
    window->signal(to, communicator.rank(), 1);
  }
  std::vector<T> sums(values.size());
  std::vector<T> part(values.size());
  for (int from = 0; from < ranks; ++from) {
    window->wait(from, 1, {.phase = "sum", .rank = from});
    if (bytes > 0) {
      std::memcpy(part.data(), window->local() + static_cast<std::size_t>(from) * bytes, bytes);
    }
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += part[i];
  }
  communicator.barrier("sum");
  return sums;
}

}  // namespace

std::vector<std::int64_t> sum_over_ranks(Communicator& communicator,
                                         const std::vector<std::int64_t>& values) {
  return sum(communicator, values);
}

std::vector<double> sum_over_ranks(Communicator& communicator, const std::vector<double>& values) {
  return sum(communicator, values);
}

namespace {

/// On the ranks below `num_to`.
std::vector<std::vector<std::byte>> gather_to(Communicator& communicator, int num_to,
                                              const std::vector<std::byte>& part) {
  const std::vector<std::uint64_t> sizes = exchange(communicator, part.size());
  const std::uint64_t most = *std::max_element(sizes.begin(), sizes.end());
  const auto window =
      communicator.create_window(std::max<std::size_t>(most, 1), communicator.size());
  std::vector<std::vector<std::byte>> parts;
  // One rank after the other, so that the window need only hold the largest part.
  for (int from = 0; from < communicator.size(); ++from) {
    for (int to = 0; communicator.rank() == from && to < num_to; ++to) {
      if (!part.empty()) window->put(to, 0, part.data(), part.size());
      window->signal(to, from, 1);
    }
    if (communicator.rank() < num_to) {
      window->wait(from, 1, {.phase = "gather", .rank = from});
      parts.emplace_back(window->local(), window->local() + sizes[static_cast<std::size_t>(from)]);
    }
    communicator.barrier("gather");
  }
  return parts;
}

}  // namespace

std::vector<std::vector<std::byte>> gather(Communicator& communicator,
                                           const std::vector<std::byte>& part) {
  return gather_to(communicator, 1, part);
}

std::vector<std::vector<std::byte>> gather_to_all(Communicator& communicator,
                                                  const std::vector<std::byte>& part) {
  return gather_to(communicator, communicator.size(), part);
}

}  // namespace switchyard
