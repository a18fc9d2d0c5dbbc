// The bars C1 to C7 and A5: which cases, and what they ask for.
#include <algorithm>

#include "bench/cases/cpu_bars.hpp"
#include "switchyard/cpu_isa.hpp"

namespace switchyard::bench {

BarTarget target_of(const LayerCase& c, double rows_per_expert) {
  const std::string& bar = c.name;
  const std::int64_t tokens = c.num_tokens;
  const auto by_rows = [&](double two, double twelve, double thirty, double more) {
    return rows_per_expert <= 2    ? two
           : rows_per_expert <= 12 ? twelve
           : rows_per_expert < 32  ? thirty
                                   : more;
  };
  if (bar == "C1") return {tokens == 1 ? 1.5 : tokens == 4 ? 1.6 : 1.3, by_rows(.88, .75, 0, 0)};
  if (bar == "C2") {
    return {tokens == 64 ? 1.2 : tokens == 128 ? 1.15 : 1.08, by_rows(0, .75, .85, .92)};
  }
  if (bar == "C3") return {1.6, .88};
  if (bar == "C4") {
    return {tokens == 64 ? 1.8 : tokens == 128 ? 2.0 : 2.2, by_rows(0, .85, .80, .65)};
  }
  if (has_codes(c.options.weights)) return {1, 0};  // no bar
  if (bar == "C7") return {0.62, 0};
  if (bar == "A5") return {tokens == 16 ? 1.15 : tokens == 128 ? 1.4 : 1.7, 0};
  const double first = bar == "C5" ? 1.4 : 1.5;
  return {tokens == 1 ? first : tokens == 16 ? 1.0 : 1.05, by_rows(.88, .65, 0, .85)};
}

std::vector<LayerCase> cpu_bar_cases(const LayerCase& base) {
  struct Sizes {
    std::int64_t hidden, inner;
    std::int32_t experts, top_k;
  };
  std::vector<Sizes> layers = {{1024, 4096, 8, 2}, {2048, 1024, 64, 6}, {2048, 768, 128, 8}};
  struct Row {
    const char* bar;
    DType dtype;
    std::vector<std::int64_t> tokens;
  };
  const CpuIsa isa = isa_in_use();
  std::vector<Row> rows;
  if (isa == CpuIsa::kAmxBf16) {
    rows = {{"C3", DType::kBF16, {1, 4, 16}}, {"C4", DType::kBF16, {64, 128, 512}}};
  } else if (isa == CpuIsa::kAvx512Bf16) {
    rows = {{"C1", DType::kBF16, {1, 4, 16}}, {"C2", DType::kBF16, {64, 128, 512}}};
  } else {
    rows = {{isa == CpuIsa::kAvx512 ? "C6" : "C5", DType::kF32, {1, 16, 128}}};
  }
  // bf16 where its dot products are not taken for being slow.
  const std::vector<CpuIsa> here = available_isas();
  const bool has_dots = std::find(here.begin(), here.end(), CpuIsa::kAvx512Bf16) != here.end();
  if (isa == CpuIsa::kAvx512 && has_dots) rows.push_back({"A5", DType::kBF16, {16, 128, 512}});
  const bool stored = has_codes(base.options.weights);
  if (base.options.weights != WeightFormat::kExact) rows.clear();
  if (stored) {
    rows.push_back({to_string(base.options.weights), DType::kBF16, {1, 4, 16, 64, 512}});
    layers.push_back({2880, 2880, 8, 4});
  } else {
    rows.push_back({"C7", DType::kBF16, {1, 4}});
  }
  std::vector<LayerCase> cases;
  for (const Row& row : rows) {
    for (const Sizes& sizes : layers) {
      for (const std::int64_t tokens : row.tokens) {
        LayerCase c = base;
        c.name = row.bar;
        c.dtype = row.dtype;
        c.options.compute = row.dtype;
        if (!stored) c.options.weights = c.name == "C7" ? WeightFormat::kQ8 : WeightFormat::kExact;
        c.num_tokens = tokens;
        c.config.router = {.num_experts = sizes.experts, .kind = TopKRouter{.top_k = sizes.top_k}};
        c.config.experts = {
            .num_experts = sizes.experts, .hidden = sizes.hidden, .inner = sizes.inner};
        cases.push_back(std::move(c));
      }
    }
  }
  return cases;
}

}  // namespace switchyard::bench
