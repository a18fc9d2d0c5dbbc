#pragma once

// A few assignments compared with each other: what the kernel of such plans and the kernel of the
// experts that makes one itself share.

#include "plan/gpu/plan_kernel.cuh"

namespace switchyard::planning {

inline constexpr int kNoExpert = 0x7fffffff;  // sorts behind all others

/// Where assignment `i` of a few goes.
struct FewPlace {
  int row;     // in the plan
  int place;   // among the rows of its token
  int listed;  // rows of earlier tokens
  int all;     // rows of the plan
};

/// Compares assignment `i` with all `count` of `experts` [count], kNoExpert where there is none.
__device__ __forceinline__ FewPlace place_among(const int* experts, int i, int count, int top_k) {
  const int mine = experts[i];
  const int begin = i / top_k * top_k;
  FewPlace at{};
  for (int other = 0; other < count; ++other) {
    const int its = experts[other];
    const bool before = its < mine || (its == mine && other < i);
    const bool valid = its != kNoExpert;
    at.row += before ? 1 : 0;
    at.place += before && other >= begin && other < begin + top_k ? 1 : 0;
    at.listed += valid && other < begin ? 1 : 0;
    at.all += valid ? 1 : 0;
  }
  return at;
}

/// Writes what the plan says of assignment `i`.
__device__ __forceinline__ void store_few(const PlanParams& p, int i, const FewPlace& at,
                                          const Item& item) {
  const int token = i / p.top_k;
  if (i == token * p.top_k) p.token_begin[token] = at.listed;
  if (i == 0) p.token_begin[p.num_tokens] = at.all;
  if (item.expert < 0) return;
  p.row_token[at.row] = token;
  p.row_weight[at.row] = item.weight;
  p.token_row[at.listed + at.place] = at.row;
}

/// Rows of lower experts, and of this one.
struct FewRows {
  int before;
  int count;
};

__device__ __forceinline__ FewRows rows_among(const int* experts, int expert, int count) {
  FewRows rows{};
  for (int i = 0; i < count; ++i) {
    rows.before += experts[i] < expert ? 1 : 0;
    rows.count += experts[i] == expert ? 1 : 0;
  }
  return rows;
}

}  // namespace switchyard::planning
