// Stored weights, code by code: what they widen to and what is read back of them against numbers
// that numpy has computed (tests/data/stored_golden.py).
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "experts/cpu/weights/weights.hpp"
#include "testkit/experts_support.hpp"
#include "testkit/sanitized.hpp"
#include "testkit/stored_kinds.hpp"

namespace switchyard::test {
namespace {

using Bytes = std::vector<std::byte>;

/// Codes that share a scale, and what each of them means as a number of each type, bit by bit.
struct GoldenBlock {
  std::vector<std::uint8_t> codes;
  std::array<std::vector<std::uint32_t>, std::size(kTypes)> bits;
  std::uint32_t scale = 0, factor = 0;
  std::uint8_t zero = 8;
  std::string type{};  ///< int4: of the scale.
};
using Blocks = std::vector<const GoldenBlock*>;

std::vector<GoldenBlock> read_blocks(WeightFormat format) {
  static const nlohmann::json document = [] {
    std::ifstream file(SWITCHYARD_TEST_DATA "/stored_golden.json");
    return nlohmann::json::parse(file);
  }();
  std::vector<GoldenBlock> blocks;
  for (const nlohmann::json& block : document.at(to_string(format))) {
    GoldenBlock& read = blocks.emplace_back();
    read.codes = block.at("codes").get<std::vector<std::uint8_t>>();
    for (std::size_t type = 0; type < std::size(kTypes); ++type) {
      read.bits[type] = block.at(to_string(kTypes[type])).get<std::vector<std::uint32_t>>();
    }
    read.scale = block.at("scale").get<std::uint32_t>();
    if (format == WeightFormat::kInt4) {
      read.zero = block.at("zero").get<std::uint8_t>();
      read.type = block.at("type").get<std::string>();
    }
    if (format == WeightFormat::kNvfp4) read.factor = block.at("factor").get<std::uint32_t>();
  }
  return blocks;
}

/// Those of a kind that both halves of a panel may have, by half: of NVFP4 those of one factor.
std::array<Blocks, 2> golden(const StoredKind& kind, std::int64_t turn) {
  static std::map<WeightFormat, std::vector<GoldenBlock>> of_format;
  if (!of_format.contains(kind.format)) of_format[kind.format] = read_blocks(kind.format);
  const std::vector<GoldenBlock>& all = of_format.at(kind.format);
  std::array<Blocks, 2> blocks;
  for (std::size_t half = 0; half < 2; ++half) {
    const auto first = static_cast<std::size_t>(turn) + half;
    for (const GoldenBlock& block : all) {
      if (kind.format == WeightFormat::kInt4) {
        if (block.type != to_string(kind.int4.scale)) continue;
        if (!kind.int4.zero_points && block.zero != 8) continue;
      }
      // Factors come one after the other: that of the half's own first block.
      if (kind.format == WeightFormat::kNvfp4 &&
          block.factor != all[9 * first % all.size()].factor) {
        continue;
      }
      blocks[half].push_back(&block);
    }
  }
  return blocks;
}

/// A panel whose rows are golden blocks, each row of a half beginning elsewhere in them. e4m3: a
/// scale for each half and 128 of the depth; the others: one for each row and group, and no more
/// than two neighbours of the list in a group, so that there are groups on either side of every
/// border.
struct GoldenPanel {
  const cpu::Kernels& kernels;
  StoredKind kind;
  std::int64_t depth;
  std::int64_t turn;  ///< Which blocks.
  std::array<Blocks, 2> blocks = golden(kind, turn);

