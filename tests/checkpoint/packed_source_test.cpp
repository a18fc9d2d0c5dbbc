// Weights of four bits as GPTQ, AWQ, compressed-tensors and ModelOpt pack them: packed here by
// their definitions, number by number, and read back; what is refused, by the tensor's name.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <tuple>

#include "checkpoint/sources/expert_source.hpp"
#include "core/half.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/file_support.hpp"
#include "testkit/quantised_source.hpp"
#include "testkit/random.hpp"

namespace switchyard::test {
namespace {

using Words = std::vector<std::uint32_t>;
using Shape = std::vector<std::int64_t>;

/// A matrix [rows, cols] in groups: codes, zero points and the bits of scales of f16.
struct Numbers {
  std::int64_t rows, cols, group;
  std::vector<int> codes, zeros;
  std::vector<std::uint16_t> scales;

  Numbers(std::int64_t num_rows, std::int64_t num_cols, std::int64_t of_group, Random& random)
      : rows(num_rows), cols(num_cols), group(of_group) {
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      codes.push_back(static_cast<int>(random.between(0, 15)));
    }
    for (std::int64_t i = 0; i < rows * groups(); ++i) {
      zeros.push_back(static_cast<int>(random.between(0, 15)));
      scales.push_back(static_cast<std::uint16_t>(random.between(0x1800, 0x2fff)));
    }
  }
  [[nodiscard]] std::int64_t groups() const { return cols / group; }
  [[nodiscard]] int code(std::int64_t n, std::int64_t k) const {
    return codes[static_cast<std::size_t>(n * cols + k)];
  }
  [[nodiscard]] std::size_t place(std::int64_t n, std::int64_t k) const {
    return static_cast<std::size_t>(n * groups() + k / group);
  }
  [[nodiscard]] float value(std::int64_t n, std::int64_t k, bool symmetric) const {
    const double scale = value_of_16_bits(scales[place(n, k)], DType::kF16);
    return static_cast<float>((code(n, k) - (symmetric ? 8 : zeros[place(n, k)])) * scale);
  }
};

/// Eight codes a word, the first in the lowest bits.
Words words_of(std::int64_t outer, std::int64_t inner, bool along_outer,
               const std::function<int(std::int64_t, std::int64_t)>& code) {
  const std::int64_t rows = along_outer ? (outer + 7) / 8 : outer;
  const std::int64_t cols = along_outer ? inner : (inner + 7) / 8;
  Words words(static_cast<std::size_t>(rows * cols));
  for (std::int64_t i = 0; i < outer; ++i) {
    for (std::int64_t j = 0; j < inner; ++j) {
      const std::int64_t at = along_outer ? i / 8 * cols + j : i * cols + j / 8;
      const std::int64_t bit = 4 * ((along_outer ? i : j) % 8);
      words[static_cast<std::size_t>(at)] |= static_cast<std::uint32_t>(code(i, j)) << bit;
    }
  }
  return words;
}

/// Tensors to be written, whose bytes live here.
class Tensors {
 public:
  template <typename T>
  void add(const std::string& name, StoredType type, const Shape& shape,
           const std::vector<T>& values) {
    auto& bytes = bytes_[name];
    bytes.resize(values.size() * sizeof(T));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    specs_[name] = {name, type, shape};
  }
  void remove(const std::string& name) { specs_.erase(name); }
  [[nodiscard]] TensorSpec& spec(const std::string& name) { return specs_.at(name); }
  [[nodiscard]] std::vector<std::byte>& bytes(const std::string& name) { return bytes_.at(name); }

  [[nodiscard]] std::shared_ptr<const TensorSet> open(const TempDir& dir) const {
    std::vector<StoredTensor> tensors;
    for (const auto& [name, spec] : specs_) tensors.push_back({spec, bytes_.at(name)});
    write_safetensors(dir / "f.safetensors", tensors);
    return TensorSet::open_file(dir / "f.safetensors");
  }

