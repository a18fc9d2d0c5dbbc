#pragma once

// Sums over the tokens of what a router said of them, in one launch: lanes keep those of their
// experts in registers over all their tokens, a block joins its warps', and blocks' sums meet in
// words of the workspace.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>

#include "route/gpu/token_row.cuh"
#include "switchyard/routing/losses.hpp"

namespace switchyard::routing {

constexpr int kMaxSumsTopK = 32;
constexpr int kMaxSumsDevices = 32;

using Word = unsigned long long;

/// Whole numbers of blocks that come together in any order with one sum: it lies in the low bits,
/// and above it how many blocks have added theirs. Who adds the last sees the whole sum and leaves
/// zero, so nobody waits, and no block comes behind all others.
struct MeetingWord {
  static constexpr int kSumBits = 54;
  static constexpr unsigned kMostBlocks = (1U << (64 - kSumBits)) - 1;
  static constexpr Word kSum = (Word{1} << kSumBits) - 1;

  /// @returns whether that was the last of `blocks`; then `value` is the sum of all.
  static __device__ __forceinline__ bool add(Word* word, Word& value, unsigned blocks) {
    const Word before = atomicAdd(word, Word{1} << kSumBits | (value & kSum));
    if ((before >> kSumBits) + 1 != blocks) return false;
    value = (value + before) & kSum;
    *word = 0;
    return true;
  }
};

/// Where the sums go, and the memory that blocks share.
struct SumsParams {
  std::int64_t* counts;         // out [S, E]
  std::int64_t* first_choices;  // out [S, E]
  std::int64_t* device_tokens;  // out [S, D]
  double* scores;               // out [S, E]
  double* token_sums;           // out [kTokenSums]
  Word* words;  // [S, 3 E + D] MeetingWords: scores, counts, first choices, devices; zero between
                // calls
  Word* of_blocks;       // [blocks, kTokenSums] bits of doubles, inverted; 0: not there yet
  DeviceStatus* status;  // or null
  std::int32_t num_experts, top_k, devices;
  std::int32_t per_group, blocks_per_group, per_block;  // tokens
  double score_units;                                   // scores are whole numbers of one over this
  bool sigmoids;
};

/// A multiprocessor's threads, as far as their registers go.
constexpr int sums_warps(int values) { return values <= 8 ? 32 : values <= 16 ? 16 : 8; }

/// Of a lane's tokens so far: its experts', in its group of lanes.
template <typename Row>
struct LaneSums {
  using Lane = typename Row::Lane;
  static constexpr int kValues = Row::kPlaces;

  float scores[kValues] = {};
  float squares = 0;    ///< The same in all lanes of a token.
  float entropies = 0;  ///< Likewise.
  unsigned device_tokens = 0;

  /// exp(x), and what it adds to `dot`.
  static __device__ __forceinline__ float power(float x, float& dot) {
    const float exponent = fmaxf(1.44269504F * x, -1000.0F);
    const float value = ptx::exp2_approx(exponent);
    dot = fmaf(value, exponent, dot);
    return value;
  }

  /// @param largest  Of the row.
  /// @param counts  1, or 0 for a token that is there for company.
  /// @returns the sum of exp(x - largest).
  __device__ __forceinline__ float add(const Row& row, float largest, bool sigmoids, float counts) {
    constexpr float kLn2 = 0.693147181F;
    float p[kValues];
    float sum = 0.0F;
    float dot = 0.0F;  // of exponentials and their exponents to base 2
    if (__any_sync(kAll, isinf(largest))) {
      sum = row.sum_of(p, [&](float x) { return power(x == largest ? 0.0F : x - largest, dot); });
      dot = Lane::sum(dot);
    } else {
      // Where there is no expert nothing is added, and no branch taken.
#pragma unroll
      for (int v = 0; v < kValues; ++v) sum += p[v] = power(row.x[v] - largest, dot);
      Lane::sum_both(sum, dot);
    }
    const float log_sum = __logf(sum);
    const float lse = largest + log_sum;
    squares += counts * (lse * lse);
    float reciprocal = __fdividef(counts, sum);
    float entropy = counts * log_sum - kLn2 * dot * reciprocal;
    // Where all sigmoids underflow they are exponentials, as for the weights.
    const bool by_sigmoid = sigmoids && sigmoid(largest) >= kSmallestNormal;
    if (sigmoids) {
      float s[kValues];
      const float inverse = 1.0F / row.sum_of(s, [](float x) { return sigmoid(x); });
      float surprise = 0.0F;
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        const float share = s[v] * inverse;
        if (share > 0.0F) surprise -= share * logf(share);
      }
      surprise = counts * Lane::sum(surprise);
      if (by_sigmoid) {
        reciprocal = counts * inverse;
        entropy = surprise;
#pragma unroll
        for (int v = 0; v < kValues; ++v) p[v] = s[v];
      }
    }
    entropies += entropy;
#pragma unroll
    for (int v = 0; v < kValues; ++v) scores[v] += p[v] * reciprocal;
    return sum;
  }

