// Times of the stages around the experts on one GPU: each is captured often in one graph, over
// inputs that together exceed the second cache level ("cold"), or over one input ("warm"); the
// median over replays, divided by the number of calls. One line of JSON each.
// An argument picks a part: "stages" or "router".
#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/measure/graph_times.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/names.hpp"
#include "switchyard/pack.hpp"
#include "switchyard/route.hpp"
#include "testkit/gpu/stage_support.hpp"

namespace switchyard {
namespace {

constexpr int kReplays = 60;

double median_us(int calls, cudaStream_t stream, const std::function<void(int)>& call) {
  return bench::median_graph_us(calls, kReplays, stream, call);
}

/// A promise of the project: microseconds at most.
struct Bar {
  const char* id = nullptr;
  double target = 0;
};

double copy_gbps = 4000;  // measured first

/// One result line; the limit is the time that `bytes` take at the copy rate of this run.
void print(const std::string& name, double us, double bytes, double flops = 0, Bar bar = {}) {
  const double limit = bytes / copy_gbps * 1e-3;
  std::string line = fmt::format(
      R"({{"stage": "{}", "case": {{"name": "{}"}}, "backend": "cuda", "samples": {}, )"
      R"("median_us": {:.2f}, "bytes": {:.0f}, "flops": {:.0f}, "gbps": {:.0f}, "tflops": {:.1f}, )"
      R"("limit_us": {:.2f}, "limit_by": "memory", "share": {:.3f})",
      name.substr(0, name.find(' ')), name, kReplays, us, bytes, flops, bytes / us * 1e-3,
      flops / us * 1e-6, limit, limit / us);
  if (bar.id != nullptr) {
    line += fmt::format(R"(, "bar": "{}", "value": {:.2f}, "target": {:.2f}, "holds": {})", bar.id,
                        us, bar.target, us <= bar.target);
  }
  fmt::print("{}}}\n", line);
}

/// Random values, repeated: the tensor cores' clock depends on what they multiply.
void fill_random(const DeviceArray<std::byte>& array, DType type) {
  constexpr std::int64_t kPeriod = 1 << 20;
  const std::vector<std::byte> bytes = stored_as(type, random_floats(kPeriod, 9));
  const std::size_t size = index(array.vector().shape[0]);
  for (std::size_t at = 0; at < size; at += bytes.size()) {
    SWITCHYARD_CUDA(cudaMemcpy(array.bytes() + at, bytes.data(), std::min(bytes.size(), size - at),
                               cudaMemcpyHostToDevice));
  }
}

struct Bench {
  cudaStream_t stream = nullptr;
  Bench() { SWITCHYARD_CUDA(cudaStreamCreate(&stream)); }

  void copy_rate() const {
    const std::size_t bytes = std::size_t{402} << 20;
    const DeviceArray<std::byte> from(bytes), to(bytes);
    const double us = median_us(1, stream, [&](int) {
      SWITCHYARD_CUDA(
          cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, stream));
    });
    copy_gbps = 2.0 * static_cast<double>(bytes) / us * 1e-3;
    print("copy", us, 2.0 * static_cast<double>(bytes));
  }

  void routing(const std::string& name, std::int64_t num_tokens, const RouterConfig& config,
               bool bias) const {
    const StageContext context(num_tokens, config.top_k(), config.num_experts, 8);
    for (const int copies : {20, 1}) {
      std::vector<std::unique_ptr<DeviceArray<float>>> logits;
      for (int i = 0; i < copies; ++i) {
        logits.push_back(std::make_unique<DeviceArray<float>>(
            random_floats(num_tokens * config.num_experts, static_cast<unsigned>(i))));
      }
      const DeviceArray<float> device_bias(random_floats(config.num_experts, 77, 0.1F));
      const DeviceArray<std::int32_t> expert(index(num_tokens * config.top_k()));
      const DeviceArray<float> weight(index(num_tokens * config.top_k()));
      const double us = median_us(20, stream, [&](int i) {
        route({.logits = logits[index(i % copies)]->matrix(num_tokens, config.num_experts),
               .selection_bias =
                   bias ? Vector<const float>(device_bias.vector()) : Vector<const float>{},
               .config = config,
               .routing = {.expert = expert.matrix(num_tokens, config.top_k()),
                           .weight = weight.matrix(num_tokens, config.top_k())},
               .execution = context.execution(stream)});
      });
      print(name + (copies > 1 ? " cold" : " warm"), us,
            static_cast<double>(4 * num_tokens * config.num_experts +
                                8 * num_tokens * config.top_k()),
            0, copies > 1 ? Bar{"G8", 8} : Bar{});
    }
  }

