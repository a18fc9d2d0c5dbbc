// Text as pieces of sentencepiece: that it comes back, what is refused, and that losses a byte and
// runs hold with it.
#include "switchyard/models/tokenizer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "switchyard/error.hpp"
#include "switchyard/models/evaluate.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/models/ngrams.hpp"
#include "testkit/random.hpp"
#include "tests/models/run_files.hpp"
#include "tests/models/small_run.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

using namespace std::string_literals;
namespace fs = std::filesystem;

std::string refusal_of(ErrorCode code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

void expect_words(const std::string& message, std::initializer_list<const char*> words) {
  for (const char* word : words) EXPECT_NE(message.find(word), std::string::npos) << message;
}

std::string learnt_from(const std::string& text, std::int64_t vocabulary) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
  return train_tokenizer({&bytes, 1}, vocabulary);
}

/// Code and prose: runs of spaces, tabs, line ends of both kinds, letters of several bytes.
std::string mixed_text() {
  std::string text;
  for (int i = 0; i < 40; ++i) {
    text += "int main() {\n\tif (x)  {\r\n        return 0;\n  }\n}\n\n\n" + small_text(200) +
            "\xc3\xbc"
            "ber \xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x99\x82 " +
            std::to_string(i * 7919);
  }
  return text;
}

TEST(Bytes, AreTheirOwnIds) {
  const std::string text = "a\0\xff\n"s;
  const Tokenizer& bytes = *byte_tokenizer();
  EXPECT_EQ(bytes.encode(text), (std::vector<std::int32_t>{97, 0, 255, 10}));
  EXPECT_EQ(bytes.decode(bytes.encode(text)), text);
  EXPECT_TRUE(bytes.is_bytes());
  EXPECT_EQ(bytes.vocabulary(), 256);
  const std::vector<std::int32_t> outside{256};
  expect_words(refusal_of(ErrorCode::kInvalidArgument, [&] { (void)bytes.decode(outside); }),
               {"256", "255"});
}

/// What follows needs the library.
class Pieces : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_sentencepiece()) GTEST_SKIP() << "this build has no sentencepiece";
    tokenizer = parse_tokenizer(learnt_from(mixed_text(), 400), "made");
  }
  std::shared_ptr<const Tokenizer> tokenizer;
  const TestFolder folder{};
};

TEST_F(Pieces, AnyBytesComeBack) {
  EXPECT_EQ(tokenizer->vocabulary(), 400);
  for (const std::string& text : {""s,
                                  "\0"s,
                                  "a\0b"s,
                                  "\r\n\r\n"s,
                                  " "s,
                                  "  leading"s,
                                  "trailing  "s,
                                  "\t\t x"s,
                                  "\n"s,
                                  "\xe2\x96\x81"s,
                                  "a\xe2\x96\x81 b"s,
                                  "\xef\xbf\xbd"s,
                                  "<0x0A><unk><s></s>"s,
                                  "\xef\xbc\xa1\xef\xbd\x83"s,
                                  "e\xcc\x81"s,
                                  "\xc3"s,
                                  "\xe4\xbd"s,
                                  "\xed\xa0\x80"s,
                                  "\xc0\x80"s,
                                  "\xf4\x90\x80\x80"s,
                                  "\xff\xfe"s,
                                  "\xe2\x81\x87 \xe2\x96\x85"s,
                                  std::string(10000, 'x'),
                                  std::string(5000, ' '),
                                  mixed_text()}) {
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << text.substr(0, 40);
  }
  // Of all bytes, and of those that make characters often and badly.
  Random random(3);
  const std::string often = " \n\xe2\x96\x81\xf0\x9f\x80\xbf\xc3z";
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (std::uint64_t size = random.bits() % 300; size > 0; --size) {
      text += round % 2 == 0 ? static_cast<char>(random.bits() % 256)
                             : often[random.bits() % often.size()];
    }
    ASSERT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << "round " << round;
  }
}

