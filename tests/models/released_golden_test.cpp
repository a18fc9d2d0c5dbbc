// Whole models of each family against transformers: checkpoints saved by save_pretrained, logits
// and greedy tokens, as tools/peers/transformers_whole.py --golden has written them. The versions
// stand in each file's metadata.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/files/safetensors.hpp"
#include "switchyard/models/released.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using models::Generation;
using models::ReleasedModel;

const std::filesystem::path kFolder = std::filesystem::path(SWITCHYARD_TEST_DATA) / "whole_models";

template <class T>
std::vector<T> values_of(const SafetensorsFile& file, const char* name) {
  const StoredTensor& tensor = *file.find(name);
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  const std::filesystem::path directory_ = kFolder / GetParam();
  const SafetensorsFile file_{directory_ / "model.safetensors"};
  std::vector<std::int32_t> ids_ = values_of<std::int32_t>(file_, "golden.ids");
  const std::int64_t length_ = std::ssize(ids_);
};

TEST_P(Golden, LogitsAreThoseOfTransformersToWithinRounding) {
  ReleasedModel model(directory_, {.num_threads = 2});
  const auto expected = values_of<float>(file_, "golden.logits");
  std::vector<float> logits(expected.size());
  model.forward({ids_.data(), {1, length_}}, {logits.data(), {length_, model.vocabulary()}});
  float largest = 0;
  for (const float logit : expected) largest = std::max(largest, std::abs(logit));
  ASSERT_GT(largest, 1);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    ASSERT_NEAR(logits[i], expected[i], 2e-5F * largest)
        << "position " << i / static_cast<std::size_t>(model.vocabulary());
  }
}

TEST_P(Golden, GreedyTokensAreTheSame) {
  ReleasedModel model(directory_);
  const auto expected = values_of<std::int32_t>(file_, "golden.tokens");
  const Generation made = generate(model, {.prompt = ids_,
                                           .batch = 2,
                                           .max_new_tokens = std::ssize(expected),
                                           .sampling = {.temperature = 0}});
  EXPECT_EQ(made.tokens[0], expected);
  EXPECT_EQ(made.tokens[1], expected);
}

TEST_P(Golden, BitsDoNotDependOnHowASequenceIsCutNorOnThreads) {
  ReleasedModel one(directory_);
  ReleasedModel two(directory_, {.num_threads = 2});
  const std::int64_t vocabulary = one.vocabulary();
  std::vector<std::int32_t> batch = ids_;
  batch.insert(batch.end(), ids_.rbegin(), ids_.rend());
  std::vector<float> whole(static_cast<std::size_t>(2 * length_ * vocabulary));
  one.forward({batch.data(), {2, length_}}, {whole.data(), {2 * length_, vocabulary}});
  models::Cache cache = two.make_cache(2, length_);
  std::int64_t first = 0;
  for (const std::int64_t count : {std::int64_t{9}, std::int64_t{1}, std::int64_t{2}}) {
    std::vector<std::int32_t> piece;
    for (const std::int64_t b : {std::int64_t{0}, length_}) {
      piece.insert(piece.end(), batch.begin() + b + first, batch.begin() + b + first + count);
    }
    std::vector<float> logits(static_cast<std::size_t>(2 * count * vocabulary));
    two.decode({piece.data(), {2, count}}, cache, {logits.data(), {2 * count, vocabulary}});
    for (std::int64_t b = 0; b < 2; ++b) {
      ASSERT_EQ(std::memcmp(logits.data() + b * count * vocabulary,
                            whole.data() + (b * length_ + first) * vocabulary,
                            static_cast<std::size_t>(4 * count * vocabulary)),
                0)
          << "sequence " << b << " from position " << first;
    }
    first += count;
  }
}

INSTANTIATE_TEST_SUITE_P(Released, Golden, ::testing::ValuesIn(test::sorted_names_in(kFolder)),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace switchyard
