#pragma once

// Files of tensors of which each process of a launcher has a share.

#include <filesystem>
#include <set>
#include <span>
#include <string>

#include "models/training/tensor_files.hpp"
#include "switchyard/comm.hpp"

namespace switchyard::models {

/// Collective: rank 0 writes the file, the tensors that all have alike and its own from where they
/// lie, those of others as they come, by pieces of 4 MiB; `others` last.
/// @param own  As many on every rank, in the same order.
void write_shares(Communicator& ranks, std::span<const NamedNumbers> own,
                  const std::filesystem::path& file, std::span<const StoredTensor> others);

/// Collective: the names of all ranks' parts.
[[nodiscard]] std::set<std::string> names_of_shares(Communicator& ranks,
                                                    std::span<const NamedNumbers> own);

}  // namespace switchyard::models
