// Generation on a GPU: logits of a cache beside a CPU's forward of the same text, however it is cut
// and whoever is beside it; tokens; what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "switchyard/models/generate.hpp"
#include "testkit/expect_error.hpp"
#include "tests/cuda/models/gpu_generation.hpp"

namespace switchyard::models {
namespace {

using test::expect_error;
using TestText = test::Text;

// Fails with: an angle one position off, a key or value that is not stored, a split left out of the
// sum, a residual or a norm left out.
TEST(GenerationOnGpu, SmallLogitsInF32AreThoseOfTheCpu) {
  expect_like_the_cpu(gpu_config(), DType::kF32, kBoundF32, {1, 3});
}
// 9 and more rows go by other products (in bf16 up to 64 by the stages of a batch); 2, 4 and 8 by
// other kernels of few rows.
TEST(GenerationOnGpu, LogitsInF32AreThoseOfTheCpu) {
  expect_like_the_cpu(gpu_config(), DType::kF32, kBoundF32, {2, 4, 7, 8, 9, 33});
  ModelConfig tied = gpu_config();
  tied.tied = true;
  tied.qk_norm = QkNorm::kNone;
  tied.head_dim = 24;
  expect_like_the_cpu(tied, DType::kF32, kBoundF32, {1, 5, 9});
  tied.heads = tied.kv_heads = 1;
  tied.head_dim = 6;  // no multiple of 16 bytes
  expect_like_the_cpu(tied, DType::kF32, kBoundF32, {2});
  ModelConfig wide = gpu_config();
  wide.head_dim = 128;
  wide.heads = 6;  // three queries a key
  expect_like_the_cpu(wide, DType::kF32, kBoundF32, {1, 8, 9});
  ModelConfig dense = gpu_config();
  dense.first_dense = 1;
  dense.dense_inner = 96;
  expect_like_the_cpu(dense, DType::kF32, kBoundF32, {1, 8, 9});
  ModelConfig shared = gpu_config();
  shared.shared_inner = 32;
  expect_like_the_cpu(shared, DType::kF32, kBoundF32, {1, 8, 9});
  shared.shared_gated = true;
  expect_like_the_cpu(shared, DType::kF32, kBoundF32, {1, 8, 9});
  shared.first_dense = 1;
  shared.dense_inner = 96;
  shared.head_dim = 128;
  shared.heads = 6;
  expect_like_the_cpu(shared, DType::kF32, kBoundF32, {1, 8, 9});
  ModelConfig full = gpu_config();  // drops nothing here
  full.capacity_factor = 0.5;
  full.head_dim = 64;
  full.kv_heads = full.heads;
  expect_like_the_cpu(full, DType::kF32, kBoundF32, {1, 9});
}
// What a kernel of one row, or of few, does more than once: items of attention, turns of positions,
// rounds of a product, experts that no block has all logits of.
TEST(GenerationOnGpu, LargeStepsAreThoseOfTheCpu) {
  ModelConfig wide = gpu_config();
  wide.vocabulary = 5000;
  wide.heads = wide.kv_heads = 24;
  wide.sequence = 700;
  expect_like_the_cpu(wide, DType::kF32, kBoundF32, {8});
  expect_like_the_cpu(wide, DType::kF32, kBoundF32, {1, 8}, 700);
  ModelConfig many = gpu_config();
  many.hidden = 264;
  many.experts = 40;
  many.top_k = 3;
  many.inner = 52;
  expect_like_the_cpu(many, DType::kF32, kBoundF32, {1, 2, 8});
  many.experts = many.top_k = 32;
  many.inner = 264;
  many.sequence = 300;
  many.heads = many.kv_heads = 24;
  many.head_dim = 64;
  expect_like_the_cpu(many, DType::kBF16, kBoundBf16, {1, 8}, 300);
}
TEST(GenerationOnGpu, RoutersInF32AreThoseOfTheCpu) {
  for (const char* router : {"hash", "gshard", "switch", "noisy-top-k", "chain"}) {
    ModelConfig config = gpu_config();
    config.router = router;
    config.losses = {};
    expect_like_the_cpu(config, DType::kF32, kBoundF32, {1, 5});
  }
}
TEST(GenerationOnGpu, SmallLogitsInBf16AreNearThoseOfTheCpuInF32) {
  ModelConfig config = gpu_config();
  config.top_k = config.experts;
  expect_like_the_cpu(config, DType::kBF16, kBoundBf16, {1, 3});
}
TEST(GenerationOnGpu, LogitsInBf16AreNearThoseOfTheCpuInF32) {
  ModelConfig config = gpu_config();
  config.top_k = config.experts;
  for (const std::int64_t dim : {32, 64, 128}) {
    config.head_dim = dim;
    expect_like_the_cpu(config, DType::kBF16, kBoundBf16, {1, 2, 4, 8, 12, 40, 65});
  }
  config.hidden = 72;  // no whole block of columns
  config.inner = 56;
  config.first_dense = 1;
  config.dense_inner = 104;
  expect_like_the_cpu(config, DType::kBF16, kBoundBf16, {1, 3, 8, 9, 64});
}

// Fails with: a piece that sees itself alone, or whose positions begin at 0; logits of another row
// than the last one.
TEST(GenerationOnGpu, SmallPrefixesAreCutAnywhere) {
  Model cpu(gpu_config(), {.num_threads = 2, .seed = 3});
  Model gpu(gpu_config(), on_gpu());
  make_rough(cpu, 0.1F);
  make_rough(gpu, 0.1F);
  const TestText text(3, 20, 37);
  const std::vector<float> want = test::logits(cpu, text);
  for (const std::vector<std::int64_t>& pieces : std::vector<std::vector<std::int64_t>>{
           {20}, {1, 19}, {19, 1}, {7, 5, 8}, {13, 1, 1, 5}, std::vector<std::int64_t>(20, 1)}) {
    expect_pieces(gpu, text, want, pieces, kBoundF32);
  }
}

// Fails with: a sequence that reads another one's cache or ids.
TEST(GenerationOnGpu, SmallSequencesAloneAreThoseOfABatch) {
  Model gpu(gpu_config(), on_gpu());
  make_rough(gpu, 0.1F);
  for (const std::int64_t batch : {3, 11}) {
    const TestText text(batch, 16, 37);
    Cache together = gpu.make_cache(batch, 16);
    std::vector<std::vector<float>> of_batch = {decode(gpu, together, text, 6)};
    for (int i = 6; i < 16; ++i) of_batch.push_back(decode(gpu, together, text, 1));
    for (std::int64_t b = 0; b < batch; ++b) {
      TestText own(1, 16, 37);
      own.tokens.assign(text.tokens.begin() + 16 * b, text.tokens.begin() + 16 * (b + 1));
      Cache alone = gpu.make_cache(1, 16);
      for (const std::vector<float>& of_all : of_batch) {
        const std::int64_t count = std::ssize(of_all) / (37 * batch);
        const std::vector<float> have = decode(gpu, alone, own, count);
        for (std::size_t i = 0; i < have.size(); ++i) {
          const float want = of_all[static_cast<std::size_t>(b) * have.size() + i];
          ASSERT_NEAR(have[i], want, kBoundF32 * (1 + std::abs(want)))
              << batch << " " << b << " " << i;
        }
      }
    }
  }
}

// Fails with: memory that caches share, a place that a graph has as a constant.
TEST(GenerationOnGpu, SmallCachesOfDifferentLengthsTakeTurns) {
  Model cpu(gpu_config(), {.num_threads = 2, .seed = 3});
  Model gpu(gpu_config(), on_gpu());
  make_rough(cpu, 0.1F);
  make_rough(gpu, 0.1F);
  const TestText one(2, 40, 37, 1), two(2, 40, 37, 2), three(1, 40, 37, 3);
  const std::vector<const TestText*> texts = {&one, &two, &three};
  std::vector<std::vector<float>> want;
  std::vector<Cache> caches;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    want.push_back(test::logits(cpu, *texts[i]));
    caches.push_back(gpu.make_cache(texts[i]->batch, 40));
    const std::int64_t prompt = 3 + 11 * static_cast<std::int64_t>(i);
    expect_like(decode(gpu, caches[i], *texts[i], prompt), want[i], *texts[i], 0, prompt,
                kBoundF32);
  }
  for (int step = 0; step < 14; ++step) {
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const std::int64_t length = caches[i].length();
      expect_like(decode(gpu, caches[i], *texts[i], 1), want[i], *texts[i], length, 1, kBoundF32);
    }
  }
  caches[1].truncate(2);
  expect_like(decode(gpu, caches[1], two, 1), want[1], two, 2, 1, kBoundF32);
}

