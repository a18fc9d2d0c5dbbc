// Adapters forward and back, on one rank or several, as check_backward() asks for it.
#include "verify/perft/run_perft.hpp"

#include <algorithm>

#include "switchyard/device.hpp"
#include "switchyard/names.hpp"
#include "testkit/call_memory.hpp"
#include "verify/plain_source.hpp"
#include "verify/run_layer.hpp"

namespace switchyard::verify {
namespace {

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& values) {
  to.insert(to.end(), values.begin(), values.end());
}

template <typename T>
void add_up(std::vector<T>& to, const std::vector<T>& values) {
  to.resize(std::max(to.size(), values.size()));
  for (std::size_t i = 0; i < values.size(); ++i) to[i] += values[i];
}

/// An array's values times a number, in its type.
void multiply(GradientArray& array, float factor) {
  if (factor == 1.0F) return;
  std::vector<float> values = decode(array.dtype, array.bytes);
  for (float& value : values) value *= factor;
  array.bytes = encode(array.dtype, values);
}

RawMatrix raw(GradientArray& array, CallMemory& memory) {
  if (array.bytes.empty()) return {};
  return {memory.place(array.bytes), array.dtype, array.rows, array.cols};
}

/// B's has the rows of all adapters, whatever the problem's.
RawMatrix raw_of(GradientArray& db, const PerftConfig& config, CallMemory& memory) {
  if (db.bytes.empty()) return {};
  return {memory.place(db.bytes), db.dtype, config.num_adapters * config.hidden, config.rank};
}

template <typename T>
std::vector<std::byte> bytes_of(const T* values, std::int64_t count) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(values);
  return {bytes, bytes + count * std::int64_t{sizeof(T)}};
}

/// Tokens [begin, end) of it, as they are before.
GradientArray rows_of(const GradientArray& whole, std::int64_t begin, std::int64_t end) {
  GradientArray part = whole;
  part.rows = end - begin;
  if (whole.bytes.empty()) return part;
  const std::int64_t row_bytes = whole.cols * size_of(whole.dtype);
  part.bytes.assign(whole.bytes.begin() + begin * row_bytes, whole.bytes.begin() + end * row_bytes);
  return part;
}

/// Whether the adapters of the problem are side by side in one expert.
bool are_one(const Problem& adapters, const PerftConfig& config) {
  return adapters.test.layer.experts.num_experts < config.num_adapters;
}

/// Calls body(place in B [M, H, r], place in [H, M r]) for each number of B.
template <typename Body>
void each_of_b(const PerftConfig& config, Body&& body) {
  const std::int64_t adapters = config.num_adapters, rank = config.rank;
  for (std::int64_t i = 0; i < adapters * config.hidden * rank; ++i) {
    const std::int64_t adapter = i / (config.hidden * rank), h = i / rank % config.hidden;
    body(static_cast<std::size_t>(i),
         static_cast<std::size_t>((h * adapters + adapter) * rank + i % rank));
  }
}

/// B of [H, M r].
std::vector<float> apart(const std::vector<float>& one, const PerftConfig& config) {
  std::vector<float> b(one.size());
  each_of_b(config, [&](std::size_t of_b, std::size_t of_one) { b[of_b] = one[of_one]; });
  return b;
}

/// And the other way.
std::vector<float> together(const std::vector<float>& b, const PerftConfig& config) {
  std::vector<float> one(b.size());
  each_of_b(config, [&](std::size_t of_b, std::size_t of_one) { one[of_one] = b[of_b]; });
  return one;
}

bool is_by_token(std::size_t i) { return i <= static_cast<std::size_t>(Gradient::kWeight); }

}  // namespace

bool is_merged(const PerftConfig& config, Backend backend) {
  return backend == Backend::kCuda && config.kind == PerftKind::kDense;
}

PerftModel model_of(const Problem& adapters, const PerftConfig& config) {
  const auto& all = dynamic_cast<const PlainSource&>(*adapters.model.experts);
  auto own = std::make_shared<PlainSource>(config.experts(), all.dtype());
  own->gate = all.gate;
  own->down = are_one(adapters, config) ? apart(all.down, config) : all.down;
  for (float& value : own->down) value /= config.scale();
  PerftModel model{.config = config, .adapters = std::move(own)};
  if (config.kind == PerftKind::kRouted) model.gate = adapters.model.gate;
  return model;
}

PerftCall::PerftCall(const Problem& adapters, const PerftConfig& config, std::int64_t begin,
                     std::int64_t end, CallMemory& memory)
    : x_(encode(adapters.test.tokens,
                std::span(adapters.tokens)
                    .subspan(static_cast<std::size_t>(begin * config.hidden),
                             static_cast<std::size_t>((end - begin) * config.hidden)))) {
  const std::int64_t tokens = end - begin;
  args.tokens = {memory.place(x_), adapters.test.tokens, tokens, config.hidden};
  args.request = request_of(adapters, begin, end);
  args.stream = memory.stream();
  if (config.kind != PerftKind::kEmbedded) return;
  const std::int64_t columns = adapters.test.layer.router.top_k(), count = tokens * columns;
  expert_ = bytes_of(adapters.given_expert.data() + begin * columns, count);
  weight_ = bytes_of(adapters.given_weight.data() + begin * columns, count);
  args.expert = {reinterpret_cast<const std::int32_t*>(memory.place(expert_)), {tokens, columns}};
  args.weight = {reinterpret_cast<const float*>(memory.place(weight_)), {tokens, columns}};
}

