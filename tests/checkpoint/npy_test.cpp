#include "checkpoint/files/npy.hpp"

#include <gtest/gtest.h>

#include "checkpoint/files/matrix_file.hpp"
#include "checkpoint/files/safetensors.hpp"
#include "core/half.hpp"
#include "testkit/file_support.hpp"

namespace switchyard {
namespace {

using test::bytes_of;
using test::expect_error;
using test::TempDir;

/// A file of that version and header dictionary, and so many bytes of data.
std::string file_with(const std::string& header, std::size_t data_bytes, char version = 1) {
  std::string file("\x93NUMPY");
  file += {version, '\0'};
  for (std::size_t i = 0; i < (version == 1 ? 2U : 4U); ++i) {
    file += static_cast<char>(header.size() >> (8 * i));
  }
  return file + header + std::string(data_bytes, 'x');
}

std::string dict(const std::string& descr, const std::string& order, const std::string& shape) {
  return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

TEST(Npy, EveryMalformedFileHasItsOwnWords) {
  struct BadCase {
    std::string file;
    const char* words;
  };
  const auto with = [](const std::string& header, std::size_t bytes = 0) {
    return file_with(header, bytes);
  };
  std::string long_header = with(dict("'<f4'", "False", "(0,)"));
  long_header[9] = '\x7f';
  const BadCase cases[] = {
      {"", "not a .npy file"},
      {"PK\x03\x04 a zip archive", "not a .npy file"},
      {"\x93NUMPY", "truncated: 6 bytes"},
      {std::string("\x93NUMPY\x02\x00\x01\x00", 10), "truncated: 10 bytes"},
      {file_with("{}", 0, 4), ".npy version 4 is not supported"},
      {file_with("{}", 0, 0), ".npy version 0 is not supported"},
      {long_header, "truncated: header length"},
      {with(""), "header ends too early"},
      {with("{}"), "header lacks descr, fortran_order or shape"},
      {with("[]"), "header is malformed: '{' expected"},
      {with("{'descr'"), "header ends too early"},
      {with("{'descr': '<f4"), "string without end"},
      {with("{'descr': 4}"), "no string at '4}'"},
      {with("{'colour': 'red'}"), "header key 'colour' is unknown"},
      {with("{'descr': '<f4', 'descr': '<f4'}"), "header key 'descr' stands twice"},
      {with("{'fortran_order': 0}"), "no True or False at '0}'"},
      {with("{'shape': 3}"), "'(' expected at '3}'"},
      {with("{'shape': (-3,)}"), "no whole number at '-3,)}'"},
      {with("{'shape': (3 4)}"), "')' expected"},
      {with("{'shape': (99999999999999999999,)}"), "an extent of the shape overflows"},
      {with(dict("'<f4'", "False", "(1,)") + "{", 4), "header goes on after its '}'"},
      {with(dict("[('a', '<f4')]", "False", "(1,)"), 4), "structured arrays are not supported"},
      {with(dict("'>f4'", "False", "(1,)"), 4), "dtype '>f4' is big endian"},
      {with(dict("'<c8'", "False", "(1,)"), 8), "dtype '<c8' is not supported"},
      {with(dict("'<f4'", "True", "(2, 2)"), 16), "the array is in Fortran order"},
      {with(dict("'<f8'", "False", "(4611686018427387904, 4)")), "overflows"},
      {with(dict("'<f8'", "False", "(4611686018427387904,)")), "overflows"},
      {with(dict("'<f4'", "False", "(2, 3)"), 23), "shape [2, 3] needs 24 bytes, 23 follow"},
      {with(dict("'<f4'", "False", "(2, 3)"), 25), "1 bytes after the array"},
  };
  for (const BadCase& bad : cases) {
    SCOPED_TRACE(bad.words);
    expect_error(ErrorCode::kBadFile, bad.words,
                 [&] { (void)parse_npy(bytes_of(bad.file), "some.npy"); });
  }
}

TEST(Npy, VersionsOneToThreeAreRead) {
  for (const char version : {'\1', '\2', '\3'}) {
    const std::string file = file_with(dict("'<i8'", "False", "(2, 3)"), 48, version);
    const NpyArray array = parse_npy(bytes_of(file), "f");
    EXPECT_EQ(array.dtype, DType::kI64);
    EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 3}));
    EXPECT_EQ(array.bytes.size(), 48U);
  }
}

