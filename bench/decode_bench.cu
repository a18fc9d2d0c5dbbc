// Few-token experts against the memory's floor: every case checked in double on the device, then
// timed as a graph over layers with weights of their own, so that the L2 is cold. The floor is the
// bytes of the experts hit over the read rate measured in the same run. Where experts have too many
// rows for the streaming kernels (worth_streaming()) the case is the grouped GEMM and combine.
//
//   decode_bench [name=regex] [variants] [grid] [check] [arena=GiB]

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "bench/device_read.hpp"
#include "experts/decode.hpp"
#include "experts/grouped_gemm.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/error.hpp"

namespace {

using namespace switchyard;

#define CHECK_CUDA(call)                                                           \
  do {                                                                             \
    const cudaError_t status_ = (call);                                            \
    if (status_ != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

struct Case {
  const char* name;
  DType dtype;
  int experts, hidden, inner, top_k, tokens;
  double zipf;  // 0: uniform
  double bar;   // of the floor; <0: none
};

struct HostPlan {
  std::vector<int> expert_begin, expert_rows, row_token, token_begin, token_row;
  std::vector<float> row_weight;
  int hits = 0, most = 0;
};

HostPlan make_plan(const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> log_weight(c.experts);
  std::vector<int> order(c.experts);
  for (int e = 0; e < c.experts; ++e) order[e] = e;
  std::shuffle(order.begin(), order.end(), random);
  for (int e = 0; e < c.experts; ++e) log_weight[order[e]] = -c.zipf * std::log(e + 1.0);
  std::vector<std::vector<std::pair<int, float>>> of(c.experts);
  std::uniform_real_distribution<double> uniform(1e-12, 1.0);
  for (int t = 0; t < c.tokens; ++t) {
    std::vector<std::pair<double, int>> score(c.experts);
    for (int e = 0; e < c.experts; ++e) {
      score[e] = {log_weight[e] - std::log(-std::log(uniform(random))), e};
    }
    std::partial_sort(score.begin(), score.begin() + c.top_k, score.end(), std::greater<>());
    for (int k = 0; k < c.top_k; ++k) {
      of[score[k].second].push_back({t, static_cast<float>(uniform(random))});
    }
  }
  HostPlan plan;
  std::vector<std::vector<int>> rows(c.tokens);
  for (int e = 0; e < c.experts; ++e) {
    plan.expert_begin.push_back(static_cast<int>(plan.row_token.size()));
    plan.expert_rows.push_back(static_cast<int>(of[e].size()));
    plan.hits += of[e].empty() ? 0 : 1;
    plan.most = std::max(plan.most, static_cast<int>(of[e].size()));
    for (const auto& [token, weight] : of[e]) {
      rows[token].push_back(static_cast<int>(plan.row_token.size()));
      plan.row_token.push_back(token);
      plan.row_weight.push_back(weight);
    }
  }
  plan.expert_begin.push_back(static_cast<int>(plan.row_token.size()));
  for (const auto& r : rows) {
    plan.token_begin.push_back(static_cast<int>(plan.token_row.size()));
    plan.token_row.insert(plan.token_row.end(), r.begin(), r.end());
  }
  plan.token_begin.push_back(static_cast<int>(plan.token_row.size()));
  return plan;
}

__device__ float noise(std::uint64_t i, unsigned seed) {
  std::uint32_t v =
      static_cast<std::uint32_t>(i) * 2654435761U ^ static_cast<std::uint32_t>(i >> 32) * 40503U;
  v += seed;
  v ^= v >> 16;
  v *= 0x85ebca6bU;
  v ^= v >> 13;
  v *= 0xc2b2ae35U;
  v ^= v >> 16;
  return (static_cast<float>(v >> 8) / 8388608.0F - 1.0F) * 1.7320508F;
}
template <typename T>
__device__ T as(float v);
template <>
__device__ float as<float>(float v) {
  return v;
}
template <>
__device__ __nv_bfloat16 as<__nv_bfloat16>(float v) {
  return __float2bfloat16(v);
}
template <>
__device__ __half as<__half>(float v) {
  return __float2half(v);
}
template <typename T>
__device__ double wide(T v) {
  return static_cast<double>(static_cast<float>(v));
}

template <typename T>
__global__ void fill(T* p, std::size_t n, float scale, unsigned seed) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    p[i] = as<T>(noise(i, seed) * scale);
  }
}

// The reference: doubles, one thread an output, the intermediate rounded as the kernels do.
template <typename T>
__global__ void reference_up(const T* x, const T* w13, const int* row_token, const int* expert_of,
                             double* act, int hidden, int inner) {
  const int row = blockIdx.y;
  const int j = blockIdx.x * 8 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (j >= inner) return;
  const T* gate = w13 + (static_cast<std::size_t>(expert_of[row]) * 2 * inner + j) * hidden;
  const T* up = gate + static_cast<std::size_t>(inner) * hidden;
  const T* xr = x + static_cast<std::size_t>(row_token[row]) * hidden;
  double g = 0, u = 0;
  for (int k = lane; k < hidden; k += 32) {
    g += wide(gate[k]) * wide(xr[k]);
    u += wide(up[k]) * wide(xr[k]);
  }
  for (int o = 16; o > 0; o /= 2) {
    g += __shfl_xor_sync(~0U, g, o);
    u += __shfl_xor_sync(~0U, u, o);
  }
  if (lane == 0) act[static_cast<std::size_t>(row) * inner + j] = g / (1.0 + exp(-g)) * u;
}
template <typename T>
__global__ void reference_down(const double* act, const T* w2, const int* begin, const int* rows,
                               const int* expert_of, const float* weight, double* out, int hidden,
                               int inner) {
  const int token = blockIdx.y;
  const int h = blockIdx.x * 8 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (h >= hidden) return;
  double sum = 0;
  for (int i = begin[token]; i < begin[token + 1]; ++i) {
    const int row = rows[i];
    const T* w = w2 + (static_cast<std::size_t>(expert_of[row]) * hidden + h) * inner;
    double y = 0;
    for (int k = lane; k < inner; k += 32)
      y += wide(w[k]) * act[static_cast<std::size_t>(row) * inner + k];
    for (int o = 16; o > 0; o /= 2) y += __shfl_xor_sync(~0U, y, o);
    sum += weight[row] * y;
  }
  if (lane == 0) out[static_cast<std::size_t>(token) * hidden + h] = sum;
}

template <typename V>
V* upload(const std::vector<V>& v) {
  V* p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, std::max<std::size_t>(v.size(), 1) * sizeof(V)));
  CHECK_CUDA(cudaMemcpy(p, v.data(), v.size() * sizeof(V), cudaMemcpyHostToDevice));
  return p;
}

