// The kernels in plain C++, for any CPU and compiler: four floats at a time, which compilers turn
// into whatever vectors the target has. Products are rounded before they are added here.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/half.hpp"
#include "experts/cpu/product/rows.hpp"

namespace switchyard::cpu {
namespace {

struct Portable {
  static constexpr int kWidth = 4;
  static constexpr int kMaxRows = 4;
  static constexpr int panels(int rows) { return rows == 1 ? 2 : 1; }

  struct Reg {
    float lane[kWidth];
  };

  template <class F>
  static Reg each(F f) {
    Reg out;
    for (int i = 0; i < kWidth; ++i) out.lane[i] = f(i);
    return out;
  }
  static constexpr std::int64_t kPieceBytes = 16 << 10;
  static constexpr int ahead_rows() { return 1; }
  static constexpr std::int64_t kAheadBytes = 0;

  static void prefetch(const std::byte*) {}
  static Reg set(float x) {
    return each([&](int) { return x; });
  }
  static Reg zero() { return set(0.0F); }
  static Reg broadcast(const float* p) { return set(*p); }
  static Reg load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  static void store(float* p, const Reg& a) {
    for (int i = 0; i < kWidth; ++i) p[i] = a.lane[i];
  }
  static void stream(float* p, const Reg& a) { store(p, a); }
  /// 2 * kWidth of them, rounded.
  struct Words {
    std::uint16_t word[2 * kWidth];
  };
  static Words rounded(DType dtype, const Reg& a, const Reg& b) {
    Words out;
    for (int i = 0; i < kWidth; ++i) {
      store_float(out.word, dtype, i, a.lane[i]);
      store_float(out.word, dtype, kWidth + i, b.lane[i]);
    }
    return out;
  }
  static Words bf16_words(const Reg& a, const Reg& b) { return rounded(DType::kBF16, a, b); }
  static Words f16_words(const Reg& a, const Reg& b) { return rounded(DType::kF16, a, b); }
  static void store_words(std::byte* p, const Words& a) { std::memcpy(p, a.word, sizeof a.word); }
  static void stream_words(std::byte* p, const Words& a) { store_words(p, a); }
  static void keep(Reg& a) { asm volatile("" : "+m"(a)); }
  static Reg add(const Reg& a, const Reg& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Reg sub(const Reg& a, const Reg& b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Reg mul(const Reg& a, const Reg& b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Reg div(const Reg& a, const Reg& b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  /// Not one rounding but two: without hardware for it, std::fma is a slow call.
  static Reg fma(const Reg& a, const Reg& b, const Reg& c) { return add(mul(a, b), c); }
  static Reg exact_fma(const Reg& a, const Reg& b, const Reg& c) {
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
  }
  static Reg min(const Reg& a, const Reg& b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Reg max(const Reg& a, const Reg& b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Reg abs(const Reg& a) {
    return each([&](int i) { return std::fabs(a.lane[i]); });
  }
  static Reg round(const Reg& a) {
    return each([&](int i) { return std::nearbyintf(a.lane[i]); });
  }
  static Reg pow2(const Reg& n) {
    // A NaN has already made the other factor NaN; its conversion to an integer is not defined.
    return each([&](int i) {
      const int exponent = n.lane[i] > -127.0F ? static_cast<int>(n.lane[i]) : 0;
      return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
    });
  }
  static Reg select_negative(const Reg& x, const Reg& negative, const Reg& other) {
    return each([&](int i) { return std::signbit(x.lane[i]) ? negative.lane[i] : other.lane[i]; });
  }
  static Reg round_bf16(const Reg& a) {
    return each([&](int i) { return round_to(DType::kBF16, a.lane[i]); });
  }
  static Reg round_f16(const Reg& a) {
    return each([&](int i) { return round_to(DType::kF16, a.lane[i]); });
  }
  static float widen_one(std::uint16_t bits, DType dtype) {
    return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
  static std::uint32_t pair(const std::byte* p, int i) {
    std::uint32_t bits;
    std::memcpy(&bits, p + 4 * i, sizeof bits);
    return bits;
  }
  static Reg first_bf16(const std::byte* p) {
    return each([&](int i) { return std::bit_cast<float>(pair(p, i) << 16); });
  }
  static Reg second_bf16(const std::byte* p) {
    return each([&](int i) { return std::bit_cast<float>(pair(p, i) & 0xffff0000U); });
  }
  static Reg from_f16(const std::byte* p) {
    return each([&](int i) {
      std::uint16_t bits;
      std::memcpy(&bits, p + 2 * i, sizeof bits);
      return f16_to_float(bits);
    });
  }

  struct Int {
    std::int32_t lane[kWidth];
  };
  static Int int_zero() { return {}; }
  /// Pairs of neighbours, each in the halves of a lane.
  static Int widen_i8(const std::byte* p) {
    Int out;
    for (int i = 0; i < kWidth; ++i) {
      const int first = static_cast<std::int8_t>(p[2 * i]);
      const int second = static_cast<std::int8_t>(p[2 * i + 1]);
      out.lane[i] = (first & 0xffff) | second * 65536;
    }
    return out;
  }
  static Int broadcast_pair(const std::byte* p) {
    std::int32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    Int out;
    for (int i = 0; i < kWidth; ++i) out.lane[i] = bits;
    return out;
  }
  static Int add_products(const Int& a, const Int& b, const Int& c) {
    Int out;
    for (int i = 0; i < kWidth; ++i) {
      const int first = static_cast<std::int16_t>(a.lane[i] & 0xffff) *
                        static_cast<std::int16_t>(b.lane[i] & 0xffff);
      out.lane[i] = c.lane[i] + first + (a.lane[i] >> 16) * (b.lane[i] >> 16);
    }
    return out;
  }
  static Reg to_float(const Int& a) {
    return each([&](int i) { return static_cast<float>(a.lane[i]); });
  }
  static void store_rounded(std::int32_t* p, const Reg& a) {
    for (int i = 0; i < kWidth; ++i) {
      const float x = a.lane[i];  // a NaN as the vectors' instructions have it
      p[i] = std::isnan(x) ? INT32_MIN : static_cast<std::int32_t>(std::nearbyintf(x));
    }
  }
};

}  // namespace

const Kernels* portable_kernels(DType dtype, bool q8) {
  return find_float_kernels<Portable>(CpuIsa::kPortable, dtype, q8);
}

}  // namespace switchyard::cpu
