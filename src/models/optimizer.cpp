// AdamW and clipping. Bound by memory: one pass over parameters, gradients and moments, and one
// over the gradients for their norm. Pieces of a fixed size: no bits depend on threads.
#include "switchyard/models/optimizer.hpp"

#include <algorithm>
#include <cmath>

#include "core/check.hpp"
#include "core/cpu/vector_loops.hpp"

namespace switchyard::models {
namespace {

constexpr std::int64_t kPiece = 16 << 10;

/// A part of a tensor that is worked on at once.
struct Piece {
  std::size_t tensor;
  std::int64_t first, size;
};

/// Numbers that the optimiser moves.
std::int64_t learning_size(const ParameterTensor& tensor) {
  return tensor.frozen ? 0 : tensor.size();
}

std::vector<Piece> pieces_of(std::span<const ParameterTensor> tensors) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::int64_t size = learning_size(tensors[i]);
    for (std::int64_t first = 0; first < size; first += kPiece) {
      pieces.push_back({i, first, std::min(kPiece, size - first)});
    }
  }
  return pieces;
}

double sum_of_squares(const float* x, std::int64_t n) {
  double sum = 0;
  cpu::vectorized([&]() SWITCHYARD_INLINE {
    double lanes[cpu::kLanes] = {};
    std::int64_t i = 0;
    for (; i + cpu::kLanes <= n; i += cpu::kLanes) {
      for (std::int64_t j = 0; j < cpu::kLanes; ++j) {
        const double value = x[i + j];
        lanes[j] += value * value;
      }
    }
    for (; i < n; ++i) lanes[0] += double{x[i]} * double{x[i]};
    for (const double lane : lanes) sum += lane;
  });
  return sum;
}

/// Of a step, made in double.
struct Factors {
  float clip, beta1, rest1, beta2, rest2, decay, rate, root, epsilon;
};

struct Numbers {
  float* p;
  const float* g;
  float* m;
  float* v;
  std::int64_t size;
};

void update(const Numbers& n, const Factors& f) {
  cpu::vectorized([&]() SWITCHYARD_INLINE {
    float* const p = n.p;
    float* const m = n.m;
    float* const v = n.v;
    const float* const gradient = n.g;
    for (std::int64_t i = 0; i < n.size; ++i) {
      const float g = gradient[i] * f.clip;
      m[i] = f.beta1 * m[i] + f.rest1 * g;
      v[i] = f.beta2 * v[i] + f.rest2 * g * g;
      p[i] = p[i] * f.decay - f.rate * m[i] / (__builtin_sqrtf(v[i]) * f.root + f.epsilon);
    }
  });
}

}  // namespace

void check(const AdamWConfig& config) {
  require(config.beta1 >= 0 && config.beta1 < 1, "beta1={} is not in 0 to 1", config.beta1);
  require(config.beta2 >= 0 && config.beta2 < 1, "beta2={} is not in 0 to 1", config.beta2);
  require(config.epsilon > 0 && std::isfinite(config.epsilon), "epsilon={} is not positive",
          config.epsilon);
  require(config.weight_decay >= 0 && std::isfinite(config.weight_decay),
          "weight_decay={} is not a number from 0", config.weight_decay);
  require(config.clip >= 0 && std::isfinite(config.clip), "clip={} is not a number from 0",
          config.clip);
}

double gradient_norm(std::span<const ParameterTensor> tensors, ThreadPool* pool) {
  const std::vector<Piece> pieces = pieces_of(tensors);
  std::vector<double> sums(pieces.size());
  parallel_for(pool, std::ssize(pieces), [&](std::int64_t i, int) {
    const Piece& piece = pieces[static_cast<std::size_t>(i)];
    sums[static_cast<std::size_t>(i)] =
        sum_of_squares(tensors[piece.tensor].gradient + piece.first, piece.size);
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return std::sqrt(sum);
}

AdamW::AdamW(std::span<const ParameterTensor> tensors, const AdamWConfig& config)
    : tensors_(tensors.begin(), tensors.end()), config_(config) {
  check(config);
  std::int64_t size = 0;
  for (const ParameterTensor& tensor : tensors_) {
    require(tensor.value != nullptr && tensor.gradient != nullptr, "{} has no gradient",
            tensor.name);
    offsets_.push_back(size);
    size += learning_size(tensor);
  }
  try {
    m_.resize(static_cast<std::size_t>(size));
    v_.resize(static_cast<std::size_t>(size));
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::kOutOfMemory, "cannot allocate {} bytes for the moments of {} parameters",
         8 * size, size);
  }
}

double AdamW::step(double learning_rate, ThreadPool* pool) {
  const double norm = gradient_norm(tensors_, pool);
  if (std::isfinite(norm)) apply(learning_rate, norm, pool);
  return norm;
}

void AdamW::apply(double learning_rate, double norm, ThreadPool* pool) {
  require(std::isfinite(learning_rate) && learning_rate >= 0,
          "the learning rate {} is not a number from 0", learning_rate);
  require(std::isfinite(norm) && norm >= 0, "the norm {} is not a number from 0", norm);
  ++steps_;
  const auto steps = static_cast<double>(steps_);
  const double clip = config_.clip > 0 && norm > config_.clip ? config_.clip / norm : 1;
  const double bias1 = 1 - std::pow(config_.beta1, steps);
  const double bias2 = 1 - std::pow(config_.beta2, steps);
  Factors factors{.clip = static_cast<float>(clip),
                  .beta1 = static_cast<float>(config_.beta1),
                  .rest1 = static_cast<float>(1 - config_.beta1),
                  .beta2 = static_cast<float>(config_.beta2),
                  .rest2 = static_cast<float>(1 - config_.beta2),
                  .decay = 1,
                  .rate = static_cast<float>(learning_rate / bias1),
                  .root = static_cast<float>(1 / std::sqrt(bias2)),
                  .epsilon = static_cast<float>(config_.epsilon)};
  const auto decay = static_cast<float>(1 - learning_rate * config_.weight_decay);
  const std::vector<Piece> pieces = pieces_of(tensors_);
  parallel_for(pool, std::ssize(pieces), [&](std::int64_t i, int) {
    const Piece& piece = pieces[static_cast<std::size_t>(i)];
    const ParameterTensor& tensor = tensors_[piece.tensor];
    const std::int64_t place = offsets_[piece.tensor] + piece.first;
    Factors own = factors;
    if (tensor.decay) own.decay = decay;
    update({.p = tensor.value + piece.first,
            .g = tensor.gradient + piece.first,
            .m = m_.data() + place,
            .v = v_.data() + place,
            .size = piece.size},
           own);
  });
}

std::span<float> AdamW::m(std::size_t index) { return moments(m_, index); }
std::span<float> AdamW::v(std::size_t index) { return moments(v_, index); }

std::span<float> AdamW::moments(std::vector<float>& of, std::size_t index) const {
  const ParameterTensor& tensor = tensors_.at(index);
  if (tensor.frozen) return {};
  return {of.data() + offsets_[index], static_cast<std::size_t>(tensor.size())};
}

}  // namespace switchyard::models
