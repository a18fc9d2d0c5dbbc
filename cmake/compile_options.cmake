option(SWITCHYARD_WARNINGS_AS_ERRORS "Fail on a warning" ${PROJECT_IS_TOP_LEVEL})
option(SWITCHYARD_QUICK_KERNELS "Compile kernels fast that run slowly: to see that they compile" OFF)
set(SWITCHYARD_SANITIZE "" CACHE STRING "Sanitizers to build with: address,undefined or thread")

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
    # Not those of sm_90a: whether ptxas keeps wgmma asynchronous shows in optimized code alone.
    set(optimized $<STREQUAL:$<TARGET_PROPERTY:CUDA_ARCHITECTURES>,90a-real>)
    target_compile_options(${target} PRIVATE
      $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<NOT:${optimized}>>:--Ofast-compile=max>)
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
    find_program(SWITCHYARD_LLD ld.lld)  # a fifth of the time of GNU's linker
    if(SWITCHYARD_LLD AND CMAKE_CXX_COMPILER_ID MATCHES Clang)
      target_link_options(${target} PRIVATE -fuse-ld=lld)
    endif()
  endif()
  switchyard_use_precompiled_headers(${target})
endfunction()
