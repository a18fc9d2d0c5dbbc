# What find_package(switchyard) needs: library, headers, targets, version.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/switchyard)
install(TARGETS switchyard EXPORT switchyard-targets FILE_SET HEADERS)
install(EXPORT switchyard-targets NAMESPACE switchyard:: DESTINATION ${package_dir})
configure_package_config_file(cmake/switchyard-config.cmake.in switchyard-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(switchyard-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/switchyard-config.cmake
  ${PROJECT_BINARY_DIR}/switchyard-config-version.cmake DESTINATION ${package_dir})