struct Layer {
  HostPlan plan;
  DecodeParams params;
  std::vector<void*> owned;
};

struct Variant {
  std::string name;
  std::function<void(DecodeParams&, DecodeShape&)> change;
  std::function<void(const DecodeParams&, cudaStream_t)> launch = nullptr;  // null: decode
};

// What the grouped GEMM needs beside the layer's own memory.
void* grouped_rows = nullptr;       // [max_rows, H]
void* grouped_workspace = nullptr;  // zeroed

/// Both products by the grouped GEMM, then combine; `parts`: 1 up, 2 down, 4 combine.
void launch_grouped(const DecodeParams& p, GroupedPath path, int parts, cudaStream_t stream) {
  const GroupedGemmParams params{.x = p.x,
                                 .row_token = p.row_token,
                                 .w13 = p.w13,
                                 .act = p.act,
                                 .w2 = p.w2,
                                 .y = grouped_rows,
                                 .expert_begin = p.expert_begin,
                                 .expert_rows = p.expert_rows,
                                 .workspace = grouped_workspace,
                                 .num_experts = p.num_experts,
                                 .max_rows = p.max_rows,
                                 .num_tokens = p.num_tokens,
                                 .hidden = p.hidden,
                                 .inner = p.inner,
                                 .dtype = p.dtype,
                                 .path = path};
  if ((parts & 1) != 0) launch_gate_up(params, stream);
  if ((parts & 2) != 0) launch_down(params, stream);
  if ((parts & 4) == 0) return;
  // The plan's arrays are only read.
  const auto list = [](const std::int32_t* data, std::int64_t size) {
    return Vector<std::int32_t>{const_cast<std::int32_t*>(data), {size}};
  };
  PlanView plan;
  plan.num_experts = p.num_experts;
  plan.expert_begin = list(p.expert_begin, p.num_experts + 1);
  plan.expert_rows = list(p.expert_rows, p.num_experts);
  plan.row_token = list(p.row_token, p.max_rows);
  plan.row_weight = {const_cast<float*>(p.row_weight), {p.max_rows}};
  plan.token_begin = list(p.token_begin, p.num_tokens + 1);
  plan.token_row = list(p.token_row, p.max_assignments);
  combine(
      {.rows = {static_cast<const std::byte*>(grouped_rows), p.dtype, p.max_rows, p.hidden},
       .plan = plan,
       .reduced = {.sums = {static_cast<std::byte*>(p.sums), p.sums_dtype, p.num_tokens, p.hidden},
                   .subtree = p.subtree},
       .execution = {.backend = Backend::kCuda, .stream = stream}});
}

