// A case as JSON and back: what a miss prints is what --case takes.
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "verify/case.hpp"

namespace switchyard::verify {
namespace {

using nlohmann::json;

template <typename T, std::size_t kCount>
using Names = std::array<std::pair<T, const char*>, kCount>;

constexpr Names<DType, 4> kDTypes{
    {{DType::kF32, "f32"}, {DType::kBF16, "bf16"}, {DType::kF16, "f16"}, {DType::kF8E4M3, "fp8"}}};
constexpr Names<Data, 6> kData{{{Data::kPlain, "plain"},
                                {Data::kTies, "ties"},
                                {Data::kLarge, "large"},
                                {Data::kSmall, "small"},
                                {Data::kZero, "zero"},
                                {Data::kNan, "nan"}}};
constexpr Names<Given, 5> kGiven{{{Given::kNothing, "nothing"},
                                  {Given::kRandom, "random"},
                                  {Given::kOne, "one"},
                                  {Given::kNone, "none"},
                                  {Given::kBadId, "bad-id"}}};
constexpr Names<Split, 4> kSplits{{{Split::kEven, "even"},
                                   {Split::kFirst, "first"},
                                   {Split::kLast, "last"},
                                   {Split::kUneven, "uneven"}}};
constexpr Names<Again, 5> kAgain{{{Again::kNothing, "nothing"},
                                  {Again::kCall, "call"},
                                  {Again::kThreads, "threads"},
                                  {Again::kRanks, "ranks"},
                                  {Again::kAlone, "alone"}}};
constexpr Names<Score, 3> kScores{{{Score::kSoftmax, "softmax"},
                                   {Score::kTopkSoftmax, "topk-softmax"},
                                   {Score::kSigmoid, "sigmoid"}}};
constexpr Names<GroupScore, 2> kGroupScores{
    {{GroupScore::kMax, "max"}, {GroupScore::kTop2Sum, "top2sum"}}};
constexpr Names<Activation, 6> kActivations{{{Activation::kSilu, "silu"},
                                             {Activation::kGelu, "gelu"},
                                             {Activation::kGeluTanh, "gelu_tanh"},
                                             {Activation::kRelu, "relu"},
                                             {Activation::kRelu2, "relu2"},
                                             {Activation::kClampedSwiglu, "clamped_swiglu"}}};
constexpr Names<LayoutKind, 3> kLayouts{{{LayoutKind::kCompact, "compact"},
                                         {LayoutKind::kAligned, "aligned"},
                                         {LayoutKind::kPadded, "padded"}}};
constexpr Names<DropPolicy, 4> kPolicies{{{DropPolicy::kToken, "token"},
                                          {DropPolicy::kChoice, "choice"},
                                          {DropPolicy::kProbs, "probs"},
                                          {DropPolicy::kBpr, "bpr"}}};

constexpr Names<CpuIsa, 5> kIsas{{{CpuIsa::kPortable, "portable"},
                                  {CpuIsa::kAvx2, "avx2"},
                                  {CpuIsa::kAvx512, "avx512"},
                                  {CpuIsa::kAvx512Bf16, "avx512_bf16"},
                                  {CpuIsa::kAmxBf16, "amx_bf16"}}};

/// Writes members into a JSON object.
class Writer {
 public:
  template <typename T>
  void operator()(const char* name, const T& value) {
    object_[name] = value;
  }
  template <typename T, std::size_t kCount>
  void operator()(const char* name, const T& value, const Names<T, kCount>& names) {
    for (const auto& [known, word] : names) {
      if (known == value) object_[name] = word;
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
    try {
      value = member(name).template get<T>();
    } catch (const json::exception&) {
      fail(ErrorCode::kInvalidArgument, "--case: \"{}\" is {}, which is of the wrong kind", name,
           member(name).dump());
    }
  }
  template <typename T, std::size_t kCount>
  void operator()(const char* name, T& value, const Names<T, kCount>& names) {
    std::string known_words;
    for (const auto& [known, word] : names) {
      if (member(name) == word) {
        value = known;
        return;
      }
      known_words += known_words.empty() ? word : std::string(", ") + word;
    }
    fail(ErrorCode::kInvalidArgument, "--case: \"{}\" is {}, want one of {}", name,
         member(name).dump(), known_words);
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
  member("data", c.data, kData);
  member("E", c.layer.router.num_experts);
  member("K", router.top_k);
  member("H", experts.hidden);
  member("I", experts.inner);
  member("T", c.num_tokens);
  member("score", router.score, kScores);
  member("renormalize", router.renormalize);
  member("scale", router.scale);
  member("groups", router.groups);
  member("top_groups", router.top_groups);
  member("group_score", router.group_score, kGroupScores);
  member("router_bias", c.router_bias);
  member("selection_bias", c.selection_bias);
  member("activation", experts.activation, kActivations);
  member("gated", experts.gated);
  member("bias", experts.bias);
  member("shared_inner", c.layer.shared.inner);
  member("shared_gated", c.layer.shared_gated);
  member("reduction_groups", c.layer.reduction_groups);
  member("stored", c.stored, kDTypes);
  member("compute", c.compute, kDTypes);
  member("q8", c.quantize_q8);
  member("tokens", c.tokens, kDTypes);
  member("output", c.output, kDTypes);
  member("given", c.given, kGiven);
  member("layout", c.layout.kind, kLayouts);
  member("alignment", c.layout.alignment);
  member("capacity_factor", c.capacity_factor);
  member("drop_policy", c.drop_policy, kPolicies);
  member("ranks", c.ranks);
  member("threads", c.threads);
  member("split", c.split, kSplits);
  member("wire", c.wire, kDTypes);
  member("dispatch_wire", c.dispatch_wire, kDTypes);
  member("batch_invariant", c.batch_invariant);
  member("rank_invariant", c.rank_invariant);
  member("again", c.again, kAgain);
  member("again_threads", c.again_threads);
  member("isa", c.isa, kIsas);
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