 private:
  std::map<std::string, TensorSpec> specs_;
  std::map<std::string, std::vector<std::byte>> bytes_;
};

enum class Form { kGptq, kGptqV2, kAwq, kPacked, kPackedSymmetric };
constexpr Form kForms[] = {Form::kGptq, Form::kGptqV2, Form::kAwq, Form::kPacked,
                           Form::kPackedSymmetric};

/// "a.*" of one matrix.
void add(Tensors& tensors, const std::string& module, const Numbers& m, Form form) {
  const auto code = [&](std::int64_t k, std::int64_t n) { return m.code(n, k); };
  const auto across = [&](std::int64_t n, std::int64_t k) { return m.code(n, k); };
  const auto zero = [&](std::int64_t group, std::int64_t n) {
    const int z = m.zeros[m.place(n, group * m.group)];
    return form == Form::kGptq ? (z + 15) % 16 : z;
  };
  // The order in which AWQ takes eight columns.
  constexpr std::array<std::int64_t, 8> kOrder = {0, 2, 4, 6, 1, 3, 5, 7};
  const auto ordered = [&](const auto& of) {
    return [&, of](std::int64_t i, std::int64_t n) {
      return of(i, n / 8 * 8 + kOrder[static_cast<std::size_t>(n % 8)]);
    };
  };
  std::vector<std::uint16_t> turned;
  for (std::int64_t group = 0; group < m.groups(); ++group) {
    for (std::int64_t n = 0; n < m.rows; ++n) {
      turned.push_back(m.scales[m.place(n, group * m.group)]);
    }
  }
  if (form == Form::kPacked || form == Form::kPackedSymmetric) {
    tensors.add(module + ".weight_packed", StoredType::kI32, {m.rows, m.cols / 8},
                words_of(m.rows, m.cols, false, across));
    tensors.add(module + ".weight_scale", StoredType::kF16, {m.rows, m.groups()}, m.scales);
    if (form == Form::kPackedSymmetric) return;
    const auto by_row = [&](std::int64_t n, std::int64_t group) { return zero(group, n); };
    tensors.add(module + ".weight_zero_point", StoredType::kI32, {(m.rows + 7) / 8, m.groups()},
                words_of(m.rows, m.groups(), true, by_row));
    return;
  }
  tensors.add(module + ".scales", StoredType::kF16, {m.groups(), m.rows}, turned);
  if (form == Form::kAwq) {
    tensors.add(module + ".qweight", StoredType::kI32, {m.cols, m.rows / 8},
                words_of(m.cols, m.rows, false, ordered(code)));
    tensors.add(module + ".qzeros", StoredType::kI32, {m.groups(), m.rows / 8},
                words_of(m.groups(), m.rows, false, ordered(zero)));
    return;
  }
  tensors.add(module + ".qweight", StoredType::kI32, {m.cols / 8, m.rows},
              words_of(m.cols, m.rows, true, code));
  tensors.add(module + ".qzeros", StoredType::kI32, {m.groups(), m.rows / 8},
              words_of(m.groups(), m.rows, false, zero));
  std::vector<std::int32_t> order;
  for (std::int64_t k = 0; k < m.cols; ++k) order.push_back(static_cast<std::int32_t>(k / m.group));
  tensors.add(module + ".g_idx", StoredType::kI32, {m.cols}, order);
}

/// One expert of [64, 96] gate, up and [96, 64] down matrices.
class PackedSources : public ::testing::Test {
 protected:
  static constexpr std::int64_t kGroup = 32;
  ExpertConfig config{.num_experts = 1, .hidden = 96, .inner = 64};
  Random random{7};
  Numbers gate{64, 96, kGroup, random};
  Numbers up{64, 96, kGroup, random};
  Numbers down{96, 64, kGroup, random};
  Tensors tensors;
  TempDir dir;

