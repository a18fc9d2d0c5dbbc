#pragma once

// Host side of one type's kernels on Hopper.

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/tensor_map.hpp"
#include "experts/gpu/backward/sm90/rows.cuh"
#include "experts/gpu/backward/sm90/weights.cuh"

namespace switchyard {
namespace backward::sm90 {

template <Roles kRoles, typename Args>
void launch(void (*kernel)(CUtensorMap, Args), const CUtensorMap& map, const Args& args,
            cudaStream_t stream) {
  const auto* const function = reinterpret_cast<const void*>(kernel);
  allow_most_shared_memory(function);
  const auto blocks = static_cast<unsigned>(num_multiprocessors()) / 2 * 2;
  kernel<<<blocks, kRoles.threads(), kSharedBytes, stream>>>(map, args);
  SWITCHYARD_CUDA(cudaGetLastError());
}

template <typename T, typename Args>
void launch_rows(const CUtensorMap& map, const Args& args, cudaStream_t stream) {
  constexpr Roles kRoles = kRowsRoles<Args>;
  launch<kRoles>(rows_gradient<T, Args>, map, args, stream);
}

}  // namespace backward::sm90

template <typename T>
void HopperBackward<T>::down(const DownGradient& args, cudaStream_t stream) {
  const CUtensorMap map =
      tensor_map_of(args.weight_maps, MatricesMapArgs{.data = args.w2,
                                                      .dtype = args.dtype,
                                                      .matrices = args.rows.num_experts,
                                                      .rows = args.hidden,
                                                      .cols = args.inner_cols});
  backward::sm90::launch_rows<T>(map, args, stream);
}

template <typename T>
void HopperBackward<T>::rows(const RowsGradient& args, cudaStream_t stream) {
  const CUtensorMap map =
      tensor_map_of(args.weight_maps, MatricesMapArgs{.data = args.weights,
                                                      .dtype = args.dtype,
                                                      .matrices = args.rows.num_experts,
                                                      .rows = args.depth,
                                                      .cols = args.cols});
  backward::sm90::launch_rows<T>(map, args, stream);
}

template <typename T>
void HopperBackward<T>::weights(const WeightGradient& args, cudaStream_t stream) {
  const bool gather_left = args.left.token != nullptr;
  const GradientOperand& in_turn = gather_left ? args.right : args.left;
  // Without rows there is no memory to make a map of, and none is looked at.
  CUtensorMap map{};
  if (args.rows.max_rows > 0) {
    map = make_tensor_map({.data = in_turn.rows,
                           .dtype = args.dtype,
                           .rows = args.rows.max_rows,
                           .cols = in_turn.cols,
                           .box_rows = 64});
  }
  using backward::sm90::weight_gradient;
  backward::sm90::launch<backward::sm90::kWeightRoles>(
      gather_left ? weight_gradient<T, false> : weight_gradient<T, true>, map, args, stream);
  PortableBackward<T>::add_parts(args, stream);
}

}  // namespace switchyard