TEST_F(Pieces, AreFewerThanBytesAndOnesThatWereLearnt) {
  const std::string text = mixed_text();
  EXPECT_LT(tokenizer->encode(text).size(), text.size() / 2);
  EXPECT_LT(tokenizer->encode("        return 0;\n").size(), 10U);  // spaces and line end too
  for (std::int32_t id = 1; id < 400; ++id) EXPECT_FALSE(tokenizer->bytes_of(id).empty()) << id;
}

TEST_F(Pieces, AreTheSameForTheSameText) {
  EXPECT_EQ(learnt_from(mixed_text(), 400), tokenizer->file());
  EXPECT_NE(learnt_from(mixed_text(), 401), tokenizer->file());
  EXPECT_NE(learnt_from(small_text(9000), 300), tokenizer->file());
}

TEST_F(Pieces, VocabulariesThatCannotBeAreRefusedWithNumbers) {
  expect_words(refusal_of(ErrorCode::kInvalidArgument, [] { (void)learnt_from("aab", 5000); }),
               {"5000"});
  expect_words(refusal_of(ErrorCode::kInvalidArgument, [] { (void)learnt_from("abc", 257); }),
               {"257", "258"});
  expect_words(
      refusal_of(ErrorCode::kInvalidArgument, [] { (void)learnt_from(mixed_text(), 270); }),
      {"270", "want 2"});
}

TEST_F(Pieces, DamagedFilesAreRefusedByName) {
  const std::string whole = tokenizer->file();
  std::string cut = whole.substr(0, whole.size() / 2);
  for (const std::string& content : {""s, "no model"s, cut, std::string(5000, '\xff')}) {
    const fs::path path = folder.file("broken.model", content);
    expect_words(refusal_of(ErrorCode::kBadFile, [&] { (void)load_tokenizer(path); }),
                 {"broken.model"});
  }
}

TEST_F(Pieces, TextKnowsTokensAndBytes) {
  const std::string content = mixed_text();
  const fs::path file = folder.file("text", content + "\0b\0"s + "second"s);
  const Text bytes({file});
  const Text text({file}, tokenizer);
  ASSERT_EQ(text.documents().size(), 2U);
  EXPECT_EQ(text.too_short(), 1);
  EXPECT_EQ(text.num_bytes(), bytes.num_bytes());
  EXPECT_EQ(text.fingerprint(), bytes.fingerprint());
  const Document& first = text.documents()[0];
  EXPECT_EQ(std::vector(first.tokens.begin(), first.tokens.end()), tokenizer->encode(content));
  EXPECT_EQ(text.bytes_of(first.tokens), std::ssize(content));
  EXPECT_EQ(first.token(3), first.tokens[3]);
  // Every token but a document's first is a target once.
  std::int64_t targets = 0;
  Batch batch;
  for (const Window& window : held_out_windows(text, 16)) {
    fill_batch(text, {&window, 1}, 16, batch);
    for (std::int64_t i = 0; i < window.length; ++i) {
      const Document& of = text.documents()[std::size_t(window.document)];
      EXPECT_EQ(batch.tokens[std::size_t(i)], of.tokens[std::size_t(window.first + i)]);
      EXPECT_EQ(batch.targets[std::size_t(i)], of.tokens[std::size_t(window.first + i + 1)]);
      ++targets;
    }
  }
  EXPECT_EQ(targets, text.num_targets());
  expect_words(
      refusal_of(ErrorCode::kInvalidArgument, [&] { (void)witten_bell_floors(bytes, text, 2); }),
      {"n-grams", "bytes"});
}

/// Pieces of another tokenizer, with something wrong.
class Wrong final : public Tokenizer {
 public:
  Wrong(std::shared_ptr<const Tokenizer> of, std::function<void(std::vector<std::int32_t>&)> change)
      : of_(std::move(of)), change_(std::move(change)) {}
  [[nodiscard]] std::int64_t vocabulary() const override { return of_->vocabulary(); }
  void encode(std::span<const std::byte> text, std::vector<std::int32_t>& ids) const override {
    of_->encode(text, ids);
    change_(ids);
  }
  [[nodiscard]] std::string_view bytes_of(std::int32_t id) const override {
    return of_->bytes_of(id);
  }
  [[nodiscard]] const std::string& file() const override { return of_->file(); }

