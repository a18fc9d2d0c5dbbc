// Router logits on a CPU: fp32 fused multiply-adds, each output's sum in ascending h, whatever the
// number of tokens, threads or the vector length.
//
// Bound by the multiply-adds for many tokens and by reading the gate for one. The vector runs over
// 32 experts: a tile of the gate [32, kDepth] is transposed into the first cache level, then all
// tokens of the task pass over it. Sums wait in `logits` between tiles. Tasks are (32 experts,
// block of tokens).
#include <algorithm>
#include <cmath>

#include "core/cpu/multi_isa.hpp"
#include "core/row_ops.hpp"
#include "route/implementations.hpp"
#include "switchyard/thread_pool.hpp"

#ifdef SWITCHYARD_X86
#include <immintrin.h>
#endif

namespace switchyard {
namespace {

constexpr std::int64_t kExperts = 32;
constexpr std::int64_t kDepth = 128;
constexpr std::int64_t kTokens = 4;  // that share each loaded piece of the gate
constexpr std::int64_t kTokensPerTask = 128;

/// sums[t][e] += x[t][h] * gate[h][e] over h in [0, depth), ascending.
using TileKernel = void (*)(const float* x, const float* gate, std::int64_t depth, float* sums);

void tile_portable(const float* x, const float* gate, std::int64_t depth, float* sums) {
  for (std::int64_t h = 0; h < depth; ++h) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const float factor = x[t * kDepth + h];
      for (std::int64_t e = 0; e < kExperts; ++e) {
        float& sum = sums[t * kExperts + e];
        sum = std::fma(factor, gate[h * kExperts + e], sum);
      }
    }
  }
}

#ifdef SWITCHYARD_X86
/// Two tokens by four vectors of 8 experts: eight independent chains hide the latency of the fma.
SWITCHYARD_TARGET("avx2,fma")
void tile_avx2(const float* x, const float* gate, std::int64_t depth, float* sums) {
  for (std::int64_t t = 0; t < kTokens; t += 2) {
    float* out = sums + t * kExperts;
    const float* in = x + t * kDepth;
    __m256 a0 = _mm256_loadu_ps(out), a1 = _mm256_loadu_ps(out + 8);
    __m256 a2 = _mm256_loadu_ps(out + 16), a3 = _mm256_loadu_ps(out + 24);
    __m256 b0 = _mm256_loadu_ps(out + 32), b1 = _mm256_loadu_ps(out + 40);
    __m256 b2 = _mm256_loadu_ps(out + 48), b3 = _mm256_loadu_ps(out + 56);
    for (std::int64_t h = 0; h < depth; ++h) {
      const __m256 a = _mm256_broadcast_ss(in + h);
      const __m256 b = _mm256_broadcast_ss(in + kDepth + h);
      const float* row = gate + h * kExperts;
      __m256 g = _mm256_load_ps(row);
      a0 = _mm256_fmadd_ps(a, g, a0);
      b0 = _mm256_fmadd_ps(b, g, b0);
      g = _mm256_load_ps(row + 8);
      a1 = _mm256_fmadd_ps(a, g, a1);
      b1 = _mm256_fmadd_ps(b, g, b1);
      g = _mm256_load_ps(row + 16);
      a2 = _mm256_fmadd_ps(a, g, a2);
      b2 = _mm256_fmadd_ps(b, g, b2);
      g = _mm256_load_ps(row + 24);
      a3 = _mm256_fmadd_ps(a, g, a3);
      b3 = _mm256_fmadd_ps(b, g, b3);
    }
    _mm256_storeu_ps(out, a0), _mm256_storeu_ps(out + 8, a1);
    _mm256_storeu_ps(out + 16, a2), _mm256_storeu_ps(out + 24, a3);
    _mm256_storeu_ps(out + 32, b0), _mm256_storeu_ps(out + 40, b1);
    _mm256_storeu_ps(out + 48, b2), _mm256_storeu_ps(out + 56, b3);
  }
}

