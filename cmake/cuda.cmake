# The CUDA backend, part of the library. Kernels that use Hopper's own instructions are built for
# sm_90a; portable ones for sm_80 too, with PTX for later chips.
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
target_compile_definitions(switchyard PRIVATE SWITCHYARD_WITH_CUDA=1)
# Not the driver library: its functions are asked of the runtime, so the library loads without a GPU.
target_link_libraries(switchyard PRIVATE CUDA::cudart_static)

# switchyard_cuda_sources(<sm90a|portable> files...): add kernels to the library.
function(switchyard_cuda_sources kind)
  set(name switchyard_cuda_${kind})
  if(NOT TARGET ${name})
    add_library(${name} OBJECT)
    target_include_directories(${name} PRIVATE src include)
    # fmt 9 takes nvcc for a compiler without constexpr, and then its checks of formats do not build.
    target_compile_definitions(${name} PRIVATE SWITCHYARD_WITH_CUDA=1 NDEBUG FMT_USE_CONSTEXPR=1)
    target_link_libraries(${name} PRIVATE fmt::fmt-header-only CUDA::cudart_static)
    switchyard_compile_options(${name})
    if(kind STREQUAL "sm90a")
      set(architectures 90a-real)
      set_property(TARGET ${name} PROPERTY
        RULE_LAUNCH_COMPILE "${PROJECT_SOURCE_DIR}/cmake/reject_serialized_wgmma.sh")
    else()
      set(architectures 80-real 90-real 80-virtual)
    endif()
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}"
      POSITION_INDEPENDENT_CODE ON)
    target_link_libraries(switchyard PRIVATE $<BUILD_INTERFACE:$<TARGET_OBJECTS:${name}>>)
    add_dependencies(switchyard ${name})
  endif()
  target_sources(${name} PRIVATE ${ARGN})
endfunction()

# In the order that data flows through them.
switchyard_cuda_sources(portable
  src/core/tensor_map.cu
  src/route/router_gemm_few_cuda.cu
  src/route/router_gemm_cuda.cu
  src/route/route_cuda.cu
  src/route/route_groups_cuda.cu
  src/plan/capacity_cuda.cu
  src/plan/plan_cuda.cu
  src/plan/plan_few_cuda.cu
  src/plan/plan_tiles_cuda.cu
  src/dispatch/pack_cuda.cu
  src/experts/grouped_gemm.cu
  src/experts/grouped_gemm_sm80_gated.cu
  src/experts/grouped_gemm_sm80_plain.cu
  src/experts/grouped_gemm_sm80_down.cu
  src/experts/grouped_gemm_f32.cu
  src/experts/decode_portable_bf16.cu
  src/experts/decode_portable_f16.cu
  src/experts/decode_portable_f32.cu
  src/combine/combine_cuda.cu
  src/combine/combine_pair_cuda.cu
  src/combine/finish_cuda.cu
  src/layer/wire_rows_cuda.cu
  src/layer/layer_kernels.cu
  src/comm/dispatch_exchange_cuda.cu
  src/comm/dispatch_low_latency_cuda.cu
  src/comm/combine_exchange_cuda.cu
  src/comm/combine_pull_cuda.cu
  src/comm/combine_low_latency_cuda.cu
  src/comm/pairs_kernels_cuda.cu
  src/comm/variants/device_assignments_cuda.cu
  src/comm/variants/device_fixed_size_cuda.cu
  src/comm/variants/device_host_lists_cuda.cu
)
target_sources(switchyard PRIVATE
  src/layer/stage_workspace.cpp
  src/experts/load_experts_cuda.cpp
  src/experts/decode_shape.cpp
  src/experts/decode_launch.cpp
  src/experts/experts_cuda_decode.cpp
  src/experts/experts_cuda_grouped.cpp
  src/layer/cuda_router.cpp
  src/layer/cuda_shared_experts.cpp
  src/layer/cuda_exchange.cpp
  src/layer/cuda_experts.cpp
  src/layer/stage_calls_cuda.cpp
  src/layer/layer_cuda.cpp
)
switchyard_cuda_sources(sm90a
  src/route/router_gemm_sm90.cu
  src/experts/grouped_gemm_sm90_gated.cu
  src/experts/grouped_gemm_sm90_gated_ping_pong.cu
  src/experts/grouped_gemm_sm90_plain.cu
  src/experts/grouped_gemm_sm90_down.cu
  src/experts/grouped_gemm_f32_sm90.cu
  src/experts/decode_hopper_bf16.cu
  src/experts/decode_hopper_f16.cu
  src/experts/decode_hopper_f32.cu
)
target_sources(switchyard PRIVATE
  src/comm/device_sharing.cpp
  src/comm/device_exchange_setup.cpp
  src/comm/device_windows.cpp
  src/comm/nccl_watch.cpp
  src/comm/nccl_transfer.cpp
  src/comm/device_expert_parallel_state.cpp
  src/comm/device_expert_parallel.cpp
  src/comm/variants/device_native.cpp
  src/comm/variants/device_assignments.cpp
  src/comm/variants/device_fixed_size.cpp
  src/comm/variants/device_host_lists.cpp
)

# NCCL: its headers only. The library is opened when it is first needed (src/comm/nccl_library.cpp).
# CUDA's images have the headers among CUDA's or the system's, Python environments in a package.
if(SWITCHYARD_WITH_NCCL)
  find_program(SWITCHYARD_PYTHON NAMES python3)
  get_filename_component(python_home "${SWITCHYARD_PYTHON}" DIRECTORY)
  file(GLOB nccl_packages "${python_home}/../lib/python3*/site-packages/nvidia/nccl/include")
  find_path(SWITCHYARD_NCCL_INCLUDE nccl_device.h
    HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${nccl_packages})
endif()
if(SWITCHYARD_WITH_NCCL AND SWITCHYARD_NCCL_INCLUDE)
  set(nccl_sources src/comm/nccl_library.cpp src/comm/nccl_rank.cpp src/comm/nccl_windows.cpp
    src/comm/nccl_pairs.cpp)
  target_sources(switchyard PRIVATE ${nccl_sources})
  target_include_directories(switchyard SYSTEM PRIVATE ${SWITCHYARD_NCCL_INCLUDE})
  set_property(SOURCE src/comm/launch.cpp APPEND PROPERTY COMPILE_DEFINITIONS
    SWITCHYARD_WITH_NCCL=1)
  target_link_libraries(switchyard PRIVATE ${CMAKE_DL_LIBS})
  switchyard_cuda_sources(portable src/comm/nccl_pointers.cu)
  target_include_directories(switchyard_cuda_portable SYSTEM PRIVATE ${SWITCHYARD_NCCL_INCLUDE})
else()
  message(STATUS "NCCL: no nccl_device.h (2.28 or later): built without the engine nccl")
  target_sources(switchyard PRIVATE src/comm/no_nccl.cpp)
endif()
