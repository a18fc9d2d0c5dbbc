#pragma once

// The combine inside the second streaming kernel: each token's weighted rows, from the shared
// memory of the block that owns a range of H, by the fixed order of ReductionOrder. Bound by
// latency: it is the tail of the layer.

#include <cstdint>

#include "core/gpu/ptx.cuh"
#include "experts/gpu/streaming/args.hpp"
#include "experts/gpu/streaming/math.cuh"
#include "experts/gpu/streaming/ring.cuh"

namespace switchyard::streaming {

/// One assignment of a token, in the order of the sum.
struct Term {
  float weight;
  std::int32_t row;  // row | group << 24
};

__device__ __forceinline__ int group_of(const DownArgs& args, int expert) {
  int group = 0;
  while (args.first_group + group + 1 < args.order.groups &&
         args.first_expert + expert >= args.order.begin(args.first_group + group + 1)) {
    ++group;
  }
  return group;
}

/// Lists each token's terms in the order of its sum: needs the plan only. The consumer warps call
/// it before the first weights arrive.
template <typename Crew = UsualCrew>
__device__ __forceinline__ void list_terms(const DownArgs& args, const Hit* hits, int num_hits,
                                           unsigned char* row_group, std::int32_t* begins,
                                           Term* terms) {
  constexpr int kListers = 32 * Crew::kConsumers;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < num_hits; i += kListers) {
    const int group = group_of(args, hits[i].expert());
    for (int r = 0; r < hits[i].rows(); ++r) {
      row_group[hits[i].row + r] = static_cast<unsigned char>(group);
    }
  }
  for (int t = thread; t <= args.num_tokens; t += kListers) begins[t] = args.token_begin[t];
  ptx::named_barrier(1, kListers);
  const int count = begins[args.num_tokens];
  for (int i = thread; i < count; i += kListers) {
    const int row = args.token_row[i];
    terms[i] = {args.row_weight[row], row | row_group[row] << 24};
  }
}

__device__ __forceinline__ void store_sum(const DownArgs& args, std::int64_t at, float value) {
  if (args.sums_dtype == DType::kF32) {
    static_cast<float*>(args.sums)[at] = value;
  } else if (args.sums_dtype == DType::kBF16) {
    store_as(static_cast<__nv_bfloat16*>(args.sums) + at, value);
  } else {
    store_as(static_cast<__half*>(args.sums) + at, value);
  }
}

/// What add_up() reads: the rows of y of this block's range of H, and each token's terms.
template <typename T>
struct Rows {
  int first_row;
  int rows;
  const std::int32_t* begins;
  const Term* terms;
  const T* y;
  __device__ __forceinline__ float add(float sum, const Term& term, int row) const {
    return fmaf(term.weight, to_float(y[(term.row & 0xffffff) * rows + row]), sum);
  }
};

/// Few outputs: a lane for each group of each, then the tree of neighbours over the lanes. Groups
/// past the last are +0.
template <typename Crew, typename T>
__device__ __forceinline__ void add_up_by_group(const DownArgs& args, const Rows<T>& in,
                                                int width) {
  const int count = args.num_tokens * in.rows * width;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane & (width - 1);
  for (int first = static_cast<int>(threadIdx.x) - lane; first < count; first += Crew::kThreads) {
    const bool exists = first + lane < count;
    const int output = exists ? (first + lane) / width : 0;
    const int token = output / in.rows;
    const int row = output - token * in.rows;
    float sum = 0;
    const int end = in.begins[token + 1];
#pragma unroll 4
    for (int i = in.begins[token]; i < end; ++i) {
      const Term term = in.terms[i];
      if (term.row >> 24 == group) sum = in.add(sum, term, row);
    }
    for (int step = 1; step < width; step *= 2) sum += __shfl_xor_sync(~0U, sum, step);
    if (exists && group == 0) {
      store_sum(args, static_cast<std::int64_t>(token) * args.hidden + in.first_row + row, sum);
    }
  }
}

