#pragma once

// What bench/kernels/grouped_gemm_bench.cu measures with: random inputs on the device, loads of the
// experts, calls that take turns with dense cuBLAS, checks against double, and result lines.

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "core/half.hpp"
#include "experts/gpu/grouped/gemm.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard {
namespace {

inline int repeats = 50;

__global__ void fill_random(__nv_bfloat16* p, std::size_t n, float scale, unsigned seed) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += step) {
    // Sum of three uniforms: about normal.
    float sum = 0;
    for (unsigned k = 0; k < 3; ++k) {
      unsigned v = static_cast<unsigned>(i * 3 + k) * 2654435761U + seed +
                   static_cast<unsigned>(i >> 30) * 977U;
      v ^= v >> 16;
      v *= 0x85ebca6bU;
      v ^= v >> 13;
      v *= 0xc2b2ae35U;
      v ^= v >> 16;
      sum += static_cast<float>(v & 0xffffU) / 32768.0F - 1.0F;
    }
    p[i] = __float2bfloat16(sum * scale);
  }
}

__global__ void checksum_rows(const unsigned* p, std::size_t n, unsigned long long* out) {
  unsigned long long sum = 0;
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += step) {
    sum += static_cast<unsigned long long>(p[i]) * (2 * (i % 1000003) + 1);
  }
  atomicAdd(out, sum);
}

using Bf16Array = DeviceArray<__nv_bfloat16>;

void randomize(const Bf16Array& a, double scale, unsigned seed) {
  fill_random<<<2048, 256>>>(a.data(), a.size(), static_cast<float>(scale), seed);
}

