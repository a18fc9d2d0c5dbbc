// Weights of every layer lie behind each other in the arena, so that a chain of layers finds none
// of them in the L2 cache.
#include "bench/kernels/streaming_layers.hpp"

#include <algorithm>
#include <cmath>

#include "bench/cases/synthetic.hpp"
#include "bench/kernels/streaming_check.hpp"
#include "bench/measure/device_read.hpp"
#include "bench/measure/graph_times.hpp"
#include "core/check.hpp"
#include "experts/gpu/coded/expand.hpp"
#include "experts/gpu/coded/expanded.hpp"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/grouped/coded/product.hpp"
#include "experts/gpu/grouped/fp8/product.hpp"
#include "layer/gpu/wire_rows.hpp"
#include "testkit/gpu/stage_support.hpp"
#include "testkit/random.hpp"

namespace switchyard::bench {
namespace {

/// Made on the host, from routing of its own.
PlanView make_plan(const StreamingCase& c, std::uint64_t seed, Plan& memory) {
  SyntheticRouting routing =
      synthetic_routing(c.num_tokens, c.num_experts, c.top_k,
                        c.zipf > 0 ? fmt::format("zipf:{}", c.zipf) : "uniform", seed);
  Random random(seed);
  for (float& weight : routing.weight) weight = static_cast<float>(random.uniform());
  const PlanView view =
      memory.reserve(c.num_tokens, c.top_k, c.num_experts, c.num_tokens * c.top_k);
  plan({.assignments = DenseAssignments{.expert = {routing.expert.data(), {c.num_tokens, c.top_k}},
                                        .weight = {routing.weight.data(), {c.num_tokens, c.top_k}}},
        .total_experts = c.num_experts,
        .plan = view});
  return view;
}

/// Of a row of e4m3 that have a scale.
std::int64_t row_blocks(std::int64_t columns) { return (columns + kE4M3Block - 1) / kE4M3Block; }

}  // namespace

struct StreamingLayers::Memory {
  DeviceArray<std::byte> tokens, act, sums, rows, workspace, sync, numbers;
  DeviceArray<float> scales13, scales2;  // the same of all layers
  DeviceArray<std::byte> fp8_tokens;
  DeviceArray<float> token_scales, act_scales, split_scales;
  DeviceArray<std::int32_t> fp8_counters;
  std::vector<std::unique_ptr<PlanOnDevice>> plans{};