TEST(Npy, KeysInAnyOrderAndEitherQuoteAreRead) {
  const std::string file = file_with(R"({"shape":(),"fortran_order":True,"descr":"<f2"})", 2);
  const NpyArray array = parse_npy(bytes_of(file), "f");
  EXPECT_EQ(array.dtype, DType::kF16);
  EXPECT_TRUE(array.shape.empty());
}

TEST(Npy, TheWriterWritesWhatNumpyWrites) {
  const TempDir dir;
  const std::vector<float> values = {1.0F, 2.0F, 3.0F};
  write_npy(dir / "a.npy", DType::kF32, {3}, std::as_bytes(std::span(values)));
  const std::string file = test::read_file(dir / "a.npy");
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
  header.resize(128 - 10 - 1, ' ');  // numpy.save pads to a multiple of 64 as well
  EXPECT_EQ(file.substr(0, 128), std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header + "\n");
  EXPECT_EQ(file.size(), 128U + 12U);
}

TEST(Npy, EveryTypeSurvivesWritingAndReading) {
  const TempDir dir;
  const std::string data = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL";
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kF64, DType::kI32, DType::kI64, DType::kU8}) {
    for (const std::vector<std::int64_t>& shape :
         {std::vector<std::int64_t>{}, {0}, {6}, {2, 3}, {3, 0, 2}, {1, 2, 3}}) {
      const auto bytes = bytes_of(data).first(
          static_cast<std::size_t>(num_elements(shape).value() * size_of(dtype)));
      write_npy(dir / "a.npy", dtype, shape, bytes);
      const std::string file = test::read_file(dir / "a.npy");
      const NpyArray array = parse_npy(bytes_of(file), "a.npy");
      EXPECT_EQ(array.dtype, dtype);
      EXPECT_EQ(array.shape, shape);
      EXPECT_EQ((array.bytes.data() - bytes_of(file).data()) % 64, 0);
      EXPECT_TRUE(std::equal(array.bytes.begin(), array.bytes.end(), bytes.begin(), bytes.end()));
    }
  }
  expect_error(ErrorCode::kInvalidArgument, ".npy has no bf16; write .safetensors",
               [&] { write_npy(dir / "a.npy", DType::kBF16, {0}, {}); });
}

template <typename T>
ConstRawMatrix matrix_of(const std::vector<T>& values, DType dtype, std::int64_t rows,
                         std::int64_t cols) {
  return {reinterpret_cast<const std::byte*>(values.data()), dtype, rows, cols};
}

TEST(MatrixFile, MatricesSurviveWritingAndReadingInBothFormats) {
  const TempDir dir;
  const std::vector<float> floats = {1.0F, -2.0F, 3.5F, 0.0F, 5.0F, 6.0F};
  const std::vector<std::uint16_t> halves = {1, 2, 3, 4, 5, 6};
  for (const char* name : {"m.npy", "m.safetensors"}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      if (dtype == DType::kBF16 && std::string(name) == "m.npy") continue;
      const ConstRawMatrix written =
          dtype == DType::kF32 ? matrix_of(floats, dtype, 2, 3) : matrix_of(halves, dtype, 2, 3);
      write_matrix(dir / name, written);
      const MatrixFile read = MatrixFile::read((dir / name).string());
      EXPECT_EQ(read.view().dtype, dtype);
      EXPECT_EQ(read.view().rows, 2);
      EXPECT_EQ(read.view().cols, 3);
      EXPECT_EQ(
          std::memcmp(read.view().data, written.data, static_cast<std::size_t>(written.bytes())),
          0);
    }
    write_matrix(dir / name, {nullptr, DType::kF32, 0, 3});
    const MatrixFile empty = MatrixFile::read((dir / name).string());
    EXPECT_EQ(empty.view().rows, 0);
  }
}