/// Four tokens by two vectors of 16 experts.
SWITCHYARD_TARGET("avx512f")
void tile_avx512(const float* x, const float* gate, std::int64_t depth, float* sums) {
  __m512 low[kTokens], high[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    low[t] = _mm512_loadu_ps(sums + t * kExperts);
    high[t] = _mm512_loadu_ps(sums + t * kExperts + 16);
  }
  for (std::int64_t h = 0; h < depth; ++h) {
    const __m512 g0 = _mm512_load_ps(gate + h * kExperts);
    const __m512 g1 = _mm512_load_ps(gate + h * kExperts + 16);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      const __m512 factor = _mm512_set1_ps(x[t * kDepth + h]);
      low[t] = _mm512_fmadd_ps(factor, g0, low[t]);
      high[t] = _mm512_fmadd_ps(factor, g1, high[t]);
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    _mm512_storeu_ps(sums + t * kExperts, low[t]);
    _mm512_storeu_ps(sums + t * kExperts + 16, high[t]);
  }
}
#endif

TileKernel tile_kernel() {
#ifdef SWITCHYARD_X86
  if (has_avx512()) return tile_avx512;
  if (has_avx2()) return tile_avx2;
#endif
  return tile_portable;
}

/// tile[h][e] = float(gate[first + e][begin + h]); experts beyond the last are 0.
void transpose_gate(ConstRawMatrix gate, std::int64_t first, std::int64_t begin, std::int64_t depth,
                    float* tile) {
  const std::int64_t count = std::min(kExperts, gate.rows - first);
  if (count < kExperts) std::fill_n(tile, depth * kExperts, 0.0F);
  float widened[kDepth];
  for (std::int64_t e = 0; e < count; ++e) {
    const std::byte* stored = gate.row(first + e) + begin * size_of(gate.dtype);
    const auto* row = reinterpret_cast<const float*>(stored);
    if (gate.dtype != DType::kF32) {
      row_ops::widen(gate.dtype, stored, widened, depth);
      row = widened;
    }
    for (std::int64_t h = 0; h < depth; ++h) tile[h * kExperts + e] = row[h];
  }
}

struct Block {
  std::int64_t first_expert;
  std::int64_t first_token;
};

void run_block(const RouterGemmArgs& args, Block block, TileKernel kernel) {
  alignas(64) float tile[kDepth * kExperts];
  alignas(64) float x[kTokens * kDepth] = {};
  alignas(64) float sums[kTokens * kExperts] = {};
  const std::int64_t hidden = args.tokens.cols;
  const std::int64_t count = std::min(kExperts, args.gate.rows - block.first_expert);
  const std::int64_t end = std::min(args.tokens.rows, block.first_token + kTokensPerTask);
  for (std::int64_t t = block.first_token; t < end; ++t) {
    std::fill_n(args.logits.row(t) + block.first_expert, count, 0.0F);
  }
  for (std::int64_t begin = 0; begin < hidden; begin += kDepth) {
    const std::int64_t depth = std::min(kDepth, hidden - begin);
    transpose_gate(args.gate, block.first_expert, begin, depth, tile);
    for (std::int64_t t = block.first_token; t < end; t += kTokens) {
      const std::int64_t tokens = std::min(kTokens, end - t);
      for (std::int64_t i = 0; i < tokens; ++i) {
        const std::byte* row = args.tokens.row(t + i) + begin * size_of(args.tokens.dtype);
        row_ops::widen(args.tokens.dtype, row, x + i * kDepth, depth);
        std::copy_n(args.logits.row(t + i) + block.first_expert, count, sums + i * kExperts);
      }
      kernel(x, tile, depth, sums);
      for (std::int64_t i = 0; i < tokens; ++i) {
        std::copy_n(sums + i * kExperts, count, args.logits.row(t + i) + block.first_expert);
      }
    }
  }
  if (args.bias.data == nullptr) return;
  for (std::int64_t t = block.first_token; t < end; ++t) {
    float* row = args.logits.row(t) + block.first_expert;
    for (std::int64_t e = 0; e < count; ++e) row[e] += args.bias[block.first_expert + e];
  }
}

std::optional<std::string> reject(const RouterGemmArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run(const RouterGemmArgs& args) {
  const std::int64_t expert_blocks = (args.gate.rows + kExperts - 1) / kExperts;
  const std::int64_t token_blocks = (args.tokens.rows + kTokensPerTask - 1) / kTokensPerTask;
  const TileKernel kernel = tile_kernel();
  parallel_for(args.execution.pool, expert_blocks * token_blocks, [&](std::int64_t task, int) {
    run_block(args,
              {.first_expert = task % expert_blocks * kExperts,
               .first_token = task / expert_blocks * kTokensPerTask},
              kernel);
  });
}

}  // namespace

const Implementation<RouterGemmArgs> kRouterGemmCpu{"cpu.fma", reject, run};

}  // namespace switchyard
