// The noise of routers on a CPU. Bound by the generator: ten rounds for four numbers.
#include "core/row_ops.hpp"
#include "route/cpu/tokens.hpp"
#include "route/draws.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

void jitter(const NoiseArgs& args) {
  const Draws draws(args.request, Draws::For::kJitter);
  const std::int64_t hidden = args.jittered.shape[1];
  routing::for_tokens(args.execution.pool, args.jittered.shape[0], [&] {
    return [&](std::int64_t token) {
      float* out = args.jittered.row(token);
      if (args.tokens.data != nullptr) {
        row_ops::widen(args.tokens.dtype, args.tokens.row(token), out, hidden);
      }
      for (std::int64_t first = 0; first < hidden; first += 4) {
        const PhiloxWords words = draws.words(token, static_cast<std::uint32_t>(first / 4));
        for (std::int64_t h = first; h < std::min(first + 4, hidden); ++h) {
          const float u = unit_of(words.word[h % 4]);
          out[h] *= std::fma(args.noise.size, 2.0F * u - 1.0F, 1.0F);
        }
      }
    };
  });
}

void add_normal(const NoiseArgs& args) {
  const Draws draws(args.request, Draws::For::kLogits);
  const std::int64_t num_experts = args.logits.shape[1];
  routing::for_tokens(args.execution.pool, args.logits.shape[0], [&] {
    return [&](std::int64_t token) {
      float* logits = args.logits.row(token);
      for (std::int64_t first = 0; first < num_experts; first += 4) {
        const PhiloxWords words = draws.words(token, static_cast<std::uint32_t>(first / 4));
        for (std::int64_t e = first; e < std::min(first + 4, num_experts); ++e) {
          const std::uint32_t* pair = &words.word[e % 4 / 2 * 2];
          logits[e] =
              std::fma(args.noise.size,
                       normal_of(pair[0], pair[1], static_cast<std::uint32_t>(e % 2)), logits[e]);
        }
      }
    };
  });
}

std::optional<std::string> reject(const NoiseArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run(const NoiseArgs& args) {
  if (args.noise.kind == RouterNoise::Kind::kInputJitter) jitter(args);
  if (args.noise.kind == RouterNoise::Kind::kLogits) add_normal(args);
}

}  // namespace

const Implementation<NoiseArgs> kNoiseCpu{"cpu.philox", reject, run};

}  // namespace switchyard
