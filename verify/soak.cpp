// Many exchanges on the same objects. Tokens, weights and experts' factors are small whole numbers,
// so that every type on the wire carries them and every sum is exact, in whatever order.
#include "verify/soak.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>

#include "comm/ranks/on_ranks.hpp"
#include "core/check.hpp"
#include "core/half.hpp"
#include "switchyard/dispatch.hpp"
#include "testkit/random.hpp"
#include "verify/soak_shapes.hpp"
#ifdef SWITCHYARD_WITH_CUDA
#include "verify/device_soak.hpp"
#endif

namespace switchyard::verify {
namespace {

/// A page here and there is the allocator's, not a leak of each exchange.
constexpr std::int64_t kGrowth = 4 << 20;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

class SoakingRank {
 public:
  SoakingRank(std::uint64_t seed, Communicator& communicator)
      : seed_(seed), communicator_(communicator) {
    for (int shape = 0; shape < kSoakShapes; ++shape) {
      exchanges_.emplace_back(communicator, soak_shape(shape, 1));
    }
  }

  SoakStory run(std::int64_t count) {
    SoakStory story;
    for (std::int64_t i = 0; i < count; ++i) {
      if (i == count / 10) story.before = resident_memory();
      const std::string wrong = exchange(i);
      if (!wrong.empty()) {
        // The others need not wait for what will not come.
        communicator_.give_up(wrong);
        return {.wrong = fmt::format("exchange {}: {}", i, wrong)};
      }
    }
    communicator_.barrier("end of the exchanges");
    story.after = resident_memory();
    return story;
  }

 private:
  std::string exchange(std::int64_t index) {
    const auto shape = static_cast<int>(index % kSoakShapes);
    const ExpertParallelConfig config = soak_shape(shape, 1);
    make_tokens(index, config);
    const std::int64_t hidden = config.hidden;
    ExpertParallel& exchange = exchanges_[at(shape)];
    const Received received =
        exchange.dispatch({.x = {x_.data(), config.dtype, num_tokens_, hidden},
                           .expert = {expert_.data(), {num_tokens_, config.top_k}},
                           .weight = {weight_.data(), {num_tokens_, config.top_k}}});
    const std::int64_t rows = received.x.rows;
    partials_.resize(at(rows * hidden * size_of(config.combine_wire)));
    for (std::int64_t n = 0; n < rows; ++n) {
      float factor = 0;
      for (std::int64_t k = 0; k < config.top_k; ++k) {
        const std::int32_t expert = received.expert.row(n)[k];
        if (expert >= 0) factor += received.weight.row(n)[k] * factor_of(expert);
      }
      for (std::int64_t h = 0; h < hidden; ++h) {
        store_float(partials_.data(), config.combine_wire, n * hidden + h,
                    factor * load_float(received.x.row(n), config.dtype, h));
      }
    }
    out_.assign(at(num_tokens_ * hidden), -1.0F);
    exchange.combine(
        {.partials = {partials_.data(), config.combine_wire, rows, hidden},
         .out = {reinterpret_cast<std::byte*>(out_.data()), DType::kF32, num_tokens_, hidden}});
    return compare(config);
  }

  void make_tokens(std::int64_t index, const ExpertParallelConfig& config) {
    Random random(seed_, static_cast<std::uint64_t>(index) * 64 +
                             static_cast<std::uint64_t>(communicator_.rank()));
    num_tokens_ = random.between(0, config.max_tokens);
    x_.resize(at(num_tokens_ * config.hidden * size_of(config.dtype)));
    for (std::int64_t i = 0; i < num_tokens_ * config.hidden; ++i) {
      store_float(x_.data(), config.dtype, i, static_cast<float>(random.between(-4, 4)));
    }
    expert_.resize(at(num_tokens_ * config.top_k));
    weight_.resize(expert_.size());
    for (std::size_t i = 0; i < expert_.size(); ++i) {
      expert_[i] = static_cast<std::int32_t>(random.between(-1, config.num_experts - 1));
      weight_[i] = static_cast<float>(random.between(1, 2));
    }
  }

