// Directories of whole models: shards, damage, tensors too many, and what train() has written.
#include <gtest/gtest.h>

#include <cmath>

#include <nlohmann/json.hpp>

#include "checkpoint/files/mapped_file.hpp"
#include "checkpoint/files/safetensors.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/models/released.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/small_run.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::test {
namespace {

using models::ReleasedModel;
using nlohmann::json;

const std::filesystem::path kFolder = std::filesystem::path(SWITCHYARD_TEST_DATA) / "whole_models";

std::vector<float> logits_of(ReleasedModel& model) {
  const std::vector<std::int32_t> ids{3, 1, 4, 1, 5, 9, 2, 6};
  std::vector<float> logits(ids.size() * static_cast<std::size_t>(model.vocabulary()));
  model.forward({ids.data(), {2, 4}}, {logits.data(), {8, model.vocabulary()}});
  return logits;
}

/// A copy of a model, whose configuration and tensors a test may change.
class Copy {
 public:
  explicit Copy(const char* name) : file_(kFolder / name / "model.safetensors") {
    config = json::parse(read_text(kFolder / name / "config.json"));
    for (const StoredTensor& tensor : file_.tensors()) tensors.push_back(tensor);
  }
  StoredTensor& tensor(const std::string& name) {
    for (StoredTensor& of : tensors) {
      if (of.spec.name == name) return of;
    }
    throw std::runtime_error(name);
  }
  const std::filesystem::path& write() {
    folder_.file("config.json", config.dump());
    write_safetensors(folder_.path() / "model.safetensors", tensors);
    return folder_.path();
  }
  const std::filesystem::path& write_in_shards() {
    folder_.file("config.json", config.dump());
    json index;
    for (std::size_t shard = 0; shard < 3; ++shard) {
      const std::string name = "part-" + std::to_string(shard) + ".safetensors";
      std::vector<StoredTensor> some;
      for (std::size_t i = shard; i < tensors.size(); i += 3) {
        some.push_back(tensors[i]);
        index["weight_map"][tensors[i].spec.name] = name;
      }
      write_safetensors(folder_.path() / name, some);
    }
    folder_.file("model.safetensors.index.json", index.dump());
    return folder_.path();
  }

  json config;
  std::vector<StoredTensor> tensors;

