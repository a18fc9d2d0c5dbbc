# libswitchyard.so: the C interface, which the Python package opens. Nothing but sy_* leaves it.
add_library(switchyard_c SHARED
  src/capi/capi.cpp
  src/capi/calls.cpp
  src/capi/capi_names.cpp
  src/capi/capi_plan.cpp
  src/capi/capi_route.cpp
  src/capi/capi_experts.cpp
  src/capi/capi_soft_moe.cpp
  src/capi/capi_comm.cpp
  src/capi/capi_ep.cpp
  src/capi/capi_ep_published.cpp
  src/capi/capi_ep_device.cpp
  src/capi/capi_layer.cpp
  src/capi/capi_layer_router.cpp
  src/capi/capi_layer_stats.cpp
  src/capi/capi_losses.cpp
  src/capi/capi_perft.cpp
  src/capi/capi_stored.cpp
  src/capi/capi_backward.cpp
  src/capi/capi_experts_backward.cpp
)
target_include_directories(switchyard_c PRIVATE src PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
target_link_libraries(switchyard_c PRIVATE switchyard fmt::fmt)
target_compile_definitions(switchyard_c PRIVATE SWITCHYARD_VERSION="${PROJECT_VERSION}")
switchyard_compile_options(switchyard_c)
target_link_options(switchyard_c PRIVATE -Wl,--exclude-libs,ALL)
if(NOT SWITCHYARD_SANITIZE)  # whose functions are clang's programs'
  target_link_options(switchyard_c PRIVATE -Wl,--no-undefined)
endif()
set_target_properties(switchyard_c PROPERTIES OUTPUT_NAME switchyard VERSION ${PROJECT_VERSION}
  SOVERSION 0 CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
if(SKBUILD)
  # A wheel has it beside the package, under the one name that the package looks for.
  install(PROGRAMS $<TARGET_FILE:switchyard_c> DESTINATION switchyard
    RENAME libswitchyard.so COMPONENT python)
else()
  install(TARGETS switchyard_c)
endif()
