#include "checkpoint/files/safetensors.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <memory>
#include <numeric>

#include "checkpoint/files/json.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using test::bytes_of;
using test::expect_error;
using test::TempDir;

/// A file with that header and so many bytes of data.
std::string file_with(const std::string& header, std::size_t data_bytes) {
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  return file + header + std::string(data_bytes, 'x');
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

struct BadCase {
  const char* name;
  std::string file;
  const char* words;
};

std::vector<BadCase> bad_cases() {
  const std::string good = tensor("a", "F32", "[2]", "[0,8]");
  const auto one = [&](const char* dtype, const char* shape, const char* offsets,
                       std::size_t data_bytes) {
    return file_with("{" + tensor("a", dtype, shape, offsets) + "}", data_bytes);
  };
  std::string huge = file_with("{}", 0);
  huge[7] = '\x7f';
  std::string long_header = file_with("{}", 0);
  long_header[0] = 100;
  return {
      {"empty file", "", "truncated: 0 bytes"},
      {"seven bytes", "1234567", "truncated: 7 bytes"},
      {"length zero", std::string(8, '\0') + "{}", "header length is 0"},
      {"length huge", huge, "exceeds 100000000"},
      {"length beyond the file", long_header, "truncated: header length 100, but 2 bytes follow"},
      {"not an object", file_with("[]", 0), "header does not begin with '{'"},
      {"a space first", file_with(" {}", 0), "header does not begin with '{'"},
      {"not JSON", file_with("{a}", 0), "not valid JSON"},
      {"ends early", file_with("{\"a\":", 0), "not valid JSON"},
      {"two values", file_with("{}{}", 0), "not valid JSON"},
      {"not UTF-8", file_with("{\"\xff\":1}", 0), "not valid JSON"},
      {"nested deeply",
       file_with("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}", 0),
       "nested deeper than 64"},
      {"number overflows", file_with("{\"a\":1e999}", 0), "not valid JSON"},
      {"duplicate tensor", file_with("{" + good + "," + good + "}", 8), "duplicate key 'a'"},
      {"duplicate field",
       file_with(
           "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8),
       "duplicate key 'dtype'"},
      {"tensor not an object", file_with("{\"a\":7}", 0),
       "tensor 'a': needs exactly dtype, shape and data_offsets"},
      {"field missing", file_with("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8),
       "tensor 'a': needs exactly dtype, shape and data_offsets"},
      {"field too many",
       file_with("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"b\":1}}", 8),
       "tensor 'a': needs exactly dtype, shape and data_offsets"},
      {"dtype not text", file_with("{\"a\":{\"dtype\":3,\"shape\":[2],\"data_offsets\":[0,8]}}", 8),
       "tensor 'a': dtype is not a string"},
      {"dtype unknown", one("F31", "[2]", "[0,8]", 8), "tensor 'a': unknown dtype 'F31'"},
      {"shape not a list", one("F32", "2", "[0,8]", 8), "tensor 'a': shape is not a list"},
      {"extent negative", one("F32", "[-2]", "[0,8]", 8), "extent -2 is not a whole number"},
      {"extent a fraction", one("F32", "[2.0]", "[0,8]", 8), "extent 2.0 is not a whole number"},
      {"extent too large", one("F32", "[9223372036854775808]", "[0,8]", 8),
       "extent 9223372036854775808 is not a whole number"},
      {"shape overflows", one("U8", "[4294967296,4294967296]", "[0,0]", 0), "overflows"},
      {"bytes overflow", one("F64", "[2305843009213693952]", "[0,0]", 0), "overflows"},
      {"offsets not a pair", one("F32", "[2]", "[0]", 8), "data_offsets is not a pair"},
      {"offset negative", one("F32", "[2]", "[-8,0]", 8), "offset -8 is not a whole number"},
      {"offsets reversed", one("F32", "[2]", "[8,0]", 8), "data_offsets end 0 before they begin 8"},
      {"data truncated", one("F32", "[2]", "[0,8]", 7),
       "truncated: tensor 'a' ends at byte 8 of 7 bytes of data"},
      {"size mismatch", one("F32", "[3]", "[0,8]", 8),
       "tensor 'a': F32 [3] needs 12 bytes, data_offsets give 8"},
      {"overlap", file_with("{" + good + "," + tensor("b", "F32", "[2]", "[4,12]") + "}", 12),
       "tensor 'b' overlaps the one before it"},
      {"same bytes twice",
       file_with("{" + good + "," + tensor("b", "F32", "[2]", "[0,8]") + "}", 8),
       "tensor 'b' overlaps the one before it"},
      {"gap", file_with("{" + good + "," + tensor("b", "F32", "[2]", "[12,20]") + "}", 20),
       "a gap of 4 bytes before tensor 'b'"},
      {"gap first", one("F32", "[2]", "[4,12]", 12), "a gap of 4 bytes before tensor 'a'"},
      {"bytes left over", one("F32", "[2]", "[0,8]", 11), "3 bytes after the last tensor"},
      {"metadata not an object", file_with("{\"__metadata__\":3}", 0),
       "__metadata__ is not an object"},
      {"metadata not text", file_with("{\"__metadata__\":{\"a\":3}}", 0),
       "__metadata__ 'a' is not a string"},
  };
}

TEST(Safetensors, EveryMalformedFileHasItsOwnWords) {
  for (const BadCase& bad : bad_cases()) {
    SCOPED_TRACE(bad.name);
    expect_error(ErrorCode::kBadFile, bad.words,
                 [&] { (void)parse_safetensors(bytes_of(bad.file), "some.safetensors"); });
    expect_error(ErrorCode::kBadFile, "some.safetensors: ", [&] {
      (void)parse_safetensors(bytes_of(bad.file), "some.safetensors");
    });
  }
}

TEST(Safetensors, NoPrefixOfAFileIsRead) {
  const std::string whole = file_with("{" + tensor("a", "F32", "[2]", "[0,8]") + "}", 8);
  EXPECT_EQ(parse_safetensors(bytes_of(whole), "f").size(), 1U);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW((void)parse_safetensors(bytes_of(whole.substr(0, size)), "f"), Error) << size;
  }
}

TEST(Safetensors, MetadataAndEmptyTensorsAndScalarsAreRead) {
  const std::string file =
      file_with("{\"__metadata__\":{\"format\":\"pt\"}," + tensor("none", "F64", "[0,3]", "[0,0]") +
                    "," + tensor("scalar", "F8_E8M0", "[]", "[0,1]") + "," +
                    tensor("after", "I16", "[0]", "[1,1]") + "}",
                1);
  const auto tensors = parse_safetensors(bytes_of(file), "f");
  ASSERT_EQ(tensors.size(), 3U);
  EXPECT_EQ(tensors[0].spec.name, "none");
  EXPECT_EQ(tensors[1].spec.name, "scalar");
  EXPECT_EQ(tensors[1].bytes.size(), 1U);
  EXPECT_EQ(tensors[2].spec.name, "after");
  EXPECT_TRUE(parse_safetensors(bytes_of(file_with("{}", 0)), "f").empty());
}

TEST(Safetensors, EveryTypeSurvivesWritingAndReading) {
  const TempDir dir;
  const char* names[] = {"BOOL", "U8",   "I8",  "F8_E4M3", "F8_E5M2", "F8_E8M0", "U16", "I16",
                         "F16",  "BF16", "U32", "I32",     "F32",     "U64",     "I64", "F64"};
  std::string data(8 * 6, '\0');
  std::iota(data.begin(), data.end(), 'A');
  std::vector<StoredTensor> tensors;
  for (const char* name : names) {
    const StoredType type = stored_type(name).value();
    tensors.push_back({{std::string("t.") + name, type, {2, 3}},
                       bytes_of(data).first(static_cast<std::size_t>(6 * size_of(type)))});
  }
  write_safetensors(dir / "all.safetensors", tensors);
  const SafetensorsFile file(dir / "all.safetensors");
  ASSERT_EQ(file.tensors().size(), std::size(names));
  for (const StoredTensor& written : tensors) {
    const StoredTensor* read = file.find(written.spec.name);
    ASSERT_NE(read, nullptr) << written.spec.name;
    EXPECT_EQ(read->spec.type, written.spec.type);
    EXPECT_EQ(read->spec.shape, written.spec.shape);
    EXPECT_TRUE(std::equal(read->bytes.begin(), read->bytes.end(), written.bytes.begin(),
                           written.bytes.end()));
    const auto address = reinterpret_cast<std::uintptr_t>(read->bytes.data());
    EXPECT_EQ(address % static_cast<std::uintptr_t>(size_of(read->spec.type)), 0U);
  }
  EXPECT_EQ(file.find("t"), nullptr);
}

TEST(Safetensors, NamesMayHaveAnyCharacter) {
  const TempDir dir;
  const std::string name = "quote\" back\\slash \n tab\t é";
  write_safetensors(dir / "f.safetensors",
                    std::vector<StoredTensor>{{{name, StoredType::kU8, {0}}, {}}});
  EXPECT_NE(SafetensorsFile(dir / "f.safetensors").find(name), nullptr);
}

TEST(Safetensors, AnUnfinishedFileLeavesTheOldOneAndNoOther) {
  const TempDir dir;
  const auto path = dir / "f.safetensors";
  test::write_file(path, "old");
  {
    AtomicFile file(path);
    const TensorSpec spec{"a", StoredType::kF32, {2}};
    SafetensorsWriter writer(file, {&spec, 1});
    writer.append(bytes_of("1234"));
    expect_error(ErrorCode::kInvalidArgument, "4 bytes of the tensors are missing",
                 [&] { writer.finish(); });
    expect_error(ErrorCode::kInvalidArgument, "1 bytes more",
                 [&] { writer.append(bytes_of("56789")); });
  }
  EXPECT_EQ(test::read_file(path), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

TEST(Safetensors, AnInterruptRemovesWhatIsUnfinished) {
  const TempDir dir;
  std::vector<std::unique_ptr<AtomicFile>> files;  // more than ever were unfinished before
  for (int i = 0; i < 100; ++i) {
    files.push_back(std::make_unique<AtomicFile>(dir / std::to_string(i)));
    if (i % 2 == 0) files.back()->finish();
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 100);
  remove_unfinished_files();
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(Safetensors, AHiddenNameSaysWhatTheFileWasToBecome) {
  const TempDir dir;
  const AtomicFile file(dir / "a-1.b");
  const auto hidden = std::filesystem::directory_iterator(dir.path())->path().filename();
  EXPECT_EQ(target_of_temporary(hidden.string()), "a-1.b");
  for (const char* other : {"", ".", ".tmp", "a.1-2.tmp", ".a.1-2", ".a.1-.tmp", ".a.-2.tmp",
                            ".a.1.2-3.tmp.x", ".a-b.tmp", ".a.x-1.tmp"}) {
    EXPECT_EQ(target_of_temporary(other), "") << other;
  }
}

TEST(Safetensors, ASymbolicLinkStaysOneAndItsTargetIsReplaced) {
  const TempDir dir;
  test::write_file(dir / "target", "old");
  std::filesystem::create_symlink("target", dir / "link");
  write_text(dir / "link", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(dir / "link"));
  EXPECT_EQ(test::read_file(dir / "target"), "new");
}

// The time goes with the number of tensors: with its square 100k took over a minute.
TEST(Safetensors, AHundredThousandTensorsAreWrittenAndReadAtOnce) {
  const auto seconds_since = [](auto begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  constexpr std::size_t kTensors = 100'000;
  const TempDir dir;
  const auto path = dir / "f.safetensors";
  const std::string data = "x";
  std::vector<StoredTensor> tensors;
  for (std::size_t i = 0; i < kTensors; ++i) {
    tensors.push_back({{"model.layers.0.mlp.experts." + std::to_string(i), StoredType::kU8, {1}},
                       bytes_of(data)});
  }
  const auto begin = std::chrono::steady_clock::now();
  write_safetensors(path, tensors);
  const double writing = seconds_since(begin);
  const SafetensorsFile file(path);
  const double both = seconds_since(begin);
  EXPECT_EQ(file.tensors().size(), kTensors);
  EXPECT_LT(both, 30) << "of these to write: " << writing;  // a sanitizer's build on a busy machine
  RecordProperty("seconds", std::to_string(both));

  // What is wrong at the very end is still found.
  std::string text = test::read_file(path);
  const std::string last = "experts." + std::to_string(kTensors - 1) + "\"";
  const auto with = [&](const std::string& name) {
    std::string other = text;
    other.replace(other.find(last), last.size(), name);
    return other;
  };
  expect_error(ErrorCode::kBadFile, "duplicate key",
               [&] { (void)parse_safetensors(bytes_of(with("experts.12345\"")), "f"); });
  const std::string offsets = "[99999,100000]";
  text.replace(text.find(offsets), offsets.size(), "[99998,99999] ");
  expect_error(ErrorCode::kBadFile, "overlaps",
               [&] { (void)parse_safetensors(bytes_of(text), "f"); });
}

TEST(Safetensors, AHeaderLongerThanIsReadIsNotWritten) {
  const TempDir dir;
  std::vector<StoredTensor> tensors;
  for (char c = 'a'; c < 'd'; ++c) {
    std::string name;
    name.resize(40'000'000, c);
    tensors.push_back({{name, StoredType::kU8, {0}}, {}});
  }
  expect_error(ErrorCode::kInvalidArgument, "the header of 3 tensors",
               [&] { write_safetensors(dir / "f.safetensors", tensors); });
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(Safetensors, TwoTensorsOfOneNameAreRefused) {
  const TempDir dir;
  const std::vector<StoredTensor> twice(2, {{"a", StoredType::kU8, {0}}, {}});
  expect_error(ErrorCode::kInvalidArgument, "two tensors are named 'a'",
               [&] { write_safetensors(dir / "f.safetensors", twice); });
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(Safetensors, PlacesThatCannotBeReadOrWrittenAreNamed) {
  const TempDir dir;
  expect_error(ErrorCode::kBadFile, "none.safetensors: cannot be read: No such file",
               [&] { SafetensorsFile{dir / "none.safetensors"}; });
  expect_error(ErrorCode::kBadFile, "is not a regular file", [&] { SafetensorsFile{dir.path()}; });
  expect_error(ErrorCode::kInvalidArgument, "No such file or directory",
               [&] { write_safetensors(dir / "no/dir.safetensors", {}); });
  expect_error(ErrorCode::kInvalidArgument, "it is not a regular file",
               [&] { write_safetensors("/dev/null", {}); });
  expect_error(ErrorCode::kInvalidArgument, "it is not a regular file",
               [&] { write_safetensors(dir.path(), {}); });
}

TEST(Json, EveryKindOfValueIsReadInItsPlace) {
  const std::string text =
      R"({"a":[1,-2,3.5,true,false,null,"x",[],{}],"b":{"c":{"d":[[1],[2,[3]]]}},"e":"\u00e9"})";
  EXPECT_EQ(parse_json(text, "f"), Json::parse(text));
  for (const char* alone : {"1", "\"x\"", "[]", "null", "[[[]],1]", "[{\"a\":1},{\"a\":2}]"}) {
    EXPECT_EQ(parse_json(alone, "f"), Json::parse(alone)) << alone;
  }
  const std::string deepest = std::string(64, '[') + std::string(64, ']');
  EXPECT_EQ(parse_json(deepest, "f"), Json::parse(deepest));
  expect_error(ErrorCode::kBadFile, "f: JSON is nested deeper than 64",
               [&] { (void)parse_json("[" + deepest + "]", "f"); });
}

TEST(Json, KeysMayRepeatInDifferentObjects) {
  const Json json = parse_json(R"({"a":{"x":1},"b":{"x":[{"x":2},{"x":3}]}})", "f");
  EXPECT_EQ(json["b"]["x"][1]["x"], 3);
  expect_error(ErrorCode::kBadFile, "f: duplicate key 'x'",
               [] { (void)parse_json(R"({"a":{"x":1},"b":[{"x":2,"y":{},"x":3}]})", "f"); });
}

}  // namespace
}  // namespace switchyard