void launch_best(const DecodeParams& p, cudaStream_t stream) {
  if (worth_streaming(p, decode_chip())) {
    launch_decode(p, stream);
  } else {
    launch_grouped(p, GroupedPath::kBest, 7, stream);
  }
}

float median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

float time_graph(const std::vector<Layer>& layers, const Variant& variant, cudaStream_t stream,
                 int repeats, DecodeShape* used) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (const Layer& layer : layers) {
    DecodeParams params = layer.params;
    params.plan_is_older = true;
    DecodeChip chip = decode_chip();
    DecodeShape shape = choose_decode(params, chip);
    if (variant.change) {
      variant.change(params, shape);
    }
    if (variant.launch) {
      variant.launch(params, stream);
      continue;
    }
    *used = shape;
    if (!shape.fits) {
      cudaStreamEndCapture(stream, &graph);
      return -1;
    }
    try {
      launch_decode(params, shape, stream);
    } catch (const Error&) {
      cudaStreamEndCapture(stream, &graph);
      cudaGetLastError();
      return -1;
    }
  }
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  CHECK_CUDA(cudaEventCreate(&a));
  CHECK_CUDA(cudaEventCreate(&b));
  std::vector<float> times;
  for (int i = 0; i < repeats + 3; ++i) {
    CHECK_CUDA(cudaEventRecord(a, stream));
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaEventRecord(b, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, a, b));
    if (i >= 3) times.push_back(ms * 1e3F / static_cast<float>(layers.size()));
  }
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  return median(times);
}

unsigned char* arena = nullptr;
std::size_t arena_bytes = 0;
double read_rate = 0;

template <typename T>
void check_layer(const Case& c, const Layer& layer, cudaStream_t stream, char* verdict) {
  const int rows = static_cast<int>(layer.plan.row_token.size());
  std::vector<int> expert_of(rows);
  for (int e = 0; e < c.experts; ++e) {
    for (int r = 0; r < layer.plan.expert_rows[e]; ++r)
      expert_of[layer.plan.expert_begin[e] + r] = e;
  }
  int* of = upload(expert_of);
  double *act, *out;
  CHECK_CUDA(cudaMalloc(&act, sizeof(double) * rows * c.inner));
  CHECK_CUDA(cudaMalloc(&out, sizeof(double) * c.tokens * c.hidden));
  const DecodeParams& p = layer.params;
  reference_up<T><<<dim3((c.inner + 7) / 8, rows), 256, 0, stream>>>(
      static_cast<const T*>(p.x), static_cast<const T*>(p.w13), p.row_token, of, act, c.hidden,
      c.inner);
  reference_down<T><<<dim3((c.hidden + 7) / 8, c.tokens), 256, 0, stream>>>(
      act, static_cast<const T*>(p.w2), p.token_begin, p.token_row, of, p.row_weight, out, c.hidden,
      c.inner);
  const std::size_t n = static_cast<std::size_t>(c.tokens) * c.hidden;
  std::vector<double> want(n);
  std::vector<float> got(n), again(n);
  DecodeParams run = p;
  for (int repeat = 0; repeat < 4; ++repeat) {
    CHECK_CUDA(cudaMemsetAsync(p.sums, 0xff, n * 4, stream));
    CHECK_CUDA(cudaMemsetAsync(p.act, 0xff, sizeof(T) * rows * c.inner, stream));
    run.plan_is_older = repeat % 2 == 1;
    launch_best(run, stream);
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(
        cudaMemcpy(repeat == 0 ? got.data() : again.data(), p.sums, n * 4, cudaMemcpyDeviceToHost));
    if (repeat > 0 && std::memcmp(got.data(), again.data(), n * 4) != 0) {
      std::snprintf(verdict, 64, "BITS DIFFER");
      return;
    }
  }
  CHECK_CUDA(cudaMemcpy(want.data(), out, n * 8, cudaMemcpyDeviceToHost));
  double error = 0, norm = 0, worst = 0;
  std::size_t outside = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double d = std::abs(got[i] - want[i]);
    error += d * d;
    norm += want[i] * want[i];
    const double share = d / (1e-5 + 1e-3 * std::abs(want[i]));
    worst = std::isnan(d) ? 1e30 : std::max(worst, share);
    if (!(share <= 1)) ++outside;
  }
  CHECK_CUDA(cudaFree(act));
  CHECK_CUDA(cudaFree(out));
  CHECK_CUDA(cudaFree(of));
  const double relative = std::sqrt(error / norm);
  const double limit = c.dtype == DType::kF32 ? 2e-6 : c.dtype == DType::kBF16 ? 6e-3 : 1e-3;
  const bool ok = relative < limit && (c.dtype != DType::kF32 || outside == 0);
  std::snprintf(verdict, 64, "%s %.1e/%.2f", ok ? "ok" : "WRONG", relative, worst);
}

