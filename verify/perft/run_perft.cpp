// Adapters forward and back, on one rank or several, as check_backward() asks for it.
#include "verify/perft/run_perft.hpp"

#include <algorithm>

#include "switchyard/names.hpp"
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

RawMatrix raw(GradientArray& array) {
  if (array.bytes.empty()) return {};
  return {array.bytes.data(), array.dtype, array.rows, array.cols};
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

bool is_by_token(std::size_t i) { return i <= static_cast<std::size_t>(Gradient::kWeight); }

}  // namespace

PerftModel model_of(const Problem& adapters, const PerftConfig& config) {
  const auto& all = dynamic_cast<const PlainSource&>(*adapters.model.experts);
  auto own = std::make_shared<PlainSource>(all);
  for (float& value : own->down) value /= config.scale();
  PerftModel model{.config = config, .adapters = std::move(own)};
  if (config.kind == PerftKind::kRouted) model.gate = adapters.model.gate;
  return model;
}

PerftForwardArgs forward_of(const Problem& adapters, const PerftConfig& config, std::int64_t begin,
                            std::int64_t end) {
  PerftForwardArgs args{.request = request_of(adapters, begin, end)};
  if (config.kind != PerftKind::kEmbedded) return args;
  const std::int64_t columns = adapters.test.layer.router.top_k();
  args.expert = {adapters.given_expert.data() + begin * columns, {end - begin, columns}};
  args.weight = {adapters.given_weight.data() + begin * columns, {end - begin, columns}};
  return args;
}

namespace {

BackwardResult run_rank(const Problem& adapters, const PerftConfig& config,
                        const BackwardProblem& backward, int threads, std::int64_t begin,
                        std::int64_t end, Communicator* ranks) {
  const Case& test = adapters.test;
  const std::int64_t tokens = end - begin, hidden = config.hidden;
  const auto rows = [&](const std::vector<float>& values) {
    return std::span(values).subspan(static_cast<std::size_t>(begin * hidden),
                                     static_cast<std::size_t>(tokens * hidden));
  };
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
  const std::vector<std::byte> x = encode(test.tokens, rows(adapters.tokens));
  const std::vector<std::byte> dout = encode(backward.dout_type, rows(backward.dout));
  PerftAdapters layer(model_of(adapters, config), {.compute = test.compute, .num_threads = threads},
                      ranks);
  SavedForward saved(backward.recompute);
  PerftForwardArgs forward = forward_of(adapters, config, begin, end);
  forward.tokens = {x.data(), test.tokens, tokens, hidden};
  forward.out = {result.out.data(), test.output, tokens, hidden};
  forward.saved = &saved;
  forward.request.record = &result.record;
  layer.forward(forward);
  forward.out.data = result.plain_out.data();
  forward.saved = nullptr;
  forward.request.record = nullptr;
  layer.forward(forward);
  // The problem's B has the scale in it, so its gradient is smaller by that.
  if (backward.accumulate) multiply(array(Gradient::kW2), config.scale());
  GradientArray& weight = array(Gradient::kWeight);
  PerftBackwardArgs args{.saved = &saved,
                         .dout = {dout.data(), backward.dout_type, tokens, hidden},
                         .dtokens = raw(array(Gradient::kTokens)),
                         .da = raw(array(Gradient::kW13)),
                         .db = raw(array(Gradient::kW2)),
                         .dgate = raw(array(Gradient::kGate)),
                         .accumulate = backward.accumulate};
  if (!weight.bytes.empty()) {
    args.dweight = {reinterpret_cast<float*>(weight.bytes.data()), {weight.rows, weight.cols}};
  }
  layer.backward(args);
  multiply(array(Gradient::kW2), 1 / config.scale());
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
      return run_rank(adapters, config, backward, run.threads, begin[0], begin[1], nullptr);
    }
    std::vector<BackwardResult> of(static_cast<std::size_t>(ranks));
    run_ranks(
        ranks,
        [&](Communicator& communicator) {
          const auto r = static_cast<std::size_t>(communicator.rank());
          of[r] = run_rank(adapters, config, backward, run.threads, begin[r], begin[r + 1],
                           &communicator);
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
