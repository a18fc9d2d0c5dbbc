# What measures and what checks a run, by themselves.
if(SWITCHYARD_BUILD_TOOL)
  switchyard_test(tool/bench_test LIBRARIES switchyard_bench)
  switchyard_test(tool/inference_test LIBRARIES switchyard_bench)
  switchyard_test(tool/study/study_test LIBRARIES switchyard_commands)
  switchyard_test(tool/study/study_findings_test LIBRARIES switchyard_commands)
  switchyard_test(tool/run_check_test LIBRARIES switchyard_commands
    ENVIRONMENT SWITCHYARD_ROOFS=rough)
  switchyard_test(tool/report_test LIBRARIES switchyard_commands)
  switchyard_test(tool/sweep_test LIBRARIES switchyard_commands)
endif()

# What reads the tables of a GPU's profiler, the bars of result lines, and the peers in Python; no GPU needed.
find_program(SWITCHYARD_TEST_PYTHON python3 HINTS /usr/bin)
if(NOT SWITCHYARD_TEST_PYTHON)
  switchyard_leave_out("tests of the tool" "there is no python3")
endif()
if(SWITCHYARD_TEST_PYTHON)
  add_test(NAME routing_ties COMMAND ${SWITCHYARD_TEST_PYTHON}
    ${CMAKE_CURRENT_SOURCE_DIR}/data/routing_ties.py --check)
  add_test(NAME routers_golden COMMAND ${SWITCHYARD_TEST_PYTHON}
    ${CMAKE_CURRENT_SOURCE_DIR}/data/routers_golden.py --check)
  add_test(NAME soft_moe_golden_values COMMAND ${SWITCHYARD_TEST_PYTHON}
    ${CMAKE_CURRENT_SOURCE_DIR}/data/soft_moe_golden.py --check)
  add_test(NAME perft_golden_values COMMAND ${SWITCHYARD_TEST_PYTHON}
    ${CMAKE_CURRENT_SOURCE_DIR}/data/perft_golden.py --check)
  add_test(NAME stored_golden_values COMMAND ${SWITCHYARD_TEST_PYTHON}
    ${CMAKE_CURRENT_SOURCE_DIR}/data/stored_golden.py --check)
  foreach(name counters_test bars_test compare_results_test peers_test corpus_test)
    add_test(NAME ${name} COMMAND ${SWITCHYARD_TEST_PYTHON}
      ${CMAKE_CURRENT_SOURCE_DIR}/tools/${name}.py)
  endforeach()
  add_test(NAME architecture
    COMMAND ${SWITCHYARD_TEST_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/architecture/architecture_test.py)
  add_test(NAME includes
    COMMAND ${SWITCHYARD_TEST_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/architecture/includes_test.py)
endif()

# The tool as a user sees it, one test for each class of a file. The system's Python is the one that
# has the packages. Nobody reads what share of the machine these runs reached.
if(SWITCHYARD_BUILD_TOOL AND SWITCHYARD_TEST_PYTHON)
  set(tool_tests tool_test tool_bench_test tool_bad_input_test tool_files_test tool_terminal_test
    tool_srun_test tool_routers_test tool_stored_weights_test tool_routing_stats_test tool_sweep_test
    tool_models_test tool_models_bad_input_test tool_adapters_test tool_tokenizer_test
    tool_models_ranks_test tool_evaluate_test tool_generate_test tool_released_test tool_study_test
    tool_study_runs_test page_test)
  if(MPI_CXX_FOUND)
    list(APPEND tool_tests tool_mpi_test tool_train_processes_test)
  endif()
  foreach(file ${tool_tests})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS tool/${file}.py)
    file(STRINGS tool/${file}.py classes REGEX "^class [A-Za-z]+\\(.*Test.*\\):")
    foreach(line ${classes})
      string(REGEX REPLACE "^class ([A-Za-z]+).*" "\\1" class "${line}")
      set(name ${file}.${class})
      add_test(NAME ${name}
               COMMAND ${SWITCHYARD_TEST_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/tool/${file}.py ${class})
      # The longest begin first: at the end one of them would run alone.
      set_tests_properties(${name} PROPERTIES TIMEOUT 1500 COST 10 ENVIRONMENT
        "SWITCHYARD_ROOFS=rough;SWITCHYARD_TEST_TOOL=$<TARGET_FILE:switchyard_tool>;SWITCHYARD_TEST_SANITIZED=${SWITCHYARD_SANITIZE};MPIEXEC=${MPIEXEC_EXECUTABLE}")
    endforeach()
  endforeach()
endif()
