#pragma once

// What the finished runs of a study say, and no more.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tool/study/plan.hpp"

namespace switchyard::tool {

/// A false claim at all is made in at most this share of studies.
inline constexpr double kLevel = 0.05;

/// The arms in their order, each a JSON object:
///   name, model, router, parameters, active, flops_per_token, executed (the same by the experts
///   that computed in the last steps), rate, rates, edge, below, above
///   losses by seed, diverged, n, loss {mean, low, high, deviation}, accuracy, at_capacity,
///   load_cv, max_vio, dropped, tokens_per_s, seconds, causal, leaks, curve difference from the
///   reference {n, mean, low, high, deviation, p, holm, text_error, text_low, text_high, smallest,
///   verdict}; time: the same of the runs at equal wall-clock
/// Differences are pairs by seed, of the last step's models. Holm's family is every arm but the
/// reference that may be compared: it is finished, nothing diverged, nothing leaks.
[[nodiscard]] nlohmann::json findings_of(const StudyConfig& study, const RunResults& results);

/// Sentences, each carried by an interval of findings_of().
/// @param floors  Of n-grams, orders from 1.
/// @param passes  How often a run reads the text it is trained on.
[[nodiscard]] std::vector<std::string> sentences_of(const StudyConfig& study,
                                                    const nlohmann::json& arms,
                                                    const std::vector<double>& floors,
                                                    double passes);

/// Tables and sentences of a document of study_files.hpp, to stdout.
void print_findings(const nlohmann::json& document);

}  // namespace switchyard::tool
