// Faults of one rank, through the whole layer: who leaves with what, when, and whether the next
// call is right.
#include "verify/fault.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <thread>

#include "comm/ranks/faults.hpp"
#include "comm/ranks/on_ranks.hpp"
#include "core/check.hpp"
#include "reference/reference.hpp"
#include "switchyard/device.hpp"
#include "switchyard/layer.hpp"
#include "verify/problem.hpp"

namespace switchyard::verify {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// What one rank met.
struct RankStory {
  std::string error{};       ///< What ended its call; empty: nothing did.
  milliseconds duration{0};  ///< From the fault to the error.
  std::string wrong{};       ///< What broke the promise.
};

/// A layer that every rank takes part in: 4 experts a rank, 3 of them for each token.
Case fault_case(std::uint64_t seed, int ranks) {
  Case test;
  test.seed = seed;
  test.layer.router = {.num_experts = 4 * ranks, .kind = TopKRouter{.top_k = 3}};
  test.layer.experts = {.num_experts = 4 * ranks, .hidden = 24, .inner = 16};
  test.num_tokens = 16 * ranks;
  test.ranks = ranks;
  return test;
}

/// One rank of a fault: a call that is right, one that fails, recovery, two that are right again.
class FaultyRank {
 public:
  FaultyRank(const Problem& problem, Communicator& inner, Fault fault, milliseconds deadline,
             const VerifyOptions& options)
      : problem_(problem),
        communicator_(make_faulty(inner)),
        fault_(fault),
        deadline_(deadline),
        on_gpu_(options.backend == Backend::kCuda),
        tokens_(encode(problem.test.tokens, rank_tokens())) {
    const milliseconds limit = communicator_->timeout();
    if (on_gpu_) {
      use_gpu_of_rank(communicator_->rank());
      communicator_->set_timeout(deadline);  // that of the kernels, for as long as the layer lives
    }
    layer_.emplace(problem.model,
                   LayerOptions{.backend = options.backend,
                                .max_tokens = num_tokens(),
                                .device_engine = options.device_engine},
                   communicator_.get());
    communicator_->set_timeout(limit);
  }

  RankStory run() {
    RankStory story;
    forward(story, "before the fault");
    communicator_->barrier("fault");
    communicator_->set_timeout(deadline_);
    const bool faulty = communicator_->rank() == communicator_->size() - 1;
    if (faulty && !on_gpu_) communicator_->arm(fault_);
    const Clock::time_point start = Clock::now();
    if (faulty && on_gpu_) fail_on_gpu(story);
    // A rank that has all it needs may notice only in the next exchange.
    for (int call = 0; call < 2 && story.error.empty(); ++call) {
      try {
        forward(story, "during the fault");
      } catch (const std::exception& error) {
        story.error = error.what();
      }
    }
    story.duration = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
    if (story.error.empty()) note(story, "the fault went by unnoticed");
    if (faulty && on_gpu_ && fault_ == Fault::kLate) story.duration -= lateness();
    // The deadline, and as much again for a machine with more ranks than cores.
    if (story.duration > 2 * deadline_ + milliseconds(2000)) {
      note(story, fmt::format("left after {} ms", story.duration.count()));
    }
    communicator_->set_timeout(std::max(deadline_, milliseconds(10000)));
    communicator_->recover();
    forward(story, "after recovery");
    forward(story, "in the second call after recovery");
    return story;
  }

 private:
  [[nodiscard]] milliseconds lateness() const { return deadline_ + milliseconds(500); }

  /// No message passes through the host: the rank itself stays away, comes late, or says why not.
  void fail_on_gpu(RankStory& story) {
    if (fault_ == Fault::kLate) {
      std::this_thread::sleep_for(lateness());
    } else if (fault_ == Fault::kThrow) {
      story.error = "made to fail";
      communicator_->give_up(fmt::format("rank {} was made to fail", communicator_->rank()));
    } else {
      story.error = "stayed away";
    }
  }

  [[nodiscard]] std::int64_t num_tokens() const {
    return problem_.test.num_tokens / problem_.test.ranks;
  }

  [[nodiscard]] std::span<const float> rank_tokens() const {
    const std::int64_t count = num_tokens() * problem_.test.layer.experts.hidden;
    return std::span(problem_.tokens)
        .subspan(static_cast<std::size_t>(communicator_->rank() * count),
                 static_cast<std::size_t>(count));
  }

  static void note(RankStory& story, const std::string& wrong) {
    if (story.wrong.empty()) story.wrong = wrong;
  }

