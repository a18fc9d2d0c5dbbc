#pragma once

// Steps of processes that only all of them can take or none: with one error, said once.

#include <functional>
#include <string>

#include "switchyard/comm.hpp"
#include "switchyard/error.hpp"

namespace switchyard {

/// An error that every rank has, with the same words, so that one of them may say it for all.
class CommonError : public Error {
 public:
  /// @param text  All that what() says.
  CommonError(ErrorCode code, const std::string& text) : Error(code, text), text_(text) {}
  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

/// Collective: runs `body` on every rank, which may wait for others there, and comes back when all
/// have. Null: one rank.
/// @throws CommonError on every rank where it has failed on any: the error of the first rank that
///         did not merely wait, with that rank's number where it is not 0; the ranks can work
///         together again then. Where a rank is gone, each its own: {kTimeout} that names it, at
///         most half a minute behind the deadline.
void together(Communicator* ranks, const std::function<void()>& body);

/// together(), with `body` on rank 0 alone.
void on_first(Communicator* ranks, const std::function<void()>& body);

}  // namespace switchyard
