// Floors of byte n-grams, against values that tests/data/ngrams_golden.py counts from the
// definition.
#include "switchyard/models/ngrams.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "switchyard/error.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void expect_near(const std::vector<double>& found, const nlohmann::json& golden) {
  ASSERT_EQ(found.size(), golden.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], golden[i].get<double>(), 1e-10) << "order " << i + 1;
  }
}

TEST(Ngrams, FloorsAreThoseThatAnIndependentCountGives) {
  const auto golden = nlohmann::json::parse(content_of(SWITCHYARD_TEST_DATA "/ngrams_golden.json"));
  const std::string text = content_of(SWITCHYARD_TEST_DATA "/../../LICENSE");
  const std::size_t split = text.size() - golden["held_out"].get<std::size_t>();
  const std::size_t cut = golden["cut"].get<std::size_t>();
  const TestFolder folder;
  const auto train = folder.file("train", text.substr(0, split));
  const auto held_out = folder.file("held_out", text.substr(split));
  expect_near(witten_bell_floors(Text({train}), Text({held_out})), golden["one_document"]);
  expect_near(witten_bell_floors(Text({train}), Text({folder.file("begin", text.substr(0, 1000))})),
              golden["same_text"]);
  const Text halves(
      {folder.file("a", text.substr(0, cut)), folder.file("b", text.substr(cut, split - cut))});
  const Text parts(
      {folder.file("c", text.substr(split, 700)), folder.file("d", text.substr(split + 700))});
  expect_near(witten_bell_floors(halves, parts), golden["documents"]);
}

TEST(Ngrams, FewerOrdersAreTheFirstOfMore) {
  const TestFolder folder;
  const Text text({folder.file("t", "the cat sat on the mat and the cat ate the rat")});
  const std::vector<double> all = witten_bell_floors(text, text);
  for (int order = 1; order <= kMaxNgramOrder; ++order) {
    const std::vector<double> some = witten_bell_floors(text, text, order);
    ASSERT_EQ(std::ssize(some), order);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()));
  }
  for (const int order : {0, 9, -1}) {
    EXPECT_THROW((void)witten_bell_floors(text, text, order), Error);
  }
}

TEST(Ngrams, OfOneByteAndOfBytesNeverSeenAreTheFormulas) {
  const TestFolder folder;
  const Text as({folder.file("a", std::string(100, 'a'))});
  const Text bs({folder.file("b", std::string(10, 'b'))});
  // Order 1 of a's: (100 + 1/256) / 101; of b's: types / (count + types) of the uniform.
  EXPECT_NEAR(witten_bell_floors(as, as, 1)[0], -std::log((100 + 1.0 / 256) / 101), 1e-15);
  const std::vector<double> unseen = witten_bell_floors(as, bs);
  for (const double floor : unseen) EXPECT_NEAR(floor, -std::log(1.0 / 101 / 256), 1e-12);
}

}  // namespace
}  // namespace switchyard::models
