// The router product's way back on Hopper: when it runs, and its launches. See backward_sm90.cuh.
#include "route/gemm/backward_sm90.cuh"

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/tensor_map.hpp"
#include "core/shape_check.hpp"
#include "route/gemm/backward_parts.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace router_backward;

// Multiprocessors that parts of T are made for: not the device's, for how T is cut decides bits.
constexpr std::int64_t kBlocksAtOnce = 132;
constexpr std::int64_t kFewestTokensOfPart = 256;
constexpr std::int64_t kMostParts = 64;
constexpr int kMostGateBoxRows = 6;  // of 32 KB each: they leave room for a ring of four boxes
constexpr int kMostShared = 232448;

/// As few parts as bring the tiles' waves within 5% of the best; never fewer for more tokens.
std::int64_t most_parts(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t hidden) {
  const bool narrow = num_experts <= sm90::kBox;
  const std::int64_t tiles = blocks_of(num_experts, 128) * blocks_of(hidden, narrow ? 512 : 256);
  const std::int64_t most =
      std::clamp<std::int64_t>(num_tokens / kFewestTokensOfPart, 1, kMostParts);
  const auto time = [&](std::int64_t parts) {
    return static_cast<double>(blocks_of(tiles * parts, kBlocksAtOnce)) /
           static_cast<double>(parts);
  };
  double best = time(1);
  for (std::int64_t parts = 2; parts <= most; ++parts) best = std::min(best, time(parts));
  std::int64_t count = 1;
  while (time(count) > 1.05 * best) ++count;
  return count;
}

Parts parts_for(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t hidden) {
  const std::int64_t count = most_parts(num_tokens, num_experts, hidden);
  const std::int64_t tokens = blocks_of(blocks_of(num_tokens, count), sm90::kBox) * sm90::kBox;
  return {.count = blocks_of(num_tokens, tokens), .tokens = tokens};
}

/// Pieces of the workspace, each from a multiple of 128 bytes on.
struct Workspace {
  std::int64_t gate_terms, parts, bias_parts, end;

  Workspace(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t hidden) {
    const auto after = [](std::int64_t begin, std::int64_t bytes) {
      return blocks_of(begin + bytes, 128) * 128;
    };
    const std::int64_t count = most_parts(num_tokens, num_experts, hidden);
    gate_terms = after(0, 2 * kLogitTerms * num_tokens * padded(num_experts));
    parts = after(gate_terms, 2 * kLogitTerms * num_experts * hidden);
    bias_parts = after(parts, 4 * count * num_experts * hidden);
    end = after(bias_parts, 4 * count * num_experts);
  }
  static std::int64_t padded(std::int64_t num_experts) { return blocks_of(num_experts, 8) * 8; }
};

std::int64_t gate_box_rows(const RouterGemmBackwardArgs& args) {
  return blocks_of(args.gate.rows, sm90::kBox) * (args.gate.dtype == DType::kF32 ? 3 : 1);
}

bool is_hopper() { return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9; }

std::optional<std::string> reject(const RouterGemmBackwardArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.tokens.dtype != DType::kBF16) return "takes tokens in bf16";
  const bool reads_gate = args.dtokens.data != nullptr;
  if (reads_gate && args.gate.dtype == DType::kF16) return "takes gates in bf16 and f32";
  if (args.tokens.rows == 0) return "no tokens";
  if (args.tokens.cols % 8 != 0) return "hidden size is not a multiple of 8";
  if (!is_aligned_16(args.tokens.data) || !is_aligned_16(args.gate.data) ||
      !is_aligned_16(args.dtokens.data)) {
    return "tokens, gate or dtokens are not aligned to 16 bytes";
  }
  if (args.tokens.rows > std::int64_t{1} << 24) return "more than 2^24 tokens";
  if (reads_gate && gate_box_rows(args) > kMostGateBoxRows) {
    return "more experts than shared memory has room for";
  }
  if (!is_hopper()) return "needs sm_90";
  return std::nullopt;
}

