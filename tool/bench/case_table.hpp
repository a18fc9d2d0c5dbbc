#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/cases/cases.hpp"
#include "bench/cases/suites.hpp"
#include "tool/options/options.hpp"

namespace switchyard::tool {

/// "olmoe-1b-7b: T=16 E=64 K=8 H=2048 I=1024".
[[nodiscard]] std::string label_of(const bench::LayerCase& c);

/// What it takes. @throws Error: of a case that is refused, with `place` in front.
[[nodiscard]] std::vector<bench::CaseResult> run_case_at(const std::string& place,
                                                         const bench::SuiteCase& c,
                                                         const bench::Machine& machine,
                                                         const bench::Limits& limits);

/// Prints each case as it is done, and appends it to --results.
class BenchReport {
 public:
  BenchReport(const Options& options, const bench::Machine& machine, const bench::Limits& limits);
  void add(const bench::CaseResult& result);
  /// The same for results that belong together: their lines are appended together.
  void add(const std::vector<bench::CaseResult>& results);
  /// The same without printing: the caller has a table of its own.
  void record(const bench::CaseResult& result);
  /// The same for what all cases together say: only its verdict is printed.
  void conclude(const bench::CaseResult& result);
  /// With --json: one more key of the document.
  void note(const std::string& key, nlohmann::json value) { notes_[key] = std::move(value); }
  /// With --json: one document with all cases.
  void finish();

 private:
  void record(const std::vector<bench::CaseResult>& results);
  void print_case(const bench::CaseResult& result) const;

  const Options& options_;
  const bench::Machine& machine_;
  nlohmann::json lines_ = nlohmann::json::array();
  nlohmann::json notes_ = nlohmann::json::object();
};

}  // namespace switchyard::tool
