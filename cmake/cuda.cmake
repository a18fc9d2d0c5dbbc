# The CUDA backend, part of the library. Kernels that use Hopper's own instructions are built for
# sm_90a; portable ones for sm_80 too, with PTX for later chips.
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
target_compile_definitions(switchyard PRIVATE SWITCHYARD_WITH_CUDA=1)
# Not the driver library: its functions are asked of the runtime, so the library loads without a GPU.
target_link_libraries(switchyard PRIVATE CUDA::cudart_static)

# switchyard_cuda_sources(<sm90a|sm90a_streaming|portable> files...): add kernels to the library; those
# of sm90a_streaming have no wgmma.
function(switchyard_cuda_sources kind)
  set(name switchyard_cuda_${kind})
  if(NOT TARGET ${name})
    switchyard_add_kernels(${name} ${kind})
    target_link_libraries(switchyard PRIVATE $<BUILD_INTERFACE:$<TARGET_OBJECTS:${name}>>)
    add_dependencies(switchyard ${name})
  endif()
  target_sources(${name} PRIVATE ${ARGN})
endfunction()

# switchyard_add_kernels(name <sm90a|sm90a_streaming|portable>): objects of kernels, still without files.
function(switchyard_add_kernels name kind)
  add_library(${name} OBJECT)
  target_include_directories(${name} PRIVATE src include)
  # fmt 9 takes nvcc for a compiler without constexpr, and then its checks of formats do not build.
  target_compile_definitions(${name} PRIVATE SWITCHYARD_WITH_CUDA=1 NDEBUG FMT_USE_CONSTEXPR=1)
  target_link_libraries(${name} PRIVATE fmt::fmt CUDA::cudart_static)
  switchyard_compile_options(${name})
  if(kind MATCHES "^sm90a")
    set(architectures 90a-real)
    set_property(TARGET ${name} PROPERTY
      RULE_LAUNCH_COMPILE "${PROJECT_SOURCE_DIR}/cmake/reject_serialized_wgmma.sh")
  else()
    set(architectures 80-real 90-real 80-virtual)
  endif()
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}"
    POSITION_INDEPENDENT_CODE ON)
endfunction()