namespace {

BackwardResult run_rank(const Problem& adapters, const PerftConfig& config,
                        const BackwardProblem& backward, const BackwardRun& run, std::int64_t begin,
                        std::int64_t end, Communicator* ranks) {
  const Case& test = adapters.test;
  const std::int64_t tokens = end - begin, hidden = config.hidden;
  BackwardResult result;
  for (std::size_t i = 0; i < backward.gradients.size(); ++i) {
    const GradientArray& whole = backward.gradients[i];
    result.gradients.push_back(is_by_token(i) ? rows_of(whole, begin, end) : whole);
  }
  const auto array = [&](Gradient which) -> GradientArray& {
    return result.gradients[static_cast<std::size_t>(which)];
  };
  result.out.assign(static_cast<std::size_t>(tokens * hidden * size_of(test.output)),
                    std::byte{0xff});
  result.plain_out = result.out;
  std::vector<std::byte> dout =
      encode(backward.dout_type, std::span(backward.dout)
                                     .subspan(static_cast<std::size_t>(begin * hidden),
                                              static_cast<std::size_t>(tokens * hidden)));
  GradientArray& db = array(Gradient::kW2);
  const bool wants_b = !db.bytes.empty(), one = are_one(adapters, config);
  if (wants_b && one) db.bytes = encode(db.dtype, apart(decode(db.dtype, db.bytes), config));
  // The problem's B has the scale in it, so its gradient is smaller by that.
  if (backward.accumulate) multiply(db, config.scale());
  if (run.backend == Backend::kCuda) use_gpu_of_rank(ranks == nullptr ? 0 : ranks->rank());
  CallMemory memory(run.backend);
  PerftCall call(adapters, config, begin, end, memory);
  GradientArray& weight = array(Gradient::kWeight);
  PerftBackwardArgs args{.dout = {memory.place(dout), backward.dout_type, tokens, hidden},
                         .dtokens = raw(array(Gradient::kTokens), memory),
                         .da = raw(array(Gradient::kW13), memory),
                         .db = raw_of(db, config, memory),
                         .dgate = raw(array(Gradient::kGate), memory),
                         .accumulate = backward.accumulate,
                         .stream = memory.stream()};
  if (!weight.bytes.empty()) {
    args.dweight = {reinterpret_cast<float*>(memory.place(weight.bytes)),
                    {weight.rows, weight.cols}};
  }
  PerftAdapters layer(model_of(adapters, config),
                      {.backend = run.backend, .compute = test.compute, .num_threads = run.threads},
                      ranks);
  SavedForward saved(backward.recompute);
  PerftForwardArgs& forward = call.args;
  forward.out = {memory.place(result.out), test.output, tokens, hidden};
  forward.saved = &saved;
  forward.request.record = &result.record;
  layer.forward(forward);
  forward.out.data = memory.place(result.plain_out);
  forward.saved = nullptr;
  forward.request.record = nullptr;
  layer.forward(forward);
  layer.check();
  args.saved = &saved;
  layer.backward(args);
  layer.check();
  memory.finish();
  multiply(db, 1 / config.scale());
  if (wants_b && one) db.bytes = encode(db.dtype, together(decode(db.dtype, db.bytes), config));
  return result;
}

void add_part(BackwardResult& whole, const BackwardResult& part, bool first) {
  append(whole.out, part.out);
  append(whole.plain_out, part.plain_out);
  append(whole.record.expert, part.record.expert);
  append(whole.record.weight, part.record.weight);
  append(whole.record.kept, part.record.kept);
  add_up(whole.record.counts, part.record.counts);
  add_up(whole.record.counts_kept, part.record.counts_kept);
  for (std::size_t i = 0; i < whole.gradients.size(); ++i) {
    GradientArray& array = whole.gradients[i];
    const std::vector<std::byte>& bytes = part.gradients[i].bytes;
    if (first) array.bytes.clear();
    if (first || is_by_token(i)) {
      append(array.bytes, bytes);
    } else if (array.bytes != bytes) {
      whole.apart = array.name;
    }
  }
}

}  // namespace

BackwardResult run_perft(const Problem& adapters, const PerftConfig& config,
                         const BackwardProblem& backward, const BackwardRun& run, int ranks) {
  Case split = adapters.test;
  split.ranks = ranks;
  const std::vector<std::int64_t> begin = rank_begin(split);
  BackwardResult result;
  try {
    if (ranks == 1) {
      return run_rank(adapters, config, backward, run, begin[0], begin[1], nullptr);
    }
    std::vector<BackwardResult> of(static_cast<std::size_t>(ranks));
    run_ranks(
        ranks,
        [&](Communicator& communicator) {
          const auto r = static_cast<std::size_t>(communicator.rank());
          of[r] = run_rank(adapters, config, backward, run, begin[r], begin[r + 1], &communicator);
        },
        run.timeout);
    result.gradients = backward.gradients;
    for (const BackwardResult& part : of) add_part(result, part, &part == of.data());
  } catch (const Error& error) {
    result.error = error;
  }
  return result;
}

}  // namespace switchyard::verify
