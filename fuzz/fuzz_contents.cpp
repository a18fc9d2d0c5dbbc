// Tensors of the right shapes with any contents: blocks and scales of MXFP4, fp8 with its scales,
// weights of four bits as they are packed, plain halves. Whatever they hold, rows that are read
// some at a time are those read all at once, or what is no number is a bad file.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "checkpoint/models.hpp"
#include "fuzz/scratch_folder.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/error.hpp"

using switchyard::Checkpoint;
using switchyard::DType;
using switchyard::ExpertConfig;
using switchyard::ExpertPart;
using switchyard::ExpertSource;
using switchyard::LayerModel;
using switchyard::WeightPacking;

namespace {

struct Made {
  const char* family;
  DType dtype;
  WeightPacking packing = WeightPacking::kPlain;
  std::string path{};
  std::string bytes{};  ///< Of model.safetensors.
};

std::vector<Made>& checkpoints() {
  static std::vector<Made> made{{"gpt-oss", DType::kBF16},
                                {"deepseek-v3", DType::kF8E4M3},
                                {"mixtral", DType::kF16},
                                {"qwen3-moe", DType::kBF16, WeightPacking::kGptq},
                                {"qwen2-moe", DType::kF16, WeightPacking::kAwq},
                                {"olmoe", DType::kBF16, WeightPacking::kPackQuantized},
                                {"dots1", DType::kBF16, WeightPacking::kModelOpt}};
  return made;
}

void read_parts(const ExpertSource& source, const ExpertConfig& config, DType dtype) {
  const auto size = static_cast<std::size_t>(size_of(dtype));
  for (std::int32_t e = 0; e < config.num_experts; ++e) {
    for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
      const bool down = part == ExpertPart::kDown;
      const std::int64_t rows = down ? config.hidden : config.inner;
      const std::int64_t cols = down ? config.inner : config.hidden;
      const std::size_t row_bytes = static_cast<std::size_t>(cols) * size;
      std::vector<std::byte> all(static_cast<std::size_t>(rows) * row_bytes);
      source.read(e, part, 0, rows, dtype, all.data());
      const std::int64_t first = rows / 3;
      std::vector<std::byte> some(static_cast<std::size_t>(rows - first) * row_bytes);
      source.read(e, part, first, rows - first, dtype, some.data());
      if (std::memcmp(some.data(), all.data() + static_cast<std::size_t>(first) * row_bytes,
                      some.size()) != 0) {
        std::abort();
      }
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  for (Made& made : checkpoints()) {
    made.path = switchyard::fuzz::scratch_folder() / made.family;
    switchyard::LayerSizes sizes{.hidden = 64, .inner = 32, .num_experts = 2, .top_k = 1};
    auto recipe = switchyard::family_recipe(made.family, sizes);
    recipe.vocabulary = 2;
    recipe.dtype = made.dtype;
    recipe.packing = made.packing;
    make_checkpoint(recipe, made.path);
    std::FILE* file = std::fopen((made.path + "/model.safetensors").c_str(), "rb");
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) {
      made.bytes += static_cast<char>(c);
    }
    std::fclose(file);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const Made& made = checkpoints()[data[0] % checkpoints().size()];
  std::string bytes = made.bytes;
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof(header));
  // The input again and again, so that it reaches every tensor.
  for (std::size_t i = 8 + header; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(data[(i - 8 - header) % size]);
  }
  const std::string name = std::string(made.family) + "/model.safetensors";
  switchyard::fuzz::write_scratch(name.c_str(), reinterpret_cast<const std::uint8_t*>(bytes.data()),
                                  bytes.size());
  const Checkpoint checkpoint(made.path);
  try {
    const LayerModel model = checkpoint.layer(checkpoint.moe_layers().front());
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      read_parts(*model.experts, model.config.experts, dtype);
    }
  } catch (const switchyard::Error& error) {
    if (error.code() != switchyard::ErrorCode::kBadFile) throw;
  }
  return 0;
}
