// Times the way back through the experts by itself, bf16: each product and sum of nine published
// layers in turns with dense cuBLAS, uniform and Zipf(1.0) loads; the forward's first product with
// and without the pre-activation kept. Checks sums of weights' gradients against double first.
//
//   experts_backward_bench [repeats=25] [portable] [SHAPE ...]
//
// Without a shape named it runs all; with `portable` the portable path beside the Hopper kernels.
// Lines that begin with '{' are for tools/add_results.py.

#include <algorithm>

#include "bench/kernels/grouped_gemm_measure.cuh"
#include "experts/gpu/backward/products.hpp"

namespace switchyard {
namespace {

struct Shape {
  const char* name;
  int experts, top_k;
  std::int64_t hidden, inner;
  int tokens;
};
constexpr Shape kShapes[] = {
    {"qwen3-30b", 128, 8, 2048, 768, 32768},   {"30b-256", 256, 16, 4096, 256, 32768},
    {"30b-512", 128, 8, 4096, 512, 32768},     {"30b-1024", 64, 4, 4096, 1024, 32768},
    {"olmoe", 64, 8, 2048, 1024, 32768},       {"7b-256", 128, 8, 1536, 256, 24576},
    {"qwen3-235b", 128, 8, 4096, 1536, 16384}, {"mixtral", 8, 2, 4096, 14336, 8192},
    {"dsv3-32e", 32, 1, 7168, 2048, 32768}};

std::size_t count_of(std::int64_t rows, std::int64_t cols) {
  return static_cast<std::size_t>(rows * cols);
}

/// One layer's memory and calls under one load.
class Layer {
 public:
  Layer(const Shape& s, double zipf)
      : s_(s),
        host_(assign(s.experts, s.tokens, s.top_k, zipf)),
        rows_(std::ssize(host_.token)),
        begin_(host_.begin),
        counts_(host_.rows),
        token_(host_.token),
        weight_(std::vector<float>(host_.token.size(), 0.25F)),
        x_(count_of(s.tokens, s.hidden)),
        dout_(count_of(s.tokens, s.hidden)),
        w13_(count_of(s.experts * 2 * s.inner, s.hidden)),
        w2_(count_of(s.experts * s.hidden, s.inner)),
        z_(count_of(rows_, 2 * s.inner)),
        dz_(count_of(rows_, 2 * s.inner)),
        inner_(count_of(rows_, s.inner)),
        dw13_(w13_.size()),
        dw2_(w2_.size()),
        dots_(count_of(rows_, tiles_along(s.inner))),
        dweight_(host_.token.size()),
        dx_(count_of(rows_, s.hidden)),
        tiles_(static_cast<std::size_t>(std::max(split_bytes(first()), split_bytes(second()))) / 4 +
               4),
        units_(count_of(4, s.experts + 1)),
        counters_(std::vector<std::int32_t>(128, 0)) {
    randomize(x_, 1, 3);
    randomize(dout_, 1, 4);
    randomize(w13_, 1 / std::sqrt(static_cast<double>(s.hidden)), 5);
    randomize(w2_, 1 / std::sqrt(static_cast<double>(s.inner)), 6);
  }

  [[nodiscard]] double rows() const { return static_cast<double>(rows_); }