TEST(MatrixFile, ATensorIsChosenByNameAndSurvivesTheFileObject) {
  const TempDir dir;
  const std::vector<float> one(6, 1.0F);
  const std::vector<float> two(6, 2.0F);
  write_safetensors(dir / "two.safetensors",
                    std::vector<StoredTensor>{
                        {{"one", StoredType::kF32, {2, 3}}, std::as_bytes(std::span(one))},
                        {{"a:b", StoredType::kF32, {3, 2}}, std::as_bytes(std::span(two))}});
  const std::string file = (dir / "two.safetensors").string();
  const MatrixFile matrix = MatrixFile::read(file + ":a:b");
  EXPECT_EQ(matrix.view().rows, 3);
  EXPECT_EQ(load_float(matrix.view().data, DType::kF32, 5), 2.0F);
  expect_error(ErrorCode::kBadFile, "has 2 tensors; say which by FILE:TENSOR (one, a:b)",
               [&] { MatrixFile::read(file); });
  expect_error(ErrorCode::kBadFile, "has no tensor 'three'; it has one, a:b",
               [&] { MatrixFile::read(file + ":three"); });
  expect_error(ErrorCode::kInvalidArgument, "names no tensor after the ':'",
               [&] { MatrixFile::read(file + ":"); });
}

TEST(MatrixFile, UnalignedTensorsAreRead) {
  const TempDir dir;
  const std::string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("m":{"dtype":"F32","shape":[1,2],"data_offsets":[1,9]}})";
  std::string file(8, '\0');
  file[0] = static_cast<char>(header.size());
  const float values[] = {1.5F, -2.5F};
  file += header + "x" + std::string(reinterpret_cast<const char*>(values), 8);
  test::write_file(dir / "f.safetensors", file);
  const MatrixFile matrix = MatrixFile::read((dir / "f.safetensors").string() + ":m");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(matrix.view().data) % 4, 0U);
  EXPECT_EQ(std::memcmp(matrix.view().data, values, 8), 0);
}

TEST(MatrixFile, WhatIsNoMatrixOfTokensIsNamed) {
  const TempDir dir;
  write_npy(dir / "i.npy", DType::kI32, {0, 3}, {});
  write_npy(dir / "v.npy", DType::kF32, {0}, {});
  write_safetensors(dir / "i.safetensors",
                    std::vector<StoredTensor>{{{"a", StoredType::kI8, {0, 3}}, {}}});
  const auto read = [&](const char* name) {
    return [&dir, name] { MatrixFile::read((dir / name).string()); };
  };
  expect_error(ErrorCode::kBadFile, "is i32; f32 and f16 are read", read("i.npy"));
  expect_error(ErrorCode::kBadFile, "has shape [0]; a matrix is needed", read("v.npy"));
  expect_error(ErrorCode::kBadFile, "is I8; F32, BF16 and F16 are read", read("i.safetensors"));
  expect_error(ErrorCode::kBadFile, "cannot be read", read("none.npy"));
  expect_error(ErrorCode::kInvalidArgument, "ends neither in .npy nor in .safetensors",
               read("a.bin"));
  expect_error(ErrorCode::kInvalidArgument, "a .npy file has one array", read("i.npy:a"));
  expect_error(ErrorCode::kInvalidArgument, ".npy has no bf16",
               [] { check_matrix_path("out.npy", DType::kBF16); });
  expect_error(ErrorCode::kInvalidArgument, "ends neither in",
               [] { check_matrix_path("out.txt", DType::kF32); });
}

