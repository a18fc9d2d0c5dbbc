// `switchyard run --check`, checked: a result that is damaged in one place fails, says where, and
// is not left behind. The layer itself is sound here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/files/matrix_file.hpp"
#include "checkpoint/tensor_set.hpp"
#include "core/half.hpp"
#include "testkit/checkpoint_support.hpp"
#include "testkit/file_support.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/run/run.hpp"

namespace switchyard::tool {
namespace {

using bench::LayerRunArgs;
using bench::LayerRunResult;
using Damage = std::function<void(LayerRunResult&)>;

constexpr std::int64_t kTokens = 11;
constexpr std::int64_t kHidden = test::kSmall.hidden;

class RunCheck : public testing::Test {
 protected:
  void SetUp() override {
    make_checkpoint(test::small_recipe("mixtral", DType::kF32), folder_ / "made");
    std::vector<float> x;
    for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
      x.push_back(static_cast<float>((i * 37) % 101 - 50) / 40.0F);
    }
    write_matrix(folder_ / "x.npy",
                 {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, kTokens, kHidden});
  }

  [[nodiscard]] std::string output() const { return folder_ / "out.npy"; }

  /// Exit code of `run --check` with what the layer gives spoiled by `damage`; leaves the report in
  /// report_.
  int run(const Damage& damage, const std::vector<std::string>& more = {}) {
    std::vector<std::string> words{"switchyard",   "run",
                                   "--checkpoint", folder_ / "made",
                                   "--tokens",     folder_ / "x.npy",
                                   "--output",     output(),
                                   "--check",      "--json",
                                   "--ranks",      "2",
                                   "--iterations", "1",
                                   "--threads",    "2"};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    const auto options = parse_command_line(static_cast<int>(argv.size()), argv.data());
    testing::internal::CaptureStdout();
    const int exit_code = run_command(*options, [&](const LayerRunArgs& args) {
      LayerRunResult result = bench::run_layer(args);
      damage(result);
      return result;
    });
    std::fflush(stdout);
    report_ = nlohmann::json::parse(testing::internal::GetCapturedStdout());
    return exit_code;
  }

  void expect_failure(const std::string& words, const Damage& damage,
                      const std::vector<std::string>& more = {}) {
    EXPECT_EQ(run(damage, more), kCheckFailed) << words;
    const nlohmann::json& check = report_.at("check");
    EXPECT_EQ(check.at("holds"), false) << words;
    EXPECT_NE(check.at("miss").get<std::string>().find(words), std::string::npos)
        << "want '" << words << "', got " << check.at("miss");
    EXPECT_FALSE(std::filesystem::exists(output())) << words;
  }

  /// Makes element `element` of a tensor of the checkpoint NaN.
  void spoil(const std::string& tensor, std::int64_t element) const {
    const auto file = folder_ / "made" / "model.safetensors";
    std::ptrdiff_t place = 4 * element;
    {
      const auto set = TensorSet::open_file(file);
      const StoredTensor* found = set->find(tensor);
      ASSERT_NE(found, nullptr) << tensor;
      place += found->bytes.data() - set->file_of(*found).bytes().data();
    }
    std::fstream out(file, std::ios::binary | std::ios::in | std::ios::out);
    const float nan = std::nanf("");
    out.seekp(place).write(reinterpret_cast<const char*>(&nan), sizeof(nan));
  }

  nlohmann::json report_;

 private:
  test::TempDir folder_;
};

float* outputs(LayerRunResult& result) { return reinterpret_cast<float*>(result.out.data()); }

TEST_F(RunCheck, ASoundRunHoldsAndIsWritten) {
  EXPECT_EQ(run([](LayerRunResult&) {}), kFine);
  EXPECT_EQ(report_.at("check").at("holds"), true);
  EXPECT_EQ(report_.at("check").at("tokens_computed"), kTokens);
  EXPECT_GT(report_.at("check").at("largest_error"), 0.0);
  EXPECT_TRUE(std::filesystem::exists(output()));
}

TEST_F(RunCheck, AnOutputOutsideOfItsBoundFails) {
  expect_failure("output: out[0, 0] is",
                 [](LayerRunResult& result) { outputs(result)[0] += 1e-3F; });
  expect_failure("output: out[10, 63] is",
                 [](LayerRunResult& result) { outputs(result)[kTokens * kHidden - 1] += 1e-3F; });
  expect_failure("output: out[0, ", [](LayerRunResult& result) {
    std::swap_ranges(outputs(result), outputs(result) + kHidden, outputs(result) + kHidden);
  });
}

TEST_F(RunCheck, AnOutputThatIsNaNOrInfiniteFailsAndIsNoSmallError) {
  expect_failure("output: out[3, 5] is nan",
                 [](LayerRunResult& result) { outputs(result)[3 * kHidden + 5] = std::nanf(""); });
  EXPECT_TRUE(report_.at("check").at("largest_error").is_null());  // infinite
  expect_failure("output: out[0, 0] is -inf",
                 [](LayerRunResult& result) { outputs(result)[0] = -HUGE_VALF; });
  expect_failure("nan, not", [](LayerRunResult& result) {
    std::fill(result.out.begin(), result.out.end(), std::byte{0xff});
  });
}

TEST_F(RunCheck, AWrongChoiceOrWeightFails) {
  expect_failure("routing of token 0: not in descending order", [](LayerRunResult& result) {
    std::swap(result.record.expert[0], result.record.expert[2]);
  });
  expect_failure("routing of token 10: weight 2 is nan",
                 [](LayerRunResult& result) { result.record.weight.back() = std::nanf(""); });
  expect_failure("routing of token 4: weight 0 is",
                 [](LayerRunResult& result) { result.record.weight[12] *= 1.0001F; });
  expect_failure("routing of token 1: expert 8 is no expert",
                 [](LayerRunResult& result) { result.record.expert[4] = 8; });
}

TEST_F(RunCheck, ADropThatThePolicyDoesNotAskForFails) {
  expect_failure("drops of rank 0", [](LayerRunResult& result) { result.record.kept[0] = 0; });
  const std::vector<std::string> limited{"--capacity-factor", "0.5", "--drop-policy", "token"};
  for (const std::uint8_t now : {std::uint8_t{0}, std::uint8_t{1}}) {
    expect_failure(
        "drops of rank",
        [&](LayerRunResult& result) {
          auto& kept = result.record.kept;
          *std::find(kept.begin(), kept.end(), 1 - now) = now;
        },
        limited);
  }
}

TEST_F(RunCheck, AWeightThatIsNaNIsNamedBeforeTheLayerRuns) {
  const std::string layer = "model.layers.0.block_sparse_moe.";
  const auto expect_named = [&](const std::string& words) {
    bool ran = false;
    test::expect_error(ErrorCode::kBadFile, words,
                       [&] { (void)run([&](LayerRunResult&) { ran = true; }); });
    EXPECT_FALSE(ran);
    if (!ran) testing::internal::GetCapturedStdout();
  };
  spoil(layer + "experts.5.w3.weight", 7 * kHidden + 3);
  expect_named("made: layer 0: expert 5, up weight[7, 3] is nan, want finite numbers");
  spoil(layer + "experts.2.w2.weight", 4 * test::kSmall.inner + 95);
  expect_named("made: layer 0: expert 2, down weight[4, 95] is nan, want finite numbers");
  spoil(layer + "gate.weight", 3 * kHidden + 1);
  expect_named("made: layer 0: router weight[3, 1] is nan, want finite numbers");
}

}  // namespace
}  // namespace switchyard::tool
