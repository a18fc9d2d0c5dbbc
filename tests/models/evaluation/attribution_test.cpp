// Which source a passage is from, beside likelihoods of the model in double and counts by hand.
#include "switchyard/models/attribution.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>

#include "switchyard/error.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/evaluation/made_model.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

// Of a model with 16 positions passages have 8 bytes and excerpts 9: sources of 9 bytes have one.
const std::vector<std::string> kSources = {"all happy", "unhappy i", "0123 4567"};
const std::vector<std::string> kHeldOut = {small_text(203), small_text(800).substr(500, 170),
                                           "8901 2345 6789 0123 4567 8901 2345 67"};

std::vector<Text> texts(const TestFolder& folder, const std::string& name,
                        const std::vector<std::string>& contents) {
  std::vector<Text> out;
  for (std::size_t i = 0; i < contents.size(); ++i) {
    out.push_back(Text({folder.file(name + std::to_string(i), contents[i])}));
  }
  return out;
}

double nats_in_double(test::DoubleModel& twin, const std::string& excerpt,
                      const std::string& passage) {
  const auto window = double_windows(excerpt + passage, 100)[0];
  const auto nll =
      test::in_double::nll(twin.logits(window.tokens, window.tokens.size()), window.targets, 256);
  return std::accumulate(nll.end() - std::ptrdiff_t(passage.size()), nll.end(), 0.0);
}

std::vector<std::string> words_of(const std::vector<Passage>& passages) {
  std::vector<std::string> words;
  for (const Passage& of : passages) {
    words.push_back(kHeldOut[std::size_t(of.source)].substr(std::size_t(of.first), 8));
  }
  return words;
}

TEST(Attribution, TakesTheSourceBehindWhichAPassageIsLikeliest) {
  const TestFolder folder;
  Model model = made_model(small_bytes_model());
  test::DoubleModel twin(model);
  const auto sources = texts(folder, "s", kSources), held_out = texts(folder, "h", kHeldOut);
  const auto passages = passages_of(held_out, 8, 100);
  ASSERT_EQ(passages.size(), 12U);
  std::vector<std::int64_t> wanted(9);
  const auto words = words_of(passages);
  for (std::size_t i = 0; i < passages.size(); ++i) {
    std::vector<double> nats;
    for (const std::string& source : kSources) {
      nats.push_back(nats_in_double(twin, source, words[i]));
    }
    const auto taken = std::min_element(nats.begin(), nats.end()) - nats.begin();
    ++wanted[std::size_t(passages[i].source * 3 + taken)];
  }
  for (const std::int64_t sequences : {1, 7, 100}) {
    const Attribution found =
        attribute(model, sources, held_out, passages, {.excerpts = 2, .sequences = sequences});
    EXPECT_EQ(found.confusion, wanted);
    EXPECT_EQ(found.passages(), 12);
    EXPECT_EQ(found.correct(), wanted[0] + wanted[4] + wanted[8]);
  }
  EXPECT_GT(*std::max_element(wanted.begin(), wanted.end()), 0);
  EXPECT_LT(wanted[0] + wanted[4] + wanted[8], 12);
}

TEST(Attribution, DrawsExcerptsFromAllPlacesInsideOfDocuments) {
  const TestFolder folder;
  Model model = made_model(small_bytes_model());
  test::DoubleModel twin(model);
  const auto held_out = texts(folder, "h", kHeldOut);
  const auto passages = passages_of(held_out, 8, 100);
  // The first source has two places and a document that is too short for any.
  const std::string first = "0123456789";
  std::vector<Text> sources;
  sources.push_back(Text({folder.file("short", "zzzzz"), folder.file("first", first)}));
  sources.push_back(Text({folder.file("second", kSources[1])}));
  sources.push_back(Text({folder.file("third", kSources[2])}));
  const auto words = words_of(passages);
  std::set<std::int64_t> possible[12];
  bool differ = false;
  for (std::size_t i = 0; i < passages.size(); ++i) {
    for (const std::size_t place : {0U, 1U}) {
      const double nats[] = {nats_in_double(twin, first.substr(place, 9), words[i]),
                             nats_in_double(twin, kSources[1], words[i]),
                             nats_in_double(twin, kSources[2], words[i])};
      possible[i].insert(std::min_element(nats, nats + 3) - nats);
    }
    std::set<std::int64_t> seen;
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
      const Attribution found =
          attribute(model, sources, held_out, {&passages[i], 1}, {.seed = seed});
      const auto one = std::find(found.confusion.begin(), found.confusion.end(), 1);
      seen.insert((one - found.confusion.begin()) % 3);
    }
    EXPECT_EQ(seen, possible[i]) << i;
    differ = differ || seen.size() > 1;
  }
  EXPECT_TRUE(differ);  // else this shows nothing of places
}

