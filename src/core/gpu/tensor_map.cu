#include "core/gpu/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/gpu/cuda_check.hpp"

namespace switchyard {
namespace {

CUtensorMap make(const TensorMapArgs& args) { return make_tensor_map(args); }
CUtensorMap make(const StackMapArgs& args) { return make_stack_map(args); }
CUtensorMap make(const GatedMapArgs& args) { return make_gated_map(args); }

CUtensorMap make(const MatricesMapArgs& args) { return make_matrices_map(args); }

CUtensorMapDataType type_of(DType dtype) {
  return dtype == DType::kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

/// What all maps have alike: every element of a box, zeros beyond the ends.
template <int kDims>
CUresult encode(CUtensorMap& map, CUtensorMapDataType type, const void* data,
                const cuuint64_t (&extent)[kDims], const cuuint64_t (&stride)[kDims - 1],
                const cuuint32_t (&box)[kDims], CUtensorMapSwizzle swizzle) {
  cuuint32_t every_element[kDims];
  std::fill_n(every_element, kDims, 1U);
  return tensor_map_encoder()(&map, type, kDims, const_cast<void*>(data), extent, stride, box,
                              every_element, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

CUtensorMap make_any(const AnyMapArgs& args) {
  return std::visit([](const auto& kind) { return make(kind); }, args);
}

}  // namespace

decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    SWITCHYARD_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                     cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || found == nullptr) {
      fail(ErrorCode::kUnsupported, "the CUDA driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<Encode>(found);
  }();
  return function;
}

CUtensorMap make_tensor_map(const TensorMapArgs& args) {
  CUtensorMap map;
  const cuuint64_t extent[2] = {static_cast<cuuint64_t>(args.cols),
                                static_cast<cuuint64_t>(args.rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(args.cols * size_of(args.dtype))};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(args.box_cols),
                             static_cast<cuuint32_t>(args.box_rows)};
  const CUresult result =
      encode(map, type_of(args.dtype), args.data, extent, row_bytes, box,
             args.box_cols * size_of(args.dtype) == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                        : CU_TENSOR_MAP_SWIZZLE_64B);
  require(result == CUDA_SUCCESS,
          "the driver refuses a tensor map of {} x {} values at {} (error {})", args.rows,
          args.cols, args.data, static_cast<int>(result));
  return map;
}

CUtensorMap make_stack_map(const StackMapArgs& args) {
  // Elements of 8 bytes, whatever they mean: a box may have 256 along memory.
  CUtensorMap map;
  const cuuint64_t extent[3] = {static_cast<cuuint64_t>(args.row_bytes / 8),
                                static_cast<cuuint64_t>(args.rows),
                                static_cast<cuuint64_t>(args.matrices)};
  const cuuint64_t stride[2] = {static_cast<cuuint64_t>(args.row_bytes),
                                static_cast<cuuint64_t>(args.row_bytes * args.rows)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(args.box_bytes / 8),
                             static_cast<cuuint32_t>(args.box_rows),
                             static_cast<cuuint32_t>(args.box_matrices)};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_INT64, args.data, extent, stride, box,
                                 CU_TENSOR_MAP_SWIZZLE_NONE);
  require(result == CUDA_SUCCESS,
          "the driver refuses a tensor map of {} matrices of {} x {} bytes at {} (error {})",
          args.matrices, args.rows, args.row_bytes, args.data, static_cast<int>(result));
  return map;
}

CUtensorMap make_gated_map(const GatedMapArgs& args) {
  CUtensorMap map;
  const auto row_bytes = static_cast<cuuint64_t>(args.cols * size_of(args.dtype));
  const auto rows = static_cast<cuuint64_t>(args.rows);
  // Groups of eight rows up to the last expert's gate ones: up rows lie `rows` further.
  const cuuint64_t extent[4] = {static_cast<cuuint64_t>(args.cols), 8, 2,
                                static_cast<cuuint64_t>(2 * args.experts - 1) * (rows / 8)};
  const cuuint64_t stride[3] = {row_bytes, row_bytes * rows, row_bytes * 8};
  const cuuint32_t box[4] = {64, 8, 2, static_cast<cuuint32_t>(args.box_rows / 16)};
  const CUresult result =
      encode(map, type_of(args.dtype), args.data, extent, stride, box, CU_TENSOR_MAP_SWIZZLE_128B);
  require(result == CUDA_SUCCESS,
          "the driver refuses a tensor map of {} gated experts of {} x {} values at {} (error {})",
          args.experts, args.rows, args.cols, args.data, static_cast<int>(result));
  return map;
}

CUtensorMap make_matrices_map(const MatricesMapArgs& args) {
  CUtensorMap map;
  const auto row_bytes = static_cast<cuuint64_t>(args.cols * size_of(args.dtype));
  const cuuint64_t extent[3] = {static_cast<cuuint64_t>(args.cols),
                                static_cast<cuuint64_t>(args.rows),
                                static_cast<cuuint64_t>(args.matrices)};
  const cuuint64_t stride[2] = {row_bytes, row_bytes * static_cast<cuuint64_t>(args.rows)};
  const cuuint32_t box[3] = {64, 64, 1};
  const CUresult result =
      encode(map, type_of(args.dtype), args.data, extent, stride, box, CU_TENSOR_MAP_SWIZZLE_128B);
  require(result == CUDA_SUCCESS,
          "the driver refuses a tensor map of {} matrices of {} x {} values at {} (error {})",
          args.matrices, args.rows, args.cols, args.data, static_cast<int>(result));
  return map;
}

CUtensorMap TensorMaps::get(const AnyMapArgs& args) {
  const std::lock_guard lock(mutex_);
  const auto found = maps_.find(args);
  return found != maps_.end() ? found->second : maps_.emplace(args, make_any(args)).first->second;
}

CUtensorMap tensor_map_of(TensorMaps* owner, const AnyMapArgs& args) {
  return owner != nullptr ? owner->get(args) : make_any(args);
}

}  // namespace switchyard
