// What a router said of its tokens, added up on a GPU in one launch (routing_sums.cuh): a block a
// multiprocessor, so that few sums meet in the L2 cache, whose lanes fetch a token's logits while
// they add up those of the one before. Bound by reading the logits, which the router has just
// written: from the L2 cache where they fit.
#include <algorithm>
#include <cmath>

#include "core/gpu/cuda_device.hpp"
#include "route/gpu/routing_sums.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kMaxExperts = 1024;

struct LossSumsParams {
  const float* logits;         // [T, E]
  const std::int32_t* expert;  // [T, K]
  SumsParams sums;
};

/// A token's row and the lane's choice of it.
template <typename Row>
struct Token {
  Row row;
  int id;

  /// @param logits, expert  Of the block's group; expert from the lane on.
  __device__ __forceinline__ void load(const SumsParams& p, int token, const float* logits,
                                       const std::int32_t* expert) {
    row.load(logits + product(token, p.num_experts), p.num_experts);
    id = Row::Lane::lane() < p.top_k ? expert[product(token, p.top_k)] : -1;
  }
};

template <int kValues, int kLanes>
__global__ void __launch_bounds__(BlockSums<TokenRow<kValues, kLanes>>::kThreads, 1)
    routing_sums_kernel(const __grid_constant__ LossSumsParams p) {
  using Row = TokenRow<kValues, kLanes>;
  using Block = BlockSums<Row>;
  __shared__ __align__(16) Block block;
  constexpr int kTokens = Block::kThreads / kLanes;  // at once
  const BlockTokens tokens(p.sums);
  const int last = tokens.end - 1;
  // Lanes without a token go along with the last one and add nothing.
  int own = tokens.begin + static_cast<int>(threadIdx.x) / kLanes;
  const float* const logits = in_one(p.logits + tokens.first * p.sums.num_experts);
  const std::int32_t* const expert =
      in_one(p.expert + tokens.first * p.sums.top_k + Row::Lane::lane());
  ptx::start_after_previous_kernel();
  Token<Row> next;
  if (tokens.begin < tokens.end) next.load(p.sums, min(own, last), logits, expert);
  block.clear();
  LaneSums<Row> sums;
  for (int begin = tokens.begin; begin < tokens.end; begin += kTokens, own += kTokens) {
    const Token<Row> token = next;
    if (begin + kTokens < tokens.end) {
      next.load(p.sums, min(own + kTokens, last), logits, expert);
    }
    const bool active = own <= last;
    sums.add(token.row, token.row.largest(), p.sums.sigmoids, active ? 1.0F : 0.0F);
    sums.add_choice(p.sums, active ? token.id : -1, block.counts, block.firsts, block.devices);
  }
  block.finish(p.sums, sums);
}

/// Blocks of a launch for so many groups, at most.
std::int64_t max_blocks(std::int64_t groups) { return num_multiprocessors() + groups; }

std::int64_t words_of(std::int64_t groups, std::int64_t num_experts, std::int64_t devices) {
  return groups * (3 * num_experts + devices);
}

std::optional<std::string> reject(const RoutingSumsArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  const auto* const dense = std::get_if<DenseAssignments>(&args.assignments);
  if (dense == nullptr) return "no lists";
  if (args.logits.shape[1] > kMaxExperts) return "num_experts exceeds 1024";
  if (!is_aligned_16(args.logits.data)) return "the logits are not aligned to 16 bytes";
  return reject_sums(args.sums, dense->expert.shape[1], args.execution);
}

void run(const RoutingSumsArgs& args) {
  const Matrix<const std::int32_t>& expert = std::get<DenseAssignments>(args.assignments).expert;
  const auto [num_tokens, num_experts] = args.logits.shape;
  const std::int64_t top_k = expert.shape[1];
  for_row_width(num_tokens, num_experts, top_k, [&]<int kValues, int kLanes>() {
    constexpr int kThreads = BlockSums<TokenRow<kValues, kLanes>>::kThreads;
    const LossSumsParams params{.logits = args.logits.data,
                                .expert = expert.data,
                                .sums = sums_params(args.sums, num_tokens, num_experts, top_k,
                                                    args.score, args.execution, kThreads / kLanes)};
    launch_overlapped(routing_sums_kernel<kValues, kLanes>, sums_blocks(params.sums, args.sums),
                      kThreads, 0, static_cast<cudaStream_t>(args.execution.stream), params);
  });
}

}  // namespace

std::optional<std::string> routing::reject_sums(const RoutingSums& sums, std::int64_t top_k,
                                                const Execution& execution) {
  const auto [groups, num_experts] = sums.counts.shape;
  const std::int64_t devices = sums.device_tokens.shape[1];
  if (top_k > kMaxSumsTopK) return "top_k exceeds 32";
  if (devices > kMaxSumsDevices) return "devices exceed 32";
  const std::int64_t want = routing_sums_workspace_bytes(groups, num_experts, devices);
  if (execution.workspace_bytes < want) {
    return fmt::format("the workspace has {} bytes, want {}", execution.workspace_bytes, want);
  }
  return std::nullopt;
}

SumsParams routing::sums_params(const RoutingSums& sums, std::int64_t num_tokens,
                                std::int64_t num_experts, std::int64_t top_k, Score score,
                                const Execution& execution, int tokens_at_once) {
  const std::int64_t groups = std::max<std::int64_t>(sums.counts.shape[0], 1);
  const std::int64_t devices = std::max<std::int64_t>(sums.device_tokens.shape[1], 1);
  const std::int64_t per_group = num_tokens / groups;
  // As many as run at once, none without tokens for each lane.
  const std::int64_t wanted = (max_blocks(groups) - 1) / groups;
  const std::int64_t most =
      std::max<std::int64_t>((per_group + tokens_at_once - 1) / tokens_at_once, 1);
  const std::int64_t blocks = std::min({wanted, most, std::int64_t{MeetingWord::kMostBlocks}});
  auto* const words = static_cast<Word*>(execution.workspace);
  constexpr int kScoreBits = 30;
  const int token_bits = std::bit_width(static_cast<std::uint64_t>(per_group));
  return {
      .counts = sums.counts.data,
      .first_choices = sums.first_choices.data,
      .device_tokens = sums.device_tokens.data,
      .scores = sums.scores.data,
      .token_sums = sums.tokens.data,
      .words = words,
      .of_blocks = words + words_of(groups, num_experts, devices),
      .status = execution.status,
      .num_experts = static_cast<std::int32_t>(num_experts),
      .top_k = static_cast<std::int32_t>(top_k),
      .devices = static_cast<std::int32_t>(devices),
      .per_group = static_cast<std::int32_t>(per_group),
      .blocks_per_group = static_cast<std::int32_t>(blocks),
      .per_block = static_cast<std::int32_t>((per_group + blocks - 1) / blocks),
      .score_units = std::ldexp(1.0, std::min(kScoreBits, MeetingWord::kSumBits - 1 - token_bits)),
      .sigmoids = score == Score::kSigmoid};
}

std::int64_t routing_sums_workspace_bytes(std::int64_t groups, std::int64_t num_experts,
                                          std::int64_t devices) {
  return 8 * (words_of(groups, num_experts, devices) + kTokenSums * max_blocks(groups));
}

const Implementation<RoutingSumsArgs> kRoutingSumsCuda{"cuda.warp", reject, run};

}  // namespace switchyard
