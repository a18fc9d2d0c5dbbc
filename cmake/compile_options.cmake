option(SWITCHYARD_WARNINGS_AS_ERRORS "Fail on a warning" ${PROJECT_IS_TOP_LEVEL})
option(SWITCHYARD_QUICK_KERNELS "Compile kernels fast that run slowly: to see that they compile" OFF)
option(SWITCHYARD_QUICK_TESTS "Compile tests, tool and verify with little optimization: what they call has all of it" OFF)
set(SWITCHYARD_SANITIZE "" CACHE STRING "Sanitizers to build with: address,undefined or thread")

# A fifth of the time of GNU's linker: for builds that only check.
find_program(SWITCHYARD_LLD ld.lld)
if(SWITCHYARD_LLD)
  set(SWITCHYARD_FAST_LINKER -fuse-ld=lld)
endif()

# The only place with compiler flags.
function(switchyard_compile_options target)
  set(warnings -Wall -Wextra -Wshadow -Wconversion)
  if(SWITCHYARD_WARNINGS_AS_ERRORS)
    list(APPEND warnings -Werror)
  endif()
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:${warnings}>
    # The order of sums is a contract: nobody may contract a*b+c into an fma that is not written.
    $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
    # Not CUDA_STANDARD 20: CMake 3.25 does not know that nvcc 12 and later have it.
    # 20208: fmt has long double. 554: the const conversion of a view that is const already is never called; that is its purpose.
    $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -lineinfo --expt-relaxed-constexpr -diag-suppress=554,20208>)
  if(SWITCHYARD_QUICK_KERNELS)
    # Not those with wgmma: whether ptxas keeps it asynchronous shows in optimized code alone.
    if(NOT target MATCHES "_sm90a$")
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
    endif()
  endif()
  if(SWITCHYARD_SANITIZE)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SWITCHYARD_SANITIZE} -fno-omit-frame-pointer
        -fno-sanitize-recover=all>)
    if(NOT target MATCHES "^switchyard(_c|_models|_reference|_precompiled_(library|interface))?$")
      # What computes is optimized for its tests' sake; the rest compiles in half the time without.
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
    endif()
    target_link_options(${target} PUBLIC -fsanitize=${SWITCHYARD_SANITIZE})
    if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
      target_link_options(${target} PRIVATE ${SWITCHYARD_FAST_LINKER})
    endif()
  endif()
  get_target_property(folder ${target} SOURCE_DIR)
  # Of the programs the tool's commands and verify's draws: they call what computes.
  file(RELATIVE_PATH folder "${PROJECT_SOURCE_DIR}" "${folder}")
  if(SWITCHYARD_QUICK_TESTS AND folder MATCHES "^(tests|tool|verify)$")
    # Then, and with precompiled headers, GCC 12 warns of arrays in the standard library that are no
    # fault. Without it none of its warnings is lost in the library, nor clang's in the tests.
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-O1 $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds>
        $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow>>)
    target_link_options(${target} PRIVATE ${SWITCHYARD_FAST_LINKER})
  endif()
  # What only has to compile and link; the library's host files are taken from a build that optimizes.
  if(SWITCHYARD_QUICK_KERNELS)
    if(NOT target MATCHES "^switchyard(_c)?$")
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
    endif()
    target_link_options(${target} PRIVATE ${SWITCHYARD_FAST_LINKER})
  endif()
  switchyard_use_precompiled_headers(${target})
  set_property(GLOBAL APPEND PROPERTY switchyard_compiled_targets ${target})
endfunction()
