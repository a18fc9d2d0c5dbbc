#pragma once

#include <gtest/gtest.h>

#include <string>

#include "switchyard/error.hpp"

namespace switchyard::test {

/// What the Error that `call` throws says; "no error" if it throws none.
template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// `call` must throw Error{code} whose message is one line and has `words` in it.
template <typename Call>
void expect_error(ErrorCode code, const std::string& words, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos)
        << "message: " << error.what() << "\nexpected: " << words;
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "more than one line";
  }
}

}  // namespace switchyard::test
