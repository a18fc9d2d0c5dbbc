#pragma once

#include <cstdint>

#include "switchyard/router.hpp"

namespace switchyard {

/// The most of s that RouterNetwork::Kind::kCosine takes: ln 100.
inline constexpr float kMostCosineScale = 4.60517019F;

/// The matrices in the parameters of a router's network, or in their gradients.
template <class T>
struct NetworkParts {
  T* w1 = nullptr;  ///< [M, H]; of kCosine P.
  T* b1 = nullptr;  ///< [M]; of kCosine s [1].
  T* w2 = nullptr;  ///< [H, M], of kHadamard.
  T* b2 = nullptr;  ///< [H], likewise.

  /// @param all  [RouterNetwork::size(hidden)], or null: then all are.
  static NetworkParts of(const RouterNetwork& network, std::int64_t hidden, T* all) {
    if (all == nullptr) return {};
    const std::int64_t width = network.inner(hidden);
    NetworkParts parts{.w1 = all, .b1 = all + width * hidden};
    if (network.kind == RouterNetwork::Kind::kHadamard) {
      parts.w2 = parts.b1 + width;
      parts.b2 = parts.w2 + width * hidden;
    }
    return parts;
  }
};

}  // namespace switchyard
