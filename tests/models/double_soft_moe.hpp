#pragma once

// Soft-MoE in double and in plain loops, from the formulas of
// include/switchyard/routing/soft_moe.hpp: nothing of the library.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

namespace switchyard::test::in_double {

struct SoftMoe {
  std::size_t hidden = 0, experts = 0, slots = 0;
  std::size_t group = 0;  ///< Tokens that are mixed; the last of a sequence may have fewer.
  bool normalize = true, causal = false;
  double scale = 1;
};

/// Rows over their lengths.
inline std::vector<double> of_length_one(std::vector<double> rows, std::size_t size) {
  for (std::size_t first = 0; first < rows.size(); first += size) {
    double squares = 1e-6;
    for (std::size_t i = 0; i < size; ++i) squares += rows[first + i] * rows[first + i];
    for (std::size_t i = 0; i < size; ++i) rows[first + i] /= std::sqrt(squares);
  }
  return rows;
}

/// One sequence x [T, H] by phi [E*p, H]; `expert(e, rows)` is what expert e makes of rows.
inline std::vector<double> soft_moe(
    const std::vector<double>& x, const std::vector<double>& phi, const SoftMoe& of,
    const std::function<std::vector<double>(std::size_t, const std::vector<double>&)>& expert) {
  const std::size_t tokens = x.size() / of.hidden, all = of.experts * of.slots;
  const std::vector<double> xn = of.normalize ? of_length_one(x, of.hidden) : x;
  const std::vector<double> pn = of.normalize ? of_length_one(phi, of.hidden) : phi;
  std::vector<double> weight(tokens * all);  // exp(scale u)
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t s = 0; s < all; ++s) {
      double u = 0;
      for (std::size_t h = 0; h < of.hidden; ++h)
        u += xn[t * of.hidden + h] * pn[s * of.hidden + h];
      weight[t * all + s] = std::exp(of.scale * u);
    }
  }
  std::vector<double> out(x.size());
  for (std::size_t first = 0; first < tokens; first += of.group) {
    const std::size_t end = std::min(tokens, first + of.group);
    std::vector<double> made(all * of.hidden);
    for (std::size_t s = 0; s < all; ++s) {
      std::vector<double> slot(of.hidden);
      double sum = 0;
      for (std::size_t t = first; t < end; ++t) sum += weight[t * all + s];
      for (std::size_t t = first; t < end; ++t) {
        for (std::size_t h = 0; h < of.hidden; ++h) {
          slot[h] += weight[t * all + s] / sum * x[t * of.hidden + h];
        }
      }
      const std::vector<double> y = expert(s / of.slots, slot);
      std::copy(y.begin(), y.end(), made.begin() + static_cast<std::ptrdiff_t>(s * of.hidden));
    }
    const std::size_t reads = of.causal ? first + of.group : first;
    for (std::size_t t = reads; t < std::min(tokens, reads + of.group); ++t) {
      double sum = 0;
      for (std::size_t s = 0; s < all; ++s) sum += weight[t * all + s];
      for (std::size_t s = 0; s < all; ++s) {
        for (std::size_t h = 0; h < of.hidden; ++h) {
          out[t * of.hidden + h] += weight[t * all + s] / sum * made[s * of.hidden + h];
        }
      }
    }
  }
  return out;
}

}  // namespace switchyard::test::in_double