  /// @param id  Of the lane's choice, -1: none.
  __device__ __forceinline__ void add_choice(const SumsParams& p, int id, unsigned* counts,
                                             unsigned* firsts, unsigned* devices) {
    const bool used = id >= 0 && id < p.num_experts;
    if (!used && id != -1 && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
    if (used) {
      atomicAdd(counts + id, 1U);
      if (Lane::lane() == 0) atomicAdd(firsts + id, 1U);
    }
    const int device = p.devices == 1 || !used ? 0 : id / (p.num_experts / p.devices);
    if (p.devices == 1) {
      device_tokens += Lane::any(used) ? 1U : 0U;
      return;
    }
    unsigned sent = used ? 1U << device : 0U;
#pragma unroll
    for (int offset = 1; offset < Row::kLaneCount; offset *= 2) {
      sent |= __shfl_xor_sync(kAll, sent, offset);
    }
    for (int d = Lane::lane(); d < p.devices; d += Row::kLaneCount) {
      if ((sent >> d & 1U) != 0) atomicAdd(devices + d, 1U);
    }
  }

  /// Adds what the warp's groups of lanes have; what is of tokens, in the lanes of one each.
  __device__ __forceinline__ void join() {
#pragma unroll
    for (int offset = Row::kLaneCount; offset < 32; offset *= 2) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) scores[v] += __shfl_xor_sync(kAll, scores[v], offset);
      squares += __shfl_xor_sync(kAll, squares, offset);
      entropies += __shfl_xor_sync(kAll, entropies, offset);
      device_tokens += __shfl_xor_sync(kAll, device_tokens, offset);
    }
  }
};

/// A block's sums in shared memory, and how they meet those of others.
template <typename Row>
struct BlockSums {
  static constexpr int kWarps = sums_warps(Row::kPlaces);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRow = Row::kPlaces * Row::kLaneCount;

  float scores[kWarps][kRow];
  unsigned counts[kRow], firsts[kRow], devices[kMaxSumsDevices];
  float of_warps[kTokenSums][kWarps];