  void gemm(const std::string& name, DType tokens, DType gate, std::int64_t num_tokens,
            std::int64_t num_experts, std::int64_t hidden, bool batch_invariant = false) const {
    const StageContext context(num_tokens, 1, num_experts, hidden);
    const std::size_t bytes = index(num_tokens * hidden * size_of(tokens));
    const std::size_t gate_bytes = index(num_experts * hidden * size_of(gate));
    const int copies = bytes + gate_bytes > (std::size_t{64} << 20) ? 1 : 16;
    const DeviceArray<std::byte> x(bytes * index(copies)), w(gate_bytes * index(copies));
    fill_random(x, tokens);
    fill_random(w, gate);
    const DeviceArray<float> logits(index(num_tokens * num_experts));
    Execution execution = context.execution(stream);
    execution.batch_invariant = batch_invariant;
    const double us = median_us(copies, stream, [&](int i) {
      router_gemm({.tokens = {x.bytes() + index(i) * bytes, tokens, num_tokens, hidden},
                   .gate = {w.bytes() + index(i) * gate_bytes, gate, num_experts, hidden},
                   .logits = logits.matrix(num_tokens, num_experts),
                   .execution = execution});
    });
    print("router_gemm " + name + (batch_invariant ? ", batch_invariant" : ""), us,
          static_cast<double>(bytes + gate_bytes) +
              4.0 * static_cast<double>(num_tokens * num_experts),
          2.0 * static_cast<double>(num_tokens * num_experts) * static_cast<double>(hidden));
  }

  void planning(std::int64_t num_tokens, std::int64_t top_k, std::int32_t num_experts,
                const Layout& layout) const {
    const StageContext context(num_tokens, top_k, num_experts, 8);
    const std::int64_t rows = max_rows(layout, num_tokens, top_k, num_experts, 0);
    const PlanOnDevice device(num_tokens, top_k, num_experts, rows);
    for (const int copies : {20, 1}) {
      std::vector<std::unique_ptr<DeviceArray<std::int32_t>>> expert;
      for (int i = 0; i < copies; ++i) {
        std::vector<std::int32_t> ids(index(num_tokens * top_k));
        std::mt19937 generator(static_cast<unsigned>(i));
        for (auto& id : ids) {
          id = static_cast<std::int32_t>(generator() % static_cast<unsigned>(num_experts));
        }
        expert.push_back(std::make_unique<DeviceArray<std::int32_t>>(ids));
      }
      const DeviceArray<float> weight(random_floats(num_tokens * top_k, 1));
      const double us = median_us(20, stream, [&](int i) {
        plan({.assignments =
                  DenseAssignments{.expert = expert[index(i % copies)]->matrix(num_tokens, top_k),
                                   .weight = weight.matrix(num_tokens, top_k)},
              .layout = layout,
              .plan = device.view(),
              .execution = context.execution(stream)});
      });
      print(fmt::format("plan T {} K {} E {} align {} {}", num_tokens, top_k, num_experts,
                        layout.alignment, copies > 1 ? "cold" : "warm"),
            us, static_cast<double>(20 * num_tokens * top_k), 0,
            copies > 1 && layout.alignment == 1 && num_tokens * top_k == 32768 ? Bar{"G9", 8}
                                                                               : Bar{});
    }
  }

  void capacity(DropPolicy policy) const {
    const StageContext context(4096, 8, 256, 8);
    const Routed routed(4096, 8, 256, 1);
    const DeviceArray<std::int32_t> expert(routed.expert);
    const DeviceArray<float> weight(routed.weight);
    const DeviceArray<std::uint8_t> kept(32768);
    const DeviceArray<std::int64_t> counts(256), counts_kept(256);
    const double us = median_us(20, stream, [&](int) {
      apply_capacity({.assignments = DenseAssignments{.expert = expert.matrix(4096, 8),
                                                      .weight = weight.matrix(4096, 8)},
                      .num_experts = 256,
                      .capacity = 128,
                      .policy = policy,
                      .kept = flat(kept.matrix(4096, 8)),
                      .counts = counts.vector(),
                      .counts_kept = counts_kept.vector(),
                      .execution = context.execution(stream)});
    });
    print(std::string("capacity 4096 x 8, E 256, ") + to_string(policy), us, 32768.0 * 9);
  }

