#pragma once

// Result lines: one JSON object per stage of a case.

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "bench/measure/machine.hpp"

namespace switchyard::bench {

/// What was measured, in the words of the command line; "case" of a line.
struct Case {
  std::string name{};  ///< Model or suite.
  std::int32_t num_experts = 0, top_k = 0;
  std::int64_t hidden = 0, inner = 0, num_tokens = 0;
  int num_ranks = 1, num_threads = 1;
  std::string compute{}, layout{}, skew{}, engine{}, wire{}, activation{}, experts = "ffn";
  std::string drop_policy{};
  double capacity_factor = 0;  ///< 0: dropless.
  std::int32_t shared_experts = 0;
  bool gated = true;
  bool batch_invariant = false;
  bool cold = true;  ///< Weights were not in a cache.
};

/// A case with its figures.
struct CaseResult {
  Case what{};
  std::vector<StageFigures> stages{};
  Load load{};
  Limits limits{};
  std::string backend = "cpu";
  std::int64_t seed = 0;
  double routing_share = 0;                  ///< Share of the layer's time outside of the experts.
  std::map<std::string, double> peers{};     ///< Name: median in microseconds.
  std::string whole = "layer";               ///< The stage that peers do.
  std::map<std::string, double> torch_us{};  ///< What torch takes, by stage.
  std::string verdict{};                     ///< "", or what a comparison in the same run said.
  bool holds = true;                         ///< Of that comparison.
  nlohmann::json more{};                     ///< Further keys of every line of this case.
};

/// metrics::Load by its names; "load" of a line has `dropped` too.
[[nodiscard]] nlohmann::json load_json(const metrics::Load& load);
[[nodiscard]] nlohmann::json load_json(const Load& load);

/// One object per stage.
[[nodiscard]] std::vector<nlohmann::json> to_lines(const CaseResult& result,
                                                   const Machine& machine);

/// Append lines to a file, all of them or none, also beside other writers.
/// @throws Error{kIo}; the file is then as it was.
void append_lines(const std::string& path, const std::vector<nlohmann::json>& lines);

/// Cut off what a writer that was killed has left at the end of a file, while no other can write.
/// @param kept  Given the file's text, how much of it stays; a last line without its end gets it.
/// @throws Error{kIo}, and what `kept` throws.
void mend_lines(const std::string& path, const std::function<std::size_t(std::string_view)>& kept);

/// The same figures as comma-separated values with a header.
[[nodiscard]] std::string to_csv(const std::vector<CaseResult>& results);

}  // namespace switchyard::bench
