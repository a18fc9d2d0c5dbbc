# Files as arrays of bytes in a header, each ended by a zero.
#   cmake -DOUTPUT=FILE -DNAMESPACE=NAME -DFILES=kName=path,... -P embed.cmake
# A path that is empty makes an array of the zero alone. Lines that name a source map are left out.
set(text "#pragma once\n\n// Made by tool/report/embed.cmake.\nnamespace ${NAMESPACE} {\n")
string(REPLACE "," ";" entries "${FILES}")
foreach(entry IN LISTS entries)
  string(REGEX MATCH "^([^=]+)=(.*)$" matched "${entry}")
  set(name ${CMAKE_MATCH_1})
  set(path "${CMAKE_MATCH_2}")
  set(bytes "")
  if(path)
    file(READ "${path}" bytes HEX)
    # "//# sourceMappingURL=" and "/*# sourceMappingURL=", to the end of the file.
    string(REGEX REPLACE "2f2[fa]2320736f757263654d617070696e6755524c3d.*$" "" bytes "${bytes}")
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
  endif()
  string(APPEND text "inline constexpr unsigned char ${name}[] = {${bytes}0};\n")
endforeach()
string(APPEND text "}  // namespace ${NAMESPACE}\n")
file(WRITE "${OUTPUT}" "${text}")
