// Many exchanges on the same objects. Tokens, weights and experts' factors are small whole numbers,
// so that every type on the wire carries them and every sum is exact, in whatever order.
#include "verify/soak.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>

#include "comm/on_ranks.hpp"
#include "core/check.hpp"
#include "core/half.hpp"
#include "switchyard/expert_parallel.hpp"
#include "verify/random.hpp"

namespace switchyard::verify {
namespace {

constexpr int kShapes = 24;
/// A page here and there is the allocator's, not a leak of each exchange.
constexpr std::int64_t kGrowth = 4 << 20;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

ExpertParallelConfig shape_of(int index) {
  constexpr std::int32_t kExperts[] = {1, 2, 5, 8, 16, 64};
  constexpr std::int32_t kTopK[] = {1, 2, 3, 8};
  constexpr std::int64_t kHidden[] = {8, 33, 64, 257};
  constexpr std::int64_t kTokens[] = {1, 3, 16, 40};
  constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  const std::int32_t experts = kExperts[index % 6];
  return {.num_experts = experts,
          .top_k = std::min(experts, kTopK[index / 6]),
          .hidden = kHidden[(index + index / 6) % 4],
          .max_tokens = kTokens[(index + index / 4) % 4],
          .dtype = kTypes[index % 3],
          .combine_wire = kTypes[(index + index / 3) % 3]};
}

float factor_of(std::int32_t expert) { return static_cast<float>(1 + expert % 3); }

/// Of this process, in bytes.
std::int64_t resident_memory() {
  std::int64_t all = 0;
  std::int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * sysconf(_SC_PAGE_SIZE);
}

class SoakingRank {
 public:
  SoakingRank(std::uint64_t seed, Communicator& communicator)
      : seed_(seed), communicator_(communicator) {
    for (int shape = 0; shape < kShapes; ++shape) {
      exchanges_.emplace_back(communicator, shape_of(shape));
    }
  }

  nlohmann::json run(std::int64_t count) {
    std::int64_t before = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      if (i == count / 10) before = resident_memory();
      const std::string wrong = exchange(i);
      if (!wrong.empty()) {
        // The others need not wait for what will not come.
        communicator_.give_up(wrong);
        return {{"wrong", fmt::format("exchange {}: {}", i, wrong)}, {"before", 0}, {"after", 0}};
      }
    }
    communicator_.barrier("end of the exchanges");
    return {{"wrong", ""}, {"before", before}, {"after", resident_memory()}};
  }

 private:
  std::string exchange(std::int64_t index) {
    const auto shape = static_cast<int>(index % kShapes);
    const ExpertParallelConfig config = shape_of(shape);
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

}  // namespace

int run_soak(const VerifyOptions& options, std::ostream& out) {
  const int ranks = options.world != nullptr ? options.world->size() : options.ranks.back();
  const auto said =
      on_ranks({.num_ranks = ranks, .world = options.world, .timeout = options.timeout},
               [&](Communicator& communicator) {
                 return SoakingRank(options.seed, communicator).run(options.soak);
               });
  if (said.empty()) return 0;  // another process reports
  std::string wrong;
  std::int64_t before = 0;
  std::int64_t after = 0;
  std::int64_t growth = 0;
  for (const nlohmann::json& rank : said) {
    if (wrong.empty()) wrong = rank.at("wrong");
    before = std::max(before, rank.at("before").get<std::int64_t>());
    after = std::max(after, rank.at("after").get<std::int64_t>());
    growth = std::max(growth,
                      rank.at("after").get<std::int64_t>() - rank.at("before").get<std::int64_t>());
  }
  if (wrong.empty() && growth > kGrowth)
    wrong = fmt::format("memory has grown by {} bytes", growth);
  if (options.json) {
    out << nlohmann::json{{"soak", options.soak},   {"ranks", ranks}, {"shapes", kShapes},
                          {"holds", wrong.empty()}, {"wrong", wrong}, {"bytes_before", before},
                          {"bytes_after", after}}
               .dump()
        << '\n';
  } else if (!wrong.empty()) {
    out << "miss: " << wrong << '\n';
  } else {
    out << fmt::format(
        "{} exchanges over {} shapes on {} ranks: every bit is right; memory {:.1f} MB after a "
        "tenth, {:.1f} MB at the end\n",
        options.soak, kShapes, ranks, static_cast<double>(before) * 1e-6,
        static_cast<double>(after) * 1e-6);
  }
  return wrong.empty() ? 0 : 1;
}

}  // namespace switchyard::verify