// One JSON object a case, for results/.
void print_line(const Case& c, double us, double floor, bool right) {
  const bool small = std::strcmp(c.name, "G6") == 0;  // its bar allows 4 us beside the floor
  const double target = small ? 1.25 + 4 / floor : c.bar;
  std::printf(
      "{\"stage\": \"decode\", \"case\": {\"name\": \"%s\", \"E\": %d, \"K\": %d, \"H\": %d, "
      "\"I\": %d, \"T\": %d, \"dtype\": \"%s\", \"zipf\": %.1f}, \"median_us\": %.2f, "
      "\"limit_us\": %.2f, \"limit_by\": \"memory\", \"share\": %.3f, \"right\": %s",
      c.name, c.experts, c.top_k, c.hidden, c.inner, c.tokens, to_string(c.dtype), c.zipf, us,
      floor, floor / us, right ? "true" : "false");
  if (target > 0) {
    std::printf(", \"bar\": \"%.2s\", \"value\": %.3f, \"target\": %.3f, \"holds\": %s", c.name,
                us / floor, target, right && us / floor <= target ? "true" : "false");
  }
  std::printf("}\n");
}

template <typename T>
void run_case(const Case& c, std::vector<Variant> variants, cudaStream_t stream, bool time_it) {
  const std::size_t w13 = std::size_t{2} * c.experts * c.inner * c.hidden;
  const std::size_t w2 = std::size_t{1} * c.experts * c.inner * c.hidden;
  const std::size_t layer_bytes = (w13 + w2) * sizeof(T);
  const int num_layers = static_cast<int>(
      std::clamp<std::size_t>(arena_bytes / layer_bytes, 1, c.tokens <= 2 ? 24 : 10));
  std::vector<Layer> layers(num_layers);
  T* x = nullptr;
  CHECK_CUDA(cudaMalloc(&x, sizeof(T) * c.tokens * c.hidden));
  fill<<<64, 256, 0, stream>>>(x, std::size_t{1} * c.tokens * c.hidden, 1.0F, 99U);
  void *act, *out;
  const std::size_t max_rows = static_cast<std::size_t>(c.tokens) * c.top_k;
  CHECK_CUDA(cudaMalloc(&act, sizeof(T) * max_rows * c.inner));
  CHECK_CUDA(cudaMalloc(&out, 4 * std::size_t{1} * c.tokens * c.hidden));
  CHECK_CUDA(cudaMalloc(&grouped_rows, sizeof(T) * max_rows * c.hidden));
  CHECK_CUDA(cudaMalloc(&grouped_workspace, grouped_gemm_workspace_bytes()));
  CHECK_CUDA(cudaMemset(grouped_workspace, 0, grouped_gemm_workspace_bytes()));
  double bytes = 0;
  int most = 0;
  for (int l = 0; l < num_layers; ++l) {
    T* weights = reinterpret_cast<T*>(arena + l * layer_bytes);
    fill<<<2048, 256, 0, stream>>>(weights, w13, 1.0F / std::sqrt(static_cast<float>(c.hidden)),
                                   7U * l + 1);
    fill<<<2048, 256, 0, stream>>>(weights + w13, w2, 1.0F / std::sqrt(static_cast<float>(c.inner)),
                                   7U * l + 2);
    Layer& layer = layers[l];
    layer.plan = make_plan(c, 131 * l + c.tokens);
    DecodeParams& p = layer.params;
    p.x = x;
    p.w13 = weights;
    p.w2 = weights + w13;
    p.act = act;
    p.sums = out;
    int* ints[5] = {upload(layer.plan.expert_begin), upload(layer.plan.expert_rows),
                    upload(layer.plan.row_token), upload(layer.plan.token_begin),
                    upload(layer.plan.token_row)};
    float* row_weight = upload(layer.plan.row_weight);
    layer.owned.assign(ints, ints + 5);
    layer.owned.push_back(row_weight);
    p.expert_begin = ints[0];
    p.expert_rows = ints[1];
    p.row_token = ints[2];
    p.token_begin = ints[3];
    p.token_row = ints[4];
    p.row_weight = row_weight;
    p.sums_dtype = DType::kF32;
    p.subtree = {{c.experts, 8}, 0, 8};
    p.num_experts = c.experts;
    p.num_tokens = c.tokens;
    p.max_rows = p.max_assignments = static_cast<std::int64_t>(max_rows);
    p.hidden = c.hidden;
    p.inner = c.inner;
    p.dtype = c.dtype;
    bytes += static_cast<double>(layer.plan.hits) * 3 * c.inner * c.hidden * sizeof(T) / num_layers;
    most = std::max(most, layer.plan.most);
  }
  const bool streamed = worth_streaming(layers.front().params, decode_chip());
  if (!streamed) variants.front().launch = launch_best;
  if (variants.size() > 1 && c.dtype == DType::kF32) {
    const auto grouped = [](GroupedPath path, int parts) {
      return [path, parts](const DecodeParams& p, cudaStream_t s) {
        launch_grouped(p, path, parts, s);
      };
    };
    if (!streamed) variants.push_back({"streaming", nullptr, nullptr});
    variants.push_back({"grouped", nullptr, grouped(GroupedPath::kBest, 7)});
    variants.push_back({"its up", nullptr, grouped(GroupedPath::kBest, 1)});
    variants.push_back({"its down", nullptr, grouped(GroupedPath::kBest, 2)});
    variants.push_back({"its combine", nullptr, grouped(GroupedPath::kBest, 4)});
    variants.push_back({"grouped sm80", nullptr, grouped(GroupedPath::kSm80, 7)});
  }
  char verdict[64] = "";
  check_layer<T>(c, layers.back(), stream, verdict);
  CHECK_CUDA(cudaGetLastError());
  const double floor = bytes / read_rate * 1e6;
  std::printf("%-22s T%-4d L%-2d %-22s most %-3d floor %8.1f |", c.name, c.tokens, num_layers,
              verdict, most, floor);
  float first_us = 0;
  if (time_it) {
    for (const Variant& variant : variants) {
      DecodeShape shape;
      const float us = time_graph(layers, variant, stream,
                                  variants.size() > 12 ? 9
                                  : bytes > 2e9        ? 30
                                                       : 51,
                                  &shape);
      if (us < 0) continue;
      const double share = shape.down.num_blocks == 0 ? 2.0 / 3
                           : shape.up.num_blocks == 0 ? 1.0 / 3
                                                      : 1;
      std::printf(" %s %.1f (%.3f)", variant.name.c_str(), us, us / (floor * share));
      if (&variant == &variants.front()) {
        first_us = us;
        std::printf(" [up %dt %dx%d/%d, down %dt %dx%d/%d]", shape.up.tiles, shape.up.num_stages,
                    shape.up.stage_bytes, shape.up.piece_bytes, shape.down.tiles,
                    shape.down.num_stages, shape.down.stage_bytes, shape.down.piece_bytes);
        if (c.bar > 0) std::printf(" bar %.2f %s", c.bar, us / floor <= c.bar ? "met" : "MISSED");
      }
    }
  }
  std::printf("\n");
  if (first_us > 0) print_line(c, first_us, floor, std::strncmp(verdict, "ok", 2) == 0);
  std::fflush(stdout);
  for (Layer& layer : layers) {
    for (void* p : layer.owned) cudaFree(p);
  }
  for (void* p : {static_cast<void*>(x), act, out, grouped_rows, grouped_workspace}) cudaFree(p);
}