/// The same of one token, whose terms are those of all outputs: no division, and a lane adds up two
/// outputs at a time. `rows` <= 2 * Crew::kThreads / width.
template <typename Crew, typename T>
__device__ __forceinline__ void add_up_one_token(const DownArgs& args, const Rows<T>& in,
                                                 int width) {
  const int shift = 31 - __clz(width);
  const int stride = Crew::kThreads >> shift;
  const int row = static_cast<int>(threadIdx.x) >> shift;
  const int group = static_cast<int>(threadIdx.x) & (width - 1);
  if (row - static_cast<int>(threadIdx.x) % 32 / width >= in.rows) return;  // the whole warp
  const int here = min(row, in.rows - 1);
  const int next = min(row + stride, in.rows - 1);
  float sum = 0;
  float its = 0;
  const int end = in.begins[1];
#pragma unroll 8
  for (int i = in.begins[0]; i < end; ++i) {
    const Term term = in.terms[i];
    if (term.row >> 24 == group) {
      sum = in.add(sum, term, here);
      its = in.add(its, term, next);
    }
  }
  for (int step = 1; step < width; step *= 2) {
    sum += __shfl_xor_sync(~0U, sum, step);
    its += __shfl_xor_sync(~0U, its, step);
  }
  if (group != 0 || row >= in.rows) return;
  store_sum(args, in.first_row + row, sum);
  if (row + stride < in.rows) store_sum(args, in.first_row + row + stride, its);
}

/// The same tree over groups that come one by one, ascending: a binary counter of subtrees.
struct Tree {
  static constexpr int kLevels = 6;
  float subtree[kLevels];
  __device__ __forceinline__ void add(int group, float value) {
    bool carry = true;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      if (!carry) continue;
      carry = (group >> level & 1) != 0;
      value = carry ? subtree[level] + value : value;
      if (!carry) subtree[level] = value;
    }
  }
};

/// Many outputs, or each group's sum by itself: a thread for each output.
template <typename Crew, typename T>
__device__ __forceinline__ void add_up_by_output(const DownArgs& args, const Rows<T>& in,
                                                 int width) {
  for (int i = static_cast<int>(threadIdx.x); i < args.num_tokens * in.rows; i += Crew::kThreads) {
    const int token = i / in.rows;
    const int row = i - token * in.rows;
    int term = in.begins[token];
    const int end = in.begins[token + 1];
    Tree tree;
    for (int group = 0; group < width; ++group) {
      float sum = 0;
      while (term < end && in.terms[term].row >> 24 == group) {
        sum = in.add(sum, in.terms[term++], row);
      }
      if (!args.each_group) {
        tree.add(group, sum);
      } else if (group < args.num_groups) {
        const std::int64_t at = static_cast<std::int64_t>(token) * args.num_groups + group;
        store_sum(args, at * args.hidden + in.first_row + row, sum);
      }
    }
    if (args.each_group) continue;
    float total = 0;
#pragma unroll
    for (int level = 0; level < Tree::kLevels; ++level) {
      if (width >> level == 1) total = tree.subtree[level];
    }
    store_sum(args, static_cast<std::int64_t>(token) * args.hidden + in.first_row + row, total);
  }
}

template <typename Crew = UsualCrew, typename T>
__device__ __forceinline__ void add_up(const DownArgs& args, const Rows<T>& in) {
  int width = 1;
  while (width < args.num_groups) width *= 2;
  if (!args.each_group && args.num_tokens == 1 && in.rows * width <= 2 * Crew::kThreads) {
    add_up_one_token<Crew>(args, in, width);
  } else if (!args.each_group && args.num_tokens * in.rows * width <= 4 * Crew::kThreads) {
    add_up_by_group<Crew>(args, in, width);
  } else {
    add_up_by_output<Crew>(args, in, width);
  }
}

}  // namespace switchyard::streaming