// Fails with: a graph that is launched beyond its memory's life, or has copies of weights.
TEST(GenerationOnGpu, AGraphIsReplayedManyStepsBesideOtherCallsAndOtherWeights) {
  for (const std::int64_t batch : {2, 10}) {
    Model cpu(gpu_config(), {.num_threads = 2, .seed = 3});
    Model gpu(gpu_config(), on_gpu());
    const TestText text(batch, 80, 37), large(40, 80, 37, 9);
    Cache cache = gpu.make_cache(batch, 80);
    for (const std::uint64_t seed : {5, 6}) {
      make_rough(cpu, 0.1F, seed);
      make_rough(gpu, 0.1F, seed);
      const std::vector<float> want = test::logits(cpu, text);
      cache.truncate(0);
      for (std::int64_t step = 0; step < 80; ++step) {
        if (step == 30) (void)test::logits(gpu, large);
        if (step == 50) (void)test::step(gpu, large);
        expect_like(decode(gpu, cache, text, 1), want, text, step, 1, kBoundF32);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(GenerationOnGpu, SmallStepsHaveTheSameBitsInEveryRun) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t batch : {3, 20, 64, 70}) {
      const TestText text(batch, 24, 37);
      Model first(gpu_config(), on_gpu(compute)), second(gpu_config(), on_gpu(compute));
      Cache one = first.make_cache(batch, 24), two = second.make_cache(batch, 24);
      for (const std::int64_t count : {9, 1, 1, 1, 6, 1, 1}) {
        EXPECT_EQ(decode(first, one, text, count), decode(second, two, text, count));
      }
    }
  }
}

/// How far the largest two logits behind these tokens are apart.
float gap_behind(Model& model, std::vector<std::int32_t> tokens) {
  const std::int64_t vocabulary = model.config().vocabulary, count = std::ssize(tokens);
  std::vector<float> logits(static_cast<std::size_t>(count * vocabulary));
  model.forward({tokens.data(), {1, count}}, {logits.data(), {count, vocabulary}});
  std::vector<float> last(logits.end() - vocabulary, logits.end());
  std::sort(last.rbegin(), last.rend());
  return last[0] - last[1];
}

// Fails with: a token that is not the likeliest, tokens of another step, of another sequence.
TEST(GenerationOnGpu, SmallGreedyTokensInF32AreThoseOfTheCpu) {
  Model cpu(gpu_config(), {.num_threads = 2, .seed = 3});
  Model gpu(gpu_config(), on_gpu());
  make_rough(cpu, 0.1F);
  make_rough(gpu, 0.1F);
  std::int64_t compared = 0;
  for (const std::int64_t batch : {1, 3, 12}) {
    for (std::int32_t begin = 0; begin < 4; ++begin) {
      GenerateArgs args{.prompt = {begin, 7, 21},
                        .batch = batch,
                        .max_new_tokens = 60,
                        .sampling = {.temperature = 0}};
      const std::vector<std::int32_t> want = generate(cpu, args).tokens[0];
      for (const std::vector<std::int32_t>& have : generate(gpu, args).tokens) {
        ASSERT_EQ(have.size(), want.size());
        std::vector<std::int32_t> text = args.prompt;
        for (std::size_t i = 0; i < want.size(); ++i, ++compared) {
          if (have[i] != want[i]) {
            ASSERT_LT(gap_behind(cpu, text), 1e-3) << "token " << i << " of batch " << batch;
            break;
          }
          text.push_back(want[i]);
        }
      }
    }
  }
  EXPECT_GT(compared, 1000);
}

TEST(GenerationOnGpu, SmallTokensThatAreDrawnAreByTheSameRule) {
  Model cpu(gpu_config(), {.num_threads = 2, .seed = 3});
  Model gpu(gpu_config(), on_gpu());
  make_rough(cpu, 0.1F);
  make_rough(gpu, 0.1F);
  const GenerateArgs args{.prompt = {1, 2, 3},
                          .batch = 3,
                          .max_new_tokens = 30,
                          .sampling = {.temperature = 0.8, .top_k = 20, .top_p = 0.9, .seed = 4}};
  EXPECT_EQ(generate(gpu, args).tokens, generate(cpu, args).tokens);
}

TEST(GenerationOnGpu, SmallSequencesAreThoseOfABatchOfOneWhereTheyAreAskedToBe) {
  ModelOptions options = on_gpu();
  options.compute = DType::kBF16;
  Model gpu(gpu_config(), options);
  make_rough(gpu, 0.1F);
  for (const double temperature : {0.0, 1.3}) {
    GenerateArgs args{.prompt = {3, 1, 2},
                      .batch = 1,
                      .max_new_tokens = 40,
                      .sampling = {.temperature = temperature, .seed = 4},
                      .batch_invariant = true};
    const std::vector<std::int32_t> first = generate(gpu, args).tokens[0];
    args.batch = 12;
    const Generation made = generate(gpu, args);
    ASSERT_EQ(made.tokens.size(), 12U);
    EXPECT_EQ(made.tokens[0], first);
    EXPECT_EQ(made.tokens.back() == first, temperature == 0);
    args.on_token = [](std::int64_t done) { return done == 5; };
    EXPECT_EQ(generate(gpu, args).tokens.back().size(), 5U);
  }
}

TEST(GenerationOnGpu, SmallGenerationEndsWhereItIsToldTo) {
  Model gpu(gpu_config(), on_gpu());
  make_rough(gpu, 0.1F);
  GenerateArgs args{
      .prompt = {1, 2}, .batch = 2, .max_new_tokens = 79, .sampling = {.temperature = 0}};
  const Generation all = generate(gpu, args);
  ASSERT_EQ(all.tokens[1].size(), 79U);
  for (const std::int64_t end : {1, 2, 9, 79}) {
    std::int64_t calls = 0;
    args.on_token = [&](std::int64_t done) {
      EXPECT_EQ(done, ++calls);
      return done == end;
    };
    const std::vector<std::int32_t> have = generate(gpu, args).tokens[1];
    EXPECT_EQ(have, std::vector<std::int32_t>(all.tokens[1].begin(), all.tokens[1].begin() + end));
    EXPECT_EQ(calls, end);
  }
  args.on_token = nullptr;
  args.max_new_tokens = 1;
  EXPECT_EQ(generate(gpu, args).tokens[0].size(), 1U);
}

TEST(GenerationOnGpu, SmallWhatCannotBeIsRefusedInWords) {
  Model gpu(gpu_config(), on_gpu()), other(gpu_config(), on_gpu());
  Model cpu(gpu_config(), {.seed = 3});
  const TestText text(2, 8, 37);
  Cache cache = gpu.make_cache(2, 5), of_cpu = cpu.make_cache(2, 5);
  (void)decode(gpu, cache, text, 5);
  for (const std::int64_t count : {1, 2}) {
    expect_error(ErrorCode::kInvalidArgument, "behind 5: the cache has room for 5",
                 [&] { (void)decode(gpu, cache, text, count); });
  }
  EXPECT_EQ(cache.length(), 5);
  cache.truncate(1);
  expect_error(ErrorCode::kInvalidArgument, "of another model",
               [&] { (void)decode(other, cache, text, 1); });
  expect_error(ErrorCode::kInvalidArgument, "the model is on a CPU, the cache on a GPU",
               [&] { (void)decode(cpu, cache, text, 1); });
  expect_error(ErrorCode::kInvalidArgument, "the model is on a GPU, the cache on a CPU",
               [&] { (void)decode(gpu, of_cpu, text, 1); });
  expect_error(ErrorCode::kInvalidArgument, "81 positions", [&] { (void)gpu.make_cache(1, 81); });
  ModelConfig config = gpu_config();
  config.router = "expert-choice";
  config.losses = {};
  Model ahead(config, on_gpu());
  Cache of_ahead = ahead.make_cache(2, 5);
  expect_error(ErrorCode::kUnsupported, "expert-choice looks at later tokens",
               [&] { (void)decode(ahead, of_ahead, text, 1); });
}

TEST(GenerationOnGpu, SmallLogitsThatAreNotNumbersAreSaidToBe) {
  Model model(gpu_config(), on_gpu());
  make_rough(model, 0.1F);
  const auto spoil = [&](std::int64_t done) {  // between the prompt and the first step
    if (done != 1) return false;
    for (const ParameterTensor& tensor : model.parameters()) {
      if (tensor.group == Group::kHead) tensor.value[3] = std::numeric_limits<float>::quiet_NaN();
    }
    model.parameters_changed();
    return false;
  };
  expect_error(ErrorCode::kInvalidArgument, "behind position 3 of sequence 0 are not all numbers",
               [&] {
                 (void)generate(model, {.prompt = {1, 2},
                                        .batch = 2,
                                        .max_new_tokens = 9,
                                        .sampling = {.temperature = 0},
                                        .on_token = spoil});
               });
}

}  // namespace
}  // namespace switchyard::models
