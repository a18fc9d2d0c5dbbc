# One file per instruction set, compiled with its own flags; the CPU decides at run time which one
# is called. The rest of the library runs on any CPU of the architecture.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_compile_definitions(switchyard PRIVATE SWITCHYARD_X86_KERNELS=1)
  if(SWITCHYARD_SANITIZE AND EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo cpu_flags LIMIT_COUNT 1 REGEX "^flags")
  endif()
  function(switchyard_cpu_kernels isa)
    set(file src/experts/cpu/kernels/${isa}.cpp)
    target_sources(switchyard PRIVATE ${file})
    string(REGEX REPLACE "^avx512$" "avx512f" flag ${isa})
    if(cpu_flags AND NOT " ${cpu_flags} " MATCHES " ${flag} ")
      # No test can run it here: a tenth of the time.
      list(APPEND ARGN -O0)
    endif()
    set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${ARGN}"
      SKIP_PRECOMPILE_HEADERS ON)
  endfunction()
  # gcc 12 warns about its own AVX-512 headers.
  set(avx512 $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
    $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  switchyard_cpu_kernels(avx2 -mavx2 -mfma -mf16c)
  switchyard_cpu_kernels(avx512 ${avx512})
  switchyard_cpu_kernels(avx512_bf16 ${avx512} -mavx512bf16)
  switchyard_cpu_kernels(amx_bf16 ${avx512} -mavx512bf16 -mamx-tile -mamx-bf16)
endif()
