// The noise of routers on a CPU. Bound by the generator: ten rounds for four numbers.
#include <algorithm>
#include <array>
#include <cmath>

#include "core/cpu/multi_isa.hpp"
#include "core/row_ops.hpp"
#include "route/cpu/tokens.hpp"
#include "route/draws.hpp"
#include "route/implementations.hpp"
#include "route/normal.hpp"

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

using Normals = std::array<float, 4>;

__attribute__((always_inline)) inline void make_normals(const PhiloxWords& words, Normals& out) {
  for (std::size_t i = 0; i < 4; i += 2) {
    const NormalPair pair = normal_pair_of(words.word[i], words.word[i + 1]);
    out[i] = pair.first;
    out[i + 1] = pair.second;
  }
}

#ifdef SWITCHYARD_X86
/// In a third of the time: std::fma is an instruction, not a call.
SWITCHYARD_TARGET("avx2,fma") void normals_by_fma(const PhiloxWords& words, Normals& out) {
  make_normals(words, out);
}
#endif

void normals_of(const PhiloxWords& words, Normals& out) {
#ifdef SWITCHYARD_X86
  if (has_avx2()) return normals_by_fma(words, out);
#endif
  make_normals(words, out);
}

/// visit(token, expert, its normal number) of all logits [T, E].
void for_normals(const RouteRequest& request, std::array<std::int64_t, 2> shape, ThreadPool* pool,
                 const auto& visit) {
  const Draws draws(request, Draws::For::kLogits);
  routing::for_tokens(pool, shape[0], [&] {
    return [&](std::int64_t token) {
      for (std::int64_t first = 0; first < shape[1]; first += 4) {
        Normals normals;
        normals_of(draws.words(token, static_cast<std::uint32_t>(first / 4)), normals);
        for (std::int64_t e = first; e < std::min(first + 4, shape[1]); ++e) {
          visit(token, e, normals[static_cast<std::size_t>(e - first)]);
        }
      }
    };
  });
}

/// log(1 + exp(x)), also where exp(x) is too large.
float softplus(float x) { return std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x))); }

void add_normal(const NoiseArgs& args) {
  const bool learned = args.noise.kind == RouterNoise::Kind::kLearned;
  for_normals(args.request, args.logits.shape, args.execution.pool,
              [&](std::int64_t token, std::int64_t e, float normal) {
                float size = args.noise.size;
                if (learned) size += softplus(args.noise_logits.row(token)[e]);
                float& logit = args.logits.row(token)[e];
                logit = std::fma(size, normal, logit);
              });
}

template <typename Args>
std::optional<std::string> reject(const Args& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run(const NoiseArgs& args) {
  if (args.noise.kind == RouterNoise::Kind::kInputJitter) jitter(args);
  if (args.noise.is_on_logits()) add_normal(args);
}

void run_backward(const NoiseBackwardArgs& args) {
  if (!args.request.training) {
    std::fill_n(args.dnoise_logits.data, args.dnoise_logits.size(), 0.0F);
    return;
  }
  for_normals(args.request, args.dlogits.shape, args.execution.pool,
              [&](std::int64_t token, std::int64_t e, float normal) {
                args.dnoise_logits.row(token)[e] =
                    args.dlogits.row(token)[e] * normal * sigmoid(args.noise_logits.row(token)[e]);
              });
}

}  // namespace

const Implementation<NoiseArgs> kNoiseCpu{"cpu.philox", reject<NoiseArgs>, run};
const Implementation<NoiseBackwardArgs> kNoiseBackwardCpu{"cpu.philox", reject<NoiseBackwardArgs>,
                                                          run_backward};

}  // namespace switchyard
