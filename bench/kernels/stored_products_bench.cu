// Times the grouped products with stored weights, in turns with dense cuBLAS, where experts have
// many rows. e4m3, rows likewise: the second product on six published shapes, and both products of
// layers with their gather, activation and rows that become e4m3 again, each in turns with the bf16
// kernels on the same loads as well, the first also with the plain product of its size. MXFP4, rows
// of bf16: both products at gpt-oss' sizes. Prints one line a measurement.
//
//   stored_products_bench [products] [layers] [mxfp4] [repeats=50]
//
// Without a part named it runs all. Lines that begin with '{' are for tools/add_results.py.

#include "bench/kernels/grouped_gemm_measure.cuh"
#include "bench/kernels/streaming_check.hpp"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/grouped/coded/product.hpp"
#include "experts/gpu/grouped/fp8/product.hpp"
#include "layer/gpu/wire_rows.hpp"

namespace switchyard {
namespace {

using Bytes = DeviceArray<std::byte>;

std::int64_t blocks_of(std::int64_t cols) { return (cols + 127) / 128; }
std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

/// Matrices of random codes, with scales that are all alike: e4m3's of blocks, MXFP4's of matrices.
struct Weights {
  Bytes codes;
  DeviceArray<float> scales;

  Weights(std::int64_t matrices, std::int64_t rows, std::int64_t cols, unsigned seed,
          WeightFormat format = WeightFormat::kE4M3)
      : codes(size(matrices * coded::matrix_bytes(format, rows, cols))),
        scales(
            size(matrices * std::max(std::int64_t{1}, coded::block_scales(format, rows, cols)))) {
    const float scale = bench::fill_codes(format, codes.data(), codes.size(),
                                          1 / std::sqrt(static_cast<float>(cols)), seed, nullptr);
    bench::fill_scales(scales.data(), static_cast<std::int64_t>(scales.size()), scale, nullptr);
  }
};

/// Rows of about normal values in both types.
struct RowsOfBoth {
  Bf16Array bf16;
  Bytes codes;
  DeviceArray<float> scales;

  RowsOfBoth(std::int64_t rows, std::int64_t cols, unsigned seed)
      : bf16(size(rows * cols)), codes(size(rows * cols)), scales(size(rows * blocks_of(cols))) {
    randomize(bf16, 1, seed);
    quantise(rows, cols);
  }
  void quantise(std::int64_t rows, std::int64_t cols) const {
    quantise_rows(
        {.x = {reinterpret_cast<const std::byte*>(bf16.data()), DType::kBF16, rows, cols}},
        {codes.data(), DType::kF8E4M3, rows, cols}, {scales.data(), {rows, blocks_of(cols)}},
        nullptr);
  }
};

struct Layer {
  const char* name;
  int experts, tokens, hidden, inner, top_k;
};

/// The second product alone: `inner` is its depth, `hidden` its columns.
constexpr Layer kProducts[] = {
    {"V3 w13", 32, 4096, 4096, 7168, 8},      {"V3 w2", 32, 4096, 7168, 2048, 8},
    {"Mixtral w13", 8, 8192, 28672, 4096, 2}, {"Qwen3 w13", 128, 8192, 1536, 2048, 8},
    {"Qwen3 w2", 128, 8192, 2048, 768, 8},    {"E32 K1024", 32, 4096, 8192, 1024, 8}};
constexpr Layer kLayers[] = {{"V3 rank", 32, 4096, 7168, 2048, 8},
                             {"Qwen3-30B", 128, 8192, 2048, 768, 8},
                             {"OLMoE", 64, 8192, 2048, 1024, 8}};

class Call {
 public:
  Call(const Layer& c, double zipf)
      : c_(c),
        rows_(assign(c.experts, c.tokens, c.top_k, zipf)),
        begin_(rows_.begin),
        counts_(rows_.rows),
        token_(rows_.token),
        counters_(std::vector<std::int32_t>(64, 0)),
        counters16_(std::vector<std::int32_t>(64, 0)) {}

  [[nodiscard]] std::int64_t num_rows() const { return rows_.begin.back(); }
  [[nodiscard]] Fp8GroupedParams fp8() const {
    return {.row_token = token_.data(),
            .expert_begin = begin_.data(),
            .expert_rows = counts_.data(),
            .counters = counters_.data(),
            .num_experts = c_.experts,
            .max_rows = num_rows(),
            .num_tokens = c_.tokens,
            .hidden = c_.hidden,
            .inner = c_.inner};
  }
  [[nodiscard]] GroupedGemmParams bf16() const {
    return {.row_token = token_.data(),
            .expert_begin = begin_.data(),
            .expert_rows = counts_.data(),
            .workspace = counters16_.data(),
            .num_experts = c_.experts,
            .max_rows = num_rows(),
            .num_tokens = c_.tokens,
            .hidden = c_.hidden,
            .inner = c_.inner};
  }

