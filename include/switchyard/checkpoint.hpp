#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/layer.hpp"

namespace switchyard {

/// A model's files on disk: a directory with `config.json` and `model.safetensors` (or shards with
/// `model.safetensors.index.json`), or one of those files. Tensors are mapped, not copied.
/// Families by `model_type`, as docs/checkpoints.md lists them.
class Checkpoint {
 public:
  /// @throws Error{kBadFile}: what is missing, malformed, truncated, overlapping or of an unknown
  ///         family, with the file's name; {kIo}: the system failed to map it.
  explicit Checkpoint(const std::filesystem::path& path);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  /// Every file that has been read or mapped.
  [[nodiscard]] std::vector<std::filesystem::path> files() const;
  [[nodiscard]] std::string_view family() const;
  [[nodiscard]] std::int32_t num_layers() const;
  /// Layers that are Mixture-of-Experts, ascending.
  [[nodiscard]] const std::vector<std::int32_t>& moe_layers() const;
  /// The weights of a layer's MoE block. Sources keep the mapping alive.
  /// @throws Error{kInvalidArgument}: the layer is dense or out of range; {kBadFile}: tensors are
  ///         missing or of the wrong shape or dtype.
  [[nodiscard]] LayerModel layer(std::int32_t index) const;
  /// [V, H] rows of `model.embed_tokens.weight` for the given token ids, as f32 [ids, H].
  /// @throws Error{kInvalidArgument}: an id outside the vocabulary; {kBadFile}: no such tensor.
  [[nodiscard]] std::vector<float> embed(const std::vector<std::int32_t>& ids) const;
  [[nodiscard]] std::int64_t vocabulary() const;
  /// Weights of the RMS norm right before a layer's block, as f32 [H] (most families call it
  /// `post_attention_layernorm`); empty where the checkpoint has none.
  [[nodiscard]] std::vector<float> post_attention_norm(std::int32_t index) const;
  [[nodiscard]] float rms_norm_eps() const;  ///< From the configuration, else 1e-6.

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// How make_checkpoint() stores experts' matrices.
enum class WeightPacking : std::uint8_t {
  kPlain,          ///< As CheckpointRecipe::dtype says.
  kGptq,           ///< int4 with zero points, the largest group of 128, 64 and 32 that fits.
  kAwq,            ///< The same in AWQ's order.
  kPackQuantized,  ///< int4 of compressed-tensors, symmetric.
  kNvfp4Packed,    ///< NVFP4 of compressed-tensors.
  kModelOpt,       ///< NVFP4 of ModelOpt, with scales for rows that nobody uses here.
};

/// "plain", "gptq", "awq", "pack-quantized", "nvfp4-pack-quantized", "modelopt".
[[nodiscard]] const char* to_string(WeightPacking packing) noexcept;

/// What make_checkpoint() writes.
struct CheckpointRecipe {
  std::string family{};
  LayerConfig layer{};
  std::int32_t num_layers = 1;  ///< Where a family has dense layers, the first of several is dense.
  std::int32_t shared_experts = 0;  ///< S; layer.shared.inner = S * I.
  std::int64_t vocabulary = 256;    ///< Bytes.
  /// bf16, f16 or f32. gpt-oss in bf16 has its experts in MXFP4, as the public ones; in f16 and f32
  /// they are plain. deepseek-v3 may be fp8 too: F8_E4M3 with 128x128 blocks, the rest bf16.
  DType dtype = DType::kBF16;
  /// Of families with a tensor for each matrix, bf16 or f16, which is also the type of int4's
  /// scales.
  WeightPacking packing = WeightPacking::kPlain;
  std::uint64_t seed = 0;
  std::int32_t shards = 1;
};

/// Write a small checkpoint of a family with made-up weights: the same bytes on every machine
/// (counter-based generator, integer arithmetic only). An older checkpoint in the directory stays
/// until the new one is written, then all its files go; whoever ends the process meanwhile leaves
/// one of the two or, for the moment of the change, a directory that is no checkpoint.
/// @throws Error{kInvalidArgument}: a size out of range, a layer that the family's configuration
///         cannot express, or a place that cannot be written to; {kIo}: the disk lacks room (it is
///         asked before anything is written), or another process is making one there.
void make_checkpoint(const CheckpointRecipe& recipe, const std::filesystem::path& directory);

}  // namespace switchyard
