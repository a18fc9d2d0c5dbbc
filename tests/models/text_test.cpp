// Text as documents, and batches of them.
#include "switchyard/models/text.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "switchyard/error.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

using namespace std::string_literals;

std::string text_of(const Document& document) {
  return {reinterpret_cast<const char*>(document.bytes.data()), document.bytes.size()};
}

std::string message_of(const std::function<void()>& call, ErrorCode code) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST(Text, AFileIsADocumentAndNulBytesDivideIt) {
  const TestFolder folder;
  const auto whole = folder.file("whole", "All happy families");
  const auto parts = folder.file("parts", "\0\0one\0x\0\0two\0"s);
  const Text text({whole, parts});
  ASSERT_EQ(text.documents().size(), 3U);
  EXPECT_EQ(text_of(text.documents()[0]), "All happy families");
  EXPECT_EQ(text.documents()[0].name, whole.string());
  EXPECT_EQ(text_of(text.documents()[1]), "one");
  EXPECT_EQ(text.documents()[1].name, parts.string() + "#1");
  EXPECT_EQ(text_of(text.documents()[2]), "two");
  EXPECT_EQ(text.documents()[2].name, parts.string() + "#3");
  EXPECT_EQ(text.too_short(), 1);  // "x"
  EXPECT_EQ(text.num_bytes(), 18 + 3 + 3);
  EXPECT_EQ(text.num_targets(), 17 + 2 + 2);
  EXPECT_EQ(text.longest(), 17);
  EXPECT_EQ(std::vector(text.first_target().begin(), text.first_target().end()),
            (std::vector<std::int64_t>{0, 17, 19, 21}));
}

TEST(Text, WhatHasNothingToPredictIsRefusedByName) {
  const TestFolder folder;
  EXPECT_NE(message_of([] { Text({}); }, ErrorCode::kInvalidArgument).find("no file"),
            std::string::npos);
  for (const std::string& content : {""s, "x"s, "\0"s, "\0\0\0"s, "a\0b\0c"s}) {
    const auto path = folder.file("short", content);
    const std::string message = message_of([&] { Text({path}); }, ErrorCode::kBadFile);
    EXPECT_NE(message.find(path.string()), std::string::npos) << message;
    EXPECT_NE(message.find("nothing to predict"), std::string::npos) << message;
  }
  message_of([&] { Text({folder.path() / "absent"}); }, ErrorCode::kBadFile);
  message_of([&] { Text({folder.path()}); }, ErrorCode::kBadFile);
}

TEST(Text, AFingerprintKnowsBytesAndTheirDocuments) {
  const TestFolder folder;
  std::set<std::uint64_t> seen;
  for (const std::string& content : {"abcdefgh ijkl"s, "abcdefgh ijkm"s, "abcdefgi ijkl"s,
                                     "abcdefgh\0 ijkl"s, "abcdefgh \0ijkl"s, "abcdefgh ijk"s}) {
    seen.insert(Text({folder.file("a", content)}).fingerprint());
  }
  EXPECT_EQ(seen.size(), 6U);
  const auto path = folder.file("b", "abcdefgh ijkl");
  EXPECT_EQ(Text({path}).fingerprint(), Text({folder.file("c", "abcdefgh ijkl")}).fingerprint());
}

TEST(Batches, AreAFunctionOfSeedAndStepAndRowsDoNotDependOnTheirNumber) {
  const TestFolder folder;
  std::string content;
  for (int i = 0; i < 5000; ++i) content += static_cast<char>('a' + i * i % 26);
  const Text text({folder.file("t", content)});
  Batch one, two, wide;
  draw_batch(text, 7, 3, 4, 16, one);
  draw_batch(text, 7, 3, 4, 16, two);
  draw_batch(text, 7, 3, 9, 16, wide);
  EXPECT_EQ(one.tokens, two.tokens);
  EXPECT_EQ(one.targets, two.targets);
  EXPECT_TRUE(std::equal(one.tokens.begin(), one.tokens.end(), wide.tokens.begin()));
  draw_batch(text, 8, 3, 4, 16, two);
  EXPECT_NE(one.tokens, two.tokens);
  draw_batch(text, 7, 4, 4, 16, two);
  EXPECT_NE(one.tokens, two.tokens);
  draw_batch(text, 7, 3 + (std::int64_t{1} << 32), 4, 16, two);
  EXPECT_NE(one.tokens, two.tokens);
}

