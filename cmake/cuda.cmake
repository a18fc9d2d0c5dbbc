# The CUDA backend, part of the library. Kernels that use Hopper's own instructions are built for
# sm_90a; portable ones for sm_80 too, with PTX for later chips.
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
target_compile_definitions(switchyard PRIVATE SWITCHYARD_WITH_CUDA=1)
target_link_libraries(switchyard PRIVATE CUDA::cudart_static CUDA::cuda_driver)

# switchyard_cuda_sources(<sm90a|portable> files...): add kernels to the library.
function(switchyard_cuda_sources kind)
  set(name switchyard_cuda_${kind})
  if(NOT TARGET ${name})
    add_library(${name} OBJECT)
    target_include_directories(${name} PRIVATE src include)
    target_compile_definitions(${name} PRIVATE SWITCHYARD_WITH_CUDA=1 NDEBUG)
    target_link_libraries(${name} PRIVATE fmt::fmt-header-only CUDA::cudart_static)
    switchyard_compile_options(${name})
    if(kind STREQUAL "sm90a")
      set(architectures 90a-real)
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