  void forward(RankStory& story, const char* when) {
    const std::int64_t hidden = problem_.test.layer.experts.hidden;
    std::vector<std::byte> out(tokens_.size(), std::byte{0xff});
    RoutingRecord record;
    layer_->forward({.tokens = {tokens_.data(), DType::kF32, num_tokens(), hidden},
                     .out = {out.data(), DType::kF32, num_tokens(), hidden},
                     .request = {.record = &record}});
    const auto expected =
        reference::layer_output(problem_.model, {.ranks = problem_.test.ranks},
                                reference::as_computed(rank_tokens(), DType::kF32),
                                {.expert = record.expert,
                                 .weight = record.weight,
                                 .kept = record.kept,
                                 .top_k = problem_.test.layer.router.top_k()});
    const std::string wrong =
        reference::check_output(expected, hidden, DType::kF32, decode(DType::kF32, out));
    if (!wrong.empty()) note(story, fmt::format("{}: {}", when, wrong));
  }

  const Problem& problem_;
  std::unique_ptr<FaultyCommunicator> communicator_;
  Fault fault_;
  milliseconds deadline_;
  const bool on_gpu_;
  std::vector<std::byte> tokens_;
  std::optional<MoeLayer> layer_;
};

/// What every rank met; with processes on rank 0 only, elsewhere nothing.
std::vector<RankStory> run_stories(const VerifyOptions& options, int ranks, milliseconds timeout,
                                   const std::function<RankStory(Communicator&)>& run) {
  Communicator* group = nullptr;
  if (options.world != nullptr) group = options.first_ranks(ranks);
  std::vector<RankStory> stories;
  if (options.world == nullptr || group != nullptr) {
    const auto said = on_ranks(
        {.num_ranks = ranks, .world = group, .timeout = timeout},
        [&](Communicator& communicator) -> nlohmann::json {
          const RankStory own = run(communicator);
          return {{"error", own.error}, {"ms", own.duration.count()}, {"wrong", own.wrong}};
        });
    for (const nlohmann::json& story : said) {
      stories.push_back({.error = story.at("error"),
                         .duration = milliseconds(story.at("ms").get<std::int64_t>()),
                         .wrong = story.at("wrong")});
    }
  }
  if (options.world != nullptr) options.world->barrier("end of a fault");
  return stories;
}

}  // namespace

int run_fault(const VerifyOptions& options, std::ostream& out) {
  const std::optional<Fault> fault = fault_named(options.fault);
  require(fault.has_value(), "--fault {}: want absent, late, throw or corrupt-count",
          options.fault);
  const bool on_gpu = options.backend == Backend::kCuda;
  if (on_gpu && *fault == Fault::kCorruptCount) {
    fail(ErrorCode::kUnsupported,
         "--fault corrupt-count changes a message on the host, and between GPUs there is none: "
         "want absent, late or throw");
  }
  // To make a layer on GPUs within its deadline takes longer.
  const milliseconds deadline = std::min(options.timeout, milliseconds(on_gpu ? 4000 : 1000));
  nlohmann::json runs = nlohmann::json::array();
  bool holds = true;
  bool any = false;
  for (const int ranks : options.ranks) {
    if (ranks < 2) continue;
    any = true;
    const Problem problem = make_problem(fault_case(options.seed, ranks));
    const auto run = [&](Communicator& communicator) {
      return FaultyRank(problem, communicator, *fault, deadline, options).run();
    };
    const std::vector<RankStory> stories =
        run_stories(options, ranks, std::max(options.timeout, milliseconds(10000)), run);
    if (stories.empty()) continue;  // another process reports
    for (int rank = 0; rank < ranks; ++rank) {
      const RankStory& story = stories[static_cast<std::size_t>(rank)];
      holds = holds && story.wrong.empty();
      runs.push_back({{"ranks", ranks},
                      {"rank", rank},
                      {"holds", story.wrong.empty()},
                      {"wrong", story.wrong},
                      {"error", story.error},
                      {"ms", story.duration.count()}});
      if (options.json) continue;
      out << fmt::format("{} of {} ranks, rank {} left after {} ms: {}\n", options.fault, ranks,
                         rank, story.duration.count(), story.error);
      if (!story.wrong.empty()) out << "miss: " << story.wrong << '\n';
    }
  }
  require(any, "--fault {}: needs --ranks of at least 2", options.fault);
  if (options.world != nullptr && options.world->rank() != 0) return 0;
  if (options.json) {
    out << nlohmann::json{{"fault", options.fault}, {"holds", holds}, {"runs", runs}}.dump()
        << '\n';
  } else {
    out << (holds ? "the next exchange is right on every rank\n" : "");
  }
  return holds ? 0 : 1;
}

}  // namespace switchyard::verify
