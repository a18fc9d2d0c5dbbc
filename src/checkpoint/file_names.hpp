#pragma once

// The files of a checkpoint's directory.

#include <fmt/core.h>

#include <string>

namespace switchyard {

inline constexpr const char* kConfigFile = "config.json";
/// A sentencepiece model, where tokens are its pieces.
inline constexpr const char* kTokenizerFile = "tokenizer.model";
/// Either all tensors in one file ...
inline constexpr const char* kSingleFile = "model.safetensors";
/// ... or in shards, and an index that says which is where. Where there is one it is what is read.
inline constexpr const char* kIndexFile = "model.safetensors.index.json";

/// "model-00002-of-00005.safetensors".
[[nodiscard]] inline std::string shard_name(int number, int shards) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", number, shards);
}

}  // namespace switchyard