  [[nodiscard]] bool e4m3() const { return kind.format == WeightFormat::kE4M3; }
  [[nodiscard]] const GoldenBlock& block(std::int64_t col, std::int64_t k) const {
    const std::int64_t half = col / (kernels.panel_cols / 2);
    const Blocks& list = blocks[static_cast<std::size_t>(half)];
    const std::int64_t group = k / kind.group();
    const std::int64_t number = e4m3() ? 2 * group + half : group + col % 2;
    return *list[static_cast<std::size_t>((number + turn) % std::ssize(list))];
  }
  [[nodiscard]] static std::size_t place(const GoldenBlock& block, std::int64_t col,
                                         std::int64_t k) {
    return static_cast<std::size_t>((k + 7 * col) % std::ssize(block.codes));
  }
  [[nodiscard]] std::uint32_t bits(std::int64_t col, std::int64_t k, DType dtype) const {
    const GoldenBlock& b = block(col, k);
    const auto type = std::find(std::begin(kTypes), std::end(kTypes), dtype) - std::begin(kTypes);
    return b.bits[static_cast<std::size_t>(type)][place(b, col, k)];
  }
  [[nodiscard]] StoredLayout layout() const {
    return {
        .format = kind.format, .rows = kernels.panel_cols / 2, .cols = depth, .int4 = kind.int4};
  }

  /// The scale of row `row` of a half for its group `group`.
  void put_scale(const GoldenBlock& b, std::int64_t row, std::int64_t group, Bytes& scales) const {
    std::byte* of_row = scales.data() + (e4m3() ? 0 : row * layout().scale_row_bytes());
    const std::int64_t size = e4m3() ? 4 : kind.format == WeightFormat::kInt4 ? 2 : 1;
    std::memcpy(of_row + group * size, &b.scale, static_cast<std::size_t>(size));
    if (!kind.int4.zero_points) return;
    std::byte& pair = of_row[2 * (depth / kind.group()) + group / 2];
    pair = group % 2 == 0 ? std::byte{b.zero}
                          : (pair & std::byte{15}) | static_cast<std::byte>(b.zero << 4);
  }

  /// Codes and scales of a half, and 0xff behind each.
  [[nodiscard]] std::pair<Bytes, Bytes> rows(int half) const {
    const StoredLayout shape = layout();
    Bytes values(static_cast<std::size_t>(shape.value_bytes()) + 64, std::byte{0xff});
    Bytes scales(static_cast<std::size_t>(shape.scale_bytes()) + 64, std::byte{0xff});
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      const std::int64_t col = half * shape.rows + row;
      for (std::int64_t k = 0; k < depth; ++k) {
        const GoldenBlock& b = block(col, k);
        const std::uint8_t code = b.codes[place(b, col, k)];
        const auto at = static_cast<std::size_t>(row * depth + k);
        if (e4m3()) {
          values[at] = std::byte{code};
        } else {
          std::byte& pair = values[at / 2];
          pair =
              k % 2 == 0 ? std::byte{code} : pair | std::byte{static_cast<std::uint8_t>(code << 4)};
        }
        if (k % kind.group() == 0) put_scale(b, row, k / kind.group(), scales);
      }
    }
    return {values, scales};
  }
  [[nodiscard]] float factor(int half) const {
    if (kind.format != WeightFormat::kNvfp4) return 1;
    return std::bit_cast<float>(blocks[static_cast<std::size_t>(half)].front()->factor);
  }

