#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "switchyard/comm.hpp"

namespace switchyard {

/// An all-to-all of byte strings whose sizes only their senders know: sizes first, then bytes.
class ByteExchange {
 public:
  /// @param max_bytes  Most bytes that one rank can receive in one exchange.
  ByteExchange(Communicator& communicator, std::size_t max_bytes);

  /// send[r] goes to rank r; the result's entry r came from rank r.
  std::vector<std::vector<std::byte>> all_to_all(const std::vector<std::vector<std::byte>>& send);

 private:
  Communicator& communicator_;
  const std::size_t max_bytes_;
  std::unique_ptr<Window> window_;
  std::uint64_t epoch_ = 0;
  std::uint64_t recoveries_ = 0;
};

}  // namespace switchyard