void split(ConstRawMatrix from, std::byte* to, std::int64_t padded, cudaStream_t stream) {
  const sm90::SplitParams params{.from = from.data,
                                 .to = to,
                                 .size = from.rows * padded / 8,
                                 .plane_bytes = 2 * from.rows * padded,
                                 .cols = static_cast<std::int32_t>(from.cols),
                                 .padded = static_cast<std::int32_t>(padded),
                                 .vector_rows = from.cols % 4 == 0 && is_aligned_16(from.data)};
  const auto blocks = static_cast<unsigned>(blocks_of(params.size, router_backward::kThreads));
  sm90::split_kernel<float><<<blocks, router_backward::kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

CUtensorMap planes(const void* data, std::int64_t count, std::int64_t rows, std::int64_t cols) {
  return make_matrices_map({.data = data, .matrices = count, .rows = rows, .cols = cols});
}

void make_dtokens(const RouterGemmBackwardArgs& args, const CUtensorMap& terms,
                  std::byte* gate_terms, cudaStream_t stream) {
  const std::int64_t experts = args.gate.rows;
  const std::int64_t hidden = args.gate.cols;
  const bool is_split = args.gate.dtype == DType::kF32;
  if (is_split) split(args.gate, gate_terms, hidden, stream);
  const CUtensorMap gate =
      planes(is_split ? gate_terms : args.gate.data, is_split ? kLogitTerms : 1, experts, hidden);
  const auto gate_bytes = static_cast<int>(gate_box_rows(args) * 4 * sm90::kBoxBytes);
  constexpr int kForBarriers = 512;
  const int slots = std::min(8, (kMostShared - kForBarriers - gate_bytes) / (2 * sm90::kBoxBytes));
  const sm90::TokenParams params{
      .out = args.dtokens.data,
      .num_tokens = args.tokens.rows,
      .hidden = static_cast<std::int32_t>(hidden),
      .chunks = static_cast<std::int32_t>(blocks_of(experts, sm90::kBox)),
      .token_tiles = static_cast<std::int32_t>(blocks_of(args.tokens.rows, sm90::kBox)),
      .column_tiles = static_cast<std::int32_t>(blocks_of(hidden, sm90::kWide)),
      .slots = static_cast<std::uint32_t>(slots)};
  const auto kernel = is_split ? sm90::token_kernel<kLogitTerms> : sm90::token_kernel<1>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  const std::int64_t tiles = std::int64_t{params.token_tiles} * params.column_tiles;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(tiles, num_multiprocessors()));
  kernel<<<blocks, sm90::kThreads,
           static_cast<std::size_t>(gate_bytes + 2 * slots * sm90::kBoxBytes + kForBarriers),
           stream>>>(terms, gate, params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

template <typename Tile>
void launch_gate(const RouterGemmBackwardArgs& args, const CUtensorMap& terms, float* sums,
                 const Parts& parts, cudaStream_t stream) {
  const CUtensorMap tokens = make_tensor_map({.data = args.tokens.data,
                                              .dtype = args.tokens.dtype,
                                              .rows = args.tokens.rows,
                                              .cols = args.tokens.cols,
                                              .box_rows = sm90::kBox});
  const sm90::GateParams params{.parts = sums,
                                .num_tokens = args.tokens.rows,
                                .num_experts = static_cast<std::int32_t>(args.gate.rows),
                                .hidden = static_cast<std::int32_t>(args.gate.cols),
                                .part_tokens = static_cast<std::int32_t>(parts.tokens)};
  const auto kernel = sm90::gate_kernel<Tile>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  const dim3 grid(static_cast<unsigned>(blocks_of(args.gate.cols, Tile::kColumns)),
                  static_cast<unsigned>(blocks_of(args.gate.rows, Tile::kExperts)),
                  static_cast<unsigned>(parts.count));
  kernel<<<grid, sm90::kThreads, Tile::kSharedBytes, stream>>>(terms, tokens, params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void run(const RouterGemmBackwardArgs& args) {
  const std::int64_t num_tokens = args.tokens.rows;
  const std::int64_t experts = args.gate.rows;
  const std::int64_t hidden = args.gate.cols;
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const Parts parts = parts_for(num_tokens, experts, hidden);
  const Workspace at(num_tokens, experts, hidden);
  require(args.execution.workspace != nullptr && at.end <= args.execution.workspace_bytes,
          "router_gemm_backward needs {} bytes of workspace, has {}", at.end,
          args.execution.workspace_bytes);
  auto* const workspace = static_cast<std::byte*>(args.execution.workspace);
  if (args.dtokens.data != nullptr || args.dgate.data != nullptr) {
    const std::int64_t padded = Workspace::padded(experts);
    split({reinterpret_cast<const std::byte*>(args.dlogits.data), DType::kF32, num_tokens, experts},
          workspace, padded, stream);
    const CUtensorMap terms = planes(workspace, kLogitTerms, num_tokens, padded);
    if (args.dtokens.data != nullptr) {
      make_dtokens(args, terms, workspace + at.gate_terms, stream);
    }
    if (args.dgate.data != nullptr) {
      auto* const sums = reinterpret_cast<float*>(workspace + at.parts);
      if (experts <= sm90::kBox) {
        launch_gate<sm90::GateTile<64>>(args, terms, sums, parts, stream);
      } else {
        launch_gate<sm90::GateTile<128>>(args, terms, sums, parts, stream);
      }
      add_gate_parts(args, sums, parts.count);
    }
  }
  if (args.dbias.data != nullptr) {
    make_bias_gradient(args, reinterpret_cast<float*>(workspace + at.bias_parts), parts);
  }
}

}  // namespace

std::int64_t router_backward::sm90_workspace_bytes(std::int64_t max_tokens,
                                                   std::int64_t num_experts, std::int64_t hidden) {
  if (max_tokens == 0 || !is_hopper()) return 0;
  return Workspace(max_tokens, num_experts, hidden).end;
}

const Implementation<RouterGemmBackwardArgs> kRouterGemmBackwardSm90{"cuda.sm90", reject, run};

}  // namespace switchyard
