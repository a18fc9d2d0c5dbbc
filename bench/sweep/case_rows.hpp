#pragma once

#include "bench/cases/cases.hpp"

namespace switchyard::bench {

/// What a layer computes with, before anything is drawn.
struct CaseRows {
  double used = 0;      ///< Rows that are a token's.
  double executed = 0;  ///< With padding, to the capacity or what the fullest is likely to have.
  double hit = 0;       ///< Experts that have one.
};
[[nodiscard]] CaseRows rows_of(const LayerCase& c);

}  // namespace switchyard::bench
