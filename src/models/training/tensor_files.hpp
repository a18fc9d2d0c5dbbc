#pragma once

// Tensors of a model, or of its optimiser, to and from safetensors files.

#include <cstddef>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/files/safetensors.hpp"
#include "switchyard/models/model.hpp"

namespace switchyard::models {

/// Numbers that belong to a tensor: its values, or a moment of them.
struct NamedNumbers {
  const ParameterTensor* tensor = nullptr;
  float* data = nullptr;
  std::string prefix{};  ///< Before the names of its parts: "m.".
};

[[nodiscard]] std::vector<NamedNumbers> values_of(std::span<const ParameterTensor> tensors);
void append_values(std::vector<NamedNumbers>& numbers, std::span<const ParameterTensor> tensors);

/// The parts of all as tensors of a file, their bytes where they lie.
[[nodiscard]] std::vector<StoredTensor> stored_parts(std::span<const NamedNumbers> numbers);

/// Of all parts in a file.
[[nodiscard]] std::set<std::string> names_of(std::span<const NamedNumbers> numbers);

/// Reads all parts, f32, bf16 or f16. @param others  Names of further tensors that a file may have.
/// @throws Error{kBadFile} that names file and tensor: missing, of another shape or dtype, one too
///         many, or with a number that is not finite.
void load_parts(std::span<const NamedNumbers> numbers, const std::filesystem::path& file,
                const std::set<std::string>& others = {});

}  // namespace switchyard::models
