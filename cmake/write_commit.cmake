cmake_minimum_required(VERSION 3.25)
# Writes OUTPUT with the commit of SOURCE, only when it has changed. Outside of a clone it is what the
# environment's SWITCHYARD_COMMIT says, else "unknown".
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  set(commit "$ENV{SWITCHYARD_COMMIT}")
endif()
if(commit STREQUAL "")
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define SWITCHYARD_COMMIT \"@commit@\"\n" @ONLY)
