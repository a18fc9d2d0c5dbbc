// Soft-MoE against numbers that numpy has computed from the definition
// (tests/data/soft_moe_golden.py): outputs, and gradients by complex steps; and the reference too.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/stages/soft_moe_case.hpp"

namespace switchyard::test {
namespace {

using nlohmann::json;

SoftMoeCase case_of(const json& entry) {
  const json& given = entry.at("given");
  return {.config = {.slots = entry.at("slots"),
                     .group = entry.value("group", 0),
                     .sequence = entry.value("sequence", 0),
                     .normalize = entry.value("normalize", true),
                     .causal = entry.value("causal", false),
                     .scale = given.at("scale").at(0)},
          .num_tokens = entry.at("tokens"),
          .experts = {.num_experts = entry.at("experts"),
                      .hidden = entry.at("hidden"),
                      .inner = entry.at("inner")},
          .x = given.at("x"),
          .phi = given.at("phi"),
          .w13 = given.at("w13"),
          .w2 = given.at("w2"),
          .dy = entry.at("dy")};
}

template <typename T>
void expect_near(const std::vector<T>& have, const std::vector<double>& want, double bound) {
  ASSERT_EQ(have.size(), want.size());
  for (std::size_t i = 0; i < have.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(have[i]), want[i], bound * (1 + std::abs(want[i])))
        << "number " << i;
  }
}

TEST(SoftMoeGolden, OutputsAndGradientsAreThoseOfNumpy) {
  std::ifstream file(SWITCHYARD_TEST_DATA "/soft_moe_golden.json");
  const json document = json::parse(file);
  ASSERT_EQ(document.size(), 6U);
  for (const auto& [name, entry] : document.items()) {
    SCOPED_TRACE(name);
    const SoftMoeCase c = case_of(entry);
    expect_near(reference::soft_moe(c.in_double()).y, entry.at("y"), 1e-9);
    const SoftMoeResults have = run_soft_moe(c);
    expect_near(have.y, entry.at("y"), 3e-6);
    const json& gradients = entry.at("gradients");
    expect_near(have.dx, gradients.at("x"), 2e-5);
    expect_near(have.dphi, gradients.at("phi"), 2e-5);
    expect_near(have.dscale, gradients.at("scale"), 2e-5);
    expect_near(have.dw13, gradients.at("w13"), 2e-5);
    expect_near(have.dw2, gradients.at("w2"), 2e-5);
  }
}

}  // namespace
}  // namespace switchyard::test
