#include "comm/ranks/together.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>

#include "comm/ranks/gather.hpp"
#include "comm/ranks/packed.hpp"

namespace switchyard {
namespace {

struct Failure {
  ErrorCode code = ErrorCode::kCommunication;
  std::string text{};
  std::exception_ptr error{};
};

std::optional<Failure> failure_of(const std::function<void()>& body) {
  try {
    body();
    return std::nullopt;
  } catch (const Error& error) {
    return Failure{error.code(), error.what(), std::current_exception()};
  } catch (const std::bad_alloc&) {
    return Failure{ErrorCode::kOutOfMemory, "out of memory", std::current_exception()};
  } catch (const std::exception& error) {
    return Failure{ErrorCode::kIo, error.what(), std::current_exception()};
  }
}

/// Of all ranks' failures the one that is no wait, or the first wait.
CommonError cause_of(Communicator& ranks, const Failure& own) {
  const std::vector<std::vector<std::byte>> told = gather_to_all(
      ranks, pack_message({{"code", static_cast<int>(own.code)}, {"text", own.text}}));
  std::optional<CommonError> cause;
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    const nlohmann::json failure = unpack_message(told[rank]);
    const auto code = static_cast<ErrorCode>(failure["code"].get<int>());
    if (cause && (cause->code() != ErrorCode::kTimeout || code == ErrorCode::kTimeout)) continue;
    const auto text = failure["text"].get<std::string>();
    cause.emplace(code, rank == 0 ? text : fmt::format("rank {}: {}", rank, text));
  }
  return cause.value();  // there is a rank, this one
}

}  // namespace

void together(Communicator* ranks, const std::function<void()>& body) {
  if (ranks == nullptr) return body();
  const auto failure = failure_of([&] {
    body();
    ranks->barrier("end of a common step");
  });
  if (!failure) return;
  ranks->give_up(fmt::format("rank {} failed: {}", ranks->rank(), failure->text));
  // Who is there comes at once: others wait no longer, and a rank that is gone was waited for.
  const std::chrono::milliseconds timeout = ranks->timeout();
  ranks->set_timeout(std::min<std::chrono::milliseconds>(timeout, std::chrono::seconds(30)));
  try {
    ranks->recover();
    throw CommonError(cause_of(*ranks, *failure));
  } catch (const CommonError&) {
    ranks->set_timeout(timeout);
    throw;
  } catch (const std::exception&) {
    ranks->set_timeout(timeout);
  }
  std::rethrow_exception(failure->error);
}

void on_first(Communicator* ranks, const std::function<void()>& body) {
  together(ranks, [&] {
    if (ranks == nullptr || ranks->rank() == 0) body();
  });
}

}  // namespace switchyard
