#include "checkpoint/files/matrix_file.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/npy.hpp"
#include "checkpoint/files/safetensors.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

constexpr std::string_view kNpy = ".npy";
constexpr std::string_view kSafetensors = ".safetensors";

/// What both formats boil down to.
struct Found {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
  std::shared_ptr<const MappedFile> mapping;
};

std::string names_of(const SafetensorsFile& file) {
  constexpr std::size_t kMost = 8;
  std::string names;
  for (std::size_t i = 0; i < std::min(kMost, file.tensors().size()); ++i) {
    names += (i == 0 ? "" : ", ") + file.tensors()[i].spec.name;
  }
  if (file.tensors().size() > kMost) names += ", ...";
  return names.empty() ? "none" : names;
}

Found find_tensor(const std::string& path, std::string_view name) {
  const SafetensorsFile file(path);
  const StoredTensor* tensor = file.find(name);
  if (name.empty()) {
    require_file(file.tensors().size() == 1, path, "has {} tensors; say which by FILE:TENSOR ({})",
                 file.tensors().size(), names_of(file));
    tensor = &file.tensors().front();
  }
  require_file(tensor != nullptr, path, "has no tensor '{}'; it has {}", name, names_of(file));
  const auto dtype = dtype_of(tensor->spec.type);
  require_file(dtype.has_value() && is_float(tensor->spec.type), path,
               "tensor '{}' is {}; F32, BF16 and F16 are read", tensor->spec.name,
               to_string(tensor->spec.type));
  return {*dtype, tensor->spec.shape, tensor->bytes, file.mapping()};
}

Found find_array(const std::string& path) {
  auto file = MappedFile::open(path);
  NpyArray array = parse_npy(file->bytes(), path);
  require_file(array.dtype == DType::kF32 || array.dtype == DType::kF16, path,
               "is {}; f32 and f16 are read from .npy", to_string(array.dtype));
  return {array.dtype, std::move(array.shape), array.bytes, std::move(file)};
}

Found find(std::string_view spec) {
  if (spec.ends_with(kSafetensors)) return find_tensor(std::string(spec), {});
  if (const std::string path = matrix_path(spec); path.size() < spec.size()) {
    const std::string_view tensor = spec.substr(path.size() + 1);
    require(!tensor.empty(), "'{}' names no tensor after the ':'", spec);
    return find_tensor(path, tensor);
  }
  require(spec.find(".npy:") == std::string_view::npos,
          "'{}': a .npy file has one array, without a name", spec);
  require(spec.ends_with(kNpy), "'{}' ends neither in .npy nor in .safetensors", spec);
  return find_array(std::string(spec));
}

template <typename T, std::size_t kRank>
StoredTensor stored(const char* name, StoredType type, TensorView<const T, kRank> view) {
  return {{name, type, {view.shape.begin(), view.shape.end()}},
          std::as_bytes(std::span(view.data, static_cast<std::size_t>(view.size())))};
}

/// The [T, K] tensor of that name, copied out (its bytes may lie unaligned).
template <typename T>
std::vector<T> read_choices(const SafetensorsFile& file, const char* name, StoredType type,
                            std::vector<std::int64_t>& shape) {
  const StoredTensor* tensor = file.find(name);
  require_file(tensor != nullptr, file.name(), "has no tensor '{}'; a routing needs it", name);
  require_file(tensor->spec.type == type && tensor->spec.shape.size() == 2, file.name(),
               "tensor '{}' is {} {}, a routing has {} [T, K]", name, to_string(tensor->spec.type),
               shape_text(tensor->spec.shape), to_string(type));
  require_file(shape.empty() || shape == tensor->spec.shape, file.name(),
               "tensors 'expert' {} and '{}' {} differ in shape", shape_text(shape), name,
               shape_text(tensor->spec.shape));
  shape = tensor->spec.shape;
  std::vector<T> values(tensor->bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
  return values;
}

}  // namespace