  /// Exactly as long as a panel is: what reads on finds the end of an allocation.
  [[nodiscard]] Bytes pack() const {
    const auto first = rows(0);
    const auto second = rows(1);
    const cpu::PanelShape shape = cpu::panel_shape(kernels, depth, kernels.panel_cols);
    Bytes panel(static_cast<std::size_t>(shape.panel_bytes), std::byte{0xff});
    cpu::pack_stored({.rows = {{first.first.data(), first.second.data(), factor(0)},
                               {second.first.data(), second.second.data(), factor(1)}},
                      .count = {kernels.panel_cols / 2, kernels.panel_cols / 2},
                      .depth = depth,
                      .shape = shape,
                      .kernels = &kernels,
                      .out = panel.data()});
    return panel;
  }
};

/// The bits of a number in a panel of exact weights.
std::uint32_t bits_in(const Bytes& tile, DType dtype, std::int64_t cols, std::int64_t k,
                      std::int64_t col) {
  const std::int64_t at = dtype == DType::kBF16 ? (k / 2 * cols + col) * 2 + k % 2 : k * cols + col;
  std::uint32_t bits = 0;
  std::memcpy(&bits, tile.data() + at * size_of(dtype), static_cast<std::size_t>(size_of(dtype)));
  return bits;
}

class StoredCodes : public Experts {};

void expect_widening(const GoldenPanel& panel, const Bytes& packed, DType dtype,
                     std::int64_t piece) {
  const cpu::Kernels& kernels = panel.kernels;
  for (std::int64_t first = 0; first < panel.depth; first += piece) {
    const std::int64_t depth = std::min(piece, panel.depth - first);
    Bytes tile(static_cast<std::size_t>(depth * kernels.panel_cols * size_of(dtype)));
    kernels.widen({.panel = packed.data(),
                   .first = first,
                   .depth = depth,
                   .out = tile.data(),
                   .int4 = kernels.int4});
    for (std::int64_t k = 0; k < depth; ++k) {
      for (std::int64_t col = 0; col < kernels.panel_cols; ++col) {
        std::uint32_t got = bits_in(tile, dtype, kernels.panel_cols, k, col);
        std::uint32_t want = panel.bits(col, first + k, dtype);
        const std::uint32_t sign = dtype == DType::kF32 ? 0x80000000U : 0x8000U;
        if (want == sign && got == 0) want = 0;  // of -0 sums are those of 0
        ASSERT_EQ(got, want) << panel.kind.name() << " " << to_string(dtype) << " depth "
                             << first + k << " column " << col << " turn " << panel.turn;
      }
    }
  }
}

TEST_P(StoredCodes, WidenToTheBitsOfNumpy) {
  constexpr std::int64_t kDepth = 384;
  constexpr std::int64_t kTurns = kSanitized ? 5 : 15;
  for (const StoredKind& kind : stored_kinds()) {
    for (const DType dtype : kTypes) {
      const cpu::Kernels& kernels = cpu::find_kernels(GetParam(), dtype, kind.format, kind.int4);
      ASSERT_NE(kernels.widen, nullptr);
      for (std::int64_t turn = 0; turn < kTurns; ++turn) {
        const GoldenPanel panel{kernels, kind, kDepth, turn};
        const Bytes packed = panel.pack();
        for (const std::int64_t piece : {kDepth, std::int64_t{96}}) {
          expect_widening(panel, packed, dtype, piece);
        }
      }
    }
  }
}

/// The sums of `count` random rows times two panels that lie one behind the other.
struct FewRows {
  const cpu::Kernels& kernels;  ///< Of the codes.
  std::int64_t depth;
  cpu::RowBlocks blocks;
  Bytes rows{};