/// Median microseconds of each call. Calls take turns, so that all meet the same clocks, and the L2
/// cache is flushed before each sample.
std::vector<double> median_us(const std::vector<std::function<void()>>& calls) {
  static DeviceArray<char> flush(std::size_t{192} << 20);
  cudaEvent_t begin{};
  cudaEvent_t end{};
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<std::vector<double>> samples(calls.size());
  for (int i = -3; i < repeats; ++i) {
    for (std::size_t call = 0; call < calls.size(); ++call) {
      flush.fill(i & 1);
      cudaEventRecord(begin);
      calls[call]();
      cudaEventRecord(end);
      SWITCHYARD_CUDA(cudaEventSynchronize(end));
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      if (i >= 0) samples[call].push_back(ms * 1e3);
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::vector<double> medians;
  for (auto& s : samples) {
    std::nth_element(s.begin(), s.begin() + repeats / 2, s.end());
    medians.push_back(s[static_cast<std::size_t>(repeats / 2)]);
  }
  return medians;
}

/// Dense cuBLAS bf16 8192^3: the ceiling that goes with every measurement.
class Dense {
 public:
  Dense() : a_(kCount), b_(kCount), c_(kCount) {
    randomize(a_, 1, 1);
    randomize(b_, 1, 2);
    cublasCreate(&handle_);
  }
  void operator()() const {
    const float one = 1;
    const float zero = 0;
    cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, kN, kN, kN, &one, a_.data(), CUDA_R_16BF, kN,
                 b_.data(), CUDA_R_16BF, kN, &zero, c_.data(), CUDA_R_16BF, kN, CUBLAS_COMPUTE_32F,
                 CUBLAS_GEMM_DEFAULT);
  }
  static double tflops(double us) { return 2.0 * kN * kN * kN / us / 1e6; }

 private:
  static constexpr int kN = 8192;
  static constexpr std::size_t kCount = std::size_t{kN} * kN;
  Bf16Array a_, b_, c_;
  cublasHandle_t handle_{};
};

const Dense& dense() {
  static const Dense instance;
  return instance;
}

/// A figure that something is asked of; without a name, none.
struct Bar {
  std::string_view name;
  double value = 0;
  double target = 0;
  bool at_most = false;

  /// What a result line says of it behind its other keys.
  [[nodiscard]] std::string json() const {
    if (name.empty()) return {};
    return fmt::format(R"(, "bar": "{}", "value": {:.3f}, "target": {}, "holds": {})", name, value,
                       target, at_most ? value <= target : value >= target);
  }
};

/// One result line; the limit is the time that dense cuBLAS's rate would give.
void print_result(std::string_view stage, std::string_view name, double zipf, double us,
                  double flop, double dense_rate, std::string_view bar, double value,
                  double target) {
  const double limit_us = flop / dense_rate / 1e6;
  fmt::print(
      "{{\"stage\": \"{}\", \"case\": {{\"shape\": \"{}\", \"zipf\": {}, \"dtype\": \"bf16\"}}, "
      "\"median_us\": {:.1f}, \"limit_us\": {:.1f}, \"limit_by\": \"dense cuBLAS 8192^3\", "
      "\"share\": {:.3f}{}}}\n",
      stage, name, zipf, us, limit_us, limit_us / us, Bar{bar, value, target}.json());
}

/// Tokens of each expert: K distinct ones by Gumbel top-k over Zipf weights, or all alike.
std::vector<std::vector<std::int32_t>> assign(int experts, int tokens, int top_k, double zipf) {
  std::mt19937 random(7);
  std::vector<double> log_weight(static_cast<std::size_t>(experts));
  std::vector<int> order(static_cast<std::size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (int e = 0; e < experts; ++e) log_weight[order[e]] = -zipf * std::log(e + 1.0);
  std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(experts));
  std::uniform_real_distribution<double> uniform(1e-12, 1);
  std::vector<std::pair<double, int>> score(static_cast<std::size_t>(experts));
  for (int t = 0; t < tokens; ++t) {
    if (zipf == 0) {  // forced uniform: every expert the same number, spread over the tokens
      for (int k = 0; k < top_k; ++k) {
        rows[(static_cast<std::int64_t>(t) * top_k + k) % experts].push_back(t);
      }
      continue;
    }
    for (int e = 0; e < experts; ++e) {
      score[e] = {-(log_weight[e] - std::log(-std::log(uniform(random)))), e};
    }
    std::partial_sort(score.begin(), score.begin() + top_k, score.end());
    for (int k = 0; k < top_k; ++k) rows[score[k].second].push_back(t);
  }
  return rows;
}

struct Rows {
  std::vector<std::int32_t> begin, rows, token;
  explicit Rows(const std::vector<std::vector<std::int32_t>>& per_expert) : begin{0} {
    for (const auto& tokens : per_expert) {
      rows.push_back(static_cast<std::int32_t>(tokens.size()));
      token.insert(token.end(), tokens.begin(), tokens.end());
      begin.push_back(static_cast<std::int32_t>(token.size()));
    }
  }
};

double dot(const __nv_bfloat16* a, const __nv_bfloat16* b, std::size_t n) {
  std::vector<std::uint16_t> x(n), y(n);
  SWITCHYARD_CUDA(cudaMemcpy(x.data(), a, n * 2, cudaMemcpyDeviceToHost));
  SWITCHYARD_CUDA(cudaMemcpy(y.data(), b, n * 2, cudaMemcpyDeviceToHost));
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += double{bf16_to_float(x[i])} * bf16_to_float(y[i]);
  return sum;
}

double at(const Bf16Array& a, std::size_t i) {
  std::uint16_t bits = 0;
  SWITCHYARD_CUDA(cudaMemcpy(&bits, a.data() + i, 2, cudaMemcpyDeviceToHost));
  return bf16_to_float(bits);
}

unsigned long long checksum(const Bf16Array& a) {
  const DeviceArray<unsigned long long> sum(1);
  SWITCHYARD_CUDA(cudaMemset(sum.data(), 0, 8));
  checksum_rows<<<1024, 256>>>(reinterpret_cast<const unsigned*>(a.data()), a.size() / 2,
                               sum.data());
  unsigned long long host = 0;
  SWITCHYARD_CUDA(cudaMemcpy(&host, sum.data(), 8, cudaMemcpyDeviceToHost));
  return host;
}

/// Largest error of `samples` random outputs of y = W[e] a.
struct Worst {
  double error = 0;
  void add(double want, double got) {
    const double e = std::abs(want - got) / (0.05 + std::abs(want));
    error = std::isnan(e) ? 1e9 : std::max(error, e);
  }
};

}  // namespace
}  // namespace switchyard
