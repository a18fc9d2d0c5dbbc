// Losses of a released model on tokens.
#include <algorithm>

#include "core/check.hpp"
#include "models/cpu/cross_entropy.hpp"
#include "switchyard/models/released.hpp"

namespace switchyard::models {
namespace {

/// Adds what the logits behind some positions say of the tokens that follow.
void score_rows(const ReleasedModel& model, std::span<const std::int32_t> targets,
                std::vector<float>& logits, Score& score) {
  const std::int64_t rows = std::ssize(targets), vocabulary = model.vocabulary();
  score.targets += rows;
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* const at = logits.data() + row * vocabulary;
    const auto likeliest = std::max_element(at, at + vocabulary) - at;
    score.correct += likeliest == targets[static_cast<std::size_t>(row)] ? 1 : 0;
  }
  std::vector<double> nll(static_cast<std::size_t>(rows));
  cross_entropy({.logits = logits.data(),
                 .targets = targets.data(),
                 .rows = rows,
                 .vocabulary = vocabulary,
                 .nll = nll.data(),
                 .backward = false,
                 .scale = 1,
                 .pool = nullptr});
  for (const double nats : nll) score.nats += nats;
}

/// A window's tokens and what follows each, by pieces whose logits fit into memory.
Score score_window(ReleasedModel& model, std::span<const std::int32_t> tokens,
                   std::span<const std::int32_t> targets) {
  constexpr std::int64_t kBytes = std::int64_t{64} << 20;
  const std::int64_t length = std::ssize(tokens), vocabulary = model.vocabulary();
  const std::int64_t piece = std::max<std::int64_t>(1, kBytes / (4 * vocabulary));
  Cache cache = model.make_cache(1, length);
  std::vector<float> logits;
  Score score;
  for (std::int64_t first = 0; first < length; first += piece) {
    const std::int64_t rows = std::min(piece, length - first);
    logits.resize(static_cast<std::size_t>(rows * vocabulary));
    model.decode({tokens.data() + first, {1, rows}}, cache, {logits.data(), {rows, vocabulary}});
    score_rows(model,
               targets.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(rows)),
               logits, score);
  }
  return score;
}

}  // namespace

ReleasedEvaluation evaluate(ReleasedModel& model, const std::vector<TokenDocument>& documents,
                            std::int64_t window, const std::function<void(double)>& progress) {
  require(window >= 1, "windows of {} positions", window);
  const auto length = static_cast<std::size_t>(std::min(window, model.positions()));
  double all = 0, done = 0;
  for (const TokenDocument& document : documents) {
    require(document.tokens.size() >= 2, "{} has {} tokens: there is nothing to predict",
            document.name, document.tokens.size());
    for (const std::int32_t id : document.tokens) {
      require(id >= 0 && id < model.vocabulary(), "{}: token {}, the model has 0 to {}",
              document.name, id, model.vocabulary() - 1);
    }
    all += static_cast<double>(document.tokens.size() - 1);
  }
  ReleasedEvaluation out;
  for (const TokenDocument& document : documents) {
    DocumentScore& entry = out.documents.emplace_back(DocumentScore{.name = document.name});
    const std::span<const std::int32_t> tokens(document.tokens);
    for (std::size_t first = 0; first + 1 < tokens.size(); first += length) {
      const std::size_t count = std::min(length, tokens.size() - 1 - first);
      entry.score.add(
          score_window(model, tokens.subspan(first, count), tokens.subspan(first + 1, count)));
      done += static_cast<double>(count);
      if (progress) progress(done / all);
    }
    out.all.add(entry.score);
  }
  return out;
}

}  // namespace switchyard::models