void measure_read(cudaStream_t stream) {
  unsigned* out = nullptr;
  CHECK_CUDA(cudaMalloc(&out, 4));
  cudaEvent_t a, b;
  CHECK_CUDA(cudaEventCreate(&a));
  CHECK_CUDA(cudaEventCreate(&b));
  const std::size_t bytes = std::size_t{8} << 30;
  for (const bench::ReadShape shape : bench::kReadShapes) {
    std::vector<float> times;
    for (int i = 0; i < 9; ++i) {
      CHECK_CUDA(cudaEventRecord(a, stream));
      bench::launch_read(arena, static_cast<std::int64_t>(bytes), out, shape, stream);
      CHECK_CUDA(cudaEventRecord(b, stream));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, a, b));
      times.push_back(ms);
    }
    const double rate = static_cast<double>(bytes) / (median(times) * 1e-3);
    read_rate = std::max(read_rate, rate);
    std::printf("read %dx%d: %.3f TB/s\n", shape.blocks, shape.threads, rate * 1e-12);
  }
  cudaFree(out);
}

constexpr DType kBF = DType::kBF16;
constexpr DType kF = DType::kF32;
const Case kCases[] = {
    {"G4", kBF, 256, 7168, 256, 8, 1, 0, 1.25},
    {"G4", kBF, 256, 7168, 256, 8, 2, 0, 0},
    {"G4", kBF, 256, 7168, 256, 8, 4, 0, 0},
    {"G4", kBF, 256, 7168, 256, 8, 8, 0, 1.12},
    {"G4", kBF, 256, 7168, 256, 8, 16, 0, 0},
    {"G4", kBF, 256, 7168, 256, 8, 32, 0, 1.08},
    {"G4-zipf", kBF, 256, 7168, 256, 8, 32, 1, 0},
    {"G5", kBF, 256, 7168, 2048, 8, 1, 0, 1.10},
    {"G5", kBF, 256, 7168, 2048, 8, 4, 0, 1.10},
    {"G5", kBF, 256, 7168, 2048, 8, 16, 0, 1.10},
    {"G6", kBF, 128, 2048, 768, 8, 1, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 4, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 8, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 16, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 32, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 64, 0, 0},
    {"f16", DType::kF16, 128, 2048, 768, 8, 8, 0, 0},
    {"G7", kF, 256, 7168, 256, 8, 1, 0, 1.4},
    {"G7", kF, 256, 7168, 256, 8, 2, 0, 1.4},
    {"G7", kF, 256, 7168, 256, 8, 4, 0, 1.25},
    {"G7", kF, 256, 7168, 256, 8, 8, 0, 1.15},
    {"G7", kF, 256, 7168, 256, 8, 16, 0, 1.15},
    {"G7", kF, 256, 7168, 256, 8, 32, 0, 1.15},
    {"G7-6144", kF, 8, 8192, 6144, 2, 32, 0, 1.15},
    {"G7-6144", kF, 8, 8192, 6144, 2, 64, 0, 0},
    {"G7-6144", kF, 8, 8192, 6144, 2, 128, 0, 1.15},
    {"G7-6144", kF, 8, 8192, 6144, 2, 512, 0, 0},
    {"G7-16384", kF, 8, 8192, 16384, 2, 32, 0, 1.15},
    {"G7-16384", kF, 8, 8192, 16384, 2, 128, 0, 1.15},
    {"G7-6144-zipf", kF, 8, 8192, 6144, 2, 128, 1, 0},
};

}  // namespace

