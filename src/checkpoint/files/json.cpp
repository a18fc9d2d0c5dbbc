#include "checkpoint/files/json.hpp"

#include <nlohmann/json.hpp>

#include <utility>
#include <vector>

#include "checkpoint/files/file_error.hpp"

namespace switchyard {
namespace {

/// Makes a document of a parser's events, one step an event. The library's own parser with a
/// callback looks at all members of an object whenever one of them ends: the time would go with the
/// square of the number of tensors.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(const std::string& file) : file_(file) {}

  Json take() { return std::move(document_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& value) override { return add(std::move(value)); }
  bool start_object(std::size_t /*elements*/) override { return open(Json::object()); }
  bool start_array(std::size_t /*elements*/) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    const auto [place, added] = open_.back()->get_ref<Json::object_t&>().emplace(name, nullptr);
    require_file(added, file_, "duplicate key '{}'", name);
    member_ = &place->second;
    return true;
  }

  bool parse_error(std::size_t /*at*/, const std::string& /*token*/,
                   const Json::exception& error) override {
    const std::string_view what = error.what();
    const std::size_t prefix = what.find("] ");  // "[json.exception.parse_error.101] "
    bad_file(file_, "not valid JSON: {}",
             prefix == std::string_view::npos ? what : what.substr(prefix + 2));
  }

 private:
  static constexpr std::size_t kMaxDepth = 64;

  /// The value in its place: the document, the member whose key came last, or an array's end.
  template <typename T>
  Json& place(T&& value) {
    if (open_.empty()) return document_ = Json(std::forward<T>(value));
    if (open_.back()->is_object()) return *member_ = Json(std::forward<T>(value));
    auto& array = open_.back()->get_ref<Json::array_t&>();
    return array.emplace_back(std::forward<T>(value));
  }
  template <typename T>
  bool add(T&& value) {
    place(std::forward<T>(value));
    return true;
  }
  /// An array that is open does not grow until the value is closed, so that pointers stay.
  bool open(Json value) {
    require_file(open_.size() < kMaxDepth, file_, "JSON is nested deeper than {}", kMaxDepth);
    open_.push_back(&place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const std::string& file_;
  Json document_;
  std::vector<Json*> open_;
  Json* member_ = nullptr;  ///< Of the innermost object.
};

}  // namespace

Json parse_json(std::string_view text, const std::string& file) {
  Builder builder(file);
  Json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

}  // namespace switchyard
