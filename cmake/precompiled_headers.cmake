# The headers that most of the build's time goes into, compiled once for the library (position
# independent), the programs and the tests. Only for builds that other builds stand beside: with it
# a file compiles that lacks an #include of theirs (tests/architecture/includes_test.py sees it).
# `tests`: for them alone; `programs`: for all but the library and its C interface.
set(SWITCHYARD_PRECOMPILED_HEADERS OFF CACHE STRING
  "Compile the headers of the standard library once: ON, OFF, for tests, or for programs")
if(NOT SWITCHYARD_PRECOMPILED_HEADERS)
  function(switchyard_use_precompiled_headers target)
  endfunction()
  return()
endif()

set(switchyard_common_headers <fmt/core.h> <nlohmann/json.hpp> <algorithm> <array> <atomic> <chrono>
  <cmath> <condition_variable> <cstring> <filesystem> <fstream> <functional> <map> <memory> <mutex>
  <numeric> <optional> <random> <set> <span> <string> <thread> <vector>)

function(switchyard_precompile name)
  set(target switchyard_precompiled_${name})
  if(NOT TARGET ${target})
    set(empty ${PROJECT_BINARY_DIR}/generated/precompiled_${name}.cpp)
    file(CONFIGURE OUTPUT ${empty} CONTENT "")
    add_library(${target} OBJECT ${empty})
    target_compile_features(${target} PUBLIC cxx_std_20)
    target_link_libraries(${target} PRIVATE fmt::fmt nlohmann_json::nlohmann_json)
    switchyard_compile_options(${target})
    target_precompile_headers(${target} PRIVATE ${switchyard_common_headers})
    if(name STREQUAL "tests")
      target_link_libraries(${target} PRIVATE GTest::gtest)
      target_precompile_headers(${target} PRIVATE <gtest/gtest.h>)
    elseif(name STREQUAL "library")
      set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    elseif(name STREQUAL "interface")
      set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON
        CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
    endif()
  endif()
endfunction()

# The compiler takes only what was compiled as the target is: its position, visibility, FMT_SHARED.
function(switchyard_use_precompiled_headers target)
  get_target_property(libraries ${target} LINK_LIBRARIES)
  if(SWITCHYARD_PRECOMPILED_HEADERS STREQUAL "tests" AND NOT "GTest::gtest_main" IN_LIST libraries)
    return()
  endif()
  if(target MATCHES "precompiled" OR NOT "${libraries};" MATCHES
      "fmt::fmt;|switchyard_bench;|switchyard_commands;|fuzzed_sources;")
    return()
  elseif(SWITCHYARD_PRECOMPILED_HEADERS STREQUAL "programs" AND target MATCHES "^switchyard(_c)?$")
    return()
  elseif(target MATCHES "^switchyard(_models)?$")
    set(name library)
  elseif(target STREQUAL "switchyard_c")
    set(name interface)
  elseif("GTest::gtest_main" IN_LIST libraries)
    set(name tests)
  else()
    set(name programs)
  endif()
  switchyard_precompile(${name})
  target_precompile_headers(${target} REUSE_FROM switchyard_precompiled_${name})
endfunction()
