// One thread per rank, and which of their errors is the cause of the others.
#include "comm/ranks/run_ranks.hpp"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "switchyard/error.hpp"

namespace switchyard {
namespace {

struct Failure {
  int rank = 0;
  bool timeout = false;
  std::exception_ptr error;
};

/// Runs `body`; on an error makes the other ranks leave and returns it.
Failure run_one(Communicator& communicator, const std::function<void(Communicator&)>& body) {
  const int rank = communicator.rank();
  try {
    body(communicator);
    return {};
  } catch (const Error& error) {
    communicator.give_up("rank " + std::to_string(rank) + " failed: " + error.what());
    return {rank, error.code() == ErrorCode::kTimeout, std::current_exception()};
  } catch (const std::exception& error) {
    communicator.give_up("rank " + std::to_string(rank) + " failed: " + error.what());
    return {rank, false, std::current_exception()};
  } catch (...) {
    communicator.give_up("rank " + std::to_string(rank) + " failed");
    return {rank, false, std::current_exception()};
  }
}

}  // namespace

void run_on(std::span<const std::unique_ptr<Communicator>> ranks,
            const std::function<void(Communicator&)>& body) {
  std::mutex mutex;
  std::vector<Failure> failures;
  std::vector<std::thread> threads;
  for (const auto& communicator : ranks) {
    threads.emplace_back([&mutex, &failures, &body, &rank = *communicator] {
      Failure failure = run_one(rank, body);
      if (!failure.error) return;
      const std::lock_guard lock(mutex);
      failures.push_back(std::move(failure));
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failures.empty()) return;
  // A timeout is mostly what another rank's error made of this one. Where all are timeouts, each
  // names the wait that met its deadline first.
  std::ranges::sort(failures, {}, [](const Failure& f) { return std::pair(f.timeout, f.rank); });
  std::rethrow_exception(failures.front().error);
}

void run_ranks(int num_ranks, const std::function<void(Communicator&)>& body,
               std::chrono::milliseconds timeout) {
  const std::vector<std::unique_ptr<Communicator>> ranks = make_thread_ranks(num_ranks);
  for (const auto& communicator : ranks) communicator->set_timeout(timeout);
  run_on(ranks, body);
}

}  // namespace switchyard
