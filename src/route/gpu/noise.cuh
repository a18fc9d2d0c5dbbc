#pragma once

// Normal numbers of routers in kernels.

#include "core/gpu/ptx.cuh"
#include "route/draws.hpp"
#include "route/normal.hpp"

namespace switchyard::routing {

static __constant__ NormalTables kTables = make_normal_tables();
static __constant__ NormalCoefficients kCoefficients{};

/// Copies the tables to shared memory, where lanes read what they like; by all threads of a block,
/// who then need a barrier.
__device__ __forceinline__ void load_tables(NormalTables& tables) {
  constexpr int kWords = sizeof(NormalTables) / sizeof(double);
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < kWords; i += blockDim.x) {
    reinterpret_cast<double*>(&tables)[i] = reinterpret_cast<const double*>(&kTables)[i];
  }
}

__device__ __forceinline__ float4 normals_of(const PhiloxWords& words, const NormalTables& tables) {
  const NormalPair low = normal_pair_of(words.word[0], words.word[1], tables, kCoefficients);
  const NormalPair high = normal_pair_of(words.word[2], words.word[3], tables, kCoefficients);
  return make_float4(low.first, low.second, high.first, high.second);
}

/// log(1 + exp(x)), also where exp(x) is too large: log(1 + e) = 2 atanh(e / (2 + e)).
__device__ __forceinline__ float softplus(float x) {
  const float e = expf(-fabsf(x));
  const float s = __fdividef(e, 2.0F + e);  // at most 1/3
  const float square = s * s;
  float sum = fmaf(square, 1.0F / 13, 1.0F / 11);
  sum = fmaf(sum, square, 1.0F / 9);
  sum = fmaf(sum, square, 1.0F / 7);
  sum = fmaf(sum, square, 1.0F / 5);
  sum = fmaf(sum, square, 1.0F / 3);
  sum = fmaf(sum, square, 1.0F);
  return fmaf(2.0F * s, sum, fmaxf(x, 0.0F));
}

}  // namespace switchyard::routing