TEST(Attribution, ByNgramsIsTheSourceWhoseCountsGiveThePassageTheMost) {
  const TestFolder folder;
  const auto held_out = texts(folder, "h", kHeldOut);
  const std::vector<std::string> contents = {small_text(500), small_text(2500).substr(1700),
                                             "0123456789 0123 4567 8901 2345"};
  const auto sources = texts(folder, "s", contents);
  const auto passages = passages_of(held_out, 8, 100);
  const auto words = words_of(passages);
  std::vector<std::vector<std::int64_t>> wanted(3, std::vector<std::int64_t>(9));
  for (std::size_t i = 0; i < passages.size(); ++i) {
    const Text alone({folder.file("passage", words[i])});
    std::vector<std::vector<double>> nats(3);
    for (std::size_t s = 0; s < 3; ++s) {
      // Order 1 by its formula: count c of the byte in N, and W different ones.
      const std::set<char> kinds(contents[s].begin(), contents[s].end());
      double first = 0;
      for (const char c : words[i].substr(1)) {
        const auto count = double(std::count(contents[s].begin(), contents[s].end(), c));
        first -= std::log((count + double(kinds.size()) / 256) /
                          double(contents[s].size() + kinds.size()));
      }
      nats[0].push_back(first);
      const auto floors = witten_bell_floors(sources[s], alone, 3);
      EXPECT_NEAR(floors[0], first / 7, 1e-12);
      for (const std::size_t order : {1U, 2U}) nats[order].push_back(floors[order]);
    }
    for (std::size_t order = 0; order < 3; ++order) {
      const auto& of = nats[order];
      const auto taken = std::min_element(of.begin(), of.end()) - of.begin();
      ++wanted[order][std::size_t(passages[i].source * 3 + taken)];
    }
  }
  const auto found = attribute_by_ngrams(sources, held_out, passages, 8, 3);
  ASSERT_EQ(found.size(), 3U);
  for (std::size_t order = 0; order < 3; ++order) {
    EXPECT_EQ(found[order].confusion, wanted[order]) << order + 1;
  }
  EXPECT_EQ(found[2].confusion[8], 4);  // numbers are no words
}

/// "pp" is a token, so is every byte.
class Pairs final : public Tokenizer {
 public:
  Pairs() {
    for (int byte = 0; byte < 256; ++byte) pieces_.emplace_back(1, static_cast<char>(byte));
    pieces_.emplace_back("pp");
  }
  [[nodiscard]] std::int64_t vocabulary() const override { return 257; }
  void encode(std::span<const std::byte> text, std::vector<std::int32_t>& ids) const override {
    for (std::size_t i = 0; i < text.size(); ++i) {
      const bool pair = i + 1 < text.size() && text[i] == std::byte{'p'} && text[i + 1] == text[i];
      ids.push_back(pair ? 256 : std::to_integer<std::int32_t>(text[i]));
      i += pair ? 1 : 0;
    }
  }
  [[nodiscard]] std::string_view bytes_of(std::int32_t id) const override {
    return pieces_[static_cast<std::size_t>(id)];
  }
  [[nodiscard]] const std::string& file() const override { return file_; }

 private:
  std::vector<std::string> pieces_;
  std::string file_ = "pairs";
};