  [[nodiscard]] std::string compare(const ExpertParallelConfig& config) const {
    for (std::int64_t t = 0; t < num_tokens_; ++t) {
      float factor = 0;
      for (std::int64_t k = 0; k < config.top_k; ++k) {
        const std::size_t i = at(t * config.top_k + k);
        if (expert_[i] >= 0) factor += weight_[i] * factor_of(expert_[i]);
      }
      for (std::int64_t h = 0; h < config.hidden; ++h) {
        const std::int64_t i = t * config.hidden + h;
        const float want = factor * load_float(x_.data(), config.dtype, i);
        if (out_[at(i)] != want) {
          return fmt::format("rank {}, token {}, element {} is {}, want {}", communicator_.rank(),
                             t, h, out_[at(i)], want);
        }
      }
    }
    return {};
  }

  const std::uint64_t seed_;
  Communicator& communicator_;
  std::vector<ExpertParallel> exchanges_;
  std::int64_t num_tokens_ = 0;
  std::vector<std::byte> x_, partials_;
  std::vector<std::int32_t> expert_;
  std::vector<float> weight_, out_;
};

SoakStory soak(const VerifyOptions& options, Communicator& communicator) {
#ifdef SWITCHYARD_WITH_CUDA
  if (options.backend == Backend::kCuda) return soak_on_device(options, communicator);
#endif
  return SoakingRank(options.seed, communicator).run(options.soak);
}

nlohmann::json to_json(const SoakStory& story) {
  return {{"wrong", story.wrong},
          {"before", story.before},
          {"after", story.after},
          {"device_before", story.device_before},
          {"device_after", story.device_after},
          {"checksum", story.checksum}};
}

/// All ranks' as one: the first error, the most memory and the most growth.
struct SoakSum {
  SoakStory story{};
  std::int64_t growth = 0;
  std::int64_t device_growth = 0;

  void add(const nlohmann::json& rank) {
    const auto number = [&](const char* name) { return rank.at(name).get<std::int64_t>(); };
    if (story.wrong.empty()) story.wrong = rank.at("wrong");
    story.before = std::max(story.before, number("before"));
    story.after = std::max(story.after, number("after"));
    story.device_before = std::max(story.device_before, number("device_before"));
    story.device_after = std::max(story.device_after, number("device_after"));
    story.checksum += rank.at("checksum").get<std::uint64_t>();
    growth = std::max(growth, number("after") - number("before"));
    device_growth = std::max(device_growth, number("device_after") - number("device_before"));
  }
};

double megabytes(std::int64_t bytes) { return static_cast<double>(bytes) * 1e-6; }

}  // namespace

std::int64_t resident_memory() {
  std::int64_t all = 0;
  std::int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * sysconf(_SC_PAGE_SIZE);
}

int run_soak(const VerifyOptions& options, std::ostream& out) {
  const int ranks = options.world != nullptr ? options.world->size() : options.ranks.back();
  const auto said =
      on_ranks({.num_ranks = ranks, .world = options.world, .timeout = options.timeout},
               [&](Communicator& communicator) { return to_json(soak(options, communicator)); });
  if (said.empty()) return 0;  // another process reports
  SoakSum sum;
  for (const nlohmann::json& rank : said) sum.add(rank);
  SoakStory& story = sum.story;
  const std::int64_t growth = std::max(sum.growth, sum.device_growth);
  if (story.wrong.empty() && growth > kGrowth) {
    story.wrong = fmt::format("memory{} has grown by {} bytes",
                              sum.device_growth == growth ? " of a GPU" : "", growth);
  }
  const bool cuda = options.backend == Backend::kCuda;
  if (options.json) {
    nlohmann::json result{{"soak", options.soak},      {"ranks", ranks},
                          {"shapes", kSoakShapes},     {"holds", story.wrong.empty()},
                          {"wrong", story.wrong},      {"bytes_before", story.before},
                          {"bytes_after", story.after}};
    if (cuda) {
      result["device_bytes_before"] = story.device_before;
      result["device_bytes_after"] = story.device_after;
      result["checksum"] = story.checksum;
    }
    out << result.dump() << '\n';
  } else if (!story.wrong.empty()) {
    out << "miss: " << story.wrong << '\n';
  } else {
    out << fmt::format(
        "{} exchanges over {} shapes on {} ranks: every bit is right; memory {:.1f} MB after a "
        "tenth, {:.1f} MB at the end\n",
        options.soak, kSoakShapes, ranks, megabytes(story.before), megabytes(story.after));
    if (cuda) {
      out << fmt::format(
          "on GPUs: {:.1f} MB in use after a tenth, {:.1f} MB at the end; checksum "
          "{:016x}\n",
          megabytes(story.device_before), megabytes(story.device_after), story.checksum);
    }
  }
  return story.wrong.empty() ? 0 : 1;
}

}  // namespace switchyard::verify