TEST(Batches, EachTargetIsTheByteBehindItsTokenInTheText) {
  const TestFolder folder;
  const std::string a = "0123456789abcdefghij";
  const std::string b = "ABCDE";  // shorter than a sequence
  const Text text({folder.file("t", a + "\0"s + b)});
  Batch batch;
  std::map<std::string, int> starts;
  for (std::int64_t step = 0; step < 400; ++step) {
    draw_batch(text, 1, step, 2, 8, batch);
    for (std::size_t row = 0; row < 2; ++row) {
      std::string read;
      for (std::size_t i = row * 8; i < row * 8 + 8; ++i) {
        const bool has_target = batch.targets[i] >= 0;
        if (!has_target) {
          EXPECT_EQ(batch.tokens[i], 0);
          continue;
        }
        read += static_cast<char>(batch.tokens[i]);
        const std::string& from = read[0] >= 'A' && read[0] <= 'Z' ? b : a;
        const std::size_t at = from.find(static_cast<char>(batch.tokens[i]));
        ASSERT_LT(at + 1, from.size());
        EXPECT_EQ(batch.targets[i], from[at + 1]);
      }
      ++starts[read];
    }
  }
  // 12 windows of a, which has 19 of 23 predicted bytes, and the whole of b but its end.
  EXPECT_EQ(starts.size(), 13U);
  EXPECT_NEAR(starts["ABCD"], 800 * 4 / 23, 50);
  for (const auto& [read, times] : starts) {
    if (read == "ABCD") continue;
    EXPECT_NEAR(times, 800 * 19.0 / 23 / 12, 35) << read;
  }
}

TEST(Batches, ASequenceLongerThanEveryDocumentIsRefused) {
  const TestFolder folder;
  const Text text({folder.file("t", "12345678\0abc"s)});
  Batch batch;
  draw_batch(text, 1, 0, 2, 7, batch);  // its eight bytes are one window
  const std::string message =
      message_of([&] { draw_batch(text, 1, 0, 2, 8, batch); }, ErrorCode::kInvalidArgument);
  EXPECT_NE(message.find("want a document of 9, the longest of the text has 8"), std::string::npos)
      << message;
  message_of([&] { draw_batch(text, 1, -1, 2, 7, batch); }, ErrorCode::kInvalidArgument);
  message_of([&] { draw_batch(text, 1, 0, 0, 7, batch); }, ErrorCode::kInvalidArgument);
}

TEST(HeldOutWindows, PredictEveryByteButADocumentsFirstOnce) {
  const TestFolder folder;
  std::string a(37, 'a');
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<char>('A' + i);
  const Text text({folder.file("t", a + "\0"s + "12345" + "\0"s + "xy")});
  for (const std::int64_t length : {1, 4, 5, 36, 37, 100}) {
    std::vector<std::string> targets(3);
    Batch batch;
    for (const Window& window : held_out_windows(text, length)) {
      ASSERT_GE(window.length, 1);
      ASSERT_LE(window.length, length);
      fill_batch(text, {&window, 1}, length, batch);
      for (const std::int32_t target : batch.targets) {
        if (target >= 0)
          targets[static_cast<std::size_t>(window.document)] += static_cast<char>(target);
      }
    }
    EXPECT_EQ(targets[0], a.substr(1)) << length;
    EXPECT_EQ(targets[1], "2345") << length;
    EXPECT_EQ(targets[2], "y") << length;
  }
  message_of([&] { (void)held_out_windows(text, 0); }, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace switchyard::models
