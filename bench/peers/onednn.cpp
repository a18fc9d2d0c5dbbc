// Per expert hit: gather its rows, one product for gate and up together, silu(gate) * up, one
// product down, weighted add into the output. Products are oneDNN's with weights in its own packed
// layout; everything between them is a loop over the same threads.
#include "bench/peers/onednn.hpp"

#include "core/check.hpp"
#include "switchyard/cpu_isa.hpp"

#if SWITCHYARD_WITH_ONEDNN

#include <omp.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

#include "bench/peers/onednn_products.hpp"
#include "core/half.hpp"

namespace switchyard::bench {
namespace {

using dnnl::memory;

dnnl::cpu_isa limit_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable: return dnnl::cpu_isa::sse41;
    case CpuIsa::kAvx2: return dnnl::cpu_isa::avx2;
    case CpuIsa::kAvx512: return dnnl::cpu_isa::avx512_core;
    case CpuIsa::kAvx512Bf16: return dnnl::cpu_isa::avx512_core_bf16;
    case CpuIsa::kAmxBf16: return dnnl::cpu_isa::avx512_core_amx;
  }
  return dnnl::cpu_isa::all;
}

/// In plain loops that the compiler turns into vectors of what the CPU has: std::exp would not be.
__attribute__((target_clones("avx512f", "avx2", "default"))) void silu_times_up(
    const float* gate, const float* up, float* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = std::min(std::max(-gate[i], -87.0F), 88.0F);
    constexpr float kMagic = 0x1.8p23F;  // adding it rounds to a whole number in the low bits
    const float shifted = x * 1.44269504F + kMagic;
    const float n = shifted - kMagic;
    const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
    float p = 0.0013946446F;
    p = p * r + 0.0083691515F;
    p = p * r + 0.041666262F;
    p = p * r + 0.16666517F;
    p = p * r + 0.5F;
    p = p * r * r + r + 1.0F;
    const std::uint32_t power = (std::bit_cast<std::uint32_t>(shifted) + 127U) << 23;
    out[i] = gate[i] / (1.0F + p * std::bit_cast<float>(power)) * up[i];
  }
}

struct Row {
  std::int32_t token;
  float weight;
};

/// Of each expert.
std::vector<std::vector<Row>> sort_rows(const OnednnLoopArgs& args) {
  std::vector<std::vector<Row>> rows(static_cast<std::size_t>(args.config.num_experts));
  for (std::int64_t t = 0; t < args.expert.shape[0]; ++t) {
    for (std::int64_t k = 0; k < args.expert.shape[1]; ++k) {
      const std::int32_t expert = args.expert.row(t)[k];
      if (expert < 0) continue;
      rows[static_cast<std::size_t>(expert)].push_back(
          {static_cast<std::int32_t>(t), args.weight.row(t)[k]});
    }
  }
  return rows;
}

std::vector<std::int64_t> counts_of(const std::vector<std::vector<Row>>& rows) {
  std::vector<std::int64_t> counts;
  for (const auto& list : rows) counts.push_back(static_cast<std::int64_t>(list.size()));
  return counts;
}

}  // namespace

struct OnednnLoop::State {
  OnednnLoopArgs args;
  std::vector<std::vector<Row>> rows;
  OnednnProducts products;
  std::vector<float> out;

  State(const OnednnLoopArgs& given, memory::format_tag layout)
      : args(given),
        rows(sort_rows(given)),
        products(given, counts_of(rows), layout),
        out(static_cast<std::size_t>(given.tokens.rows * given.tokens.cols)) {}

  [[nodiscard]] DType dtype() const { return args.tokens.dtype; }

  void run() {
    std::fill(out.begin(), out.end(), 0.0F);
    for (std::size_t e = 0; e < rows.size(); ++e) {
      const auto m = static_cast<std::int64_t>(rows[e].size());
      if (m == 0) continue;
      gather(rows[e]);
      products.multiply_first(e, m);
      activate(m);
      products.multiply_second(e, m);
      add_back(rows[e]);
    }
  }

