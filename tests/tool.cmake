# The tool as a user sees it. The system's Python is the one that has the packages.
find_program(SWITCHYARD_TEST_PYTHON python3 HINTS /usr/bin)
if(SWITCHYARD_BUILD_TOOL AND SWITCHYARD_TEST_PYTHON)
  set(tool_tests tool_test tool_bench_test tool_bad_input_test)
  if(MPI_CXX_FOUND)
    list(APPEND tool_tests tool_mpi_test)
  endif()
  foreach(name ${tool_tests})
    add_test(NAME ${name} COMMAND ${SWITCHYARD_TEST_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/${name}.py)
    set_tests_properties(${name} PROPERTIES TIMEOUT 900 ENVIRONMENT
      "SWITCHYARD_TOOL=$<TARGET_FILE:switchyard_tool>;MPIEXEC=${MPIEXEC_EXECUTABLE}")
  endforeach()
endif()