  static std::size_t bytes(std::int64_t rows, std::int64_t columns, DType dtype) {
    return static_cast<std::size_t>(rows * columns * size_of(dtype));
  }
  static std::size_t row_scales(const StreamingCase& c, std::int64_t rows, std::int64_t columns) {
    return c.fp8_rows ? static_cast<std::size_t>(rows * row_blocks(columns)) : 1;
  }
  static std::size_t scales_of(const StreamingCase& c, std::int64_t rows, std::int64_t cols) {
    if (c.format == WeightFormat::kExact) return 1;
    return static_cast<std::size_t>(
        c.num_experts * std::max<std::int64_t>(1, coded::block_scales(c.format, rows, cols)));
  }
  /// Where codes become numbers.
  static std::size_t numbers_of(const StreamingCase& c) {
    if (c.format == WeightFormat::kExact) return 16;
    return static_cast<std::size_t>(
        coded::expanded_experts(c.hidden, c.inner, true, c.num_experts) *
        coded::expanded_expert_bytes(c.hidden, c.inner, true));
  }
  explicit Memory(const StreamingCase& c)
      : tokens(bytes(c.num_tokens, c.hidden, c.dtype)),
        act(bytes(c.num_tokens * c.top_k, c.inner, c.dtype)),
        sums(bytes(c.num_tokens, c.hidden, DType::kF32)),
        rows(bytes(c.num_tokens * c.top_k, c.hidden, c.dtype)),
        workspace(grouped_gemm_workspace_bytes()),
        sync(sizeof(StreamingSync)),
        numbers(numbers_of(c)),
        scales13(2 * scales_of(c, c.inner, c.hidden)),
        scales2(scales_of(c, c.hidden, c.inner)),
        fp8_tokens(bytes(c.num_tokens, c.hidden, DType::kF8E4M3)),
        token_scales(row_scales(c, c.num_tokens, c.hidden)),
        act_scales(row_scales(c, c.num_tokens * c.top_k, c.inner)),
        split_scales(static_cast<std::size_t>(c.num_tokens * c.top_k)),
        fp8_counters(64) {
    workspace.fill(0);
    sync.fill(0);
    fp8_counters.fill(0);
  }
};

namespace {

/// Of a matrix of each expert.
std::size_t matrix_bytes(const StreamingCase& c, std::int64_t rows, std::int64_t cols) {
  const std::int64_t bytes = c.format == WeightFormat::kExact
                                 ? rows * cols * size_of(c.dtype)
                                 : coded::matrix_bytes(c.format, rows, cols);
  return static_cast<std::size_t>(c.num_experts * bytes);
}

}  // namespace

StreamingLayers::StreamingLayers(const StreamingCase& c, Arena arena, cudaStream_t stream)
    : memory_(std::make_unique<Memory>(c)), arena_(arena), fp8_rows_(c.fp8_rows) {
  require(!c.fp8_rows || c.format == WeightFormat::kE4M3, "rows of e4m3 are for weights of e4m3");
  const auto matrix = static_cast<std::size_t>(c.num_experts * c.inner * c.hidden);
  const std::size_t first_bytes = 2 * matrix_bytes(c, c.inner, c.hidden);
  const std::size_t down_bytes = matrix_bytes(c, c.hidden, c.inner);
  const std::size_t layer_bytes = first_bytes + down_bytes;
  const std::size_t most = c.num_tokens <= 2 ? 24 : 10;
  const std::size_t num_layers = std::min(arena.bytes / layer_bytes, most);
  require(num_layers > 0, "arena of {} bytes is too small for a layer of {}", arena.bytes,
          layer_bytes);
  const auto scale = [](std::int64_t depth) { return 1 / std::sqrt(static_cast<float>(depth)); };
  fill_uniform(memory_->tokens.data(), c.dtype, static_cast<std::size_t>(c.num_tokens * c.hidden),
               1, 99, stream);
  for (std::size_t layer = 0; layer < num_layers; ++layer) {
    std::byte* w13 = arena.data + layer * layer_bytes;
    std::byte* w2 = w13 + first_bytes;
    const auto seed = static_cast<unsigned>(7 * layer);
    if (c.format == WeightFormat::kExact) {
      fill_uniform(w13, c.dtype, 2 * matrix, scale(c.hidden), seed + 1, stream);
      fill_uniform(w2, c.dtype, matrix, scale(c.inner), seed + 2, stream);
    } else {
      const auto count = [](const DeviceArray<float>& of) {
        return static_cast<std::int64_t>(of.size());
      };
      fill_scales(memory_->scales13.data(), count(memory_->scales13),
                  fill_codes(c.format, w13, first_bytes, scale(c.hidden), seed + 1, stream),
                  stream);
      fill_scales(memory_->scales2.data(), count(memory_->scales2),
                  fill_codes(c.format, w2, down_bytes, scale(c.inner), seed + 2, stream), stream);
    }
    Plan host;
    const PlanView view =
        make_plan(c, 131 * layer + static_cast<std::uint64_t>(c.num_tokens), host);
    std::int64_t hits = 0;
    for (std::int32_t e = 0; e < c.num_experts; ++e) {
      hits += view.expert_rows[e] > 0 ? 1 : 0;
      most_rows_ = std::max<std::int64_t>(most_rows_, view.expert_rows[e]);
    }
    hit_bytes_ += static_cast<double>(hits) * static_cast<double>(layer_bytes) /
                  static_cast<double>(c.num_experts) / static_cast<double>(num_layers);
    memory_->plans.push_back(std::make_unique<PlanOnDevice>(view));
    const PlanView plan = memory_->plans.back()->view();
    StreamingParams params{{.num_experts = c.num_experts,
                            .num_tokens = c.num_tokens,
                            .max_rows = c.num_tokens * c.top_k,
                            .max_assignments = c.num_tokens * c.top_k,
                            .hidden = c.hidden,
                            .inner = c.inner,
                            .dtype = c.dtype,
                            .format = c.format,
                            .scales_fold = c.format == WeightFormat::kMxfp4}};
    params.scales13 = memory_->scales13.data();
    params.scales2 = memory_->scales2.data();
    params.x = memory_->tokens.data();
    params.w13 = w13;
    params.w2 = w2;
    params.act = memory_->act.data();
    params.sync = reinterpret_cast<StreamingSync*>(memory_->sync.data());
    params.expert_begin = plan.expert_begin.data;
    params.expert_rows = plan.expert_rows.data;
    params.row_token = plan.row_token.data;
    params.row_weight = plan.row_weight.data;
    params.token_begin = plan.token_begin.data;
    params.token_row = plan.token_row.data;
    params.sums = memory_->sums.data();
    params.subtree = {{c.num_experts, 8}, 0, 8};
    params_.push_back(params);
  }
}

StreamingLayers::~StreamingLayers() = default;

StreamingParams StreamingLayers::last_as_numbers(cudaStream_t stream) const {
  StreamingParams params = params_.back();
  if (params.format == WeightFormat::kExact) return params;
  const std::int64_t matrix = params.hidden * params.inner * 2;
  std::byte* const w13 = arena_.data;
  std::byte* const w2 = w13 + 2 * params.num_experts * matrix;
  require(w2 + params.num_experts * matrix <= static_cast<const std::byte*>(params.w13),
          "no room for the last layer's weights as numbers beside it");
  coded::launch_expand({.format = params.format,
                        .codes = static_cast<const std::byte*>(params.w13),
                        .scales = params.scales13,
                        .rows = w13,
                        .matrices = std::int64_t{2} * params.num_experts,
                        .num_rows = params.inner,
                        .cols = params.hidden},
                       stream);
  coded::launch_expand({.format = params.format,
                        .codes = static_cast<const std::byte*>(params.w2),
                        .scales = params.scales2,
                        .rows = w2,
                        .matrices = params.num_experts,
                        .num_rows = params.hidden,
                        .cols = params.inner},
                       stream);
  params.w13 = w13;
  params.w2 = w2;
  params.format = WeightFormat::kExact;
  return params;
}

GroupedGemmParams StreamingLayers::grouped_params(const StreamingParams& p) const {
  return {.x = p.x,
          .row_token = p.row_token,
          .w13 = p.w13,
          .act = p.act,
          .w2 = p.w2,
          .y = memory_->rows.data(),
          .expert_begin = p.expert_begin,
          .expert_rows = p.expert_rows,
          .workspace = memory_->workspace.data(),
          .num_experts = p.num_experts,
          .max_rows = p.max_rows,
          .num_tokens = p.num_tokens,
          .hidden = p.hidden,
          .inner = p.inner,
          .dtype = p.dtype};
}

void StreamingLayers::launch_combine(const StreamingParams& p, cudaStream_t stream) const {
  const auto found = std::ranges::find(params_, p.w13, &StreamingParams::w13);
  require(found != params_.end(), "these are no layer's parameters");
  const auto& plan = memory_->plans[static_cast<std::size_t>(found - params_.begin())];
  combine(
      {.rows = {memory_->rows.bytes(), p.dtype, p.max_rows, p.hidden},
       .plan = plan->view(),
       .reduced = {.sums = {static_cast<std::byte*>(p.sums), p.sums_dtype, p.num_tokens, p.hidden},
                   .subtree = p.subtree},
       .execution = {.backend = Backend::kCuda, .stream = stream}});
}

void StreamingLayers::launch_grouped(const StreamingParams& p, GroupedPath path, unsigned parts,
                                     cudaStream_t stream) const {
  GroupedGemmParams params = grouped_params(p);
  params.path = path;
  if ((parts & kUp) != 0) launch_gate_up(params, stream);
  if ((parts & kDown) != 0) launch_down(params, stream);
  if ((parts & kCombine) != 0) launch_combine(p, stream);
}

void StreamingLayers::launch_expanded(const StreamingParams& p, cudaStream_t stream) const {
  if (p.format == WeightFormat::kExact) fail(ErrorCode::kUnsupported, "these are numbers already");
  coded::launch_expanded({.format = p.format,
                          .w13 = static_cast<const std::byte*>(p.w13),
                          .scales13 = p.scales13,
                          .w2 = static_cast<const std::byte*>(p.w2),
                          .scales2 = p.scales2},
                         grouped_params(p), memory_->numbers.data(), stream);
  launch_combine(p, stream);
}

void StreamingLayers::launch_coded(const StreamingParams& p, unsigned parts,
                                   cudaStream_t stream) const {
  if (p.format == WeightFormat::kExact) fail(ErrorCode::kUnsupported, "these are numbers");
  const bool splits = p.format == WeightFormat::kMxfp4;
  const CodedGroupedParams params{
      .format = p.format,
      .x = p.x,
      .row_token = p.row_token,
      .ordered = splits || (parts & kOrdered) != 0 ? memory_->rows.data() : nullptr,
      .row_scales = splits ? memory_->split_scales.data() : nullptr,
      .num_tokens = p.num_tokens,
      .w13 = static_cast<const std::byte*>(p.w13),
      .scales13 = p.scales13,
      .act = p.act,
      .w2 = static_cast<const std::byte*>(p.w2),
      .scales2 = p.scales2,
      .y = memory_->rows.data(),
      .expert_begin = p.expert_begin,
      .expert_rows = p.expert_rows,
      .num_experts = p.num_experts,
      .max_rows = p.max_rows,
      .hidden = p.hidden,
      .inner = p.inner};
  if ((parts & kUp) != 0) launch_coded_gate_up(params, stream);
  if ((parts & kDown) != 0) launch_coded_down(params, stream);
  if ((parts & kCombine) != 0) launch_combine(p, stream);
}

void StreamingLayers::launch_fp8(const StreamingParams& p, unsigned parts,
                                 cudaStream_t stream) const {
  const Fp8GroupedParams params{.x = {memory_->fp8_tokens.data(), memory_->token_scales.data()},
                                .row_token = p.row_token,
                                .w13 = static_cast<const std::byte*>(p.w13),
                                .scales13 = p.scales13,
                                .act = static_cast<std::byte*>(p.act),
                                .act_scales = memory_->act_scales.data(),
                                .w2 = static_cast<const std::byte*>(p.w2),
                                .scales2 = p.scales2,
                                .y = memory_->rows.data(),
                                .expert_begin = p.expert_begin,
                                .expert_rows = p.expert_rows,
                                .counters = memory_->fp8_counters.data(),
                                .num_experts = p.num_experts,
                                .max_rows = p.max_rows,
                                .num_tokens = p.num_tokens,
                                .hidden = p.hidden,
                                .inner = p.inner};
  if ((parts & kUp) != 0) {
    quantise_rows({.x = {static_cast<const std::byte*>(p.x), p.dtype, p.num_tokens, p.hidden}},
                  {memory_->fp8_tokens.data(), DType::kF8E4M3, p.num_tokens, p.hidden},
                  {memory_->token_scales.data(), {p.num_tokens, row_blocks(p.hidden)}}, stream);
    launch_fp8_gate_up(params, stream);
  }
  if ((parts & kDown) != 0) launch_fp8_down(params, stream);
  if ((parts & kCombine) != 0) launch_combine(p, stream);
}

void StreamingLayers::launch_best(const StreamingParams& params, cudaStream_t stream) const {
  const StreamingChip chip = streaming_chip();
  if (fp8_rows_) return launch_fp8(params, kAll, stream);
  if (worth_streaming(params, chip) && choose_streaming(params, chip).fits) {
    launch_streaming(params, stream);
  } else if (params.format != WeightFormat::kExact) {
    const bool orders = coded::can_be_ordered(params.hidden, params.inner);
    launch_coded(params, orders ? kAll | kOrdered : kAll, stream);
  } else {
    launch_grouped(params, GroupedPath::kBest, kAll, stream);
  }
}

double time_layers(const StreamingLayers& layers,
                   const std::function<void(const StreamingParams&, cudaStream_t)>& launch,
                   int repeats, cudaStream_t stream) {
  const std::vector<StreamingParams>& all = layers.params();
  return median_graph_us(static_cast<int>(all.size()), repeats, stream, [&](int layer) {
    StreamingParams params = all[static_cast<std::size_t>(layer)];
    params.plan_is_older = true;
    launch(params, stream);
  });
}

double measure_read(Arena arena, cudaStream_t stream) {
  const DeviceArray<unsigned> out(1);
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  SWITCHYARD_CUDA(cudaEventCreate(&begin));
  SWITCHYARD_CUDA(cudaEventCreate(&end));
  const std::int64_t bytes = std::int64_t{8} << 30;
  fill_uniform(arena.data, DType::kF32, static_cast<std::size_t>(bytes) / sizeof(float), 1, 5,
               stream);
  double best = 0;
  for (const ReadShape shape : kReadShapes) {
    std::vector<float> times;
    for (int i = 0; i < 9; ++i) {
      SWITCHYARD_CUDA(cudaEventRecord(begin, stream));
      launch_read(arena.data, bytes, out.data(), shape, stream);
      SWITCHYARD_CUDA(cudaEventRecord(end, stream));
      SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
      SWITCHYARD_CUDA(cudaEventElapsedTime(&times.emplace_back(), begin, end));
    }
    std::ranges::sort(times);
    const double rate = static_cast<double>(bytes) / (times[times.size() / 2] * 1e-3);
    best = std::max(best, rate);
    fmt::print("read {}x{}: {:.3f} TB/s\n", shape.blocks, shape.threads, rate * 1e-12);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best;
}

}  // namespace switchyard::bench