 private:
  std::shared_ptr<const Tokenizer> of_;
  std::function<void(std::vector<std::int32_t>&)> change_;
};

TEST_F(Pieces, TextThatDoesNotComeBackIsRefusedWithThePlace) {
  const std::string content = "happy families are alike";
  const fs::path file = folder.file("book", content);
  const std::int32_t space = tokenizer->encode("\xff ").back();
  const auto refused = [&](std::function<void(std::vector<std::int32_t>&)> change) {
    const auto wrong = std::make_shared<const Wrong>(tokenizer, std::move(change));
    return refusal_of(ErrorCode::kInvalidArgument, [&] { const Text text({file}, wrong); });
  };
  const std::size_t end =
      content.size() - tokenizer->bytes_of(tokenizer->encode(content).back()).size();
  expect_words(refused([&](auto& ids) { ids.insert(ids.begin(), space); }),
               {"book", "byte 0 of 24"});
  expect_words(refused([](auto& ids) { ids.pop_back(); }),
               {("byte " + std::to_string(end) + " of 24").c_str()});
  expect_words(refused([&](auto& ids) { ids.push_back(space); }), {"byte 24 of 24"});
  expect_words(refused([](auto& ids) { ids.insert(ids.begin(), 0); }),
               {"byte 0 of 24"});  // unknown
}

TEST_F(Pieces, AModelOfOtherTokensIsRefusedWithBothNumbers) {
  const Text text({folder.file("book", mixed_text())}, tokenizer);
  TrainConfig config = small_run();
  expect_words(refusal_of(ErrorCode::kInvalidArgument, [&] { check(config, text); }),
               {"vocabulary of 256", "400"});
  Model model(config.model, {.num_threads = 1, .seed = 1});
  expect_words(refusal_of(ErrorCode::kInvalidArgument, [&] { (void)evaluate(model, text); }),
               {"256", "400"});
  expect_words(refusal_of(ErrorCode::kInvalidArgument, [&] { (void)audit_leaks(model, text); }),
               {"256", "400"});
  write_tokenizer(*tokenizer, folder.path());
  expect_words(refusal_of(ErrorCode::kBadFile, [&] { (void)tokenizer_of(folder.path(), 300); }),
               {"tokenizer.model", "400", "300"});
  EXPECT_EQ(tokenizer_of(folder.path(), 400)->file(), tokenizer->file());
}

/// Bytes by a tokenizer, and bytes as they lie: the ways of counting meet.
TEST_F(Pieces, OfOneByteEachHaveTheLossOfBytes) {
  class ByteTable final : public Tokenizer {
   public:
    [[nodiscard]] std::int64_t vocabulary() const override { return 256; }
    void encode(std::span<const std::byte> text, std::vector<std::int32_t>& ids) const override {
      for (const std::byte byte : text) ids.push_back(std::to_integer<std::int32_t>(byte));
    }
    [[nodiscard]] std::string_view bytes_of(std::int32_t id) const override {
      return byte_tokenizer()->bytes_of(id);
    }
    [[nodiscard]] const std::string& file() const override { return file_; }
    std::string file_ = "not bytes by name";
  };
  const fs::path file = folder.file("book", small_text(700));
  const Text bytes({file});
  const Text text({file}, std::make_shared<const ByteTable>());
  ASSERT_FALSE(text.documents()[0].tokens.empty());
  ModelConfig config = small_bytes_model();
  config.capacity_factor = 1.0;
  Model model(config, {.num_threads = 1, .seed = 4});
  const Evaluation one = evaluate(model, bytes, {.at_capacity = true});
  const Evaluation two = evaluate(model, text, {.at_capacity = true});
  EXPECT_EQ(one.all.nats, two.all.nats);
  EXPECT_EQ(one.all.nats_per_byte(), two.all.nats_per_byte());
  EXPECT_EQ(one.all.nats_per_byte(), one.all.nats_per_token());
  EXPECT_EQ(one.at_capacity->nats_per_byte, two.at_capacity->nats_per_byte);
}

