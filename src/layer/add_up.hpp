#pragma once

// Counts of several routings of one call.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "switchyard/dispatch.hpp"
#include "switchyard/route.hpp"

namespace switchyard {

/// to += from, value by value; nothing is as many zeros.
inline void add_up(std::vector<std::int64_t>& to, const std::vector<std::int64_t>& from) {
  to.resize(std::max(to.size(), from.size()));
  for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
}

inline void add_up(Traffic& whole, const Traffic& part) {
  add_up(whole.rows, part.rows);
  add_up(whole.payload_bytes, part.payload_bytes);
  add_up(whole.meta_bytes, part.meta_bytes);
  add_up(whole.return_rows, part.return_rows);
  add_up(whole.return_payload_bytes, part.return_payload_bytes);
  add_up(whole.return_meta_bytes, part.return_meta_bytes);
}

inline void add_up(RoutingRecord& whole, const RoutingRecord& part) {
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(whole.expert, part.expert);
  append(whole.weight, part.weight);
  append(whole.kept, part.kept);
  add_up(whole.counts, part.counts);
  add_up(whole.counts_kept, part.counts_kept);
}

}  // namespace switchyard