std::string matrix_path(std::string_view spec) {
  const std::string separator = std::string(kSafetensors) + ":";
  const std::size_t at = spec.rfind(separator);
  return std::string(at == std::string_view::npos ? spec
                                                  : spec.substr(0, at + kSafetensors.size()));
}

MatrixFile MatrixFile::read(std::string_view spec) {
  Found found = find(spec);
  require_file(found.shape.size() == 2, std::string(spec), "has shape {}; a matrix is needed",
               shape_text(found.shape));
  MatrixFile matrix;
  matrix.view_ = {found.bytes.data(), found.dtype, found.shape[0], found.shape[1]};
  const auto address = reinterpret_cast<std::uintptr_t>(found.bytes.data());
  if (address % static_cast<std::uintptr_t>(size_of(found.dtype)) == 0) {
    matrix.storage_ = std::move(found.mapping);
  } else {
    auto copy = std::make_shared<std::vector<std::byte>>(found.bytes.begin(), found.bytes.end());
    matrix.view_.data = copy->data();
    matrix.storage_ = std::move(copy);
  }
  return matrix;
}

void check_matrix_path(const std::filesystem::path& path, DType dtype) {
  const std::string name = path.string();
  if (name.ends_with(kSafetensors)) return;
  require(name.ends_with(kNpy), "'{}' ends neither in .npy nor in .safetensors", name);
  require(dtype == DType::kF32 || dtype == DType::kF16,
          "{}: .npy has no {}; write .safetensors, or another dtype", name, to_string(dtype));
}

void write_matrix(const std::filesystem::path& path, ConstRawMatrix matrix,
                  std::string_view tensor) {
  check_matrix_path(path, matrix.dtype);
  const std::span<const std::byte> bytes(matrix.data, static_cast<std::size_t>(matrix.bytes()));
  const std::vector<std::int64_t> shape = {matrix.rows, matrix.cols};
  if (path.string().ends_with(kNpy)) {
    write_npy(path, matrix.dtype, shape, bytes);
  } else {
    const StoredTensor stored_matrix = {{std::string(tensor), stored_type(matrix.dtype), shape},
                                        bytes};
    write_safetensors(path, {&stored_matrix, 1});
  }
}

RoutingInput read_routing(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  std::vector<std::int64_t> shape;
  RoutingInput routing;
  routing.expert = read_choices<std::int32_t>(file, "expert", StoredType::kI32, shape);
  routing.weight = read_choices<float>(file, "weight", StoredType::kF32, shape);
  routing.num_tokens = shape[0];
  routing.top_k = shape[1];
  const auto bad = std::find_if(routing.expert.begin(), routing.expert.end(),
                                [](std::int32_t expert) { return expert < -1; });
  require_file(bad == routing.expert.end(), file.name(),
               "expert id {} of token {}: -1 and ids of experts are allowed",
               bad == routing.expert.end() ? 0 : *bad,
               (bad - routing.expert.begin()) / std::max<std::int64_t>(routing.top_k, 1));
  return routing;
}

void write_routing(const std::filesystem::path& path, const RoutingOutput& routing) {
  require(path.string().ends_with(kSafetensors), "'{}' does not end in .safetensors",
          path.string());
  const std::vector<StoredTensor> tensors = {
      stored("expert", StoredType::kI32, routing.expert),
      stored("weight", StoredType::kF32, routing.weight),
      stored("kept", StoredType::kU8, routing.kept),
      stored("counts", StoredType::kI64, routing.counts),
      stored("counts_kept", StoredType::kI64, routing.counts_kept),
      stored("expert_begin", StoredType::kI64, routing.expert_begin),
      stored("row_token", StoredType::kI32, routing.row_token),
      stored("row_weight", StoredType::kF32, routing.row_weight),
  };
  write_safetensors(path, tensors);
}

}  // namespace switchyard