# In the order that data flows through them.
switchyard_cuda_sources(portable
  src/core/gpu/tensor_map.cu
  src/core/gpu/stacks.cu
  src/route/gemm/few_tokens.cu
  src/route/gemm/gpu.cu
  src/route/gemm/backward.cu
  src/route/gemm/backward_parts.cu
  src/route/gpu/route.cu
  src/route/gpu/backward.cu
  src/route/gpu/backward_losses.cu
  src/route/gpu/loss_sums.cu
  src/route/gpu/route_at_once.cu
  src/route/gpu/losses.cu
  src/route/gpu/groups.cu
  src/route/gpu/reroute.cu
  src/route/gpu/placed.cu
  src/route/gpu/noise.cu
  src/route/gpu/variable_rules.cu
  src/route/gpu/token_rules.cu
  src/route/gpu/expert_choice.cu
  src/route/gpu/rules_backward.cu
  src/plan/gpu/capacity.cu
  src/plan/gpu/list.cu
  src/plan/gpu/plan.cu
  src/plan/gpu/few.cu
  src/plan/gpu/tiles.cu
  src/plan/gpu/pack.cu
  src/experts/gpu/grouped/gemm.cu
  src/experts/gpu/grouped/sm80/gated.cu
  src/experts/gpu/grouped/sm80/plain.cu
  src/experts/gpu/grouped/sm80/down.cu
  src/experts/gpu/grouped/sm80/gated_kept.cu
  src/experts/gpu/grouped/sm80/plain_kept.cu
  src/experts/gpu/grouped/f32/gemm.cu
  src/experts/gpu/grouped/f32/kept.cu
  src/experts/gpu/backward/portable_bf16.cu
  src/experts/gpu/backward/portable_f16.cu
  src/experts/gpu/backward/portable_f32.cu
  src/experts/gpu/backward/sums.cu
  src/experts/gpu/coded/expand.cu
  src/experts/gpu/streaming/portable_bf16.cu
  src/experts/gpu/streaming/portable_f16.cu
  src/experts/gpu/streaming/portable_f32.cu
  src/combine/gpu/combine.cu
  src/combine/gpu/bulk.cu
  src/combine/gpu/bulk_many.cu
  src/combine/gpu/any.cu
  src/combine/gpu/finish.cu
  src/layer/gpu/wire_rows.cu
  src/layer/gpu/expert_tokens.cu
  src/layer/gpu/zero_computation/forward.cu
  src/layer/gpu/zero_computation/backward.cu
  src/layer/gpu/kernels.cu
  src/layer/gpu/chain_sums.cu
  src/layer/gpu/router/network_kernels.cu
  src/layer/gpu/backward/expert_tokens.cu
  src/layer/gpu/backward/kernels.cu
  src/perft/gpu/kernels.cu
  src/mixing/gpu/softmaxes.cu
  src/mixing/gpu/gradients.cu
  src/mixing/gpu/rows.cu
  src/comm/device/throughput/dispatch.cu
  src/comm/device/low_latency/dispatch.cu
  src/comm/device/throughput/combine_push.cu
  src/comm/device/throughput/combine_pull.cu
  src/comm/device/low_latency/combine.cu
  src/comm/device/gradients/weights_home.cu
  src/comm/device/gradients/rank_sums.cu
  src/comm/nccl/pairs/kernels.cu
  src/interfaces/device_assignments.cu
)
target_sources(switchyard PRIVATE
  src/core/gpu/device_wide.cpp
  src/core/gpu/dense/cublaslt.cpp
  src/core/gpu/dense/products.cpp
  src/experts/gpu/in_place.cpp
  src/layer/gpu/stage_workspace.cpp
  src/experts/gpu/load.cpp
  src/experts/gpu/coded/expanded.cpp
  src/experts/gpu/coded/pack.cpp
  src/experts/gpu/streaming/shape.cpp
  src/experts/gpu/streaming/launch.cpp
  src/experts/gpu/experts_streaming.cpp
  src/experts/gpu/experts_coded.cpp
  src/experts/gpu/experts_fp8.cpp
  src/experts/gpu/experts_grouped.cpp
  src/experts/gpu/backward/experts_backward.cpp
  src/layer/gpu/router/memory.cpp
  src/layer/gpu/router/router.cpp
  src/layer/gpu/router/network.cpp
  src/layer/gpu/router/residual.cpp
  src/layer/gpu/shared_experts.cpp
  src/layer/gpu/shared_gpu.cpp
  src/layer/gpu/exchange.cpp
  src/layer/gpu/experts.cpp
  src/layer/gpu/stage_calls.cpp
  src/layer/gpu/stages.cpp
  src/layer/gpu/backward/arguments.cpp
  src/layer/gpu/backward/backward.cpp
  src/layer/gpu/backward/exchange_layer.cpp
  src/layer/gpu/backward/gradient_exchange.cpp
  src/layer/gpu/backward/token_gradients.cpp
  src/layer/gpu/local_layer.cpp
  src/layer/gpu/exchange_layer.cpp
  src/layer/gpu/layer.cpp
  src/perft/gpu/adapters.cpp
  src/mixing/gpu/forward.cpp
  src/mixing/gpu/backward.cpp
)
switchyard_cuda_sources(sm90a
  src/route/gemm/sm90.cu
  src/route/gemm/backward_sm90.cu
  src/experts/gpu/grouped/sm90/gated.cu
  src/experts/gpu/grouped/sm90/gated_ping_pong.cu
  src/experts/gpu/grouped/sm90/plain.cu
  src/experts/gpu/grouped/sm90/down.cu
  src/experts/gpu/backward/sm90/bf16.cu
  src/experts/gpu/backward/sm90/f16.cu
  src/experts/gpu/grouped/sm90/gated_kept.cu
  src/experts/gpu/grouped/sm90/plain_kept.cu
  src/experts/gpu/grouped/coded/order.cu
  src/experts/gpu/grouped/coded/split.cu
  src/experts/gpu/grouped/coded/product.cu
  src/experts/gpu/grouped/fp8/product.cu
  src/experts/gpu/grouped/f32/sm90.cu
  src/experts/gpu/grouped/f32/sm90_kept.cu
)
switchyard_cuda_sources(sm90a_streaming
  src/experts/gpu/streaming/hopper_bf16.cu
  src/experts/gpu/streaming/hopper_f16.cu
  src/experts/gpu/streaming/hopper_f32.cu
  src/experts/gpu/streaming/hopper_mxfp4.cu
  src/experts/gpu/streaming/hopper_e4m3.cu
)
target_sources(switchyard PRIVATE
  src/comm/device/windows/sharing.cpp
  src/comm/device/setup.cpp
  src/comm/device/windows/windows.cpp
  src/comm/nccl/pairs/watch.cpp
  src/comm/nccl/pairs/transfer.cpp
  src/comm/device/expert_parallel_state.cpp
  src/comm/device/expert_parallel.cpp
  src/comm/device/device_exchange.cpp
  src/interfaces/device_native.cpp
  src/interfaces/device_assignments.cpp
)