  void put(Form form) {
    tensors = {};
    add(tensors, "gate", gate, form);
    add(tensors, "up", up, form);
    add(tensors, "down", down, form);
  }
  [[nodiscard]] std::unique_ptr<ExpertSource> open(GptqZeros zeros = GptqZeros::kLessOne) const {
    return make_expert_source(tensors.open(dir), config,
                              {{"gate.weight", "up.weight", "down.weight"}}, zeros);
  }
  void refused(const char* what) const {
    expect_error(ErrorCode::kBadFile, what, [&] {
      const auto source = open();
      std::vector<float> all(64 * 96);
      source->read(0, ExpertPart::kGate, 0, 64, DType::kF32, all.data());
    });
  }
};

TEST_F(PackedSources, OfInt4GiveTheNumbersThatWerePacked) {
  for (const Form form : kForms) {
    put(form);
    const auto source = open(form == Form::kGptqV2 ? GptqZeros::kWhole : GptqZeros::kLessOne);
    ASSERT_EQ(source->stored_format(), WeightFormat::kInt4);
    EXPECT_EQ(source->dtype(), DType::kF16);
    const bool symmetric = form == Form::kPackedSymmetric;
    EXPECT_EQ(source->int4_form(),
              (Int4Form{.group = 32, .scale = DType::kF16, .zero_points = !symmetric}));
    for (const Numbers* m : {&gate, &up, &down}) {
      const ExpertPart part = m == &gate ? ExpertPart::kGate
                              : m == &up ? ExpertPart::kUp
                                         : ExpertPart::kDown;
      for (const auto& [first, count] : {std::pair{std::int64_t{0}, m->rows}, {3, 37}, {63, 1}}) {
        std::vector<float> got(static_cast<std::size_t>(count * m->cols));
        source->read(0, part, first, count, DType::kF32, got.data());
        for (std::int64_t i = 0; i < count * m->cols; ++i) {
          ASSERT_EQ(got[static_cast<std::size_t>(i)],
                    m->value(first + i / m->cols, i % m->cols, symmetric))
              << "form " << static_cast<int>(form) << " element " << i;
        }
      }
    }
  }
}

TEST_F(PackedSources, OfInt4AreRefusedByTheTensorsName) {
  put(Form::kGptq);
  tensors.remove("up.qzeros");
  refused("has no tensor 'up.qzeros'");
  put(Form::kGptq);
  tensors.bytes("up.g_idx")[4 * 33] = std::byte{2};
  refused("tensor 'up.g_idx': column 33 is of group 2, expected 1");
  put(Form::kAwq);
  tensors.remove("down.scales");
  refused("has no tensor 'down.scales'");
  put(Form::kAwq);
  tensors.spec("gate.scales").shape = {6, 32};
  refused("tensor 'gate.scales' has shape [6, 32]");
  put(Form::kAwq);
  tensors.bytes("gate.scales")[2 * 64 + 3] = std::byte{0x7e};  // NaN
  refused("tensor 'gate.scales': row 1, column 1 is nan");
  put(Form::kPacked);
  tensors.spec("gate.weight_packed").shape = {64, 6, 2};
  refused("tensor 'gate.weight_packed' has shape");
  put(Form::kPacked);
  tensors.spec("gate.weight_packed").type = StoredType::kU32;
  refused("tensor 'gate.weight_packed' is U32, expected I32");
  put(Form::kPacked);
  tensors.remove("down.weight_zero_point");
  refused("'down.weight_scale' is f16 for 32 columns each, without zero points");
  put(Form::kPacked);
  tensors.add("up.input_scale", StoredType::kF32, {1}, std::vector<float>{1.0F});
  refused("'up.input_scale': rows that are quantised");
  put(Form::kPackedSymmetric);
  tensors.add("down.input_global_scale", StoredType::kF32, {1}, std::vector<float>{1.0F});
  refused("'down.input_global_scale': rows that are quantised");
  put(Form::kPacked);
  tensors.add("up.weight_g_idx", StoredType::kI32, {96}, std::vector<std::int32_t>(96, 1));
  refused("tensor 'up.weight_g_idx': column 0 is of group 1");
  put(Form::kPackedSymmetric);
  tensors.add("gate.weight_scale", StoredType::kF32, {64, 3}, std::vector<float>(192, 1.0F));
  refused("tensor 'gate.weight_scale' is F32, expected F16 or BF16");
  put(Form::kPackedSymmetric);
  tensors.add("gate.weight_scale", StoredType::kF16, {64, 1}, std::vector<std::uint16_t>(64));
  refused("expected a scale for each 32, 64 or 128 columns");
}

/// NVFP4 under the names of either.
class Nvfp4Sources : public PackedSources {
 protected:
  std::map<std::string, std::vector<std::uint8_t>> codes, scales;