TEST_F(Pieces, LossesAreByBytes) {
  const std::string content = mixed_text().substr(0, 900);
  const Text text({folder.file("book", content)}, tokenizer);
  ModelConfig config = small_bytes_model();
  config.vocabulary = 400;
  config.capacity_factor = 2.0;
  Model model(config, {.num_threads = 1, .seed = 4});
  const Evaluation found = evaluate(model, text, {.at_capacity = true});
  const auto first = tokenizer->bytes_of(text.documents()[0].tokens.front());
  EXPECT_EQ(found.all.targets, text.num_targets());
  EXPECT_EQ(found.all.bytes, std::ssize(content) - std::ssize(first));
  EXPECT_LT(found.all.targets, found.all.bytes / 2);
  EXPECT_DOUBLE_EQ(found.all.nats_per_byte(), found.all.nats / double(found.all.bytes));
  EXPECT_DOUBLE_EQ(found.all.perplexity(), std::exp(found.all.nats / double(found.all.targets)));
  // It has learnt nothing: ln 400 a token, at any capacity.
  EXPECT_NEAR(found.all.nats_per_token(), std::log(400.0), 0.05);
  const double per_byte = double(found.all.targets) / double(found.all.bytes);
  EXPECT_NEAR(found.at_capacity->nats_per_byte, std::log(400.0) * per_byte, 0.2 * per_byte);
  for (const LeakProbe& probe : audit_leaks(model, text)) EXPECT_TRUE(probe.same);
}

TEST_F(Pieces, ARunThatIsCutHasTheBytesOfAWholeOne) {
  const Text text({folder.file("book", mixed_text())}, tokenizer);
  TrainConfig config = small_run();
  config.model.vocabulary = 400;
  config.schedule.steps = 20;
  const auto options = [&](const char* name) {
    return TrainOptions{.directory = folder.path() / name, .resume = true, .save_every = 10};
  };
  ASSERT_EQ(train(config, text, &text, options("whole")).steps, 20);
  TrainOptions cut = options("cut");
  std::int64_t done = 0;
  cut.stop = [&] { return ++done == 7; };
  ASSERT_EQ(train(config, text, &text, cut).steps, 7);
  const TrainResult end = train(config, text, &text, options("cut"));
  EXPECT_EQ(end.first_step, 7);
  const auto whole = files_below(folder.path() / "whole");
  for (const auto& [name, content] : whole) {
    if (name == "log.jsonl") continue;
    EXPECT_EQ(content, content_of(folder.path() / "cut" / name)) << name;
  }
  EXPECT_EQ(log_of(folder.path() / "whole"), log_of(folder.path() / "cut"));
  EXPECT_EQ(whole.at("step-000020/tokenizer.model"), tokenizer->file());
  EXPECT_EQ(find_tokenizer(end.checkpoint)->file(), tokenizer->file());
  // Nats a byte, of a model that begins with ln 400 a token.
  const double tokens_per_byte = double(text.num_targets()) / double(text.num_bytes());
  const double first = log_of(folder.path() / "whole")[0]["loss"].get<double>();
  EXPECT_NEAR(first / (std::log(400.0) * tokens_per_byte), 1, 0.3);
  EXPECT_LT(end.last.loss, first);
  // Other pieces of as many are another run.
  const Text other(
      {folder.path() / "book"},
      parse_tokenizer(learnt_from(mixed_text() + small_text(99) + "zzzzzz", 400), "b"));
  ASSERT_NE(other.tokenizer().file(), tokenizer->file());
  expect_words(refusal_of(ErrorCode::kInvalidArgument,
                          [&] { (void)train(config, other, nullptr, options("cut")); }),
               {"tokenizer", "fingerprint"});
}

}  // namespace
}  // namespace switchyard::models