  FewRows(const cpu::Kernels& of, std::int64_t cols, std::int64_t count)
      : kernels(of), depth(cols), blocks(of.blocks(count)) {
    const std::vector<float> numbers = random_floats(count * depth, 3);
    Bytes plain(numbers.size() * 2);
    std::vector<const std::byte*> row;
    for (std::int64_t i = 0; i < std::ssize(numbers); ++i) {
      store_float(plain.data(), kernels.dtype, i, numbers[static_cast<std::size_t>(i)]);
    }
    for (std::int64_t r = 0; r < count; ++r) row.push_back(plain.data() + r * depth * 2);
    rows.resize(static_cast<std::size_t>(blocks.places() * depth * kernels.element_bytes));
    for (std::int64_t b = 0; b < blocks.count(); ++b) {
      kernels.pack_rows({.rows = row.data() + blocks.begin(b),
                         .count = blocks.size(b) < count ? blocks.size(b) : count,
                         .cols = depth,
                         .depth = depth,
                         .out = rows.data() + blocks.begin(b) * depth * kernels.element_bytes});
    }
  }
  [[nodiscard]] std::vector<float> times(const cpu::Kernels& by, const Bytes& panels) const {
    std::vector<float> out(static_cast<std::size_t>(2 * blocks.places() * by.panel_cols));
    cpu::multiply(by, {.a = rows.data(),
                       .blocks = blocks,
                       .steps = depth / by.depth_multiple,
                       .weights = panels.data(),
                       .panel_bytes = std::ssize(panels) / 2,
                       .panels = 2,
                       .out = out.data()});
    return out;
  }
};

/// Also with depths that end within four, and with scales that take plain code.
TEST_P(StoredCodes, TimesFewRowsGiveTheBitsOfTheirNumbers) {
  constexpr std::int64_t kDepth = 384;
  for (const StoredKind& kind : stored_kinds()) {
    const cpu::Kernels& exact = cpu::find_kernels(GetParam(), DType::kBF16, WeightFormat::kExact);
    const cpu::Kernels& kernels =
        cpu::find_kernels(GetParam(), DType::kBF16, kind.format, kind.int4);
    for (std::int64_t turn = 0; turn < (kSanitized ? 3 : 15); ++turn) {
      Bytes codes, numbers;
      for (const std::int64_t next : {0, 1}) {
        const Bytes packed = GoldenPanel{kernels, kind, kDepth, turn + next}.pack();
        Bytes tile(static_cast<std::size_t>(kDepth * kernels.panel_cols * 2));
        cpu::widen_exactly(kernels.storage, DType::kBF16, kernels.panel_cols,
                           {.panel = packed.data(),
                            .first = 0,
                            .depth = kDepth,
                            .out = tile.data(),
                            .int4 = kernels.int4});
        codes.insert(codes.end(), packed.begin(), packed.end());
        numbers.insert(numbers.end(), tile.begin(), tile.end());
      }
      // One more than go by their codes; where all do, some blocks of tiles and one more.
      const std::int64_t most = std::min<std::int64_t>(kernels.coded_rows.most_rows, 5 * 16);
      for (std::int64_t count = 1; count <= most + 1; ++count) {
        const FewRows rows(kernels, kDepth - kernels.depth_multiple, count);
        const std::vector<float> got = rows.times(kernels, codes);
        const std::vector<float> want = rows.times(exact, numbers);
        ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
            << kind.name() << " rows " << count << " turn " << turn;
      }
    }
  }
}

TEST_P(StoredCodes, ReadBackAreTheBitsOfNumpyWithTheirSigns) {
  for (const StoredKind& kind : stored_kinds()) {
    const cpu::Kernels& kernels =
        cpu::find_kernels(GetParam(), DType::kF32, kind.format, kind.int4);
    const GoldenPanel panel{kernels, kind, 256, 3};
    const Bytes packed = panel.pack();
    for (std::int64_t col = 0; col < kernels.panel_cols; ++col) {
      std::vector<float> row(static_cast<std::size_t>(panel.depth));
      cpu::unpack_stored(kernels, packed.data(), col, panel.depth, row.data());
      for (std::int64_t k = 0; k < panel.depth; ++k) {
        const float value = row[static_cast<std::size_t>(k)];
        ASSERT_EQ(std::bit_cast<std::uint32_t>(value), panel.bits(col, k, DType::kF32))
            << kind.name() << " depth " << k << " column " << col;
      }
    }
  }
}

/// decode(), which reads rows and no panels.
TEST(StoredCodesAlone, DecodeToTheBitsOfNumpy) {
  const cpu::Kernels& kernels =
      cpu::find_kernels(CpuIsa::kPortable, DType::kF32, WeightFormat::kExact);
  for (const StoredKind& kind : stored_kinds()) {
    for (std::int64_t turn = 0; turn < 15; ++turn) {
      const GoldenPanel panel{kernels, kind, 384, turn};
      const StoredLayout layout = panel.layout();
      for (const int half : {0, 1}) {
        const auto rows = panel.rows(half);
        for (const DType dtype : kTypes) {
          Bytes out(static_cast<std::size_t>(layout.rows * layout.cols * size_of(dtype)));
          decode(layout, {rows.first.data(), rows.second.data(), panel.factor(half)}, dtype,
                 out.data());
          for (std::int64_t i = 0; i < layout.rows * layout.cols; ++i) {
            std::uint32_t got = 0;
            std::memcpy(&got, out.data() + i * size_of(dtype),
                        static_cast<std::size_t>(size_of(dtype)));
            const std::int64_t col = half * layout.rows + i / layout.cols;
            ASSERT_EQ(got, panel.bits(col, i % layout.cols, dtype))
                << kind.name() << " " << to_string(dtype) << " element " << i;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, StoredCodes, testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return std::string(to_string(isa.param)); });

}  // namespace
}  // namespace switchyard::test