  void put_nvfp4(bool packed) {
    tensors = {};
    codes = scales = {};
    for (const auto& [module, rows, cols] : {std::tuple{"gate", std::int64_t{64}, std::int64_t{96}},
                                             {"up", 64, 96},
                                             {"down", 96, 64}}) {
      const std::string name = module;
      auto& bytes = codes[name];
      auto& factors = scales[name];
      for (std::int64_t i = 0; i < rows * cols / 2; ++i) {
        bytes.push_back(static_cast<std::uint8_t>(random.between(0, 255)));
      }
      for (std::int64_t i = 0; i < rows * cols / 16; ++i) {
        factors.push_back(static_cast<std::uint8_t>(random.between(0, 126)));
      }
      tensors.add(name + (packed ? ".weight_packed" : ".weight"), StoredType::kU8, {rows, cols / 2},
                  bytes);
      tensors.add(name + ".weight_scale", StoredType::kF8E4M3, {rows, cols / 16}, factors);
      if (packed) {
        tensors.add(name + ".weight_global_scale", StoredType::kF32, {1}, std::vector{3.0F});
      } else {
        tensors.add(name + ".weight_scale_2", StoredType::kF32, {}, std::vector{0.3F});
        tensors.add(name + ".input_scale", StoredType::kF32, {}, std::vector{0.01F});
      }
    }
  }
};

TEST_F(Nvfp4Sources, GiveTheNumbersThatWerePacked) {
  for (const bool packed : {true, false}) {
    put_nvfp4(packed);
    const auto source = open();
    ASSERT_EQ(source->stored_format(), WeightFormat::kNvfp4);
    const float factor = packed ? 1 / 3.0F : 0.3F;
    EXPECT_EQ(source->stored_factor(0, ExpertPart::kUp), factor);
    std::vector<float> got(96 * 64);
    source->read(0, ExpertPart::kDown, 0, 96, DType::kF32, got.data());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const std::uint8_t pair = codes["down"][i / 2];
      const double code = value_of_e2m1(i % 2 == 0 ? pair & 15 : pair >> 4);
      const auto scale = static_cast<float>(value_of_e4m3(scales["down"][i / 16]) * factor);
      ASSERT_EQ(got[i], static_cast<float>(code * scale)) << packed << " element " << i;
    }
  }
}

TEST_F(Nvfp4Sources, AreRefusedByTheTensorsName) {
  put_nvfp4(false);
  tensors.bytes("gate.weight_scale")[7] = std::byte{0xff};
  refused("tensor 'gate.weight_scale': row 1, column 1 is NaN");
  tensors.remove("up.weight_scale");
  refused("has no tensor 'up.weight_scale'");
  put_nvfp4(false);
  tensors.remove("down.weight_scale_2");
  refused("has no tensor 'down.weight_scale_2'");
  put_nvfp4(false);
  tensors.add("down.weight_scale_2", StoredType::kF32, {},
              std::vector{std::numeric_limits<float>::infinity()});
  refused("tensor 'down.weight_scale_2' is inf, expected a number above 0");
  put_nvfp4(false);
  tensors.add("down.input_scale", StoredType::kF32, {}, std::vector{-1.0F});
  refused("tensor 'down.input_scale' is -1, expected a number above 0");
  put_nvfp4(true);
  tensors.add("gate.weight_global_scale", StoredType::kF32, {1}, std::vector{0.0F});
  refused("tensor 'gate.weight_global_scale' is 0");
  put_nvfp4(true);
  tensors.add("up.weight_zero_point", StoredType::kI8, {64, 6}, std::vector<std::int8_t>(384));
  refused("'up.weight_zero_point': NVFP4 with zero points");
  put_nvfp4(true);
  tensors.spec("up.weight_scale").shape = {64, 3, 2};
  refused("tensor 'up.weight_scale' has shape");
  config.hidden = 88;
  refused("tensor 'gate.weight_packed': 88 columns are not a multiple of 16");
}

TEST_F(PackedSources, OfE4M3WithAScaleForRowsAreRefused) {
  std::vector<std::uint8_t> codes(4, 0x38);
  std::vector<float> one = {1.0F};
  tensors.add("a.weight", StoredType::kF8E4M3, {2, 2}, codes);
  tensors.add("a.weight_scale_inv", StoredType::kF32, {1, 1}, one);
  tensors.add("a.input_scale", StoredType::kF32, {1}, one);
  expect_error(ErrorCode::kBadFile, "'a.input_scale': rows that are quantised", [&] {
    (void)make_matrix_source(tensors.open(dir), {.num_experts = 1, .hidden = 2, .inner = 2},
                             {{"a.weight", "a.weight", "a.weight"}});
  });
}

}  // namespace
}  // namespace switchyard::test
