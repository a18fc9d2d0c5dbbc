// Times the grouped GEMM by itself: eight contiguous products (the shapes of research on
// torch._grouped_mm), the gathered first product against a plain one, and both products of nine
// published layers; uniform and Zipf(1.0) loads; dense cuBLAS in the same run; then the portable
// path beside the Hopper kernel. Checks random outputs against double first. Prints one line a
// measurement.
//
//   grouped_gemm_bench [products] [gather] [layers] [portable] [repeats=50] [variants]
//
// Without a part named it runs all. Lines that begin with '{' are for tools/add_results.py.

#include <initializer_list>
#include <span>

#include "bench/kernels/grouped_gemm_measure.cuh"
#include "reference/expert.hpp"

namespace switchyard {
namespace {

struct Variant {
  const char* name;
  TileShape tile;
  bool dynamic;
  GroupedPath path = GroupedPath::kBest;
};
constexpr Variant kBest[] = {{"auto", TileShape::kAuto, true}};
constexpr Variant kSchedules[] = {{"dynamic", TileShape::kAuto, true},
                                  {"static", TileShape::kAuto, false},
                                  {"sm_80", TileShape::kAuto, true, GroupedPath::kSm80},
                                  {"sm_80 flat", TileShape::kAuto, true, GroupedPath::kSm80Flat}};
constexpr Variant kPaths[] = {{"auto", TileShape::kAuto, true},
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

/// A product's random inputs and its call, for one load of the experts.
class ProductCall {
 public:
  ProductCall(const Product& p, const Bf16Array& a, const Bf16Array& w, Bf16Array& y, double zipf)
      : p_(p),
        a_(a),
        w_(w),
        y_(y),
        rows_(assign(p.experts, p.rows / p.top_k, p.top_k, zipf)),
        begin_(rows_.begin),
        counts_(rows_.rows),
        workspace_(std::vector<std::int32_t>(64, 0)) {}

  [[nodiscard]] GroupedGemmParams params(const Variant& variant) const {
    return {.act = a_.data(),
            .w2 = w_.data(),
            .y = y_.data(),
            .expert_begin = begin_.data(),
            .expert_rows = counts_.data(),
            .workspace = workspace_.data(),
            .num_experts = p_.experts,
            .max_rows = p_.rows,
            .hidden = p_.columns,
            .inner = p_.depth,
            .path = variant.path,
            .tile = variant.tile,
            .dynamic = variant.dynamic};
  }
  [[nodiscard]] std::function<void()> timed(const Variant& variant) const {
    return [g = params(variant)] { launch_down(g, nullptr); };
  }
  /// Runs it once: 64 outputs beside double, and whether the bits are those of the first variant.
  [[nodiscard]] std::string check(const Variant& variant) {
    y_.fill(0xff);
    launch_down(params(variant), nullptr);
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    const auto depth = static_cast<std::size_t>(p_.depth);
    const auto columns = static_cast<std::size_t>(p_.columns);
    std::mt19937 random(5);
    Worst worst;
    for (int i = 0; i < 64; ++i) {
      const std::size_t row = random() % static_cast<unsigned>(p_.rows);
      const std::size_t e =
          std::upper_bound(rows_.begin.begin(), rows_.begin.end(), row) - rows_.begin.begin() - 1;
      const std::size_t n = random() % columns;
      worst.add(dot(a_.data() + row * depth, w_.data() + (e * columns + n) * depth, depth),
                at(y_, row * columns + n));
    }
    const unsigned long long sum = checksum(y_);
    if (first_sum_ == 0) first_sum_ = sum;
    return fmt::format("err {:.1e} {}", worst.error,
                       sum == first_sum_ ? "same bits" : "OTHER BITS");
  }

 private:
  const Product& p_;
  const Bf16Array& a_;
  const Bf16Array& w_;
  Bf16Array& y_;
  const Rows rows_;
  const DeviceArray<std::int32_t> begin_, counts_, workspace_;
  unsigned long long first_sum_ = 0;
};

/// The variants of every product under these loads, in turns with dense cuBLAS; report(product,
/// zipf, medians, FLOP, dense rate) follows the table's lines.
void time_products(std::span<const Variant> variants, std::initializer_list<double> loads,
                   const auto& report) {
  for (const Product& p : kProducts) {
    const auto depth = static_cast<std::size_t>(p.depth);
    const auto columns = static_cast<std::size_t>(p.columns);
    const Bf16Array a(p.rows * depth), w(static_cast<std::size_t>(p.experts) * columns * depth);
    Bf16Array y(p.rows * columns);
    randomize(a, 1, 3);
    randomize(w, 1 / std::sqrt(p.depth), 4);
    for (const double zipf : loads) {
      ProductCall call(p, a, w, y, zipf);
      std::vector<std::function<void()>> calls = {[] { dense()(); }};
      std::vector<std::string> checks;
      for (const Variant& variant : variants) {
        checks.push_back(call.check(variant));
        calls.push_back(call.timed(variant));
      }
      std::vector<double> us = median_us(calls);
      const double ceiling = Dense::tflops(us[0]);
      us.erase(us.begin());
      const double flop = 2.0 * p.rows * p.depth * p.columns;
      for (std::size_t v = 0; v < variants.size(); ++v) {
        const double rate = flop / us[v] / 1e6;
        fmt::print(
            "product {:12} zipf {} {:12} {:8.1f} us {:6.1f} TFLOP/s {:5.1f}% of {:.0f}  {}\n",
            p.name, zipf, variants[v].name, us[v], rate, 100 * rate / ceiling, ceiling, checks[v]);
      }
      report(p, zipf, us, flop, ceiling);
      std::fflush(stdout);
    }
  }
}

/// G1: shares of the dense rate, and of the uniform load's share under Zipf.
void judge_products(std::span<const Variant> variants) {
  double uniform_share = 0;
  time_products(variants, {0.0, 1.0},
                [&](const Product& p, double zipf, const std::vector<double>& us, double flop,
                    double ceiling) {
                  const double share = flop / us[0] / 1e6 / ceiling;
                  if (zipf == 0) {
                    uniform_share = share;
                    print_result("grouped_gemm", p.name, zipf, us[0], flop, ceiling, "G1", share,
                                 0.85);
                    return;
                  }
                  const double target = p.experts <= 8 ? 0.95 : p.experts <= 32 ? 0.91 : 0.88;
                  print_result("grouped_gemm", p.name, zipf, us[0], flop, ceiling, "G1 Zipf",
                               share / uniform_share, target);
                });
}

/// The portable path's share of the Hopper kernel's speed, in turns with it: at least 1 / 1.6.
void judge_portable() {
  time_products(kPaths, {0.0},
                [](const Product& p, double zipf, const std::vector<double>& us, double flop,
                   double ceiling) {
                  print_result("grouped_gemm sm_80", p.name, zipf, us[1], flop, ceiling, "sm_80",
                               us[0] / us[1], 1 / 1.6);
                });
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
      SWITCHYARD_CUDA(cudaMemset(workspace.data(), 0, 256));
      GroupedGemmParams g{.x = x.data(),
                          .row_token = token.data(),
                          .w13 = w13.data(),
                          .act = act.data(),
                          .w2 = w2.data(),
                          .y = y.data(),
                          .expert_begin = begin.data(),
                          .expert_rows = counts.data(),
                          .workspace = workspace.data(),
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
        act.fill(0xff);
        y.fill(0xff);
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
          const __nv_bfloat16* from = x.data() + rows.token[row] * hidden;
          const double gate = dot(from, w13.data() + (e * 2 * inner + j) * hidden, hidden);
          const double up = dot(from, w13.data() + ((e * 2 + 1) * inner + j) * hidden, hidden);
          worst.add(reference::inner_value({}, {gate, 0}, {up, 0}).value, at(act, row * inner + j));
          worst.add(dot(act.data() + row * inner, w2.data() + (e * hidden + n) * inner, inner),
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
  const GroupedGemmParams gathered{.x = x.data(),
                                   .row_token = token.data(),
                                   .w13 = w13.data(),
                                   .act = act.data(),
                                   .expert_begin = begin.data(),
                                   .expert_rows = counts.data(),
                                   .workspace = workspace.data(),
                                   .num_experts = kExperts,
                                   .max_rows = kRows,
                                   .num_tokens = kTokens,
                                   .hidden = kHidden,
                                   .inner = kInner};
  GroupedGemmParams contiguous = gathered;
  contiguous.act = packed.data();
  contiguous.w2 = w13.data();
  contiguous.y = plain.data();
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
  print_result("gemm1+activation", "Qwen3-30B", 0, us[1], flop, Dense::tflops(us[0]), "G2",
               us[2] / us[1], 0.95);
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  using namespace switchyard;
  bool products = false;
  bool layers = false;
  bool gather = false;
  bool portable = false;
  bool variants = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    products |= arg == "products";
    layers |= arg == "layers";
    gather |= arg == "gather";
    portable |= arg == "portable";
    variants |= arg == "variants";
    if (arg.starts_with("repeats=")) repeats = std::atoi(argv[i] + 8);
  }
  if (!products && !gather && !layers && !portable) products = gather = layers = portable = true;
  if (products) variants ? judge_products(kSchedules) : judge_products(kBest);
  if (gather) time_gather();
  if (layers) variants ? time_layers(kTiles) : time_layers(kBest);
  if (portable) judge_portable();
  return 0;
}
