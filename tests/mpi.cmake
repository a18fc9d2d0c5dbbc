# The rank tests again, on processes: by shared memory, and by messages.
if(MPI_CXX_FOUND)
  foreach(name comm_test expert_parallel_test exchange_fault_test transport_test fixed_size_test)
    add_executable(${name}_mpi comm/${name}.cpp)
    target_link_libraries(${name}_mpi PRIVATE switchyard::switchyard fmt::fmt nlohmann_json::nlohmann_json GTest::gtest_main)
    target_include_directories(${name}_mpi PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
    target_compile_definitions(${name}_mpi PRIVATE SWITCHYARD_TEST_MPI=1
      SWITCHYARD_ALL2ALL="${PROJECT_SOURCE_DIR}/data/all2all.json")
    switchyard_compile_options(${name}_mpi)
    if(name MATCHES "transport|fixed_size")
      target_link_libraries(${name}_mpi PRIVATE switchyard_variants)
    endif()
    foreach(transport shared messages)
      add_test(NAME ${name}_mpi_${transport}
        COMMAND ${MPIEXEC_EXECUTABLE} --oversubscribe -np 4 $<TARGET_FILE:${name}_mpi>)
      set_tests_properties(${name}_mpi_${transport} PROPERTIES LABELS "ranks;mpi" PROCESSORS 2
        TIMEOUT 300 ENVIRONMENT "SWITCHYARD_TEST_TRANSPORT=${transport};\
OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_btl_base_warn_component_unused=0")
    endforeach()
  endforeach()
endif()
