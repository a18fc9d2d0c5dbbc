#pragma once

// The safetensors format: 8 bytes of header length (little endian), a JSON header that gives each
// tensor's dtype, shape and offsets, then the tensors' bytes without a gap.
// Source: the format's description in its public repository, huggingface/safetensors.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/files/mapped_file.hpp"
#include "checkpoint/files/stored_type.hpp"
#include "core/atomic_file.hpp"

namespace switchyard {

/// As the format's own reader has it: a longer header is an attack or a mistake.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// What a header says of a tensor.
struct TensorSpec {
  std::string name;
  StoredType type = StoredType::kU8;
  std::vector<std::int64_t> shape;

  /// Only for shapes that are known not to overflow.
  [[nodiscard]] std::int64_t num_bytes() const { return *num_elements(shape) * size_of(type); }
};

/// A tensor and its bytes, row-major, owned by somebody else. They may lie at any address: read
/// them by memcpy, or check the alignment first.
struct StoredTensor {
  TensorSpec spec;
  std::span<const std::byte> bytes;
};

/// Read a whole file's bytes; the tensors point into them, in the order of their offsets.
/// @throws Error{kBadFile}: what is wrong, and the tensor's name.
[[nodiscard]] std::vector<StoredTensor> parse_safetensors(std::span<const std::byte> bytes,
                                                          const std::string& file);

/// A mapped safetensors file.
class SafetensorsFile {
 public:
  /// @throws Error{kBadFile}, {kIo}.
  explicit SafetensorsFile(const std::filesystem::path& path);

  [[nodiscard]] const std::string& name() const { return file_->name(); }
  [[nodiscard]] const std::vector<StoredTensor>& tensors() const { return tensors_; }
  /// Null if there is none of that name.
  [[nodiscard]] const StoredTensor* find(std::string_view tensor) const;
  /// Keeps the tensors' bytes alive.
  [[nodiscard]] std::shared_ptr<const MappedFile> mapping() const { return file_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string_view, std::size_t> index_;
};

/// Writes a file piece by piece, so that tensors larger than memory can be made.
class SafetensorsWriter {
 public:
  /// @param file  To be committed by the caller after finish().
  /// @throws Error{kInvalidArgument}: two tensors of one name, or more than a header may list;
  /// {kIo}.
  SafetensorsWriter(AtomicFile& file, std::span<const TensorSpec> tensors);

  /// The order in which the tensors' bytes must come, as indices into what was given: larger
  /// elements first, so that every tensor starts at a multiple of its element's size.
  [[nodiscard]] const std::vector<std::size_t>& order() const { return order_; }
  /// @throws Error{kInvalidArgument}: more bytes than announced; {kIo}.
  void append(std::span<const std::byte> bytes);
  /// All bytes are on the disk.
  /// @throws Error{kInvalidArgument}: fewer bytes were appended than announced; {kIo}.
  void finish();

 private:
  std::vector<std::size_t> order_;
  AtomicFile& file_;
  std::int64_t missing_ = 0;  ///< Bytes.
};

/// Write tensors that are all in memory.
void write_safetensors(const std::filesystem::path& path, std::span<const StoredTensor> tensors);

}  // namespace switchyard
