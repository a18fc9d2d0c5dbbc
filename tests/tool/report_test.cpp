// `report` on lines that no run of ours writes: each ends, with a page or with the number of the
// line.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "testkit/file_support.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"

namespace switchyard::tool {
namespace {

nlohmann::json sweep_line() {
  return {{"sweep", "tokens"},
          {"commit", "abc"},
          {"case", {{"R", 2}, {"engine", "threads"}, {"H", 64}, {"compute", "bf16"}}},
          {"machine", {{"cpu", "a CPU"}}},
          {"peers", {{"mpi", 2.0}}},
          {"value", 8},
          {"median_us", 1.5},
          {"mean_us", 1.5},
          {"padding", 0.25},
          {"wire_bytes", 1000},
          {"M", 4},
          {"holds", true}};
}

class Report : public testing::Test {
 protected:
  /// The page of these lines; or what is said instead.
  std::string report(const std::string& lines) {
    test::write_file(folder_ / "lines.jsonl", lines);
    Options options;
    options.positional = {folder_ / "lines.jsonl"};
    options.output = folder_ / "page.html";
    try {
      testing::internal::CaptureStdout();
      const int exit_code = report_command(options);
      testing::internal::GetCapturedStdout();
      EXPECT_EQ(exit_code, kFine);
    } catch (const UsageError& error) {
      testing::internal::GetCapturedStdout();
      return error.what();
    }
    return test::read_file(options.output);
  }

 private:
  test::TempDir folder_;
};

TEST_F(Report, ATimeOfZeroHasNoPlaceInAPlotAndStandsInTheTable) {
  nlohmann::json none = sweep_line();
  none["value"] = 0;
  none["median_us"] = 0;
  const std::string page = report(sweep_line().dump() + "\n" + none.dump() + "\n");
  EXPECT_NE(page.find("<svg"), std::string::npos);
  EXPECT_NE(page.find("<tr><td>0<td>4"), std::string::npos) << page;
  none["value"] = -3;
  none["mean_us"] = -1;
  EXPECT_NE(report(none.dump() + "\n").find("<tr><td>-3<td>4"), std::string::npos);
}

TEST_F(Report, AnIncompletePointOfASweepIsNamedByItsLine) {
  const std::string good = sweep_line().dump() + "\n";
  const nlohmann::json whole = sweep_line();
  for (const auto& [member, value] : whole.items()) {
    nlohmann::json line = whole;
    if (member == "sweep") continue;  // then it is a line of another kind
    line.erase(member);
    EXPECT_NE(report(good + line.dump() + "\n").find("line 2 is no result line"), std::string::npos)
        << member;
    if (member == "peers") continue;  // of a list of peers none is known
    line[member] = nlohmann::json::array({1});
    EXPECT_NE(report(good + line.dump() + "\n").find("line 2 is no result line"), std::string::npos)
        << member;
  }
}

TEST_F(Report, ANumberThatIsNoWholeOneIsNamedByItsLine) {
  for (const nlohmann::json& value : {nlohmann::json(1e300), nlohmann::json(2.5)}) {
    nlohmann::json line = sweep_line();
    line["case"]["H"] = value;
    EXPECT_NE(report(line.dump() + "\n").find("line 1 is no result line"), std::string::npos);
    line = sweep_line();
    line["M"] = value;
    EXPECT_NE(report(line.dump() + "\n").find("line 1 is no result line"), std::string::npos);
  }
}

}  // namespace
}  // namespace switchyard::tool