  void pack_combine(std::int64_t num_tokens, std::int64_t top_k, std::int32_t num_experts,
                    std::int64_t hidden, DType dtype) const {
    const StageContext context(num_tokens, top_k, num_experts, 8);
    const std::int64_t rows = num_tokens * top_k;
    const PlanOnDevice device(num_tokens, top_k, num_experts, rows);
    std::vector<std::int32_t> ids(index(rows));
    std::mt19937 generator(5);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>((generator() % 1024 + i * 37) %
                                         static_cast<unsigned>(num_experts));
    }
    const DeviceArray<std::int32_t> expert(ids);
    const DeviceArray<float> weight(random_floats(rows, 1));
    plan({.assignments = DenseAssignments{.expert = expert.matrix(num_tokens, top_k),
                                          .weight = weight.matrix(num_tokens, top_k)},
          .plan = device.view(),
          .execution = context.execution(stream)});
    const auto row_bytes = static_cast<double>(hidden * size_of(dtype));
    const DeviceArray<std::byte> x(index(num_tokens * hidden * size_of(dtype)));
    const DeviceArray<std::byte> y(index(rows * hidden * size_of(dtype)));
    const DeviceArray<std::byte> out(index(num_tokens * hidden * size_of(dtype)));
    SWITCHYARD_CUDA(cudaMemset(x.data(), 0x3c, index(num_tokens * hidden * size_of(dtype))));
    const auto do_pack = [&] {
      pack({.x = {x.bytes(), dtype, num_tokens, hidden},
            .plan = device.view(),
            .rows = {y.bytes(), dtype, rows, hidden},
            .execution = context.execution(stream)});
    };
    const auto do_combine = [&] {
      combine({.rows = {y.bytes(), dtype, rows, hidden},
               .plan = device.view(),
               .reduced = {.sums = {out.bytes(), dtype, num_tokens, hidden},
                           .subtree = {.order = {.num_experts = num_experts}}},
               .execution = context.execution(stream)});
    };
    const double bytes = row_bytes * static_cast<double>(num_tokens + rows);
    const std::string name = fmt::format("{} x {} K {} E {} {}", num_tokens, hidden, top_k,
                                         num_experts, to_string(dtype));
    print("pack " + name, median_us(4, stream, [&](int) { do_pack(); }), bytes);
    const bool has_bar = num_tokens == 16384;
    print("combine " + name, median_us(4, stream, [&](int) { do_combine(); }), bytes, 0,
          has_bar ? Bar{"G10", 1.1 * bytes / copy_gbps * 1e-3} : Bar{});
    const double both = median_us(4, stream, [&](int) {
      do_pack();
      do_combine();
    });
    print("pack+combine " + name, both, 2 * bytes, 0, has_bar ? Bar{"G10", 210} : Bar{});
  }

  /// Router GEMM, selection and plan of few tokens, as a decode step has them; a gate each.
  void small_chain(std::int64_t num_tokens, std::int32_t num_experts, std::int64_t hidden) const {
    constexpr int kLayers = 24;
    const StageContext context(num_tokens, 8, num_experts, hidden);
    const std::size_t gate_bytes = index(num_experts * hidden * 2);
    const DeviceArray<std::byte> x(index(num_tokens * hidden * 2)), w(gate_bytes * kLayers);
    SWITCHYARD_CUDA(cudaMemset(x.data(), 0x3c, index(num_tokens * hidden * 2)));
    SWITCHYARD_CUDA(cudaMemset(w.data(), 0x3c, gate_bytes * kLayers));
    const DeviceArray<float> logits(index(num_tokens * num_experts)), weight(index(num_tokens * 8));
    const DeviceArray<std::int32_t> expert(index(num_tokens * 8));
    const PlanOnDevice device(num_tokens, 8, num_experts, num_tokens * 8);
    for (const int stages : {1, 2, 3}) {
      const double us = median_us(kLayers, stream, [&](int i) {
        const Execution execution = context.execution(stream);
        router_gemm({.tokens = {x.bytes(), DType::kBF16, num_tokens, hidden},
                     .gate = {w.bytes() + index(i) * gate_bytes, DType::kBF16, num_experts, hidden},
                     .logits = logits.matrix(num_tokens, num_experts),
                     .execution = execution});
        if (stages < 2) return;
        route({.logits = logits.matrix(num_tokens, num_experts),
               .config = {.num_experts = num_experts, .kind = TopKRouter{.top_k = 8}},
               .routing = {.expert = expert.matrix(num_tokens, 8),
                           .weight = weight.matrix(num_tokens, 8)},
               .execution = execution});
        if (stages < 3) return;
        plan({.assignments = DenseAssignments{.expert = expert.matrix(num_tokens, 8),
                                              .weight = weight.matrix(num_tokens, 8)},
              .plan = device.view(),
              .execution = execution});
      });
      const char* names[] = {"", "router_gemm", "router_gemm+select", "router_gemm+select+plan"};
      // What a decode step of one token may take beside its experts.
      const bool has_bar = num_tokens == 1 && num_experts == 256 && stages == 3;
      print(fmt::format("{} T {} E {} H {}", names[stages], num_tokens, num_experts, hidden), us,
            static_cast<double>(gate_bytes), 0, has_bar ? Bar{"G4", 8} : Bar{});
    }
  }
};

