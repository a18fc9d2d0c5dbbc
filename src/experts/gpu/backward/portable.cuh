#pragma once

// Host side of one type's kernels.

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/backward/rows.cuh"
#include "experts/gpu/backward/weights.cuh"

namespace switchyard {
namespace backward {

/// As many CTAs as there is room for at once.
template <typename Left, typename T, typename Args>
void launch(void (*kernel)(Args), const Args& args, cudaStream_t stream) {
  constexpr int kBytes = shared_bytes<T, Left>();
  const auto* const function = reinterpret_cast<const void*>(kernel);
  allow_most_shared_memory(function);
  const auto blocks = static_cast<unsigned>(num_multiprocessors() * (Tiles<T>::kIsF32 ? 1 : 2));
  kernel<<<blocks, kThreads, kBytes, stream>>>(args);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace backward

template <typename T>
void PortableBackward<T>::down(const DownGradient& args, cudaStream_t stream) {
  backward::launch<backward::DeepLoader<T>, T>(backward::rows_gradient<T, DownGradient>, args,
                                               stream);
}

template <typename T>
void PortableBackward<T>::rows(const RowsGradient& args, cudaStream_t stream) {
  backward::launch<backward::DeepLoader<T>, T>(backward::rows_gradient<T, RowsGradient>, args,
                                               stream);
}

template <typename T>
void PortableBackward<T>::weights(const WeightGradient& args, cudaStream_t stream) {
  backward::launch<backward::FlatLoader<T>, T>(backward::weight_gradient<T>, args, stream);
  add_parts(args, stream);
}

template <typename T>
void PortableBackward<T>::add_parts(const WeightGradient& args, cudaStream_t stream) {
  const RaggedProblem problem{args.rows.max_rows, args.left.cols, args.right.cols};
  if (max_split_parts(problem) == 0) return;
  const auto blocks = static_cast<unsigned>(num_multiprocessors() * 4);
  backward::add_parts<T><<<blocks, backward::kThreads, 0, stream>>>(args);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard
