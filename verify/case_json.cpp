// A case as JSON and back: what a miss prints is what --case takes.
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <type_traits>
#include <utility>

#include "core/check.hpp"
#include "switchyard/names.hpp"
#include "verify/case.hpp"

namespace switchyard::verify {
namespace {

using nlohmann::json;

/// The words of an enumeration, in the order of its values.
template <typename Enum>
std::span<const char* const> words_of() {
  return names_of<Enum>();
}
/// Only those that values travel in.
template <>
std::span<const char* const> words_of<DType>() {
  return names_of<DType>().first(static_cast<std::size_t>(DType::kF8E4M3) + 1);
}
template <>
std::span<const char* const> words_of<Data>() {
  static constexpr const char* kWords[] = {"plain", "ties", "large", "small", "zero", "nan"};
  return kWords;
}
template <>
std::span<const char* const> words_of<Given>() {
  static constexpr const char* kWords[] = {"nothing", "random", "one", "none", "bad-id"};
  return kWords;
}
template <>
std::span<const char* const> words_of<Split>() {
  static constexpr const char* kWords[] = {"even", "first", "last", "uneven"};
  return kWords;
}
template <>
std::span<const char* const> words_of<Again>() {
  static constexpr const char* kWords[] = {"nothing", "call", "threads", "ranks", "alone"};
  return kWords;
}

/// Writes members into a JSON object.
class Writer {
 public:
  template <typename T>
  void operator()(const char* name, const T& value) {
    if constexpr (std::is_enum_v<T>) {
      object_[name] = words_of<T>()[static_cast<std::size_t>(value)];
    } else {
      object_[name] = value;
    }
  }
  json take() { return std::move(object_); }

 private:
  json object_ = json::object();
};

/// Reads them from one.
class Reader {
 public:
  explicit Reader(const json& object) : object_(object) {}

  template <typename T>
  void operator()(const char* name, T& value) {
    const json& found = member(name);
    if constexpr (std::is_enum_v<T>) {
      const std::span<const char* const> words = words_of<T>();
      const auto word = std::find(words.begin(), words.end(), found);
      require(word != words.end(), "--case: \"{}\" is {}, want one of {}", name, found.dump(),
              fmt::join(words, ", "));
      value = static_cast<T>(word - words.begin());
    } else {
      try {
        value = found.template get<T>();
      } catch (const json::exception&) {
        fail(ErrorCode::kInvalidArgument, "--case: \"{}\" is {}, which is of the wrong kind", name,
             found.dump());
      }
    }
  }

 private:
  const json& member(const char* name) const {
    require(object_.is_object() && object_.contains(name), "--case: \"{}\" is missing", name);
    return object_[name];
  }

  const json& object_;
};

/// The one list of a case's members. Of the shared experts only the width is free.
void members(auto&& member, auto& c) {
  auto& router = c.layer.router.as_top_k();
  auto& experts = c.layer.experts;
  member("seed", c.seed);
  member("data", c.data);
  member("E", c.layer.router.num_experts);
  member("K", router.top_k);
  member("H", experts.hidden);
  member("I", experts.inner);
  member("T", c.num_tokens);
  member("score", router.score);
  member("renormalize", router.renormalize);
  member("scale", router.scale);
  member("groups", router.groups);
  member("top_groups", router.top_groups);
  member("group_score", router.group_score);
  member("router_bias", c.router_bias);
  member("selection_bias", c.selection_bias);
  member("activation", experts.activation);
  member("gated", experts.gated);
  member("bias", experts.bias);
  member("shared_inner", c.layer.shared.inner);
  member("shared_gated", c.layer.shared_gated);
  member("reduction_groups", c.layer.reduction_groups);
  member("stored", c.stored);
  member("compute", c.compute);
  member("q8", c.quantize_q8);
  member("tokens", c.tokens);
  member("output", c.output);
  member("given", c.given);
  member("layout", c.layout.kind);
  member("alignment", c.layout.alignment);
  member("capacity_factor", c.capacity_factor);
  member("drop_policy", c.drop_policy);
  member("ranks", c.ranks);
  member("threads", c.threads);
  member("split", c.split);
  member("wire", c.wire);
  member("dispatch_wire", c.dispatch_wire);
  member("batch_invariant", c.batch_invariant);
  member("rank_invariant", c.rank_invariant);
  member("again", c.again);
  member("again_threads", c.again_threads);
  member("isa", c.isa);
}

}  // namespace

json to_json(const Case& test) {
  Writer writer;
  members(writer, test);
  return writer.take();
}

Case case_from_json(const json& object) {
  Case test;
  Reader reader(object);
  members(reader, test);
  LayerConfig& layer = test.layer;
  layer.experts.num_experts = layer.router.num_experts;
  if (layer.shared.inner > 0) {
    const std::int64_t inner = layer.shared.inner;
    layer.shared = layer.experts;
    layer.shared.num_experts = 1;
    layer.shared.inner = inner;
  }
  require(test.num_tokens >= 0 && test.num_tokens <= 1 << 20, "--case: \"T\" is {}",
          test.num_tokens);
  require(test.ranks >= 1 && test.ranks <= 64, "--case: \"ranks\" is {}, want 1 to 64", test.ranks);
  return test;
}

}  // namespace switchyard::verify
