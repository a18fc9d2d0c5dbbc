#pragma once

// Kernels of the flat and the bucketed interface; in device_assignments_cuda.cu.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "switchyard/device.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// What a dispatch keeps of its input for the way home, and -1 in the meta of buckets to come. By a
/// kernel: copies of several ranks share queues, where one that waits for its rank's exchange would
/// keep another rank's from what the exchange waits for.
struct KeepParams {
  const std::int32_t* expert;  ///< [T, K].
  const float* weight;         ///< [T, K].
  std::int64_t count;          ///< T * K.
  std::int32_t* kept_expert;   ///< out.
  float* kept_weight;          ///< out.
  std::int32_t* meta;          ///< out [meta_size], or null.
  std::int64_t meta_size;
};
void keep_input(const KeepParams& params, cudaStream_t stream);

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
  const DeviceStatus* status;
  DeviceStatus* found;  ///< out: status, in pinned memory.
};
/// Puts every assignment into its row, and tells the host of those that had none.
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
