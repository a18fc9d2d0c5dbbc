# Builds that only check: several files of a target are compiled as one unit (cmake/write_units.py),
# since most of the time goes into headers that each file reads again. Not for a build to use: a file
# compiles in a unit that lacks an #include.
set(SWITCHYARD_UNITS 0 CACHE STRING "Compile up to so many files of a target as one; 0: each by itself")
set(SWITCHYARD_UNITS_OF "." CACHE STRING "Those whose path from the project's root, with a / before it, matches this; the others by themselves")
if(SWITCHYARD_UNITS GREATER 0)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  cmake_language(DEFER DIRECTORY ${PROJECT_SOURCE_DIR} CALL switchyard_form_units)
endif()

# At the end of the configuration, when all files of all targets are known.
function(switchyard_form_units)
  set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/cmake/write_units.py)
  get_property(targets GLOBAL PROPERTY switchyard_compiled_targets)
  foreach(target ${targets})
    get_target_property(folder ${target} SOURCE_DIR)
    get_target_property(sources ${target} SOURCES)
    set(alone)
    set(cpp)
    set(cu)
    foreach(source ${sources})
      set(path ${source})
      if(NOT path MATCHES "^(/|\\$)")
        set(path ${folder}/${source})
      endif()
      string(REPLACE "${PROJECT_SOURCE_DIR}/" "/" inside "${path}")
      set(own)
      foreach(property COMPILE_OPTIONS COMPILE_DEFINITIONS INCLUDE_DIRECTORIES)
        get_source_file_property(value ${path} TARGET_DIRECTORY ${target} ${property})
        if(value)
          list(APPEND own ${property})
        endif()
      endforeach()
      if(NOT own AND NOT target MATCHES "_sm90a$"  # compiled as they ship
          AND inside MATCHES "${SWITCHYARD_UNITS_OF}"
          AND path MATCHES "^${PROJECT_SOURCE_DIR}/.*\\.(cpp|cu)$")
        list(APPEND ${CMAKE_MATCH_1} ${path})
      else()
        list(APPEND alone ${source})
      endif()
    endforeach()
    foreach(kind cpp cu)
      list(LENGTH ${kind} count)
      if(count LESS 2)
        list(APPEND alone ${${kind}})
        continue()
      endif()
      set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
        ${${kind}})
      execute_process(COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/write_units.py
        ${PROJECT_BINARY_DIR}/units/${target} ${SWITCHYARD_UNITS} ${${kind}}
        WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE units
        OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
      string(REPLACE "\n" ";" units "${units}")
      list(APPEND alone ${units})
      if(kind STREQUAL "cpp")
        # GCC takes a file with several names for a header, which may not have anonymous namespaces;
        # what it takes for uninitialized in one of variants that it inlines across files is not.
        set_property(SOURCE ${units} TARGET_DIRECTORY ${target} PROPERTY COMPILE_OPTIONS
          $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage;-Wno-maybe-uninitialized>
          $<$<BOOL:${SWITCHYARD_QUICK_KERNELS}>:-O0>)
      endif()
    endforeach()
    set_property(TARGET ${target} PROPERTY SOURCES ${alone})
  endforeach()
endfunction()
