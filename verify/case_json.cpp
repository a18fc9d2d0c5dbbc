// A case as JSON and back: what a miss prints is what --case takes.
#include <fmt/ranges.h>

#include <algorithm>
#include <concepts>
#include <nlohmann/json.hpp>
#include <span>
#include <type_traits>
#include <utility>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "switchyard/names.hpp"
#include "verify/case.hpp"
#include "verify/perft/check_perft.hpp"

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
/// Those that a layer has, not those that it is asked for by.
template <>
std::span<const char* const> words_of<WeightFormat>() {
  return names_of<WeightFormat>().first(static_cast<std::size_t>(WeightFormat::kNvfp4) + 1);
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

/// What a number may be, bounds included.
template <typename T>
struct Range {
  T low, high;
};
using Whole = Range<std::int64_t>;
using Real = Range<double>;

// Larger than any case that is made, small enough that no product of two overflows.
constexpr std::int64_t kMostExperts = 1 << 16;
constexpr std::int64_t kMostWidth = 1 << 20;
constexpr std::int64_t kMostTokens = 1 << 20;
constexpr std::int64_t kMostThreads = 256;
constexpr std::int64_t kMostValues = std::int64_t{1} << 31;  // of all weights, of all tokens
constexpr Whole kSeeds{0, std::int64_t{1} << 53};            // what JSON's double holds exactly

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
  template <typename T, typename Bound>
  void operator()(const char* name, const T& value, const Range<Bound>& /*range*/) {
    object_[name] = value;
  }
  /// Only where it is true: cases are told without it.
  void optional(const char* name, bool value) {
    if (value) object_[name] = value;
  }
  void optional(const char* name, std::int32_t value, const Whole& /*range*/) {
    if (value != 0) object_[name] = value;
  }
  json take() { return std::move(object_); }

 private:
  json object_ = json::object();
};

/// A value in a message. Arrays and objects are only named: they may be megabytes, and so deep that
/// to write them overflows the stack.
std::string said(const json& value) {
  return value.is_structured() ? fmt::format("an {}", value.type_name()) : printable(value.dump());
}

/// Reads them from one.
class Reader {
 public:
  explicit Reader(const json& object) : object_(object) {}

  template <typename T>
  requires std::is_enum_v<T>
  void operator()(const char* name, T& value) {
    const json& found = member(name);
    const std::span<const char* const> words = words_of<T>();
    const auto word = std::find(words.begin(), words.end(), found);
    require(word != words.end(), "--case: \"{}\" is {}, want one of {}", name, said(found),
            fmt::join(words, ", "));
    value = static_cast<T>(word - words.begin());
  }
  void operator()(const char* name, bool& value) {
    require(member(name).is_boolean(), "--case: \"{}\" is {}, want true or false", name,
            said(member(name)));
    value = member(name).get<bool>();
  }
  void optional(const char* name, auto& value, const auto&... range) {
    if (object_.is_object() && object_.contains(name)) (*this)(name, value, range...);
  }
  /// Whole numbers are compared as they stand in the text, before they become narrower.
  template <std::integral T>
  void operator()(const char* name, T& value, const Whole& range) {
    const json& number = member(name);
    const bool fits = number.is_number_integer() &&
                      !(number.is_number_unsigned() && number.get<std::uint64_t>() > INT64_MAX) &&
                      in_range(number.get<std::int64_t>(), range);
    require(fits, "--case: \"{}\" is {}, want a whole number from {} to {}", name, said(number),
            range.low, range.high);
    value = static_cast<T>(number.get<std::int64_t>());
  }
  void operator()(const char* name, std::string& value) {
    const json& text = member(name);
    require(text.is_string() && text.get_ref<const std::string&>().size() <= 256,
            "--case: \"{}\" is {}, want a short text", name, said(text));
    value = text.get<std::string>();
  }
  template <std::floating_point T>
  void operator()(const char* name, T& value, const Real& range) {
    const json& number = member(name);
    require(number.is_number() && in_range(number.get<double>(), range),
            "--case: \"{}\" is {}, want a number from {} to {}", name, said(number), range.low,
            range.high);
    value = static_cast<T>(number.get<double>());
  }