void run_stages(const Bench& bench) {
  using enum DType;
  bench.routing("select 16384 x 128 top-2, softmax over all", 16384,
                {.num_experts = 128, .kind = TopKRouter{.top_k = 2, .renormalize = false}}, false);
  bench.routing("select 16384 x 128 top-2, softmax of the chosen", 16384,
                {.num_experts = 128, .kind = TopKRouter{.top_k = 2, .score = Score::kTopkSoftmax}},
                false);
  bench.routing("select 4096 x 256 DeepSeek-V3", 4096,
                {.num_experts = 256,
                 .kind = TopKRouter{.top_k = 8,
                                    .score = Score::kSigmoid,
                                    .scale = 2.5F,
                                    .groups = 8,
                                    .top_groups = 4,
                                    .group_score = GroupScore::kTop2Sum}},
                true);
  bench.planning(4096, 8, 256, {});
  bench.planning(4096, 8, 128, {});
  bench.planning(16384, 2, 128, {});
  bench.planning(16384, 2, 256, {});
  bench.planning(4096, 8, 128, {LayoutKind::kAligned, 64});
  bench.planning(32768, 8, 128, {});
  using enum DropPolicy;
  for (const DropPolicy policy : {kToken, kChoice, kProbs, kBpr}) bench.capacity(policy);
  bench.pack_combine(16384, 2, 128, 4096, kF16);
  bench.pack_combine(4096, 8, 256, 7168, kBF16);
  bench.pack_combine(32768, 8, 128, 2048, kBF16);
}

void run_router(const Bench& bench) {
  using enum DType;
  bench.gemm("32768 x 256 x 4096 bf16", kBF16, kBF16, 32768, 256, 4096);
  bench.gemm("32768 x 256 x 4096 bf16, gate f32", kBF16, kF32, 32768, 256, 4096);
  bench.gemm("32768 x 256 x 4096 f32", kF32, kF32, 32768, 256, 4096);
  bench.gemm("32768 x 256 x 4096 bf16", kBF16, kBF16, 32768, 256, 4096, true);
  bench.gemm("32768 x 128 x 2048 bf16", kBF16, kBF16, 32768, 128, 2048);
  bench.gemm("16384 x 128 x 2048 bf16", kBF16, kBF16, 16384, 128, 2048);
  bench.gemm("8192 x 64 x 2048 f16", kF16, kF16, 8192, 64, 2048);
  for (const std::int64_t num_tokens : {4096, 1024, 512, 128, 1}) {
    // The second shows where one path is better than the other.
    for (const bool batch_invariant : {false, true}) {
      bench.gemm(fmt::format("{} x 256 x 7168 bf16", num_tokens), kBF16, kBF16, num_tokens, 256,
                 7168, batch_invariant);
    }
  }
  bench.small_chain(1, 256, 7168);
  bench.small_chain(16, 256, 7168);
  bench.small_chain(64, 256, 7168);
  bench.small_chain(1, 128, 2048);
}

/// `only`: "stages", "router", or empty for both.
void run(const std::string& only) {
  const Bench bench;
  bench.copy_rate();
  if (only != "router") run_stages(bench);
  if (only != "stages") run_router(bench);
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  try {
    switchyard::run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