class RoutingFile : public ::testing::Test {
 protected:
  std::vector<std::int32_t> expert = {2, 0, 1, -1};
  std::vector<float> weight = {0.75F, 0.25F, 1.0F, 0.0F};
  std::vector<std::uint8_t> kept = {1, 1, 0, 0};
  std::vector<std::int64_t> counts = {1, 1, 1};
  std::vector<std::int64_t> counts_kept = {1, 0, 1};
  std::vector<std::int64_t> expert_begin = {0, 1, 1, 2};
  std::vector<std::int32_t> row_token = {0, 0};
  std::vector<float> row_weight = {0.25F, 0.75F};
  TempDir dir;
};

TEST_F(RoutingFile, WhatIsWrittenCanBeReadAsInput) {
  write_routing(dir / "r.safetensors", {.expert = {expert.data(), {2, 2}},
                                        .weight = {weight.data(), {2, 2}},
                                        .kept = {kept.data(), {2, 2}},
                                        .counts = {counts.data(), {3}},
                                        .counts_kept = {counts_kept.data(), {3}},
                                        .expert_begin = {expert_begin.data(), {4}},
                                        .row_token = {row_token.data(), {2}},
                                        .row_weight = {row_weight.data(), {2}}});
  const RoutingInput routing = read_routing(dir / "r.safetensors");
  EXPECT_EQ(routing.num_tokens, 2);
  EXPECT_EQ(routing.top_k, 2);
  EXPECT_EQ(routing.expert, expert);
  EXPECT_EQ(routing.weight, weight);

  const SafetensorsFile file(dir / "r.safetensors");
  const std::pair<const char*, StoredType> expected[] = {
      {"expert", StoredType::kI32},      {"weight", StoredType::kF32},
      {"kept", StoredType::kU8},         {"counts", StoredType::kI64},
      {"counts_kept", StoredType::kI64}, {"expert_begin", StoredType::kI64},
      {"row_token", StoredType::kI32},   {"row_weight", StoredType::kF32}};
  EXPECT_EQ(file.tensors().size(), std::size(expected));
  for (const auto& [name, type] : expected) {
    ASSERT_NE(file.find(name), nullptr) << name;
    EXPECT_EQ(file.find(name)->spec.type, type) << name;
  }
  EXPECT_EQ(std::memcmp(file.find("expert_begin")->bytes.data(), expert_begin.data(), 32), 0);
}

TEST_F(RoutingFile, BadRoutingsAreNamed) {
  const auto path = dir / "r.safetensors";
  const auto read = [&] { (void)read_routing(path); };
  const StoredTensor good_expert = {{"expert", StoredType::kI32, {2, 2}},
                                    std::as_bytes(std::span(expert))};
  const auto with_weight = [&](const StoredTensor& other) {
    write_safetensors(path, std::vector<StoredTensor>{good_expert, other});
  };
  write_safetensors(path, std::vector<StoredTensor>{good_expert});
  expect_error(ErrorCode::kBadFile, "has no tensor 'weight'; a routing needs it", read);
  with_weight({{"weight", StoredType::kF32, {4}}, std::as_bytes(std::span(weight))});
  expect_error(ErrorCode::kBadFile, "tensor 'weight' is F32 [4], a routing has F32 [T, K]", read);
  with_weight({{"weight", StoredType::kI32, {2, 2}}, std::as_bytes(std::span(weight))});
  expect_error(ErrorCode::kBadFile, "tensor 'weight' is I32 [2, 2]", read);
  with_weight({{"weight", StoredType::kF32, {4, 1}}, std::as_bytes(std::span(weight))});
  expect_error(ErrorCode::kBadFile, "differ in shape", read);
  expert[3] = -2;
  with_weight({{"weight", StoredType::kF32, {2, 2}}, std::as_bytes(std::span(weight))});
  expect_error(ErrorCode::kBadFile, "expert id -2 of token 1", read);
}

}  // namespace
}  // namespace switchyard