# Language models: kernels of their own, and dense products by cuBLASLt, whose library is opened when
# it is first needed (src/core/gpu/dense/cublaslt.cpp).
switchyard_add_kernels(switchyard_models_cuda portable)
target_sources(switchyard_models_cuda PRIVATE
  src/models/gpu/embedding.cu
  src/models/gpu/rms_norm.cu
  src/models/gpu/rope.cu
  src/models/gpu/attention.cu
  src/models/gpu/attention_bf16.cu
  src/models/gpu/attention_backward_bf16.cu
  src/models/gpu/cross_entropy.cu
  src/models/gpu/optimizer.cu
  src/models/gpu/generation/row_products.cu
  src/models/gpu/generation/attend.cu
  src/models/gpu/generation/norm_route.cu
  src/models/gpu/generation/rows.cu
  src/models/gpu/generation/batch/sum_norm.cu
  src/models/gpu/generation/batch/products.cu
  src/models/gpu/generation/batch/experts.cu
  src/models/gpu/generation/batch/whole_experts.cu
  src/models/gpu/generation/persistent/step_bf16.cu
  src/models/gpu/generation/persistent/step_f32.cu
)
switchyard_add_kernels(switchyard_models_sm90a sm90a)
target_sources(switchyard_models_sm90a PRIVATE
  src/models/gpu/sm90/attention.cu
  src/models/gpu/sm90/attention_backward.cu
)
target_sources(switchyard_models PRIVATE
  src/models/gpu/device_parameters.cpp
  src/models/gpu/step_sums.cpp
  src/models/gpu/block.cpp
  src/models/gpu/model.cpp
  src/models/gpu/calls.cpp
  src/models/gpu/steps.cpp
  src/models/gpu/generation/one_kernel.cpp
  src/models/gpu/generation/batch_step.cpp
  src/models/gpu/generation/persistent/step.cpp
  src/models/gpu/generation/token_step.cpp
  src/models/gpu/generation/cache.cpp
  $<TARGET_OBJECTS:switchyard_models_cuda>
  $<TARGET_OBJECTS:switchyard_models_sm90a>
)
target_compile_definitions(switchyard_models PRIVATE SWITCHYARD_WITH_CUDA=1)
target_link_libraries(switchyard_models PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS})

# NCCL: its headers only. The library is opened when it is first needed (src/comm/nccl/library.cpp).
# CUDA's images have the headers among CUDA's or the system's, Python environments in a package.
if(SWITCHYARD_WITH_NCCL)
  find_program(SWITCHYARD_PYTHON NAMES python3)
  get_filename_component(python_home "${SWITCHYARD_PYTHON}" DIRECTORY)
  file(GLOB nccl_packages "${python_home}/../lib/python3*/site-packages/nvidia/nccl/include")
  find_path(SWITCHYARD_NCCL_INCLUDE nccl_device.h
    HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${nccl_packages})
endif()
if(SWITCHYARD_WITH_NCCL AND SWITCHYARD_NCCL_INCLUDE)
  set(nccl_sources src/comm/nccl/library.cpp src/comm/nccl/rank.cpp src/comm/nccl/windows/windows.cpp
    src/comm/nccl/pairs/pairs.cpp)
  target_sources(switchyard PRIVATE ${nccl_sources})
  target_include_directories(switchyard SYSTEM PRIVATE ${SWITCHYARD_NCCL_INCLUDE})
  set_property(SOURCE src/comm/ranks/launch.cpp APPEND PROPERTY COMPILE_DEFINITIONS
    SWITCHYARD_WITH_NCCL=1)
  target_link_libraries(switchyard PRIVATE ${CMAKE_DL_LIBS})
  switchyard_cuda_sources(portable src/comm/nccl/windows/pointers.cu)
  target_include_directories(switchyard_cuda_portable SYSTEM PRIVATE ${SWITCHYARD_NCCL_INCLUDE})
else()
  message(STATUS "NCCL: no nccl_device.h (2.28 or later): built without the engine nccl")
  target_sources(switchyard PRIVATE src/comm/nccl/absent.cpp)
endif()