TEST(Attribution, ByNgramsReadsTheBytesOfThePassagesTokens) {
  const TestFolder folder;
  const auto tokenizer = std::make_shared<Pairs>();
  std::vector<Text> held_out;
  held_out.push_back(Text({folder.file("a", "happy happy apple upper app pp oppose")}, tokenizer));
  held_out.push_back(Text({folder.file("b", "0123456789 pp 987654321 happy 012 345")}, tokenizer));
  const std::vector<std::string> contents = {"apple happy oppose", "0123 4567 89 pp"};
  const auto sources = texts(folder, "s", contents);
  const auto passages = passages_of(held_out, 5, 100);
  ASSERT_GE(passages.size(), 10U);
  std::vector<std::int64_t> wanted(4);
  for (const Passage& of : passages) {
    const auto ids = held_out[std::size_t(of.source)].documents()[0].tokens;
    const std::string bytes = tokenizer->decode(ids.subspan(std::size_t(of.first), 5));
    const Text alone({folder.file("passage", bytes)});
    const double nats[] = {witten_bell_floors(sources[0], alone, 2)[1],
                           witten_bell_floors(sources[1], alone, 2)[1]};
    ++wanted[std::size_t(of.source * 2 + (nats[1] < nats[0] ? 1 : 0))];
  }
  EXPECT_EQ(attribute_by_ngrams(sources, held_out, passages, 5, 2)[1].confusion, wanted);
  EXPECT_GT(wanted[2], 0);  // happy is no number
}

TEST(Attribution, PassagesAreAsManyOfEachInsideOfDocumentsAndApart) {
  const TestFolder folder;
  std::vector<Text> held_out;
  held_out.push_back(Text({folder.file("a", small_text(19)), folder.file("b", small_text(41))}));
  held_out.push_back(Text({folder.file("c", small_text(33))}));
  const auto found = passages_of(held_out, 8, 100);
  std::vector<std::vector<std::int64_t>> places;
  for (const Passage& of : found) places.push_back({of.source, of.document, of.first});
  // The first has 2 + 5, the second 4: each fourth of seven.
  EXPECT_EQ(places, (std::vector<std::vector<std::int64_t>>{{0, 0, 0},
                                                            {0, 0, 8},
                                                            {0, 1, 8},
                                                            {0, 1, 24},
                                                            {1, 0, 0},
                                                            {1, 0, 8},
                                                            {1, 0, 16},
                                                            {1, 0, 24}}));
  EXPECT_EQ(passages_of(held_out, 8, 1).size(), 2U);
  test::expect_error(ErrorCode::kInvalidArgument, "has no document of at least 34 bytes",
                     [&] { (void)passages_of(held_out, 34, 1); });
}

TEST(Attribution, WhatIsWrongIsRefusedByName) {
  const TestFolder folder;
  const auto sources = texts(folder, "s", kSources), held_out = texts(folder, "h", kHeldOut);
  const auto passages = passages_of(held_out, 8, 1);
  Model model(small_bytes_model());
  const std::span<const Text> all(sources);
  test::expect_error(ErrorCode::kInvalidArgument, "2 sources and held-out texts of 3",
                     [&] { (void)attribute(model, all.first(2), held_out, passages); });
  const auto small = texts(folder, "t", {"all happy", "unhappy", "0123 4567"});
  test::expect_error(ErrorCode::kInvalidArgument, "no document of at least 9 bytes",
                     [&] { (void)attribute(model, small, held_out, passages); });
  const Passage outside{.source = 2, .document = 0, .first = 30};
  test::expect_error(ErrorCode::kInvalidArgument, "lies outside", [&] {
    (void)attribute(model, sources, held_out, {&outside, 1});
  });
  ModelConfig config = small_bytes_model();
  config.router = "expert-choice";
  Model ahead(config);
  test::expect_error(ErrorCode::kUnsupported, "expert-choice",
                     [&] { (void)attribute(ahead, sources, held_out, passages); });
}

}  // namespace
}  // namespace switchyard::models
