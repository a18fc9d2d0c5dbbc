// The findings in words: each sentence says what an interval carries, and what it does not.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tool/study/findings.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// A loss that ends this far above its lowest on the way, in nats a byte, is said to: more than
/// points of one curve beside each other differ by.
constexpr double kRise = 0.005;

std::string interval_words(const json& difference) {
  return fmt::format("{:+.4f} nats a byte, 95% interval {:+.4f} to {:+.4f}",
                     difference["mean"].get<double>(), difference["low"].get<double>(),
                     difference["high"].get<double>());
}

std::string pairs_words(const json& difference) {
  const auto n = difference["n"].get<int>();
  return fmt::format("{} pair{}", n, n == 1 ? "" : "s");
}

std::string sentence_of(const std::string& arm, const std::string& reference, const json& found,
                        const char* where) {
  const std::string verdict = found["verdict"].get<std::string>();
  const std::string pair = fmt::format("{} against {}{}", arm, reference, where);
  if (verdict == "diverged") {
    return pair + ": a run diverged, so nothing is claimed of those that did not.";
  }
  if (verdict == "leaks") {
    return fmt::format(
        "{}: {:+.4f} nats a byte, which proves nothing: logits depend on what they must not see, "
        "and "
        "no text can be continued at such a loss.",
        pair, found["mean"].get<double>());
  }
  if (verdict == "one seed") {
    return fmt::format("{}: {:+.4f} nats a byte in {}, which carries no claim.", pair,
                       found["mean"].get<double>(), pairs_words(found));
  }
  const double smallest = found["smallest"].get<double>();
  if (verdict == "none found") {
    return fmt::format(
        "{}: no difference found ({}, {}, Holm's p {:.2g}); one of {:.2g} would have "
        "been, four times in five.",
        pair, interval_words(found), pairs_words(found), found["holm"].get<double>(), smallest);
  }
  const char* const word = found["mean"].get<double>() < 0 ? "lower" : "higher";
  std::string sentence =
      fmt::format("{}: a {} loss ({}, {}, Holm's p {:.2g})", pair, word, interval_words(found),
                  pairs_words(found), found["holm"].get<double>());
  if (verdict == "this text") {
    sentence +=
        fmt::format("; but only on this text: by its blocks the interval is {:+.4f} to {:+.4f}",
                    found["text_low"].get<double>(), found["text_high"].get<double>());
  }
  return sentence + ".";
}

/// Where operations differ a loss at equal tokens is no loss at equal operations.
std::string operations_sentence(const json& arm, const json& reference) {
  const double ratio = arm["executed"].get<double>() / reference["executed"].get<double>();
  if (ratio > 0.98 && ratio < 1.02) return "";
  return fmt::format(
      "{} executes {:.2f} times the operations of {} a token: the two are compared at "
      "equal tokens, not at equal operations.",
      arm["name"].get<std::string>(), ratio, reference["name"].get<std::string>());
}

/// The last step counts, whatever it is worth: so where training went on for too long is said.
std::string rise_sentence(const json& arm, double passes) {
  if (!arm["loss"].is_object() || arm["curve"].empty()) return "";
  const json& lowest =
      *std::min_element(arm["curve"].begin(), arm["curve"].end(), [](const json& a, const json& b) {
        return a["mean"].get<double>() < b["mean"].get<double>();
      });
  const double last = arm["curve"].back()["mean"].get<double>();
  if (last - lowest["mean"].get<double>() <= kRise) return "";
  return fmt::format(
      "{}: from {:.4f} nats a byte behind step {} its loss rises to {:.4f} at the last step, which "
      "counts; it reads the text {:.1f} times.",
      arm["name"].get<std::string>(), lowest["mean"].get<double>(),
      lowest["step"].get<std::int64_t>(), last, passes);
}

std::string floor_sentence(const json& arm, const std::vector<double>& floors) {
  if (floors.empty() || !arm["loss"].is_object()) return "";
  const auto best = std::min_element(floors.begin(), floors.end());
  const double beyond = arm["loss"]["mean"].get<double>() - *best;
  if (beyond <= 0) return "";
  return fmt::format(
      "{} is {:.3f} nats a byte above byte n-grams of order {}: it has learnt less "
      "than counting knows.",
      arm["name"].get<std::string>(), beyond, best - floors.begin() + 1);
}

}  // namespace

std::vector<std::string> sentences_of(const StudyConfig& study, const json& arms,
                                      const std::vector<double>& floors, double passes) {
  std::vector<std::string> sentences;
  const auto add = [&](std::string sentence) {
    if (!sentence.empty()) sentences.push_back(std::move(sentence));
  };
  const json& reference = arms[study.reference];
  const std::string& name = study.arms[study.reference].name;
  for (const json& arm : arms) {
    const std::string of = arm["name"].get<std::string>();
    const auto is_there = [&](const char* key) {
      return arm.contains(key) && arm[key].is_object() && arm[key].contains("verdict");
    };
    if (is_there("difference")) {
      add(sentence_of(of, name, arm["difference"], ""));
      add(operations_sentence(arm, reference));
    }
    if (is_there("time")) add(sentence_of(of, name, arm["time"], " at equal time"));
  }
  for (const json& arm : arms) {
    for (const json& run : arm["diverged"]) {
      add(fmt::format("{} diverged with seed {}: {}.", arm["name"].get<std::string>(),
                      run[0].get<std::int64_t>(), run[1].get<std::string>()));
    }
    if (arm["edge"] == true && arm["rate"].is_number()) {
      add(fmt::format(
          "{}: the best learning rate tried, {:g}, is the last on its side; a better one "
          "may lie beyond.",
          arm["name"].get<std::string>(), arm["rate"].get<double>()));
    }
    add(rise_sentence(arm, passes));
    add(floor_sentence(arm, floors));
  }
  if (study.tuning.rates.size() == 1) {
    add("All arms have one learning rate, which was not tuned.");
  }
  return sentences;
}

}  // namespace switchyard::tool
