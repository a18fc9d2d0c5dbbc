#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/models/text.hpp"

namespace switchyard::models {

/// Contexts and their next byte fit a word of 64 bits.
inline constexpr int kMaxNgramOrder = 8;

/// What byte n-grams counted in one text lose on another, nats a byte, for the orders 1 to
/// `max_order`: a model above these has not learned what counting knows. Order n has contexts of up
/// to n - 1 bytes, inside a document; every byte of `held_out` is predicted but a document's first,
/// as evaluate() has it. Interpolated, with p_0 = 1 / 256:
///   p_n(c | ctx) = (count(ctx c) + types(ctx) p_{n-1}(c | shorter ctx)) / (count(ctx) +
///   types(ctx))
/// where count(ctx) is the number of bytes that follow ctx in `train`, types(ctx) that of different
/// ones; where there are none p_n = p_{n-1}. Sums in double. Source: Witten and Bell 1991, "The
/// zero-frequency problem", method C.
/// Memory: up to some 140 bytes for each context of one order that `held_out` has, and 8 for each
/// of its bytes; none for `train`, whatever its size. Cost: one pass over `train` for each order.
/// @throws Error{kInvalidArgument}: max_order is not in [1, 8]; a text with a tokenizer;
/// {kOutOfMemory}.
[[nodiscard]] std::vector<double> witten_bell_floors(const Text& train, const Text& held_out,
                                                     int max_order = kMaxNgramOrder);

/// The same document by document: nats of all bytes of each but its first, [max_order] of
/// [held_out]. Documents of bytes, of any text, or parts of some. @throws as witten_bell_floors().
[[nodiscard]] std::vector<std::vector<double>> witten_bell_nats(const Text& train,
                                                                std::span<const Document> held_out,
                                                                int max_order = kMaxNgramOrder);

}  // namespace switchyard::models
