# The files of tool/report/page, and dygraphs of Debian's libjs-dygraphs, as a header in generated/:
# a page of `switchyard report` has all that it needs inside. Without dygraphs its plots are left
# out, and the page says so. SWITCHYARD_REPORT_SOURCES: of the command, for the tool and for what
# fuzzes it.
include_guard(GLOBAL)

set(SWITCHYARD_REPORT_SOURCES
  report.cpp
  lines.cpp
  values.cpp
  run_document.cpp
  table.cpp
  plots.cpp
  page.cpp
  study_page.cpp
  overview.cpp
  bars.cpp
  machines.cpp
  routing.cpp
  trades.cpp
  suites.cpp
  suite_plots.cpp)
list(TRANSFORM SWITCHYARD_REPORT_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)

set(prefixes ${CMAKE_PREFIX_PATH} /usr)
list(TRANSFORM prefixes APPEND /share/javascript/dygraphs)
find_path(SWITCHYARD_DYGRAPHS_DIR dygraph.min.js PATHS ${prefixes} NO_DEFAULT_PATH)
if(SWITCHYARD_DYGRAPHS_DIR)
  set(dygraphs_script ${SWITCHYARD_DYGRAPHS_DIR}/dygraph.min.js)
  set(dygraphs_style ${SWITCHYARD_DYGRAPHS_DIR}/dygraph.min.css)
else()
  message(STATUS "report: no dygraphs (libjs-dygraphs), pages will be without plots")
endif()
set(page ${PROJECT_SOURCE_DIR}/tool/report/page)
set(report_files ${PROJECT_BINARY_DIR}/generated/report_files.hpp)
string(JOIN "," entries
  kStyle=${page}/report.css kScript=${page}/report.js kDygraphsLicense=${page}/dygraphs_license.txt
  kDygraphsScript=${dygraphs_script} kDygraphsStyle=${dygraphs_style})
add_custom_command(OUTPUT ${report_files}
  COMMAND ${CMAKE_COMMAND} -DOUTPUT=${report_files} -DNAMESPACE=switchyard::tool::report_files
          "-DFILES=${entries}" -P ${PROJECT_SOURCE_DIR}/tool/report/embed.cmake
  DEPENDS ${page}/report.css ${page}/report.js ${page}/dygraphs_license.txt ${dygraphs_script}
          ${dygraphs_style} ${PROJECT_SOURCE_DIR}/tool/report/embed.cmake
  VERBATIM)
add_custom_target(switchyard_report_files DEPENDS ${report_files})
