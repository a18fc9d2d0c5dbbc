// The loop over cases. Cases are independent, so some run at a time; the miss that is reported is
// the one of the lowest number, whichever came first.
#include "verify/verify.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <shared_mutex>
#include <thread>

#include "comm/ranks/gather.hpp"
#include "core/check.hpp"
#include "verify/case.hpp"
#include "verify/check_backward.hpp"
#include "verify/check_layer.hpp"
#include "verify/fault.hpp"
#include "verify/perft/check_perft.hpp"
#include "verify/soak.hpp"

namespace switchyard::verify {
namespace {

using nlohmann::json;

struct Miss {
  std::int64_t index = 0;
  Case test{};
  std::string what{};
};

bool is_first(const VerifyOptions& options) {
  return options.world == nullptr || options.world->rank() == 0;
}

/// Whether the way back of this case is checked.
bool goes_back(const Case& test, const VerifyOptions& options) {
  if (is_perft(test.router)) return options.pass != Pass::kForward;
  const bool pairs = options.device_engine == DeviceEngine::kNcclPairs;
  if (options.backend == Backend::kCuda && test.ranks > 1 && pairs) return false;
  return options.pass != Pass::kForward && has_backward(test);
}

std::string check_forward(const Problem& problem, const VerifyOptions& options,
                          Communicator* group) {
  std::string wrong = check_layer(problem, {.backend = options.backend,
                                            .device_engine = options.device_engine,
                                            .timeout = options.timeout,
                                            .group = group,
                                            .run = options.run});
  if (wrong.empty() && is_first(options)) {
    Case top_k = problem.test;
    top_k.router.clear();
    if (!problem.test.router.empty()) set_router(top_k);
    // A routing that is given has other columns there.
    const bool same = problem.test.router.empty();
    wrong = check_stages(same ? problem : make_problem(top_k), options.stages);
    if (!wrong.empty()) wrong = "stage " + wrong;
  }
  return wrong;
}

/// Empty if the case holds. Of processes, the case's ranks take part and rank 0 compares.
std::string check_case(const Case& test, const VerifyOptions& options) {
  Communicator* group = nullptr;
  if (options.world != nullptr && test.ranks > 1) group = options.first_ranks(test.ranks);
  if (group == nullptr && !is_first(options)) return {};
  try {
    const Problem problem = make_problem(test);
    if (is_perft(test.router)) return is_first(options) ? check_perft(problem, options) : "";
    const bool back = goes_back(test, options);
    std::string wrong;
    if (!back || options.pass == Pass::kBoth) wrong = check_forward(problem, options, group);
    if (wrong.empty() && back) {
      wrong = check_backward(problem, options.run_backward,
                             {.backend = options.backend,
                              .device_engine = options.device_engine,
                              .timeout = options.timeout,
                              .group = group});
      if (!wrong.empty()) wrong = "backward: " + wrong;
    }
    return wrong;
  } catch (const std::exception& error) {
    return fmt::format("threw: {}", error.what());
  }
}

/// Forces an instruction set as long as it lives.
class ForcedIsa {
 public:
  explicit ForcedIsa(CpuIsa isa) { force_isa(isa); }
  ~ForcedIsa() { force_isa(std::nullopt); }
  ForcedIsa(const ForcedIsa&) = delete;
  ForcedIsa& operator=(const ForcedIsa&) = delete;
};

/// Who may use the GPU. Ranks that share one wait for each other there, and have room for their own
/// waits only: they are alone on it, while other cases are made up and compared.
class GpuTurns {
 public:
  /// What `call` returns, in its turn.
  template <typename Call>
  auto of(int ranks, Call&& call) {
    if (ranks > 1) {
      const std::unique_lock alone(mutex_);
      return call();
    }
    const std::shared_lock among_others(mutex_);
    return call();
  }

