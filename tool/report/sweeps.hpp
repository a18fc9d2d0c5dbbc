#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace switchyard::tool {

/// Whether a result line is a point of a fixed-size sweep.
[[nodiscard]] bool is_sweep_line(const nlohmann::json& line);

/// What of such a line is shown.
struct SweepPoint {
  std::string title{};  ///< Of its section: sweep, ranks, types, machine.
  std::string sweep{}, commit{};
  bool beside_nccl = false;  ///< The peer is NCCL's all-to-all, else MPI's.
  double value = 0, median_us = 0, mean_us = 0, padding = 0, wire_bytes = 0;
  std::optional<double> peer_us{};
  std::int64_t rows = 0;  ///< M.
  bool holds = false;
};

/// @throws nlohmann::json::exception: a member is missing or of another kind.
[[nodiscard]] SweepPoint sweep_point_of(const nlohmann::json& line);

/// A section of the page per sweep, ranks and machine: a plot of the times and a table with M and
/// the padding. Of points at the same place the last one counts.
/// @param sections  How many were made is added to it.
[[nodiscard]] std::string sweep_sections(const std::vector<SweepPoint>& points,
                                         std::size_t& sections);

}  // namespace switchyard::tool