  void gather(const std::vector<Row>& list) {
    const auto count = static_cast<std::int64_t>(list.size());
    const std::int64_t bytes = args.tokens.row_bytes();
#pragma omp parallel for num_threads(args.num_threads) if (count > 4)
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(products.x.data() + i * bytes,
                  args.tokens.row(list[static_cast<std::size_t>(i)].token),
                  static_cast<std::size_t>(bytes));
    }
  }

  void activate(std::int64_t count) {
    const std::int64_t cols = args.config.inner;
#pragma omp parallel for num_threads(args.num_threads)
    for (std::int64_t piece = 0; piece < count * ((cols + 255) / 256); ++piece) {
      const std::int64_t row = piece % count;
      const std::int64_t begin = piece / count * 256;
      const float* gate = products.wide.data() + row * 2 * cols;
      const float* up = gate + cols;
      activate_piece(gate, up, row * cols, begin, std::min(begin + 256, cols));
    }
  }

  void activate_piece(const float* gate, const float* up, std::int64_t out_row, std::int64_t begin,
                      std::int64_t end);

  void add_back(const std::vector<Row>& list) {
    constexpr std::int64_t kBlock = 128;
    const std::int64_t hidden = args.config.hidden;
#pragma omp parallel for num_threads(args.num_threads)
    for (std::int64_t begin = 0; begin < hidden; begin += kBlock) {
      const std::int64_t end = std::min(begin + kBlock, hidden);
      for (std::size_t i = 0; i < list.size(); ++i) {
        float* to = out.data() + list[i].token * hidden;
        const float* y = products.down.data() + static_cast<std::int64_t>(i) * hidden;
        for (std::int64_t j = begin; j < end; ++j) to[j] += list[i].weight * y[j];
      }
    }
  }
};

void OnednnLoop::State::activate_piece(const float* gate, const float* up, std::int64_t out_row,
                                       std::int64_t begin, std::int64_t end) {
  float values[256];
  float* to = dtype() == DType::kF32
                  ? reinterpret_cast<float*>(products.inner.data()) + out_row + begin
                  : values;
  silu_times_up(gate + begin, up + begin, to, end - begin);
  if (dtype() != DType::kBF16) return;
  for (std::int64_t j = begin; j < end; ++j) {
    store_float(products.inner.data(), DType::kBF16, out_row + j, values[j - begin]);
  }
}

std::optional<std::string> OnednnLoop::unavailable(const ExpertConfig& config, DType dtype) {
  if (!config.gated || config.activation != Activation::kSilu || config.bias) {
    return "the loop is for gated silu without biases";
  }
  if (dtype == DType::kF16) return "oneDNN 2.6 has no f16 products on CPUs";
  if (dtype == DType::kBF16 && isa_in_use() < CpuIsa::kAvx512) {
    return "oneDNN 2.6 has no bf16 products below AVX-512";
  }
  return std::nullopt;
}

std::string OnednnLoop::version() {
  const dnnl_version_t* v = dnnl_version();
  return fmt::format("{}.{}.{}", v->major, v->minor, v->patch);
}

OnednnLoop::OnednnLoop(const OnednnLoopArgs& args) {
  omp_set_num_threads(args.num_threads);
  // All that the machine has, also where ours takes less of it, unless that is forced. Refused once
  // something has run: then it holds.
  const CpuIsaChoice choice = isa_choice();
  dnnl::set_max_cpu_isa(limit_of(choice.forced ? choice.isa : available_isas().back()));
  // With AVX-512 its own packed layout (any) is the best; its AVX2 products take plain ones, and
  // which is faster depends on the sizes: up to 2.4 times (m = 32, Zen 3, 2026-11-21).
  double best = 1e30;
  for (const auto layout :
       {memory::format_tag::any, memory::format_tag::ab, memory::format_tag::ba}) {
    auto candidate = std::make_unique<State>(args, layout);
    candidate->run();
    std::vector<double> times;
    for (int run = 0; run < 5; ++run) {
      const auto start = std::chrono::steady_clock::now();
      candidate->run();
      times.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    if (times[2] >= best) continue;
    best = times[2];
    state_ = std::move(candidate);
  }
}

void OnednnLoop::run() { state_->run(); }

const std::vector<float>& OnednnLoop::out() const { return state_->out; }

}  // namespace switchyard::bench

#else

namespace switchyard::bench {

struct OnednnLoop::State {
  std::vector<float> out;
};

std::optional<std::string> OnednnLoop::unavailable(const ExpertConfig&, DType) {
  return "this build has no oneDNN (libdnnl-dev)";
}
std::string OnednnLoop::version() { return ""; }
OnednnLoop::OnednnLoop(const OnednnLoopArgs& args) {
  fail(ErrorCode::kUnsupported, "{}", *unavailable(args.config, args.tokens.dtype));
}
void OnednnLoop::run() {}
const std::vector<float>& OnednnLoop::out() const { return state_->out; }

}  // namespace switchyard::bench

#endif

namespace switchyard::bench {

OnednnLoop::~OnednnLoop() = default;
OnednnLoop::OnednnLoop(OnednnLoop&&) noexcept = default;
OnednnLoop& OnednnLoop::operator=(OnednnLoop&&) noexcept = default;

}  // namespace switchyard::bench