  void prepare() const {
    launch_prepare_units({.rows = of_rows(),
                          .units = {units(0), units(1)},
                          .zeroed = reinterpret_cast<std::uint32_t*>(counters_.data()),
                          .num_zeroed = 128},
                         nullptr);
  }
  void forward(bool keep) const {
    launch_gate_up({.x = x_.data(),
                    .row_token = token_.data(),
                    .w13 = w13_.data(),
                    .act = inner_.data(),
                    .preactivation = keep ? z_.data() : nullptr,
                    .expert_begin = begin_.data(),
                    .expert_rows = counts_.data(),
                    .workspace = counters_.data(),
                    .num_experts = s_.experts,
                    .max_rows = rows_,
                    .num_tokens = s_.tokens,
                    .hidden = s_.hidden,
                    .inner = s_.inner},
                   nullptr);
  }
  void down(BackwardPath path) const {
    launch_down_gradient({.rows = of_rows(),
                          .dout = dout_.data(),
                          .w2 = w2_.data(),
                          .z = z_.data(),
                          .dz = dz_.data(),
                          .inner = inner_.data(),
                          .dots = dots_.data(),
                          .hidden = s_.hidden,
                          .inner_cols = s_.inner},
                         path, nullptr);
  }
  void weights2(BackwardPath path) const {
    prepare();
    launch_weight_gradient({.rows = of_rows(),
                            .left = {dout_.data(), token_.data(), s_.hidden},
                            .right = {inner_.data(), nullptr, s_.inner},
                            .units = units(1),
                            .split_sums = tiles_.data(),
                            .out = dw2_.data(),
                            .out_is_f32 = false},
                           path, nullptr);
  }
  void weights13(BackwardPath path) const {
    prepare();
    launch_weight_gradient({.rows = of_rows(),
                            .left = {dz_.data(), nullptr, 2 * s_.inner},
                            .right = {x_.data(), token_.data(), s_.hidden},
                            .units = units(0),
                            .split_sums = tiles_.data(),
                            .out = dw13_.data(),
                            .out_is_f32 = false},
                           path, nullptr);
  }
  void dx(BackwardPath path) const {
    launch_rows_gradient({.rows = of_rows(),
                          .in = dz_.data(),
                          .weights = w13_.data(),
                          .out = dx_.data(),
                          .out_is_f32 = false,
                          .depth = 2 * s_.inner,
                          .cols = s_.hidden},
                         path, nullptr);
  }
  void row_weights() const {
    launch_row_weight_sums({.rows = of_rows(),
                            .dots = dots_.data(),
                            .num_dots = tiles_along(s_.inner),
                            .dout = dout_.data(),
                            .hidden = s_.hidden,
                            .out = dweight_.data()},
                           nullptr);
  }
  void all(BackwardPath path) const {
    down(path);
    row_weights();
    weights2(path);
    weights13(path);
    dx(path);
  }

  /// Some values of every product against double, from the device's own operands.
  [[nodiscard]] Worst check(BackwardPath path) const {
    forward(true);
    all(path);
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    std::mt19937 random(5);
    Worst worst;
    for (int i = 0; i < 4; ++i) {
      const auto fullest = std::max_element(host_.rows.begin(), host_.rows.end());
      const std::size_t e = i == 0 ? static_cast<std::size_t>(fullest - host_.rows.begin())
                                   : random() % static_cast<unsigned>(s_.experts);
      const std::int64_t j = random() % static_cast<unsigned>(2 * s_.inner);
      const std::int64_t h = random() % static_cast<unsigned>(s_.hidden);
      const std::int64_t expert = static_cast<std::int64_t>(e);
      double of_w13 = 0;
      double of_w2 = 0;
      for (std::int32_t r = 0; r < host_.rows[e]; ++r) {
        const std::int64_t row = host_.begin[e] + r;
        const std::int64_t t = host_.token[static_cast<std::size_t>(row)];
        of_w13 += at(dz_, count_of(row, 2 * s_.inner) + j) * at(x_, count_of(t, s_.hidden) + h);
        of_w2 +=
            at(dout_, count_of(t, s_.hidden) + h) * at(inner_, count_of(row, s_.inner) + j / 2);
      }
      worst.add(of_w13, at(dw13_, count_of(expert * 2 * s_.inner + j, s_.hidden) + h));
      worst.add(of_w2, at(dw2_, count_of(expert * s_.hidden + h, s_.inner) + j / 2));
      if (host_.rows[e] == 0) continue;
      const std::int64_t row = host_.begin[e] + host_.rows[e] / 2;
      double of_dx = 0;
      for (std::int64_t k = 0; k < 2 * s_.inner; ++k) {
        of_dx += at(dz_, count_of(row, 2 * s_.inner) + k) *
                 at(w13_, count_of(expert * 2 * s_.inner + k, s_.hidden) + h);
      }
      worst.add(of_dx, at(dx_, count_of(row, s_.hidden) + h));
    }
    return worst;
  }

