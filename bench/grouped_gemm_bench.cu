// Times the grouped GEMM by itself: eight contiguous products (the shapes of research on
// torch._grouped_mm), the gathered first product against a plain one, and both products of nine
// published layers; uniform and Zipf(1.0) loads; dense cuBLAS in the same run. Checks random
// outputs against double first. Prints one line a measurement.
//
//   grouped_gemm_bench [products] [gather] [layers] [repeats=50] [variants]
//
// Without a part named it runs all. Lines that begin with '{' are for tools/add_results.py.

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

#include "core/cuda_check.hpp"
#include "core/half.hpp"
#include "experts/grouped_gemm.hpp"

namespace switchyard {
namespace {

int repeats = 50;

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

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t n) : size_(n) {
    SWITCHYARD_CUDA(cudaMalloc(&data_, n * sizeof(T)));
  }
  DeviceArray(const std::vector<T>& v) : DeviceArray(v.size()) {
    SWITCHYARD_CUDA(cudaMemcpy(data_, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  [[nodiscard]] T* get() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  void set_bytes(int byte) { SWITCHYARD_CUDA(cudaMemset(data_, byte, size_ * sizeof(T))); }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

using Bf16Array = DeviceArray<__nv_bfloat16>;

void randomize(const Bf16Array& a, double scale, unsigned seed) {
  fill_random<<<2048, 256>>>(a.get(), a.size(), static_cast<float>(scale), seed);
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
      flush.set_bytes(i & 1);
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
    cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, kN, kN, kN, &one, a_.get(), CUDA_R_16BF, kN,
                 b_.get(), CUDA_R_16BF, kN, &zero, c_.get(), CUDA_R_16BF, kN, CUBLAS_COMPUTE_32F,
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

/// One result line; the limit is the time that dense cuBLAS's rate would give.
void print_result(std::string_view stage, std::string_view name, double zipf, double us,
                  double flop, double dense_rate, std::string_view bar, double value,
                  double target) {
  const double limit_us = flop / dense_rate / 1e6;
  fmt::print(
      "{{\"stage\": \"{}\", \"case\": {{\"shape\": \"{}\", \"zipf\": {}, \"dtype\": \"bf16\"}}, "
      "\"median_us\": {:.1f}, \"limit_us\": {:.1f}, \"limit_by\": \"dense cuBLAS 8192^3\", "
      "\"share\": {:.3f}",
      stage, name, zipf, us, limit_us, limit_us / us);
  if (!bar.empty()) {
    fmt::print(", \"bar\": \"{}\", \"value\": {:.3f}, \"target\": {}, \"holds\": {}", bar, value,
               target, value >= target);
  }
  fmt::print("}}\n");
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
  SWITCHYARD_CUDA(cudaMemcpy(&bits, a.get() + i, 2, cudaMemcpyDeviceToHost));
  return bf16_to_float(bits);
}

unsigned long long checksum(const Bf16Array& a) {
  const DeviceArray<unsigned long long> sum(1);
  SWITCHYARD_CUDA(cudaMemset(sum.get(), 0, 8));
  checksum_rows<<<1024, 256>>>(reinterpret_cast<const unsigned*>(a.get()), a.size() / 2, sum.get());
  unsigned long long host = 0;
  SWITCHYARD_CUDA(cudaMemcpy(&host, sum.get(), 8, cudaMemcpyDeviceToHost));
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

struct Variant {
  const char* name;
  TileShape tile;
  bool dynamic;
  GroupedPath path = GroupedPath::kBest;
};
constexpr Variant kBest[] = {{"auto", TileShape::kAuto, true}};
constexpr Variant kSchedules[] = {{"dynamic", TileShape::kAuto, true},
                                  {"static", TileShape::kAuto, false},
                                  {"sm_80", TileShape::kAuto, true, GroupedPath::kSm80}};
constexpr Variant kTiles[] = {{"cooperative", TileShape::kCooperative, true},
                              {"ping-pong", TileShape::kPingPong, true},
                              {"static", TileShape::kAuto, false},
                              {"sm_80", TileShape::kAuto, true, GroupedPath::kSm80}};

struct Product {
  const char* name;
  int experts, rows, depth, columns, top_k;
};
constexpr Product kProducts[] = {
    {"V3 w13", 32, 32768, 7168, 4096, 8},      {"V3 w2", 32, 32768, 2048, 7168, 8},
    {"Mixtral w13", 8, 16384, 4096, 28672, 2}, {"Mixtral w2", 8, 16384, 14336, 4096, 2},
    {"Qwen3 w13", 128, 65536, 2048, 1536, 8},  {"Qwen3 w2", 128, 65536, 768, 2048, 8},
    {"E32 K1024", 32, 32768, 1024, 8192, 8},   {"E32 N1024", 32, 32768, 4096, 1024, 8}};

template <std::size_t kCount>
void time_products(const Variant (&variants)[kCount]) {
  for (const Product& p : kProducts) {
    const auto experts = static_cast<std::size_t>(p.experts);
    const auto depth = static_cast<std::size_t>(p.depth);
    const auto columns = static_cast<std::size_t>(p.columns);
    const Bf16Array a(p.rows * depth), w(experts * columns * depth);
    Bf16Array y(p.rows * columns);
    randomize(a, 1, 3);
    randomize(w, 1 / std::sqrt(p.depth), 4);
    double uniform_share = 0;
    for (const double zipf : {0.0, 1.0}) {
      const Rows rows(assign(p.experts, p.rows / p.top_k, p.top_k, zipf));
      const DeviceArray<std::int32_t> begin(rows.begin), counts(rows.rows), workspace(64);
      SWITCHYARD_CUDA(cudaMemset(workspace.get(), 0, 256));
      GroupedGemmParams g{.act = a.get(),
                          .w2 = w.get(),
                          .y = y.get(),
                          .expert_begin = begin.get(),
                          .expert_rows = counts.get(),
                          .workspace = workspace.get(),
                          .num_experts = p.experts,
                          .max_rows = p.rows,
                          .hidden = p.columns,
                          .inner = p.depth};
      unsigned long long first_sum = 0;
      std::vector<std::function<void()>> calls = {[] { dense()(); }};
      std::vector<std::string> checks;
      for (const Variant& v : variants) {
        g.tile = v.tile;
        g.dynamic = v.dynamic;
        g.path = v.path;
        y.set_bytes(0xff);
        launch_down(g, nullptr);
        SWITCHYARD_CUDA(cudaDeviceSynchronize());
        std::mt19937 random(5);
        Worst worst;
        for (int i = 0; i < 64; ++i) {
          const std::size_t row = random() % p.rows;
          const std::size_t e =
              std::upper_bound(rows.begin.begin(), rows.begin.end(), row) - rows.begin.begin() - 1;
          const std::size_t n = random() % columns;
          worst.add(dot(a.get() + row * depth, w.get() + (e * columns + n) * depth, depth),
                    at(y, row * columns + n));
        }
        const unsigned long long sum = checksum(y);
        if (first_sum == 0) first_sum = sum;
        checks.push_back(fmt::format("err {:.1e} {}", worst.error,
                                     sum == first_sum ? "same bits" : "OTHER BITS"));
        calls.emplace_back([g] { launch_down(g, nullptr); });
      }
      const std::vector<double> us = median_us(calls);
      const double ceiling = Dense::tflops(us[0]);
      for (std::size_t v = 0; v < kCount; ++v) {
        const double flop = 2.0 * p.rows * p.depth * p.columns;
        const double rate = flop / us[v + 1] / 1e6;
        fmt::print(
            "product {:12} zipf {} {:12} {:8.1f} us {:6.1f} TFLOP/s {:5.1f}% of {:.0f}  {}\n",
            p.name, zipf, variants[v].name, us[v + 1], rate, 100 * rate / ceiling, ceiling,
            checks[v]);
        std::fflush(stdout);
      }
    }
  }
}

struct LayerShape {
  const char* name;
  int experts, top_k, hidden, inner, tokens;
};
constexpr LayerShape kLayers[] = {
    {"Qwen3-30B", 128, 8, 2048, 768, 32768},   {"30B-I256", 256, 16, 4096, 256, 32768},
    {"30B-I512", 128, 8, 4096, 512, 32768},    {"30B-I1024", 64, 4, 4096, 1024, 32768},
    {"OLMoE", 64, 8, 2048, 1024, 32768},       {"7B-I256", 128, 8, 1536, 256, 24576},
    {"Qwen3-235B", 128, 8, 4096, 1536, 16384}, {"Mixtral", 8, 2, 4096, 14336, 8192},
    {"V3-EP8", 32, 1, 7168, 2048, 32768}};

template <std::size_t kCount>
void time_layers(const Variant (&variants)[kCount]) {
  for (const LayerShape& s : kLayers) {
    const auto experts = static_cast<std::size_t>(s.experts);
    const auto hidden = static_cast<std::size_t>(s.hidden);
    const auto inner = static_cast<std::size_t>(s.inner);
    const std::size_t num_rows = static_cast<std::size_t>(s.tokens) * s.top_k;
    const Bf16Array x(s.tokens * hidden), w13(experts * 2 * inner * hidden),
        w2(experts * inner * hidden);
    Bf16Array act(num_rows * inner), y(num_rows * hidden);
    randomize(x, 1, 3);
    randomize(w13, 1 / std::sqrt(s.hidden), 4);
    randomize(w2, 1 / std::sqrt(s.inner), 5);
    for (const double zipf : {0.0, 1.0}) {
      const Rows rows(assign(s.experts, s.tokens, s.top_k, zipf));
      const DeviceArray<std::int32_t> begin(rows.begin), counts(rows.rows), token(rows.token),
          workspace(64);
      SWITCHYARD_CUDA(cudaMemset(workspace.get(), 0, 256));
      GroupedGemmParams g{.x = x.get(),
                          .row_token = token.get(),
                          .w13 = w13.get(),
                          .act = act.get(),
                          .w2 = w2.get(),
                          .y = y.get(),
                          .expert_begin = begin.get(),
                          .expert_rows = counts.get(),
                          .workspace = workspace.get(),
                          .num_experts = s.experts,
                          .max_rows = static_cast<std::int64_t>(num_rows),
                          .num_tokens = s.tokens,
                          .hidden = s.hidden,
                          .inner = s.inner};
      unsigned long long first_sum = 0;
      std::vector<std::function<void()>> calls = {[] { dense()(); }};
      std::vector<std::string> checks;
      for (const Variant& v : variants) {
        g.tile = v.tile;
        g.dynamic = v.dynamic;
        g.path = v.path;
        act.set_bytes(0xff);
        y.set_bytes(0xff);
        launch_gate_up(g, nullptr);
        launch_down(g, nullptr);
        SWITCHYARD_CUDA(cudaDeviceSynchronize());
        std::mt19937 random(5);
        Worst worst;
        for (int i = 0; i < 64; ++i) {
          const std::size_t row = random() % num_rows;
          const std::size_t e =
              std::upper_bound(rows.begin.begin(), rows.begin.end(), row) - rows.begin.begin() - 1;
          const std::size_t j = random() % inner;
          const std::size_t n = random() % hidden;
          const __nv_bfloat16* from = x.get() + rows.token[row] * hidden;
          const double gate = dot(from, w13.get() + (e * 2 * inner + j) * hidden, hidden);
          const double up = dot(from, w13.get() + ((e * 2 + 1) * inner + j) * hidden, hidden);
          worst.add(gate / (1 + std::exp(-gate)) * up, at(act, row * inner + j));
          worst.add(dot(act.get() + row * inner, w2.get() + (e * hidden + n) * inner, inner),
                    at(y, row * hidden + n));
        }
        const unsigned long long sum = checksum(y) + checksum(act);
        if (first_sum == 0) first_sum = sum;
        checks.push_back(fmt::format("err {:.1e} {}", worst.error,
                                     sum == first_sum ? "same bits" : "OTHER BITS"));
        calls.emplace_back([g] { launch_gate_up(g, nullptr); });
        calls.emplace_back([g] { launch_down(g, nullptr); });
      }
      const std::vector<double> us = median_us(calls);
      const double ceiling = Dense::tflops(us[0]);
      const double flop = 2.0 * static_cast<double>(num_rows) * s.hidden * s.inner;
      for (std::size_t v = 0; v < kCount; ++v) {
        const double up = us[2 * v + 1];
        const double down = us[2 * v + 2];
        fmt::print(
            "layer {:10} zipf {} {:12} gate_up {:7.1f} us {:5.1f} | down {:7.1f} us {:5.1f} | both "
            "{:7.1f} us {:5.1f} TFLOP/s {:5.1f}% of {:.0f}  {}\n",
            s.name, zipf, variants[v].name, up, 2 * flop / up / 1e6, down, flop / down / 1e6,
            up + down, 3 * flop / (up + down) / 1e6, 300 * flop / (up + down) / 1e6 / ceiling,
            ceiling, checks[v]);
        if (v == 0) {
          print_result("gemm1+activation", s.name, zipf, up, 2 * flop, ceiling, "", 0, 0);
          print_result("gemm2", s.name, zipf, down, flop, ceiling, "", 0, 0);
        }
        std::fflush(stdout);
      }
    }
  }
}

/// The first product with gathered rows and SwiGLU beside the same product of contiguous rows
/// without activation.
void time_gather() {
  constexpr int kExperts = 128;
  constexpr int kHidden = 2048;
  constexpr int kInner = 768;
  constexpr int kTokens = 32768;
  constexpr int kTopK = 8;
  constexpr std::size_t kRows = std::size_t{kTokens} * kTopK;
  const Rows rows(assign(kExperts, kTokens, kTopK, 0));
  const Bf16Array x(std::size_t{kTokens} * kHidden), packed(kRows * kHidden),
      w13(std::size_t{kExperts} * 2 * kInner * kHidden), act(kRows * kInner),
      plain(kRows * 2 * kInner);
  randomize(x, 1, 3);
  randomize(packed, 1, 6);
  randomize(w13, 1 / std::sqrt(kHidden), 4);
  const DeviceArray<std::int32_t> begin(rows.begin), counts(rows.rows), token(rows.token),
      workspace(std::vector<std::int32_t>(64, 0));
  const GroupedGemmParams gathered{.x = x.get(),
                                   .row_token = token.get(),
                                   .w13 = w13.get(),
                                   .act = act.get(),
                                   .expert_begin = begin.get(),
                                   .expert_rows = counts.get(),
                                   .workspace = workspace.get(),
                                   .num_experts = kExperts,
                                   .max_rows = kRows,
                                   .num_tokens = kTokens,
                                   .hidden = kHidden,
                                   .inner = kInner};
  GroupedGemmParams contiguous = gathered;
  contiguous.act = packed.get();
  contiguous.w2 = w13.get();
  contiguous.y = plain.get();
  contiguous.inner = kHidden;
  contiguous.hidden = 2 * kInner;
  const std::vector<double> us =
      median_us({[] { dense()(); }, [=] { launch_gate_up(gathered, nullptr); },
                 [=] { launch_down(contiguous, nullptr); }});
  const double flop = 4.0 * kRows * kHidden * kInner;
  fmt::print(
      "gathered + SwiGLU {:.1f} us {:.1f} TFLOP/s, contiguous plain {:.1f} us {:.1f} TFLOP/s, "
      "ratio {:.3f}, dense {:.0f}\n",
      us[1], flop / us[1] / 1e6, us[2], flop / us[2] / 1e6, us[2] / us[1], Dense::tflops(us[0]));
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  using namespace switchyard;
  bool products = false;
  bool layers = false;
  bool gather = false;
  bool variants = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    products |= arg == "products";
    layers |= arg == "layers";
    gather |= arg == "gather";
    variants |= arg == "variants";
    if (arg.starts_with("repeats=")) repeats = std::atoi(argv[i] + 8);
  }
  if (!products && !gather && !layers) products = gather = layers = true;
  if (products) variants ? time_products(kSchedules) : time_products(kBest);
  if (gather) time_gather();
  if (layers) variants ? time_layers(kTiles) : time_layers(kBest);
  return 0;
}
