// The table of families.
#include "checkpoint/families/families.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace switchyard {
namespace {

constexpr std::array kFamilies = {&kMixtral,
                                  &kQwen3Moe,
                                  &kOlmoe,
                                  &kDeepseekV2,
                                  &kDeepseekV3,
                                  &kGptOss,
                                  &kQwen2Moe,
                                  &kQwen3Next,
                                  &kQwen35Moe,
                                  &kQwen3VlMoe,
                                  &kDots1,
                                  &kGlm4MoeLite,
                                  &kSolarOpen,
                                  &kMimoV2Flash,
                                  &kMinimax,
                                  &kMinimaxM2,
                                  &kErnie45Moe,
                                  &kHunyuanV1Moe,
                                  &kLfm2Moe,
                                  &kAfmoe,
                                  &kFlexOlmo,
                                  &kGraniteMoe,
                                  &kGraniteMoeShared,
                                  &kJetmoe,
                                  &kDbrx,
                                  &kPhimoe,
                                  &kLlama4,
                                  &kLongcatFlash};

}  // namespace

std::span<const Family* const> families() { return kFamilies; }

const std::string& family_names() {
  static const std::string names = [] {
    std::string all;
    for (const Family* family : kFamilies) {
      all += all.empty() ? "" : "|";
      all += family->name;
    }
    return all;
  }();
  return names;
}

const Family& find_family(std::string_view name) {
  std::string known;
  for (const Family* family : kFamilies) {
    if (family->name == name) return *family;
    known += fmt::format(" {}", family->name);
  }
  fail(ErrorCode::kInvalidArgument, "family '{}' is not one of:{}", name, known);
}

}  // namespace switchyard
