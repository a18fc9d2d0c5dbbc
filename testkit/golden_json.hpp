#pragma once

// Values from files of golden numbers.

#include <nlohmann/json.hpp>
#include <vector>

namespace switchyard::test {

/// The values of rows, one row after the other.
template <typename T>
std::vector<T> flat(const nlohmann::json& rows) {
  std::vector<T> values;
  for (const nlohmann::json& row : rows) {
    for (const nlohmann::json& value : row) values.push_back(value.get<T>());
  }
  return values;
}

}  // namespace switchyard::test