 private:
  [[nodiscard]] RaggedProblem first() const { return {rows_, 2 * s_.inner, s_.hidden}; }
  [[nodiscard]] RaggedProblem second() const { return {rows_, s_.hidden, s_.inner}; }
  [[nodiscard]] ExpertRows of_rows() const {
    return {begin_.data(), counts_.data(), token_.data(), weight_.data(), s_.experts, rows_};
  }
  [[nodiscard]] RaggedUnits units(int product) const {
    std::int32_t* const arrays = units_.data() + 2 * product * (s_.experts + 1);
    return {arrays, arrays + s_.experts + 1, counters_.data() + 64 + 32 * product,
            part_rows(product == 0 ? first() : second())};
  }

  const Shape& s_;
  Rows host_;
  std::int64_t rows_;
  DeviceArray<std::int32_t> begin_, counts_, token_;
  DeviceArray<float> weight_;
  Bf16Array x_, dout_, w13_, w2_, z_, dz_, inner_, dw13_, dw2_, dx_;
  DeviceArray<float> dots_, dweight_, tiles_;
  DeviceArray<std::int32_t> units_, counters_;
};

void time_layer(const Shape& s, double zipf, const std::vector<BackwardPath>& paths) {
  const Layer layer(s, zipf);
  const double matrix = 2 * layer.rows() * static_cast<double>(s.hidden * s.inner);
  struct Timed {
    std::string name;
    double flop;
    std::function<void()> call;
  };
  std::vector<Timed> timed = {{"gate_up", 2 * matrix, [&] { layer.forward(false); }},
                              {"gate_up_kept", 2 * matrix, [&] { layer.forward(true); }},
                              {"row_weights", 0, [&] { layer.row_weights(); }}};
  for (const BackwardPath path : paths) {
    const char* const of = path == BackwardPath::kSm90 ? "" : ".sm_80";
    fmt::print("{} zipf {}{}: err {:.1e}\n", s.name, zipf, of, layer.check(path).error);
    const auto add = [&](const char* name, double flop, void (Layer::*call)(BackwardPath) const) {
      timed.push_back(
          {fmt::format("{}{}", name, of), flop, [&layer, call, path] { (layer.*call)(path); }});
    };
    add("down_gradient", matrix, &Layer::down);
    add("dw2", matrix, &Layer::weights2);
    add("dw13", 2 * matrix, &Layer::weights13);
    add("dx_rows", 2 * matrix, &Layer::dx);
    add("backward", 6 * matrix, &Layer::all);
  }
  std::vector<std::function<void()>> calls{[] { dense()(); }};
  for (const Timed& one : timed) calls.push_back(one.call);
  const std::vector<double> medians = median_us(calls);
  const double dense_rate = Dense::tflops(medians[0]);
  fmt::print("{} zipf {}: dense {:.0f} TFLOP/s\n", s.name, zipf, dense_rate);
  for (std::size_t i = 0; i < timed.size(); ++i) {
    const double us = medians[i + 1];
    fmt::print("  {:20} {:9.1f} us {:7.0f} TFLOP/s {:5.1f}% of dense\n", timed[i].name, us,
               timed[i].flop / us / 1e6, 100 * timed[i].flop / us / 1e6 / dense_rate);
    print_result(fmt::format("experts_backward.{}", timed[i].name), s.name, zipf, us, timed[i].flop,
                 dense_rate, "", 0, 0);
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  using namespace switchyard;
  std::vector<std::string> wanted;
  std::vector<BackwardPath> paths{BackwardPath::kSm90};
  repeats = 25;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("repeats=")) {
      repeats = std::atoi(argument.c_str() + 8);
    } else if (argument == "portable") {
      paths.push_back(BackwardPath::kPortable);
    } else {
      wanted.push_back(argument);
    }
  }
  for (const Shape& shape : kShapes) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), shape.name) == wanted.end()) {
      continue;
    }
    for (const double zipf : {0.0, 1.0}) time_layer(shape, zipf, paths);
  }
}
