#include "checkpoint/files/npy.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cctype>
#include <limits>
#include <set>
#include <string_view>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/stored_type.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

struct Descr {
  std::string_view text;
  DType dtype;
};
constexpr std::array<Descr, 6> kDescrs = {{{"<f4", DType::kF32},
                                           {"<f2", DType::kF16},
                                           {"<f8", DType::kF64},
                                           {"<i4", DType::kI32},
                                           {"<i8", DType::kI64},
                                           {"|u1", DType::kU8}}};

/// Reads the one Python literal that headers are: {'descr': '<f4', 'fortran_order': False,
/// 'shape': (3, 4), }.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  void read() {
    expect('{');
    while (!accept('}')) {
      const std::string_view key = quoted();
      expect(':');
      require_file(seen_.insert(key).second, file_, "header key '{}' stands twice", key);
      if (key == "descr") {
        require_file(peek() != '[', file_, "structured arrays are not supported");
        descr = quoted();
      } else if (key == "fortran_order") {
        fortran_order = boolean();
      } else if (key == "shape") {
        shape = tuple();
      } else {
        bad_file(file_, "header key '{}' is unknown", key);
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    require_file(text_.empty(), file_, "header goes on after its '}}'");
    require_file(seen_.size() == 3, file_, "header lacks descr, fortran_order or shape");
  }

  std::string_view descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;

 private:
  void skip_space() {
    while (!text_.empty() && (text_.front() == ' ' || text_.front() == '\n')) {
      text_.remove_prefix(1);
    }
  }
  char peek() {
    skip_space();
    require_file(!text_.empty(), file_, "header ends too early");
    return text_.front();
  }
  bool accept(char wanted) {
    if (peek() != wanted) return false;
    text_.remove_prefix(1);
    return true;
  }
  void expect(char wanted) {
    const bool found = accept(wanted);
    require_file(found, file_, "header is malformed: '{}' expected at '{}'", wanted,
                 text_.substr(0, 10));
  }
  std::string_view quoted() {
    const char quote = peek();
    require_file(quote == '\'' || quote == '"', file_, "header is malformed: no string at '{}'",
                 text_.substr(0, 10));
    const std::size_t end = text_.find(quote, 1);
    require_file(end != std::string_view::npos, file_, "header is malformed: string without end");
    const std::string_view word = text_.substr(1, end - 1);
    text_.remove_prefix(end + 1);
    return word;
  }
  bool boolean() {
    skip_space();
    for (const bool value : {true, false}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.starts_with(word)) {
        text_.remove_prefix(word.size());
        return value;
      }
    }
    bad_file(file_, "header is malformed: no True or False at '{}'", text_.substr(0, 10));
  }
  std::int64_t number() {
    std::int64_t value = 0;
    require_file(std::isdigit(static_cast<unsigned char>(peek())) != 0, file_,
                 "header is malformed: no whole number at '{}'", text_.substr(0, 10));
    while (!text_.empty() && std::isdigit(static_cast<unsigned char>(text_.front())) != 0) {
      require_file(!__builtin_mul_overflow(value, 10, &value) &&
                       !__builtin_add_overflow(value, text_.front() - '0', &value),
                   file_, "an extent of the shape overflows");
      text_.remove_prefix(1);
    }
    return value;
  }
  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> extents;
    expect('(');
    while (!accept(')')) {
      extents.push_back(number());
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return extents;
  }

  std::string_view text_;
  const std::string& file_;
  std::set<std::string_view> seen_;
};

DType dtype_of_descr(std::string_view descr, const std::string& file) {
  for (const Descr& candidate : kDescrs) {
    if (candidate.text == descr) return candidate.dtype;
  }
  require_file(!descr.starts_with('>'), file, "dtype '{}' is big endian; little endian is read",
               descr);
  bad_file(file, "dtype '{}' is not supported; <f4, <f2, <f8, <i4, <i8 and |u1 are", descr);
}

}  // namespace

NpyArray parse_npy(std::span<const std::byte> bytes, const std::string& file) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  require_file(text.starts_with(kMagic), file,
               "not a .npy file: it does not begin with \\x93NUMPY");
  require_file(text.size() >= 10, file, "truncated: {} bytes", text.size());
  const auto byte = [&](std::size_t i) { return std::to_integer<std::size_t>(bytes[i]); };
  const std::size_t major = byte(6);
  require_file(1 <= major && major <= 3, file, ".npy version {} is not supported; 1 to 3 are",
               major);
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  const std::size_t header_begin = 8 + length_bytes;
  require_file(text.size() >= header_begin, file, "truncated: {} bytes", text.size());
  std::size_t length = 0;
  for (std::size_t i = length_bytes; i-- > 0;) length = length << 8 | byte(8 + i);
  require_file(length <= text.size() - header_begin, file,
               "truncated: header length {}, but {} bytes follow", length,
               text.size() - header_begin);

  HeaderReader header(text.substr(header_begin, length), file);
  header.read();
  NpyArray array;
  array.dtype = dtype_of_descr(header.descr, file);
  array.shape = header.shape;
  require_file(!header.fortran_order || array.shape.size() < 2, file,
               "the array is in Fortran order; C order is read");
  const auto elements = num_elements(array.shape);
  std::int64_t num_bytes = 0;
  require_file(elements && !__builtin_mul_overflow(*elements, size_of(array.dtype), &num_bytes),
               file, "shape {} overflows", shape_text(array.shape));
  array.bytes = bytes.subspan(header_begin + length);
  require_file(static_cast<std::int64_t>(array.bytes.size()) >= num_bytes, file,
               "truncated: shape {} needs {} bytes, {} follow", shape_text(array.shape), num_bytes,
               array.bytes.size());
  require_file(static_cast<std::int64_t>(array.bytes.size()) == num_bytes, file,
               "{} bytes after the array",
               static_cast<std::int64_t>(array.bytes.size()) - num_bytes);
  return array;
}

void write_npy(const std::filesystem::path& path, DType dtype,
               const std::vector<std::int64_t>& shape, std::span<const std::byte> bytes) {
  const Descr* descr = nullptr;
  for (const Descr& candidate : kDescrs) {
    if (candidate.dtype == dtype) descr = &candidate;
  }
  require(descr != nullptr, "{}: .npy has no {}; write .safetensors, or another dtype",
          path.string(), to_string(dtype));
  std::string header =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", descr->text,
                  fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  // The data starts at a multiple of 64 bytes: magic, version and length are 10, the newline 1.
  header.append((64 - (header.size() + 11) % 64) % 64, ' ');
  header.push_back('\n');
  const std::size_t length = header.size();
  std::string start(kMagic);
  start += {'\x01', '\x00', static_cast<char>(length & 0xffU), static_cast<char>(length >> 8)};
  AtomicFile file(path);
  file.write(start + header);
  file.write(bytes);
  file.commit();
}

}  // namespace switchyard