 private:
  SafetensorsFile file_;
  TestFolder folder_;
};

TEST(ReleasedFiles, ShardsGiveTheSameLogits) {
  ReleasedModel whole(kFolder / "gpt_oss");
  Copy copy("gpt_oss");
  ReleasedModel shards(copy.write_in_shards());
  EXPECT_EQ(logits_of(shards), logits_of(whole));
}

TEST(ReleasedFiles, EveryTensorIsMissedAndEveryShapeIsLookedAt) {
  for (const char* const name : {"qwen2_moe", "gpt_oss", "deepseek_v3"}) {
    Copy copy(name);
    for (std::size_t i = 0; i < copy.tensors.size(); ++i) {
      const StoredTensor kept = copy.tensors[i];
      const bool of_block = kept.spec.name.find("mlp.") != std::string::npos;  // the checkpoint's
      const bool is_again = kept.spec.name.starts_with("model.layers.0.");
      if (of_block || is_again || kept.spec.name.starts_with("golden.")) continue;
      SCOPED_TRACE(kept.spec.name);
      copy.tensors[i].spec.name = "elsewhere";
      expect_error(ErrorCode::kBadFile, {}, [&] { ReleasedModel model(copy.write()); });
      copy.tensors[i] = kept;
      copy.tensors[i].spec.shape.push_back(1);
      expect_error(ErrorCode::kBadFile, {}, [&] { ReleasedModel model(copy.write()); });
      copy.tensors[i] = kept;
    }
  }
}

TEST(ReleasedFiles, TensorsThatNobodyReadsAreRefusedByName) {
  Copy copy("mixtral");
  StoredTensor more = copy.tensor("model.layers.1.self_attn.o_proj.weight");
  more.spec.name = "model.layers.1.self_attn.o_proj.bias";
  copy.tensors.push_back(more);
  expect_error(ErrorCode::kBadFile, {"model.layers.1.self_attn.o_proj.bias"},
               [&] { ReleasedModel model(copy.write()); });
  copy.tensors.back().spec.name = "model.layers.0.pre_feedforward_layernorm.weight";
  expect_error(ErrorCode::kBadFile, {"pre_feedforward_layernorm"},
               [&] { ReleasedModel model(copy.write()); });
  copy.tensors.back().spec.name = "model.layers.0.self_attn.rotary_emb.inv_freq";
  ReleasedModel fine(copy.write());
}

TEST(ReleasedFiles, ATiedHeadIsTheEmbedding) {
  Copy copy("qwen3_moe");
  StoredTensor head = copy.tensor("model.embed_tokens.weight");
  head.spec.name = "lm_head.weight";
  copy.tensors.push_back(head);
  ReleasedModel twice(copy.write());
  ReleasedModel once(kFolder / "qwen3_moe");
  EXPECT_EQ(logits_of(twice), logits_of(once));
  std::vector<std::byte> others(head.bytes.begin(), head.bytes.end());
  others[1] ^= std::byte{1};
  copy.tensors.back().bytes = others;
  expect_error(ErrorCode::kBadFile, "tie_word_embeddings=true, but 'lm_head.weight'",
               [&] { ReleasedModel model(copy.write()); });
}

TEST(ReleasedFiles, AModelThatWasTrainedHereComputesTheSame) {
  for (const auto norm : {models::QkNorm::kHead, models::QkNorm::kWhole}) {
    models::ModelConfig config = models::small_bytes_model();
    config.qk_norm = norm;
    if (norm == models::QkNorm::kHead) config.first_dense = 1, config.dense_inner = 12;
    config.tied = norm == models::QkNorm::kWhole;
    models::Model model(config, {.seed = 3});
    const TestFolder folder;
    save_model(model, folder.path());
    EXPECT_FALSE(models::is_released(folder.path()));
    ReleasedModel released(folder.path());
    const std::vector<std::int32_t> ids{3, 1, 4, 1, 5, 9, 2, 6};
    std::vector<float> expected(8 * 256);
    model.forward({ids.data(), {2, 4}}, {expected.data(), {8, 256}});
    const std::vector<float> logits = logits_of(released);
    for (std::size_t i = 0; i < logits.size(); ++i) ASSERT_NEAR(logits[i], expected[i], 1e-6) << i;
  }
}

TEST(ReleasedModels, StoredCodesGiveTheBitsOfTheirNumbers) {
  ReleasedModel exact(kFolder / "gpt_oss_mxfp4");
  ReleasedModel stored(kFolder / "gpt_oss_mxfp4", {.weights = WeightFormat::kStored});
  EXPECT_EQ(logits_of(stored), logits_of(exact));
  expect_error(ErrorCode::kUnsupported, "weights=stored",
               [] { ReleasedModel model(kFolder / "olmoe", {.weights = WeightFormat::kStored}); });
}

TEST(ReleasedModels, OtherTypesOfProductsAreNearTheF32Ones) {
  for (const char* const name : {"qwen2_moe", "deepseek_v3"}) {
    ReleasedModel exact(kFolder / name);
    const std::vector<float> expected = logits_of(exact);
    for (const DType compute : {DType::kBF16, DType::kF16}) {
      ReleasedModel model(kFolder / name, {.compute = compute});
      const std::vector<float> logits = logits_of(model);
      EXPECT_NE(logits, expected);
      for (std::size_t i = 0; i < logits.size(); ++i) ASSERT_NEAR(logits[i], expected[i], 0.2) << i;
    }
  }
}

TEST(ReleasedModels, RefuseWhatTheyCannotTake) {
  ReleasedModel model(kFolder / "mixtral");
  EXPECT_TRUE(models::is_released(kFolder / "mixtral"));
  std::vector<std::int32_t> ids(65, 1);
  std::vector<float> logits(65 * 64);
  expect_error(ErrorCode::kInvalidArgument, {"64"}, [&] {
    model.forward({ids.data(), {1, 65}}, {logits.data(), {65, 64}});
  });
  ids[3] = 64;
  expect_error(ErrorCode::kInvalidArgument, {"tokens[0][3] is 64"}, [&] {
    model.forward({ids.data(), {1, 8}}, {logits.data(), {8, 64}});
  });
  models::Cache cache = model.make_cache(1, 4);
  expect_error(ErrorCode::kInvalidArgument, {"room for 4"}, [&] {
    model.decode({ids.data(), {1, 5}}, cache, {logits.data(), {1, 64}});
  });
  expect_error(ErrorCode::kInvalidArgument, {"65"}, [&] { (void)model.make_cache(1, 65); });
  expect_error(ErrorCode::kInvalidArgument, {"there is nothing to predict"}, [&] {
    (void)evaluate(model, {{"one", {1}}});
  });
}

TEST(ReleasedModels, LossesAreThoseOfTheLogits) {
  ReleasedModel model(kFolder / "mixtral");
  const std::vector<std::int32_t> ids{3, 1, 4, 1, 5, 9, 2};
  double nats = 0;
  for (const std::int64_t first : {0, 4}) {  // windows of 4, the last one short
    const std::int64_t count = std::min<std::int64_t>(4, std::ssize(ids) - 1 - first);
    std::vector<float> logits(static_cast<std::size_t>(count * 64));
    model.forward({ids.data() + first, {1, count}}, {logits.data(), {count, 64}});
    for (std::int64_t row = 0; row < count; ++row) {
      long double sum = 0;
      for (std::int64_t v = 0; v < 64; ++v) {
        sum += std::exp(static_cast<long double>(logits[static_cast<std::size_t>(row * 64 + v)]));
      }
      const std::int32_t target = ids[static_cast<std::size_t>(first + row + 1)];
      nats += static_cast<double>(std::log(sum)) -
              double{logits[static_cast<std::size_t>(row * 64 + target)]};
    }
  }
  const models::ReleasedEvaluation found = evaluate(model, {{"a", ids}, {"b", ids}}, 4);
  ASSERT_EQ(found.documents.size(), 2U);
  EXPECT_EQ(found.documents[0].score.targets, 6);
  EXPECT_NEAR(found.documents[0].score.nats, nats, 1e-5);
  EXPECT_NEAR(found.all.nats, 2 * nats, 2e-5);
}

}  // namespace
}  // namespace switchyard::test
