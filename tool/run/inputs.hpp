#pragma once

// What `run` works on: a layer of a checkpoint, tokens, and perhaps a routing.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/files/matrix_file.hpp"
#include "switchyard/checkpoint.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// Tokens and whatever keeps them in memory.
struct Tokens {
  std::optional<MatrixFile> file{};
  std::vector<float> values{};
  ConstRawMatrix view{};            ///< [T, H].
  std::vector<std::int32_t> ids{};  ///< [T] of --text; else empty.
};

/// The layer named by --layer, or the first that is a MoE layer.
/// @throws UsageError, Error{kBadFile}.
[[nodiscard]] std::int32_t choose_layer(const Options& options, const Checkpoint& checkpoint);

/// Tokens of --tokens, or of --text: bytes -> embedding -> the layer's RMS norm, in fp32.
/// @throws UsageError: not finite, of another hidden size; Error{kBadFile}.
[[nodiscard]] Tokens load_tokens(const Options& options, const Checkpoint& checkpoint,
                                 std::int32_t layer, std::int64_t hidden);

/// The model with the router of --router, where one is given.
/// @throws UsageError: it is not one, or has not what it needs of these tokens.
void choose_router(const Options& options, const Tokens& tokens, LayerModel& model);

/// The routing of --routing-input for these tokens, or nothing.
/// @throws UsageError: another T or K, an id out of range, a weight that is not finite.
[[nodiscard]] std::optional<RoutingInput> load_routing(const Options& options,
                                                       const RouterConfig& config,
                                                       std::int64_t num_tokens);

}  // namespace switchyard::tool
