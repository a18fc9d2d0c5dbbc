#include "models/cpu/rope.hpp"

#include <algorithm>
#include <cmath>

#include "core/cpu/vector_loops.hpp"
#include "models/cpu/rms_norm.hpp"

namespace switchyard::models {
namespace {

/// Turns one head by its angles, or with -sine back.
SWITCHYARD_INLINE inline void turn(const float* x, const float* cosine, const float* sine,
                                   float sign, std::int64_t half, float* out) {
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i], s = sign * sine[i];
    out[i] = a * cosine[i] - b * s;
    out[half + i] = b * cosine[i] + a * s;
  }
}

/// A part of a row that is normalised together.
struct Piece {
  std::int64_t first, size;
  std::int64_t weight;  ///< Where its weights begin, those of q before those of k.
};

std::vector<Piece> pieces_of(QkNorm norm, std::int64_t heads, std::int64_t kv_heads,
                             std::int64_t dim) {
  std::vector<Piece> pieces;
  if (norm == QkNorm::kWhole) {
    pieces = {{0, heads * dim, 0}, {heads * dim, kv_heads * dim, heads * dim}};
  }
  for (std::int64_t n = 0; norm == QkNorm::kHead && n < heads + kv_heads; ++n) {
    pieces.push_back({n * dim, dim, n < heads ? 0 : dim});
  }
  return pieces;
}

/// Weights of q, then of k.
std::vector<float> joined(const QueryKeyRows::Args& args, std::int64_t q, std::int64_t k) {
  std::vector<float> all;
  if (args.q_weight == nullptr) return all;
  all.assign(args.q_weight, args.q_weight + q);
  all.insert(all.end(), args.k_weight, args.k_weight + k);
  return all;
}

}  // namespace

QueryKeyRows::QueryKeyRows(const ModelConfig& config)
    : heads_(config.heads),
      kv_heads_(config.kv_heads),
      dim_(config.head_dim),
      norm_(config.qk_norm),
      epsilon_(config.norm_epsilon) {
  for (std::int64_t position = 0; position < config.sequence; ++position) {
    for (std::int64_t i = 0; i < dim_ / 2; ++i) {
      const double frequency =
          std::pow(double{config.rope_theta}, -2.0 * static_cast<double>(i) / double(dim_));
      const double angle = static_cast<double>(position) * frequency;
      cosine_.push_back(static_cast<float>(std::cos(angle)));
      sine_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
}

void QueryKeyRows::forward(const Args& args) const {
  const std::vector<Piece> pieces = pieces_of(norm_, heads_, kv_heads_, dim_);
  const std::int64_t of_q = norm_ == QkNorm::kWhole ? heads_ * dim_ : dim_;
  const std::int64_t of_k = norm_ == QkNorm::kWhole ? kv_heads_ * dim_ : dim_;
  const std::vector<float> weight = joined(args, of_q, of_k);
  constexpr std::int64_t kRows = SharedSums::kRowsPerTask;
  const std::int64_t rows = args.batch * args.positions, half = dim_ / 2;
  parallel_for(args.pool, (rows + kRows - 1) / kRows, [&](std::int64_t task, int) {
    std::vector<float> normed(static_cast<std::size_t>(qk_cols()));
    const std::int64_t end = std::min(rows, (task + 1) * kRows);
    cpu::vectorized([&]() SWITCHYARD_INLINE {
      for (std::int64_t row = task * kRows; row < end; ++row) {
        const float* x = args.qkv + row * qkv_cols();
        for (std::size_t i = 0; i < pieces.size(); ++i) {
          const Piece& piece = pieces[i];
          const float scale = norm_scale(x + piece.first, piece.size, epsilon_);
          if (args.scales != nullptr) args.scales[row * scales() + std::int64_t(i)] = scale;
          const float* const w = weight.data() + piece.weight;
          float* const out = normed.data() + piece.first;
          for (std::int64_t j = 0; j < piece.size; ++j) out[j] = x[piece.first + j] * scale * w[j];
        }
        if (!pieces.empty()) x = normed.data();
        const std::int64_t angle = (args.first + row % args.positions) * half;
        for (std::int64_t n = 0; n < heads_ + kv_heads_; ++n) {
          turn(x + n * dim_, cosine_.data() + angle, sine_.data() + angle, 1.0F, half,
               args.turned + row * qk_cols() + n * dim_);
        }
      }
    });
  });
}

void QueryKeyRows::backward(const BackwardArgs& args) const {
  const Args& forward = args.forward;
  const std::vector<Piece> pieces = pieces_of(norm_, heads_, kv_heads_, dim_);
  const std::int64_t of_q = norm_ == QkNorm::kWhole ? heads_ * dim_ : dim_;
  const std::int64_t of_k = norm_ == QkNorm::kWhole ? kv_heads_ * dim_ : dim_;
  const std::vector<float> weight = joined(forward, of_q, of_k);
  const std::int64_t rows = forward.batch * forward.positions, half = dim_ / 2;
  SharedSums sums(rows, of_q + of_k);
  parallel_for(forward.pool, sums.tasks(), [&](std::int64_t task, int) {
    std::vector<float> dnormed(static_cast<std::size_t>(qk_cols())), weighted(dnormed.size());
    float* const dweight = sums.of_task(task);
    const std::int64_t end = std::min(rows, (task + 1) * SharedSums::kRowsPerTask);
    cpu::vectorized([&]() SWITCHYARD_INLINE {
      for (std::int64_t row = task * SharedSums::kRowsPerTask; row < end; ++row) {
        const float* const x = forward.qkv + row * qkv_cols();
        float* const dx = args.dqkv + row * qkv_cols();
        const std::int64_t angle = (forward.first + row % forward.positions) * half;
        for (std::int64_t n = 0; n < heads_ + kv_heads_; ++n) {
          turn(dx + n * dim_, cosine_.data() + angle, sine_.data() + angle, -1.0F, half,
               dnormed.data() + n * dim_);
        }
        for (std::int64_t j = 0; j < qk_cols(); ++j)
          dx[j] = pieces.empty() ? dnormed[size_t(j)] : 0;
        for (std::size_t i = 0; i < pieces.size(); ++i) {
          const Piece& piece = pieces[i];
          norm_row_backward(x + piece.first, weight.data() + piece.weight,
                            forward.scales[row * scales() + std::int64_t(i)], piece.size,
                            dnormed.data() + piece.first, dx + piece.first, dweight + piece.weight,
                            weighted.data());
        }
      }
    });
  });
  if (pieces.empty()) return;
  std::vector<float> dweight(static_cast<std::size_t>(of_q + of_k));
  sums.write(dweight.data(), false);
  const auto give = [&](const float* from, std::int64_t size, float* to) {
    if (to == nullptr) return;
    for (std::int64_t i = 0; i < size; ++i) to[i] = args.accumulate ? to[i] + from[i] : from[i];
  };
  give(dweight.data(), of_q, args.dq_weight);
  give(dweight.data() + of_q, of_k, args.dk_weight);
}

}  // namespace switchyard::models