 private:
  template <typename T>
  static bool in_range(T value, const Range<T>& range) {
    return range.low <= value && value <= range.high;
  }
  const json& member(const char* name) const {
    require(object_.is_object() && object_.contains(name), "--case: \"{}\" is missing", name);
    return object_[name];
  }

  const json& object_;
};

/// The one list of a case's members. Of the shared experts only the width is free.
void members(auto&& member, auto& c) {
  auto& router = c.base;
  auto& experts = c.layer.experts;
  member("seed", c.seed, kSeeds);
  member("data", c.data);
  member("E", c.layer.router.num_experts, Whole{1, kMostExperts});
  member("K", router.top_k, Whole{1, kMostExperts});
  member("H", experts.hidden, Whole{1, kMostWidth});
  member("I", experts.inner, Whole{1, kMostWidth});
  member("T", c.num_tokens, Whole{0, kMostTokens});
  member("score", router.score);
  member("renormalize", router.renormalize);
  member("scale", router.scale, Real{-1e6, 1e6});
  member("groups", router.groups, Whole{1, kMostExperts});
  member("top_groups", router.top_groups, Whole{1, kMostExperts});
  member("group_score", router.group_score);
  member("router", c.router);
  member("training", c.training);
  member("router_bias", c.router_bias);
  member("selection_bias", c.selection_bias);
  member("activation", experts.activation);
  member("gated", experts.gated);
  member("bias", experts.bias);
  member("shared_inner", c.layer.shared.inner, Whole{0, kMostWidth});
  member("shared_gated", c.layer.shared_gated);
  member.optional("identity_experts", c.identity_experts, Whole{0, kMostExperts - 1});
  member.optional("weight_on_input", c.layer.weight_on_input);
  member("reduction_groups", c.layer.reduction_groups, Whole{1, 1024});
  member("stored", c.stored);
  member("compute", c.compute);
  member("weights", c.weights);
  member.optional("fp8_rows", c.fp8_rows);
  member("tokens", c.tokens);
  member("output", c.output);
  member("given", c.given);
  member("layout", c.layout.kind);
  member("alignment", c.layout.alignment, Whole{1, 1 << 20});
  member("capacity_factor", c.capacity_factor, Real{0, 1e6});
  member("drop_policy", c.drop_policy);
  member("ranks", c.ranks, Whole{1, 64});
  member("threads", c.threads, Whole{1, kMostThreads});
  member("split", c.split);
  member("wire", c.wire);
  member("dispatch_wire", c.dispatch_wire);
  member("batch_invariant", c.batch_invariant);
  member("rank_invariant", c.rank_invariant);
  member("again", c.again);
  member("again_threads", c.again_threads, Whole{1, kMostThreads});
  member("isa", c.isa);
}

/// Adapters fit into a machine.
void check_perft_sizes(const Case& test) {
  const PerftConfig adapters = perft_of(test);
  const std::int64_t values = adapters.num_adapters * adapters.rank * adapters.hidden;
  const std::int64_t rows = adapters.num_adapters * test.num_tokens;
  require(values <= kMostValues && rows <= kMostValues / adapters.rank,
          "--case: \"router\" = {} with \"H\" = {}, \"T\" = {}: a product of adapters, rank and "
          "one of these exceeds {}",
          test.router, adapters.hidden, test.num_tokens, kMostValues);
}

