#pragma once

// Kernels of the flat and the bucketed interface; in device_assignments_cuda.cu.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// A received assignment at its place, 0 to `places`: its one expert (-1: nothing came) and, in the
/// bits of its weight, token * K + k at its source.
struct ReceivedAssignments {
  const std::int32_t* expert;
  const float* position;
  std::int64_t places;
};

/// meta [places, 2] = position, expert; -1, -1 where nothing came.
void make_flat_meta(const ReceivedAssignments& received, std::int32_t* meta, cudaStream_t stream);

struct BucketParams {
  ReceivedAssignments received;
  ConstRawMatrix x;                 ///< [places, H].
  const std::int32_t* token_begin;  ///< Of the plan: the row of a place, if it has one.
  const std::int32_t* token_row;
  const std::int64_t* counts;  ///< [R, R] rows from s to d.
  std::int32_t rank, num_ranks, top_k;
  std::byte* rows;             ///< out [El * C, H].
  std::int32_t* meta;          ///< out [El * C, 5], -1 before.
  std::int32_t* row_of_place;  ///< out [places].
};
/// Puts every assignment into its row.
void fill_buckets(const BucketParams& params, cudaStream_t stream);

/// out[t] = sum over k of weight[t, k] * rows[t * K + k] in the order of k, in fp32, rounded once;
/// assignments to expert -1 are left out.
struct AddAssignmentsParams {
  ConstRawMatrix rows;         ///< [T * K, H].
  const std::int32_t* expert;  ///< [T, K].
  const float* weight;         ///< [T, K].
  std::int32_t top_k;
  RawMatrix out;  ///< [T, H].
};
void add_assignments(const AddAssignmentsParams& params, cudaStream_t stream);

}  // namespace switchyard
