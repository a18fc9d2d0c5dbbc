#pragma once

// Files that a command writes: they can be written, and none of them is a file that it reads.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace switchyard::tool {

/// What stands on the command line: the option and the file that it names.
struct NamedFile {
  std::string option;
  std::filesystem::path path;
};

/// How a file is written.
enum class Writing : std::uint8_t {
  kWhole,   ///< Replaced by a rename, so only a regular file can be.
  kAppend,  ///< Lines are added; a device takes them too.
};

/// Before any work is done. An output whose path is empty was not asked for.
/// @throws UsageError: there is no such directory, it cannot be written to, or what is there is a
///         directory, a pipe, or a device that is not appended to.
void check_output_place(const NamedFile& output, Writing writing = Writing::kWhole);

/// No output is an input, or another output, by whatever name: the same file by device and number
/// (links of both kinds), or what would become it (other ways to one directory).
/// @throws UsageError that names both.
void check_outputs_apart(const std::vector<NamedFile>& outputs,
                         const std::vector<NamedFile>& inputs);

}  // namespace switchyard::tool