int main(int argc, char** argv) {
  std::string pattern = ".*";
  bool with_variants = false;
  bool with_grid = false;
  bool time_it = true;
  std::size_t arena_most = 96;  // at least 8: what the read rate is measured with
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "name=", 5) == 0) pattern = argv[i] + 5;
    if (std::strcmp(argv[i], "variants") == 0) with_variants = true;
    if (std::strcmp(argv[i], "grid") == 0) with_grid = true;
    if (std::strcmp(argv[i], "check") == 0) time_it = false;
    if (std::strncmp(argv[i], "arena=", 6) == 0)
      arena_most = std::strtoull(argv[i] + 6, nullptr, 10);
  }
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  std::size_t free_bytes = 0, total = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total));
  arena_bytes = std::min(free_bytes - (std::size_t{4} << 30), arena_most << 30);
  CHECK_CUDA(cudaMalloc(&arena, arena_bytes));
  fill<<<2048, 256, 0, stream>>>(reinterpret_cast<float*>(arena), (std::size_t{8} << 30) / 4, 1.0F,
                                 5U);
  measure_read(stream);
  std::vector<Variant> variants = {{"", nullptr}};
  if (with_variants) {
    variants.push_back({"lead3", [](DecodeParams&, DecodeShape& s) {
                          s.up.lead_stages = 3;
                          s.down.lead_stages = 3;
                        }});
    variants.push_back({"lead2x", [](DecodeParams&, DecodeShape& s) {
                          s.up.lead_stages = 2 * s.up.num_stages;
                          s.down.lead_stages = 2 * s.down.num_stages;
                        }});
    variants.push_back({"lead0", [](DecodeParams&, DecodeShape& s) {
                          s.up.lead_stages = 1 << 20;
                          s.down.lead_stages = 1 << 20;
                        }});
    variants.push_back(
        {"late-plan", [](DecodeParams& p, DecodeShape&) { p.plan_is_older = false; }});
    variants.push_back({"solo", [](DecodeParams& p, DecodeShape& s) {
                          DecodeChip chip = decode_chip();
                          chip.shared_bytes_per_sm = 2 * chip.shared_bytes_per_block + 2048;
                          s = choose_decode(p, chip);
                        }});
    variants.push_back({"portable", [](DecodeParams& p, DecodeShape& s) {
                          DecodeChip chip = decode_chip();
                          chip.hopper = false;
                          s = choose_decode(p, chip);
                          p.path = DecodePath::kPortable;
                        }});
    variants.push_back({"1tile", [](DecodeParams& p, DecodeShape& s) {
                          p.batch_invariant = true;
                          s = choose_decode(p, decode_chip());
                        }});
  }
  if (with_grid) {
    // Each kernel alone, over tiles, pieces and rings: what the memory gives.
    variants.clear();
    variants.push_back({"", nullptr});
    for (const bool up : {true, false}) {
      for (const int tiles : {1, 2, 4, 8}) {
        for (const int piece : {256, 512, 1024, 2048}) {
          for (const int ring : {100, 200, 101, 201}) {
            const bool by_item = ring % 2 == 1;
            if (by_item && up) continue;
            char name[64];
            std::snprintf(name, sizeof(name), "\n   %s %dt/%d/%dK", up ? "up" : "down", tiles,
                          piece, ring);
            variants.push_back(
                {name, [=](DecodeParams& p, DecodeShape& s) {
                   DecodeKernelShape& k = up ? s.up : s.down;
                   const std::int64_t row_bytes = (up ? p.hidden : p.inner) * size_of(p.dtype);
                   const int most =
                       static_cast<int>((p.hidden + s.down.num_blocks - 1) / s.down.num_blocks);
                   const int split = (most + 16 * tiles - 1) / (16 * tiles);
                   const int rows = up ? 16 * tiles : (most + split - 1) / split;
                   k.tiles = tiles;
                   k.by_item = by_item;
                   k.piece_bytes = piece;
                   const int tokens = std::min<int>(
                       64, 1 + static_cast<int>(1.3 * static_cast<double>(p.max_rows) /
                                                std::min<double>(p.num_experts, p.max_rows)));
                   k.stage_bytes = std::max(
                       rows * piece + tokens * (piece | 64),
                       rows * std::max(64, piece / 8) + 64 * (std::max(64, piece / 8) | 64));
                   k.stage_bytes = (k.stage_bytes + 127) / 128 * 128;
                   k.num_stages = std::min(24, ring / 2 * 2 * 1024 / k.stage_bytes);
                   s.fits = k.num_stages >= 2 && piece <= row_bytes &&
                            (tiles <= 2 || ring > 150 || !up) && !(by_item && tiles == 8) &&
                            (up || tiles == 1 || 16 * tiles < 2 * most);
                   (up ? s.down : s.up).num_blocks = 0;
                 }});
          }
        }
      }
    }
  }
  const std::regex wanted(pattern);
  for (const Case& c : kCases) {
    const std::string name = std::string(c.name) + "-T" + std::to_string(c.tokens);
    if (!std::regex_match(name, wanted)) continue;
    if (c.dtype == kBF) {
      run_case<__nv_bfloat16>(c, variants, stream, time_it);
    } else if (c.dtype == DType::kF16) {
      run_case<__half>(c, variants, stream, time_it);
    } else {
      run_case<float>(c, variants, stream, time_it);
    }
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  return 0;
}