 private:
  const Layer& c_;
  const Rows rows_;
  const DeviceArray<std::int32_t> begin_, counts_, token_, counters_, counters16_;
};

void print_fp8(const char* stage, const Layer& c, double zipf, double us, double bf16_us,
               double flop, double dense_rate, const Bar& bar) {
  fmt::print(
      "{:<14} zipf {:.0f} fp8 {:8.1f} us {:6.0f} TFLOP/s ({:.2f} x dense bf16 {:.0f}), bf16 "
      "{:8.1f} "
      "us: {:.2f} x\n",
      c.name, zipf, us, flop / us / 1e6, flop / us / 1e6 / dense_rate, dense_rate, bf16_us,
      bf16_us / us);
  fmt::print(
      "{{\"stage\": \"{}\", \"case\": {{\"shape\": \"{}\", \"zipf\": {}, \"dtype\": \"e4m3\"}}, "
      "\"median_us\": {:.1f}, \"tflops\": {:.0f}, \"bf16_us\": {:.1f}, \"dense_bf16_tflops\": "
      "{:.0f}{}}}\n",
      stage, c.name, zipf, us, flop / us / 1e6, bf16_us, dense_rate, bar.json());
  std::fflush(stdout);
}

void time_product(const Layer& c, double zipf) {
  const Call call(c, zipf);
  const RowsOfBoth act(call.num_rows(), c.inner, 5);
  const Weights w2(c.experts, c.hidden, c.inner, 6);
  Bf16Array weights16(size(std::int64_t{c.experts} * c.hidden * c.inner));
  randomize(weights16, 1 / std::sqrt(static_cast<double>(c.inner)), 7);
  const Bf16Array y(size(call.num_rows() * c.hidden));
  Fp8GroupedParams p = call.fp8();
  p.act = act.codes.data();
  p.act_scales = act.scales.data();
  p.w2 = w2.codes.data();
  p.scales2 = w2.scales.data();
  p.y = y.data();
  GroupedGemmParams g = call.bf16();
  g.act = act.bf16.data();
  g.w2 = weights16.data();
  g.y = y.data();
  const std::vector<double> us = median_us(
      {[&] { launch_fp8_down(p, nullptr); }, [&] { launch_down(g, nullptr); }, [] { dense()(); }});
  const double flop = 2.0 * static_cast<double>(call.num_rows()) * c.hidden * c.inner;
  print_fp8("fp8 product", c, zipf, us[0], us[1], flop, Dense::tflops(us[2]), {});
}

void time_layer(const Layer& c, double zipf) {
  const Call call(c, zipf);
  const RowsOfBoth x(c.tokens, c.hidden, 5);
  const Weights w13(std::int64_t{2} * c.experts, c.inner, c.hidden, 6);
  const Weights w2(c.experts, c.hidden, c.inner, 7);
  const std::int64_t matrix = std::int64_t{c.experts} * c.hidden * c.inner;
  Bf16Array w13_16(size(2 * matrix));
  Bf16Array w2_16(size(matrix));
  randomize(w13_16, 1 / std::sqrt(static_cast<double>(c.hidden)), 8);
  randomize(w2_16, 1 / std::sqrt(static_cast<double>(c.inner)), 9);
  const Bytes act(size(call.num_rows() * c.inner));
  const DeviceArray<float> act_scales(size(call.num_rows() * blocks_of(c.inner)));
  const Bf16Array act16(size(call.num_rows() * c.inner));
  const Bf16Array y(size(call.num_rows() * c.hidden));
  Fp8GroupedParams p = call.fp8();
  p.x = {x.codes.data(), x.scales.data()};
  p.w13 = w13.codes.data();
  p.scales13 = w13.scales.data();
  p.act = act.data();
  p.act_scales = act_scales.data();
  p.w2 = w2.codes.data();
  p.scales2 = w2.scales.data();
  p.y = y.data();
  GroupedGemmParams g = call.bf16();
  g.x = x.bf16.data();
  g.w13 = w13_16.data();
  g.act = act16.data();
  g.w2 = w2_16.data();
  g.y = y.data();
  // The plain product of the first's size: as many weights, rows that lie packed.
  const RowsOfBoth packed(call.num_rows(), c.hidden, 10);
  const Bf16Array sums(size(2 * call.num_rows() * c.inner));
  Fp8GroupedParams plain = call.fp8();
  plain.hidden = std::int64_t{2} * c.inner;
  plain.inner = c.hidden;
  plain.act = packed.codes.data();
  plain.act_scales = packed.scales.data();
  plain.w2 = w13.codes.data();
  plain.scales2 = w13.scales.data();
  plain.y = sums.data();
  const std::vector<double> us =
      median_us({[&] { launch_fp8_gate_up(p, nullptr); }, [&] { launch_gate_up(g, nullptr); },
                 [&] {
                   x.quantise(c.tokens, c.hidden);
                   launch_fp8_gate_up(p, nullptr);
                   launch_fp8_down(p, nullptr);
                 },
                 [&] {
                   launch_gate_up(g, nullptr);
                   launch_down(g, nullptr);
                 },
                 [] { dense()(); }, [&] { launch_fp8_down(plain, nullptr); }});
  const double flop = 6.0 * static_cast<double>(call.num_rows()) * c.hidden * c.inner;
  const double dense_rate = Dense::tflops(us[4]);
  fmt::print("{:<14} zipf {:.0f} plain product of the first's size {:8.1f} us: {:.3f} x\n", c.name,
             zipf, us[5], us[0] / us[5]);
  print_fp8("fp8 first product", c, zipf, us[0], us[1], flop * 2 / 3, dense_rate,
            {"Q2", us[0] / us[5], 1.05, true});
  const bool deep = std::min(c.hidden, c.inner) >= 2048;
  print_fp8("fp8 both products", c, zipf, us[2], us[3], flop, dense_rate,
            {"Q3", us[3] / us[2], deep ? 1.6 : 1.4});
}

struct Mxfp4Layer {
  Layer layer;
  const char* bar;
  double target;  // of TFLOP/s, or of dense cuBLAS's
  bool of_dense;
};
constexpr Mxfp4Layer kMxfp4Layers[] = {
    {{"gpt-oss E32", 32, 512, 2880, 2880, 4}, "Q6 rate", 480, false},
    {{"gpt-oss E32", 32, 4096, 2880, 2880, 4}, "Q7", 0.78, true},
    {{"gpt-oss E128", 128, 4096, 2880, 2880, 4}, "Q7", 0.70, true}};

void time_mxfp4(const Mxfp4Layer& of, double zipf) {
  const Layer& c = of.layer;
  const Call call(c, zipf);
  const std::int64_t rows = call.num_rows();
  const Bf16Array x(size(std::int64_t{c.tokens} * c.hidden));
  randomize(x, 1, 5);
  const Weights w13(std::int64_t{2} * c.experts, c.inner, c.hidden, 6, WeightFormat::kMxfp4);
  const Weights w2(c.experts, c.hidden, c.inner, 7, WeightFormat::kMxfp4);
  const Bf16Array act(size(rows * c.inner));
  const Bf16Array y(size(rows * c.hidden));
  const DeviceArray<float> row_scales(size(rows));
  const GroupedGemmParams plan = call.bf16();
  const CodedGroupedParams p{.format = WeightFormat::kMxfp4,
                             .x = x.data(),
                             .row_token = plan.row_token,
                             .ordered = y.data(),
                             .row_scales = row_scales.data(),
                             .num_tokens = c.tokens,
                             .w13 = w13.codes.data(),
                             .scales13 = w13.scales.data(),
                             .act = act.data(),
                             .w2 = w2.codes.data(),
                             .scales2 = w2.scales.data(),
                             .y = y.data(),
                             .expert_begin = plan.expert_begin,
                             .expert_rows = plan.expert_rows,
                             .num_experts = c.experts,
                             .max_rows = rows,
                             .hidden = c.hidden,
                             .inner = c.inner};
  const std::vector<double> us = median_us({[&] {
                                              launch_coded_gate_up(p, nullptr);
                                              launch_coded_down(p, nullptr);
                                            },
                                            [] { dense()(); }});
  const double rate = 6.0 * static_cast<double>(rows) * c.hidden * c.inner / us[0] / 1e6;
  const double share = rate / Dense::tflops(us[1]);
  fmt::print(
      "{:<14} zipf {:.0f} MXFP4 T {} {:8.1f} us {:6.0f} TFLOP/s, {:.3f} of dense bf16 {:.0f}\n",
      c.name, zipf, c.tokens, us[0], rate, share, Dense::tflops(us[1]));
  fmt::print(
      "{{\"stage\": \"mxfp4 both products\", \"case\": {{\"shape\": \"{}\", \"T\": {}, \"zipf\": "
      "{}, "
      "\"dtype\": \"bf16\", \"weights\": \"mxfp4\"}}, \"median_us\": {:.1f}, \"tflops\": {:.0f}, "
      "\"dense_bf16_tflops\": {:.0f}{}}}\n",
      c.name, c.tokens, zipf, us[0], rate, Dense::tflops(us[1]),
      Bar{of.bar, of.of_dense ? share : rate, of.target}.json());
  std::fflush(stdout);
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  using namespace switchyard;
  bool products = false;
  bool layers = false;
  bool mxfp4 = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "products") {
      products = true;
    } else if (word == "layers") {
      layers = true;
    } else if (word == "mxfp4") {
      mxfp4 = true;
    } else if (word.starts_with("repeats=")) {
      repeats = std::stoi(word.substr(8));
    } else {
      fmt::print(stderr, "stored_products_bench: {}? want products, layers, mxfp4 or repeats=N\n",
                 word);
      return 2;
    }
  }
  const bool all = !products && !layers && !mxfp4;
  for (const double zipf : {0.0, 1.0}) {
    for (const Layer& c : kProducts) {
      if (products || all) time_product(c, zipf);
    }
    for (const Layer& c : kLayers) {
      if (layers || all) time_layer(c, zipf);
    }
    for (const Mxfp4Layer& c : kMxfp4Layers) {
      if (mxfp4 || all) time_mxfp4(c, zipf);
    }
  }
  return 0;
}
