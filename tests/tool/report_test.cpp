// `report` on lines that no run of ours writes: each ends, with a page or with the number of the
// line; and what the page shows of those that are.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "testkit/file_support.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/report/plots.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

json sweep_line() {
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

/// A stage of a layer of `tokens` tokens.
json stage_line(const std::string& stage, int tokens, double median_us) {
  return {
      {"case",
       {{"name", "a model"},
        {"compute", "bf16"},
        {"layout", "compact"},
        {"R", 1},
        {"E", 8},
        {"K", 2},
        {"H", 64},
        {"I", 32},
        {"T", tokens}}},
      {"machine",
       {{"cpu", "a CPU"}, {"isa", "avx2"}, {"gpu", ""}, {"bandwidth", 1e10}, {"flops_bf16", 1e12}}},
      {"commit", "abc"},
      {"time", "2026-01-01T00:00:00Z"},
      {"stage", stage},
      {"bytes", 1e6},
      {"flops", 1e7},
      {"limit_by", "memory"},
      {"median_us", median_us},
      {"p95_us", median_us},
      {"gbps", 1.0},
      {"tflops", 1.0},
      {"limit_us", 1.0},
      {"share", 0.5}};
}

json program_line(const std::string& program, json more) {
  json line = {{"program", program}, {"stage", "a stage"}, {"median_us", 5.0}};
  line.update(more);
  return line;
}

class Report : public testing::Test {
 protected:
  /// The page of these lines; or what is said instead.
  std::string report_text(const std::string& lines) {
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
  std::string report(const std::vector<json>& lines) {
    std::string text;
    for (const json& line : lines) text += line.dump() + "\n";
    return report_text(text);
  }

 private:
  test::TempDir folder_;
};

std::size_t count(const std::string& text, const std::string& word) {
  std::size_t found = 0;
  for (std::size_t at = 0; (at = text.find(word, at)) != std::string::npos; ++at) ++found;
  return found;
}

TEST_F(Report, ATimeOfZeroHasNoPlaceInAPlotAndStandsInTheTable) {
  json none = sweep_line();
  none["value"] = 0;
  none["median_us"] = 0;
  const std::string page = report({sweep_line(), none});
  EXPECT_EQ(page.substr(page.find("<main>")).find("[0,"), std::string::npos);
  EXPECT_NE(page.find("<td>0<td class=ok>holds"), std::string::npos) << page;
  none["value"] = -3;
  none["mean_us"] = -1;
  EXPECT_NE(report({none, sweep_line()}).find("<td>-3<td class=ok>holds"), std::string::npos);
}

TEST_F(Report, AnIncompletePointOfASweepIsNamedByItsLine) {
  const json whole = sweep_line();
  for (const auto& [member, value] : whole.items()) {
    json line = whole;
    if (member == "sweep") continue;  // then it is a line of another kind
    line.erase(member);
    EXPECT_NE(report({whole, line}).find("line 2 is no result line"), std::string::npos) << member;
    line[member] = json::array({1});
    EXPECT_NE(report({whole, line}).find("line 2 is no result line"), std::string::npos) << member;
  }
}

TEST_F(Report, AStageWithoutAMemberIsNamedByItsLine) {
  const json whole = stage_line("layer", 4, 10);
  for (const char* member : {"case", "machine", "commit", "stage", "median_us", "share"}) {
    json line = whole;
    line.erase(member);
    EXPECT_NE(report({whole, line}).find("line 2 is no result line"), std::string::npos) << member;
  }
}

TEST_F(Report, ANumberThatIsNoWholeOneIsNamedByItsLine) {
  for (const json& value : {json(1e300), json(2.5)}) {
    json line = sweep_line();
    line["case"]["H"] = value;
    EXPECT_NE(report({line}).find("line 1 is no result line"), std::string::npos);
    line = sweep_line();
    line["M"] = value;
    EXPECT_NE(report({line}).find("line 1 is no result line"), std::string::npos);
  }
}

TEST_F(Report, ValuesThatHoldEachOtherThousandsOfTimesAreNoResultLine) {
  const std::string deep(200000, '[');
  const std::string line = R"({"program":"p","x":)" + deep + std::string(200000, ']') + "}\n";
  EXPECT_NE(report_text(line).find("line 1 is no result line"), std::string::npos);
}

TEST_F(Report, TextOfALineStaysTextOnThePage) {
  const std::string evil = "</script><script>alert('1')</script>";
  std::vector<json> lines;
  for (const int tokens : {1, 2, 4}) {
    json line = stage_line(evil, tokens, 10);
    line["case"]["name"] = evil;
    line["case"][evil] = evil;
    line["machine"]["cpu"] = evil;
    line["commit"] = evil;
    line["bar"] = evil;
    line["holds"] = false;
    line["verdict"] = evil;
    line["peers"] = {{evil, 5}};
    line["versions"] = {{evil, evil}};
    line["routing"] = {{"counts", {1, 2}},
                       {evil, 3},
                       {"choices", {{0}, {1}}},
                       {"text", {evil, evil}},
                       {"kinds", {evil, evil}}};
    lines.push_back(line);
  }
  lines.push_back(program_line(evil, {{evil, evil}}));
  const std::string page = report(lines);
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;alert(&#39;1&#39;)"), std::string::npos);
}

TEST_F(Report, CasesOfASuiteShareOnePlotAndACaseOfOnePointStandsInTheTable) {
  if (!has_plots()) GTEST_SKIP() << "built without dygraphs";
  json lone = stage_line("layer", 16, 70);
  lone["case"]["skew"] = "zipf:1";
  lone["suite"] = "a suite";
  std::vector<json> lines = {lone};
  for (const int tokens : {1, 2, 4}) {
    for (const char* layout : {"compact", "padded"}) {
      lines.push_back(stage_line("layer", tokens, 10 * tokens));
      lines.back()["case"]["layout"] = layout;
      lines.back()["suite"] = "a suite";
    }
  }
  const std::string page = report(lines);
  const std::string section = page.substr(page.find("<h3>a suite <small>"));
  EXPECT_EQ(count(section, "<figure class=plot>"), 1);
  EXPECT_NE(section.find(R"("name":"compact","points":[[1,10],[2,20],[4,40]])"), std::string::npos)
      << section;
  EXPECT_NE(section.find(R"("name":"padded","points":[[1,10],[2,20],[4,40]])"), std::string::npos);
  EXPECT_EQ(section.find("[16,70]"), std::string::npos);
  EXPECT_EQ(count(section, "<tr><td"), 7);
}

TEST_F(Report, ManyCasesArePlottedApartByAMemberThatSomeLinesLack) {
  if (!has_plots()) GTEST_SKIP() << "built without dygraphs";
  std::vector<json> lines;
  for (int experts = 8; experts < 14; ++experts) {
    for (const int tokens : {1, 2, 1, 2}) {
      lines.push_back(stage_line("layer", tokens, 10 * tokens));
      lines.back()["case"]["E"] = experts;
      lines.back()["suite"] = "a suite";
      if (lines.size() % 4 > 1) lines.back()["case"]["rows"] = "e4m3";
    }
  }
  const std::string page = report(lines);
  const std::string section = page.substr(page.find("<h3>a suite <small>"));
  EXPECT_EQ(count(section, "<figure class=plot>"), 2);
  EXPECT_NE(section.find("e4m3: time over tokens"), std::string::npos);
  EXPECT_NE(section.find("without rows: time over tokens"), std::string::npos);
}

TEST_F(Report, ARooflineHasTheStagesUnderTheRoofsOfTheirMachine) {
  if (!has_plots()) GTEST_SKIP() << "built without dygraphs";
  const std::string page = report({stage_line("layer", 4, 10)});
  const std::string section = page.substr(page.find("<section id=roofline>"));
  EXPECT_NE(section.find(R"("name":"layer","points":[[10,1,)"), std::string::npos) << section;
  // 10 GB/s feed 1 TFLOP/s from 100 operations a byte on.
  EXPECT_NE(section.find(R"("name":"roof bf16","points":[[10,0.1],[100,1],[400,1]])"),
            std::string::npos)
      << section;
}

TEST_F(Report, StagesShareABarAndWhatTheyAddUpToIsNoPartOfIt) {
  const std::string page =
      report({stage_line("plan", 4, 10), stage_line("gemm1+activation", 4, 20),
              stage_line("plan+gemm1+activation", 4, 25), stage_line("layer", 4, 30)});
  EXPECT_NE(page.find("title='plan: 33.3%'"), std::string::npos);
  EXPECT_NE(page.find("title='gemm1+activation: 66.7%'"), std::string::npos);
  EXPECT_EQ(page.find("title='layer:"), std::string::npos);
  EXPECT_EQ(page.find("title='plan+gemm1"), std::string::npos);
}

TEST_F(Report, DropsStandBesideTheClosedFormAndItsBand) {
  if (!has_plots()) GTEST_SKIP() << "built without dygraphs";
  std::vector<json> lines;
  for (const char* stage : {"select", "plan"}) {
    for (const double factor : {1.0, 1.5}) {
      json line = stage_line(stage, 4, 10);
      line["suite"] = "capacity";
      line["case"]["capacity_factor"] = factor;
      line["capacity"] = {
          {"dropped", 0.25 / factor}, {"expected", 0.3 / factor}, {"standard_error", 0.01}};
      lines.push_back(line);
    }
  }
  const std::string page = report(lines);
  const std::string section = page.substr(page.find("<section id=capacity>"));
  EXPECT_NE(section.find(R"("points":[[1,30,"",27,33],[1.5,20,"",17,23]])"), std::string::npos)
      << section;
  EXPECT_EQ(count(section.substr(0, section.find("</section>")), "[1,25,"), 1);
}

TEST_F(Report, AnAnswerOfABarCountsOnceForAllStagesOfItsCase) {
  std::vector<json> lines;
  for (const char* stage : {"plan", "layer"}) {
    for (const int tokens : {4, 8}) {
      json line = stage_line(stage, tokens, 10);
      line["bar"] = "B1";
      line["value"] = tokens;
      line["target"] = 5;
      line["holds"] = tokens == 4;
      lines.push_back(line);
    }
  }
  const std::string page = report(lines);
  EXPECT_NE(page.find("<b>B1</b><span>1 of 2 hold</span>"), std::string::npos);
  EXPECT_NE(page.find("<b>1 of 2</b>answers of bars hold"), std::string::npos);
}

TEST_F(Report, OfALineThatWasMeasuredAgainTheNewestCounts) {
  json old = stage_line("layer", 4, 123456);
  old["time"] = "2025-01-01T00:00:00Z";
  const std::string page = report({stage_line("layer", 4, 10), old});
  EXPECT_EQ(page.find("123456"), std::string::npos);
}

TEST_F(Report, LoadsOfExpertsAndTheirTokensAreShown) {
  const std::string page =
      report({program_line("run", {{"routing",
                                    {{"counts", {3, 1}},
                                     {"choices", {{0}, {0}, {0}, {1}}},
                                     {"text", {"a", "b", "c", "7"}},
                                     {"kinds", {"word", "word", "word", "digit"}}}}})});
  EXPECT_NE(page.find("<i style='height:100.0%' title='expert 0: 3'>"), std::string::npos);
  EXPECT_NE(page.find("<i style='height:33.3%' title='expert 1: 1'>"), std::string::npos);
  EXPECT_NE(page.find("title='digit: 100.0% to expert 1'"), std::string::npos);
  EXPECT_NE(page.find("title='expert 1'>7</span>"), std::string::npos);
  EXPECT_NE(page.find("<tr><th>7<td><td style="), std::string::npos);
}

TEST_F(Report, TheDocumentOfARunIsShownToo) {
  const json document = {
      {"layer", {{"family", "olmoe"}, {"E", 2}, {"compute", "bf16"}}},
      {"tokens", 4},
      {"ranks", 1},
      {"stages",
       {{{"stage", "plan"}, {"median_us", 3.5}}, {{"stage", "layer"}, {"median_us", 9.5}}}},
      {"routing",
       {{"counts", {3, 1}},
        {"coactivation", {{1, 0.5}, {0.25, 1}}},
        {"choices", {{0}, {0}, {0}, {1}}},
        {"text", {"a", " b", "c", "7"}}}}};
  const std::string page = report_text(document.dump(2));
  EXPECT_NE(page.find("<h3>run"), std::string::npos);
  EXPECT_NE(page.find("<td>9.5"), std::string::npos);
  EXPECT_NE(page.find("title='digits: 100.0% to expert 1'"), std::string::npos);
  EXPECT_NE(page.find("title='0 with 1: 0.5'"), std::string::npos);
  EXPECT_NE(report_text("{\n\"layer\": 1\n}\n").find("line 1 is no result line"),
            std::string::npos);
}

TEST_F(Report, RoutingOfAnotherFormIsNotShownAndDoesNoHarm) {
  for (const json& routing :
       {json(3), json{{"counts", "x"}}, json{{"counts", {-1}}}, json{{"counts", json::array()}},
        json{{"counts", {1}}, {"choices", {3, {"x", 99, -1, 0.5}}}}}) {
    const std::string page = report({program_line("run", {{"routing", routing}})});
    EXPECT_NE(page.find("<h3>run"), std::string::npos);
  }
}

}  // namespace
}  // namespace switchyard::tool
