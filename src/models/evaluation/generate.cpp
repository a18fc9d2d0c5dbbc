// Tokens behind a prompt, by the model's cache.
#include "switchyard/models/generate.hpp"

#include <chrono>
#include <utility>

#include "core/check.hpp"
#include "models/device_model.hpp"
#include "switchyard/models/released.hpp"

namespace switchyard::models {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// What a prompt must fit into.
struct Room {
  std::int64_t vocabulary, positions;
};
Room room_of(const Model& model) { return {model.config().vocabulary, model.config().sequence}; }
Room room_of(const ReleasedModel& model) { return {model.vocabulary(), model.positions()}; }

void check(const Room& room, const GenerateArgs& args) {
  check(args.sampling);
  const std::int64_t prompt = std::ssize(args.prompt);
  require(prompt >= 1, "the prompt is empty");
  require(args.batch >= 1, "a batch of {} sequences", args.batch);
  require(args.max_new_tokens >= 1, "{} new tokens", args.max_new_tokens);
  require(prompt + args.max_new_tokens - 1 <= room.positions,
          "a prompt of {} tokens and {} new ones: the model has {} positions, and the last token "
          "needs none",
          prompt, args.max_new_tokens, room.positions);
  for (std::int64_t i = 0; i < prompt; ++i) {
    const std::int32_t id = args.prompt[static_cast<std::size_t>(i)];
    require(id >= 0 && id < room.vocabulary,
            "token {} of the prompt is {}, the model's vocabulary has {}", i, id, room.vocabulary);
  }
}

DeviceModel* device_of(Model& model) { return model.device(); }
DeviceModel* device_of(ReleasedModel& /*model*/) { return nullptr; }

/// Greedy tokens behind the first ones: on a GPU each step has its tokens from the one before, and
/// the next one is enqueued before the host has seen what this one came to.
void continue_on_device(DeviceModel& device, DeviceCache& cache, const GenerateArgs& args,
                        std::span<const std::int32_t> first, Generation& out) {
  const std::int64_t prompt = std::ssize(args.prompt);
  device.start_token(first.data(), cache, prompt);
  for (std::int64_t done = 2; done <= args.max_new_tokens; ++done) {
    const bool more = done < args.max_new_tokens;
    if (more) device.start_token(nullptr, cache, prompt + done - 1);
    const std::span<const std::int32_t> ids = device.finish_token(cache);
    for (std::size_t row = 0; row < ids.size(); ++row) {
      require(ids[row] >= 0, "the logits behind position {} of sequence {} are not all numbers",
              prompt + done - 1, row);
      out.tokens[row].push_back(ids[row]);
    }
    if (!args.on_token || !args.on_token(done)) continue;
    if (more) (void)device.finish_token(cache);
    return;
  }
}

/// @param first_row  The number of the batch's first sequence, which what is drawn goes by.
template <class AnyModel>
Generation continue_prompt(AnyModel& model, const GenerateArgs& args, std::int64_t first_row = 0) {
  const Room room = room_of(model);
  check(room, args);
  const std::int64_t prompt = std::ssize(args.prompt);
  const std::int64_t vocabulary = room.vocabulary;
  const auto batch = static_cast<std::size_t>(args.batch);
  Generation out;
  out.tokens.resize(batch);
  std::vector<float> logits(batch * static_cast<std::size_t>(vocabulary));
  const Matrix<float> last{logits.data(), {args.batch, vocabulary}};

  const auto begin = Clock::now();
  Cache cache = model.make_cache(args.batch, prompt + args.max_new_tokens - 1);
  std::vector<std::int32_t> next;
  for (std::size_t row = 0; row < batch; ++row) {
    next.insert(next.end(), args.prompt.begin(), args.prompt.end());
  }
  model.decode({next.data(), {args.batch, prompt}}, cache, last);
  out.prompt_seconds = seconds_since(begin);

  const auto decoding = Clock::now();
  next.resize(batch);
  for (std::int64_t done = 1;; ++done) {
    for (std::size_t row = 0; row < batch; ++row) {
      const std::span<const float> of_row(last.row(static_cast<std::int64_t>(row)),
                                          static_cast<std::size_t>(vocabulary));
      next[row] = sample(of_row, args.sampling, first_row + static_cast<std::int64_t>(row),
                         prompt + done - 1);
      out.tokens[row].push_back(next[row]);
    }
    const bool stop = args.on_token && args.on_token(done);
    if (stop || done == args.max_new_tokens) break;
    DeviceModel* const device = device_of(model);
    if (device != nullptr && args.sampling.temperature == 0) {
      continue_on_device(*device, *cache.state().device, args, next, out);
      break;
    }
    model.decode({next.data(), {args.batch, 1}}, cache, last);
  }
  out.decode_seconds = seconds_since(decoding);
  return out;
}

/// Each sequence as a batch of its own.
Generation one_by_one(Model& model, const GenerateArgs& args) {
  check(room_of(model), args);
  GenerateArgs one = args;
  one.batch = 1;
  Generation all = continue_prompt(model, one);
  one.on_token = nullptr;
  one.max_new_tokens = std::ssize(all.tokens[0]);
  for (std::int64_t row = 1; row < args.batch; ++row) {
    Generation next = continue_prompt(model, one, row);
    all.tokens.push_back(std::move(next.tokens[0]));
    all.prompt_seconds += next.prompt_seconds;
    all.decode_seconds += next.decode_seconds;
  }
  return all;
}

}  // namespace

Generation generate(Model& model, const GenerateArgs& args) {
  const bool alone = args.batch_invariant && args.batch > 1 && model.device() != nullptr;
  return alone ? one_by_one(model, args) : continue_prompt(model, args);
}
Generation generate(ReleasedModel& model, const GenerateArgs& args) {
  return continue_prompt(model, args);
}

}  // namespace switchyard::models