 private:
  std::shared_mutex mutex_;
};

class Loop {
 public:
  explicit Loop(const VerifyOptions& options)
      : options_(options), isas_(options.isas.empty() ? available_isas() : options.isas) {
    if (options.backend != Backend::kCuda) return;
    options_.run = [this, run = options.run](const Problem& problem, const RunArgs& args) {
      return gpu_.of(static_cast<int>(args.rank_begin.size()) - 1,
                     [&] { return run(problem, args); });
    };
    options_.run_backward = [this, run = options.run_backward](const Problem& problem,
                                                               const BackwardProblem& backward,
                                                               const BackwardRun& how) {
      return gpu_.of(problem.test.ranks, [&] { return run(problem, backward, how); });
    };
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  /// The first miss, or none. The instruction set is the process's, so it changes between blocks.
  std::optional<Miss> run() {
    int workers = options_.world != nullptr ? 1 : options_.workers;
    if (workers == 0) workers = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    for (std::int64_t block = 0; next_ < options_.cases && !miss_; ++block) {
      isa_ = isas_[static_cast<std::size_t>(block) % isas_.size()];
      const ForcedIsa forced(isa_);
      end_ = std::min(options_.cases, (block + 1) * kBlock);
      next_ = block * kBlock;
      std::vector<std::thread> threads;
      for (int w = 1; w < workers; ++w) threads.emplace_back([this] { work(false); });
      work(true);
      for (std::thread& thread : threads) thread.join();
      next_ = end_.load();
    }
    if (options_.progress) options_.progress(done_, done_);
    return miss_;
  }

  [[nodiscard]] std::int64_t done() const { return done_; }
  [[nodiscard]] std::int64_t gone_back() const { return gone_back_; }

 private:
  static constexpr std::int64_t kBlock = 500;
  static constexpr std::uint64_t kTurn = 23;  ///< Cases of which one is of adapters.

  /// Takes cases until none is left; numbers below that of a known miss are still finished.
  void work(bool reports) {
    while (true) {
      const std::int64_t index = next_++;
      if (index >= end_) return;
      const auto number = static_cast<std::uint64_t>(index);
      Case test;
      std::string wrong;
      try {
        draw(number, test);
      } catch (const std::exception& error) {
        wrong = fmt::format("case {} of seed {} cannot be drawn: {}", number, options_.seed,
                            error.what());
      }
      if (wrong.empty()) wrong = check(test);
      if (options_.world != nullptr && from_first(*options_.world, wrong.empty() ? 0 : 1) != 0) {
        if (wrong.empty()) wrong = "rank 0 has found a miss";
      }
      ++done_;
      if (goes_back(test, options_)) ++gone_back_;
      if (!wrong.empty()) note({.index = index, .test = test, .what = std::move(wrong)});
      if (reports && options_.progress) options_.progress(done_, options_.cases);
    }
  }

  std::string check(const Case& test) {
    const auto checked = [&] { return check_case(test, options_); };
    // What runs adapters is not among the options.
    const bool as_a_whole = options_.backend == Backend::kCuda && is_perft(test.router);
    return as_a_whole ? gpu_.of(test.ranks, checked) : checked();
  }

  void draw(std::uint64_t number, Case& test) const {
    test = make_case(options_.seed, number, options_.ranks, options_.threads, options_.backend);
    test.isa = isa_;
    if (options_.weights) use_weights(test, *options_.weights, options_.backend);
    if (options_.fp8_rows) use_fp8_rows(test, options_.seed, number);
    choose_router(test, number);
  }

  void choose_router(Case& test, std::uint64_t number) const {
    const bool all = options_.router == "all";
    std::string router = all ? router_number(number) : options_.router;
    if (all && number % kTurn == 0) router = "perft";
    if (router.empty()) return;
    if (is_perft(router)) {
      use_perft(test, router, options_.seed, number);
      return;
    }
    use_router(test, router, options_.backend);
    if (all) use_network(test, options_.seed, number, options_.backend);
    test.training = number % 2 == 1;
  }

  void note(Miss miss) {
    const std::lock_guard lock(mutex_);
    end_ = std::min(end_.load(), miss.index);
    if (!miss_ || miss.index < miss_->index) miss_ = std::move(miss);
  }

  VerifyOptions options_;
  GpuTurns gpu_;
  std::vector<CpuIsa> isas_;
  CpuIsa isa_ = CpuIsa::kPortable;
  std::atomic<std::int64_t> next_{0};
  std::atomic<std::int64_t> end_{0};
  std::atomic<std::int64_t> done_{0};
  std::atomic<std::int64_t> gone_back_{0};
  std::mutex mutex_;
  std::optional<Miss> miss_;
};

/// @throws Error{kUnsupported} where nothing of what is asked for has a way back.
void check_pass(const VerifyOptions& options) {
  if (options.pass == Pass::kForward || options.backend == Backend::kCpu) return;
  if (options.device_engine == DeviceEngine::kNcclPairs &&
      std::find(options.ranks.begin(), options.ranks.end(), 1) == options.ranks.end()) {
    fail(ErrorCode::kUnsupported,
         "--pass {}: there is no backward over nccl-pairs, want 1 among --ranks",
         to_string(options.pass));
  }
}

struct Checked {
  std::int64_t cases = 0;
  std::int64_t backward = 0;  ///< Of them.
};

int report(const VerifyOptions& options, std::ostream& out, const Checked& checked,
           const std::optional<Miss>& miss) {
  const bool back = options.pass != Pass::kForward;
  if (!is_first(options)) return miss ? 1 : 0;
  if (options.json) {
    json result{{"cases", checked.cases}, {"holds", !miss}, {"seed", options.seed}};
    if (back) {
      result["pass"] = to_string(options.pass);
      result["backward"] = checked.backward;
    }
    if (miss) {
      result["miss"] = miss->what;
      result["case"] = to_json(miss->test);
    }
    out << result.dump() << '\n';
  } else if (miss) {
    out << "miss: " << miss->what << '\n'
        << "switchyard verify " << (back ? fmt::format("--pass {} ", to_string(options.pass)) : "")
        << "--case '" << to_json(miss->test).dump() << "'\n";
  } else {
    out << fmt::format("{} {} checked against the reference{}: all hold\n", checked.cases,
                       checked.cases == 1 ? "case" : "cases",
                       back ? fmt::format(", {} of them backward", checked.backward) : "");
  }
  return miss ? 1 : 0;
}

}  // namespace

const char* to_string(Pass pass) noexcept {
  switch (pass) {
    case Pass::kForward: return "forward";
    case Pass::kBackward: return "backward";
    case Pass::kBoth: return "both";
  }
  return "?";
}

int run_verify(const VerifyOptions& options, std::ostream& out) {
  require(!options.ranks.empty() && !options.threads.empty(),
          "a list of ranks or threads is empty");
  if (!options.fault.empty()) return run_fault(options, out);
  if (options.soak > 0) return run_soak(options, out);
  check_pass(options);
  require(!options.fp8_rows ||
              (options.backend == Backend::kCuda && options.weights == WeightFormat::kE4M3),
          "rows of fp8 are for the backend cuda and weights of fp8");
  if (!options.case_json.empty()) {
    const Case test = parse_case(options.case_json);
    const ForcedIsa forced(test.isa);
    std::optional<Miss> miss;
    if (options.world != nullptr) {
      require(test.ranks <= options.world->size(), "--case: {} ranks, but there are {} processes",
              test.ranks, options.world->size());
    }
    const bool back = goes_back(test, options);
    if (options.pass != Pass::kForward && !back) {
      fail(
          ErrorCode::kUnsupported,
          "--pass {}: this case has no backward: that is for exact weights on experts' outputs, no "
          "error; on CUDA not over nccl-pairs",
          to_string(options.pass));
    }
    if (std::string wrong = check_case(test, options); !wrong.empty()) {
      miss = Miss{.test = test, .what = std::move(wrong)};
    }
    return report(options, out, {.cases = 1, .backward = back ? 1 : 0}, miss);
  }
  Loop loop(options);
  const std::optional<Miss> miss = loop.run();
  return report(options, out, {.cases = loop.done(), .backward = loop.gone_back()}, miss);
}

}  // namespace switchyard::verify