/// What no member says alone: that the layer is one, and that it fits into a machine.
void check_sizes(const Case& test) {
  const ExpertConfig& experts = test.layer.experts;
  try {
    check(test.layer);
  } catch (const Error& error) {
    fail(ErrorCode::kInvalidArgument, "--case: {}", message_of(error));
  }
  const std::int64_t shared = test.layer.shared.inner;
  const std::int64_t group = scale_group_of(test);
  require(experts.hidden % group == 0 && experts.inner % group == 0 && shared % group == 0,
          "--case: \"H\" = {}, \"I\" = {}, \"shared_inner\" = {}, want multiples of {} where "
          "\"weights\" are {} and \"seed\" is {}",
          experts.hidden, experts.inner, shared, group, to_string(test.weights), test.seed);
  require(!test.fp8_rows ||
              (test.weights == WeightFormat::kE4M3 && experts.gated && experts.hidden % 16 == 0 &&
               experts.inner % 16 == 0 && test.compute == DType::kBF16),
          "--case: \"fp8_rows\" with \"weights\" {}, \"compute\" {}, \"gated\" {}, \"H\" = {}, "
          "\"I\" = {}, want e4m3, bf16, true, and multiples of 16",
          to_string(test.weights), to_string(test.compute), experts.gated, experts.hidden,
          experts.inner);
  const std::int64_t width = experts.hidden * experts.inner;
  require(width <= kMostValues / experts.num_experts,
          "--case: \"E\" x \"H\" x \"I\" is {} x {} x {}, want at most {}", experts.num_experts,
          experts.hidden, experts.inner, kMostValues);
  const std::int64_t wider = std::max({experts.hidden, experts.inner, test.layer.shared.inner});
  require(
      test.num_tokens * wider <= kMostValues && wider * test.layer.shared.inner <= kMostValues,
      "--case: \"T\" = {} tokens, \"H\" = {}, \"I\" = {}, \"shared_inner\" = {}: a product of two "
      "exceeds {}",
      test.num_tokens, experts.hidden, experts.inner, test.layer.shared.inner, kMostValues);
  const RouterNetwork& network = test.layer.router.network;
  const std::int64_t columns = network.is_linear() ? 1 : network.inner(experts.hidden);
  require(
      columns * std::max({experts.hidden, std::int64_t{experts.num_experts}, test.num_tokens}) <=
          kMostValues,
      "--case: \"router\" = {}, whose network has {} columns, with \"H\" = {}, \"E\" = {}, "
      "\"T\" = {}: a product of two exceeds {}",
      test.router, columns, experts.hidden, experts.num_experts, test.num_tokens, kMostValues);
}

/// What the router does not go with: the layer would refuse it, which is no miss.
void check_router(const Case& test) {
  const RouterConfig& router = test.layer.router;
  const std::string name = router.is_top_k()
                               ? fmt::format("top-k by {}", to_string(router.as_top_k().score))
                               : test.router;
  require(!test.selection_bias || may_have_selection_bias(test),
          "--case: \"selection_bias\" is true, which the router {} takes none of", name);
  require(!router.is_variable() || test.capacity_factor == 0,
          "--case: \"capacity_factor\" is {}, but the router {} gives a token any number of "
          "experts, want 0",
          test.capacity_factor, name);
  require(may_reroute(test),
          "--case: \"drop_policy\" is reroute, which wants scores of top-k, and "
          "the router is {}",
          name);
  require(router.has_logits() || test.data != Data::kNan,
          "--case: \"data\" is nan, but the router {} has no logits that would be one", name);
  require(!router.is_variable() || test.given == Given::kNothing,
          "--case: \"given\" is {}, but the router {} has no K columns, want nothing",
          words_of<Given>()[static_cast<std::size_t>(test.given)], name);
}

}  // namespace

json to_json(const Case& test) {
  Writer writer;
  Case whole = test;
  if (test.layer.router.is_top_k() && test.router.empty()) {
    whole.base = test.layer.router.as_top_k();
  }
  whole.layer.router.num_experts = base_experts(test);
  members(writer, whole);
  return writer.take();
}

Case case_from_json(const json& object) {
  Case test;
  Reader reader(object);
  members(reader, test);
  LayerConfig& layer = test.layer;
  try {
    set_router(test);
    if (is_perft(test.router)) check_perft_sizes(test);
  } catch (const Error& error) {
    fail(ErrorCode::kInvalidArgument, "--case: {}", message_of(error));
  }
  check_router(test);
  layer.experts.num_experts = layer.router.num_computing();
  if (layer.shared.inner > 0) {
    const std::int64_t inner = layer.shared.inner;
    layer.shared = layer.experts;
    layer.shared.num_experts = 1;
    layer.shared.inner = inner;
  }
  check_sizes(test);
  return test;
}

Case parse_case(const std::string& text) {
  const json object = json::parse(text, nullptr, false);
  require(!object.is_discarded(), "--case: this is not JSON: {}", printable(text));
  return case_from_json(object);
}

}  // namespace switchyard::verify