  /// Before the first choice is counted; a barrier.
  __device__ __forceinline__ void clear() {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int e = thread; e < kRow; e += kThreads) counts[e] = firsts[e] = 0;
    if (thread < kMaxSumsDevices) devices[thread] = 0;
    __syncthreads();
  }

  /// By all threads, behind the last token.
  __device__ __forceinline__ void finish(const SumsParams& p, LaneSums<Row>& sums) {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    sums.join();
    if (thread % 32 < Row::kLaneCount) {
#pragma unroll
      for (int v = 0; v < Row::kPlaces; ++v) scores[warp][Row::expert(v)] = sums.scores[v];
    }
    if (thread % 32 == 0) {
      of_warps[0][warp] = sums.squares, of_warps[1][warp] = sums.entropies;
      if (sums.device_tokens != 0) atomicAdd(devices, sums.device_tokens);
    }
    __syncthreads();
    // The last warps have what is of tokens, one each, while the first have the experts.
    const int quantity = kWarps - 1 - warp;
    if (quantity < kTokenSums) publish(p, quantity);
    meet(p);
    if (quantity < kTokenSums && blockIdx.x + 1 == gridDim.x) collect(p, quantity);
  }

 private:
  static __device__ __forceinline__ double sum_over_lanes(double x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
    return x;
  }

  __device__ __forceinline__ void publish(const SumsParams& p, int quantity) const {
    const int lane = Lanes<32>::lane();
    double sum = lane < kWarps ? static_cast<double>(of_warps[quantity][lane]) : 0.0;
    sum = sum_over_lanes(sum);
    if (lane != 0) return;
    if (isnan(sum)) sum = nan("");  // one of those whose bits are not all 1
    ptx::store_relaxed(p.of_blocks + std::int64_t{blockIdx.x} * kTokenSums + quantity,
                       ~static_cast<Word>(__double_as_longlong(sum)));
  }

  __device__ __forceinline__ void meet(const SumsParams& p) const {
    const int group = static_cast<int>(blockIdx.x) / p.blocks_per_group;
    Word* const words = p.words + std::int64_t{group} * (3 * p.num_experts + p.devices);
    const auto blocks = static_cast<unsigned>(p.blocks_per_group);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < 3 * kRow + kMaxSumsDevices; i += kThreads) {
      const int kind = i / kRow;
      const int at = i % kRow;
      if (at >= (kind == 3 ? p.devices : p.num_experts)) continue;
      Word value = kind == 1 ? counts[at] : kind == 2 ? firsts[at] : devices[at % kMaxSumsDevices];
      if (kind == 0) {
        float sum = 0.0F;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += scores[w][at];
        // Of NaNs nothing: they must not be taken for blocks.
        value = sum >= 0.0F ? static_cast<Word>(__double2ll_rn(sum * p.score_units)) : 0;
      }
      if (!MeetingWord::add(words + kind * p.num_experts + at, value, blocks)) continue;
      const std::int64_t out = std::int64_t{group} * p.num_experts + at;
      if (kind == 0) {
        p.scores[out] = static_cast<double>(value) / p.score_units;
      } else if (kind == 3) {
        p.device_tokens[std::int64_t{group} * p.devices + at] = static_cast<std::int64_t>(value);
      } else {
        (kind == 1 ? p.counts : p.first_choices)[out] = static_cast<std::int64_t>(value);
      }
    }
  }

  /// By one warp of the launch, which waits for all blocks; none waits for it. In one order.
  static __device__ __forceinline__ void collect(const SumsParams& p, int quantity) {
    constexpr int kAtOnce = 5;
    const int blocks = static_cast<int>(gridDim.x);
    double sum = 0;
    for (int first = Lanes<32>::lane(); first < blocks; first += 32 * kAtOnce) {
      Word bits[kAtOnce];
      bool all;
      do {
        all = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int block = min(first + 32 * i, blocks - 1);
          bits[i] = ptx::load_relaxed(p.of_blocks + std::int64_t{block} * kTokenSums + quantity);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) all = all && bits[i] != 0;
      } while (!all);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + 32 * i < blocks) sum += __longlong_as_double(static_cast<long long>(~bits[i]));
      }
    }
    sum = sum_over_lanes(sum);  // so all lanes have read
    for (int block = Lanes<32>::lane(); block < blocks; block += 32) {
      p.of_blocks[std::int64_t{block} * kTokenSums + quantity] = 0;
    }
    if (Lanes<32>::lane() == 0) p.token_sums[quantity] = sum;
  }
};

/// The block's tokens [begin, end) of its group, whose first one is `first`. Within a group places
/// are counted in 32 bits: products with them are one instruction.
struct BlockTokens {
  std::int64_t first;
  int begin, end;

  __device__ __forceinline__ explicit BlockTokens(const SumsParams& p) {
    const int group = static_cast<int>(blockIdx.x) / p.blocks_per_group;
    const int part = static_cast<int>(blockIdx.x) % p.blocks_per_group;
    first = std::int64_t{group} * p.per_group;
    begin = part * p.per_block;
    end = min(begin + p.per_block, p.per_group);
  }
};

/// Why sums of so many experts and choices cannot be made on a GPU, or nothing.
[[nodiscard]] std::optional<std::string> reject_sums(const RoutingSums& sums, std::int64_t top_k,
                                                     const Execution& execution);

/// @param sums  Empty: none are made, of all tokens in one group.
/// @param tokens_at_once  Of a block. Sets how many blocks there are, too.
[[nodiscard]] SumsParams sums_params(const RoutingSums& sums, std::int64_t num_tokens,
                                     std::int64_t num_experts, std::int64_t top_k, Score score,
                                     const Execution& execution, int tokens_at_once);

[[nodiscard]] inline unsigned sums_blocks(const SumsParams& params, const RoutingSums& sums) {
  const std::int64_t groups = std::max<std::int64_t>(sums.counts.shape[0], 1);
  return static_cast<unsigned>(groups * params.blocks_per_group);
}

}  // namespace switchyard::routing
