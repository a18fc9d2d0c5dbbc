// Losses on held-out text, document by document.
#include "switchyard/models/evaluate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>

#include "comm/ranks/gather.hpp"
#include "core/check.hpp"
#include "models/cpu/cross_entropy.hpp"
#include "models/over_ranks.hpp"
#include "switchyard/routing/router_kinds.hpp"

namespace switchyard::models {
namespace {

/// Whether the target has the largest logit, of equal ones the lowest id.
bool is_largest(const float* logits, std::int64_t vocabulary, std::int32_t target) {
  return std::max_element(logits, logits + vocabulary) - logits == target;
}

class Evaluator {
 public:
  Evaluator(Model& model, const Text& text, const EvaluateOptions& options)
      : model_(model), text_(text), options_(options), ranks_(ranks_of(model.options())) {
    for (const Document& document : text.documents()) {
      out_.documents.push_back({document.name, {}});
    }
    for (const Window& window : held_out_windows(text, model.config().sequence)) {
      const bool full = window.length == model.config().sequence;
      (full ? full_ : short_).push_back(window);
      (full ? full_places_ : short_places_).push_back(out_.windows.size());
      out_.windows.push_back({window, {}});
    }
  }

  Evaluation evaluate() {
    const auto most = static_cast<std::size_t>(options_.sequences);
    for (std::size_t i = 0; i < full_.size(); i += most) {
      score(std::span(full_).subspan(i, std::min(most, full_.size() - i)), &full_places_[i]);
    }
    for (std::size_t i = 0; i < short_.size(); ++i) score({&short_[i], 1}, &short_places_[i]);
    if (ranks_ != nullptr) add_over_ranks();
    for (const WindowScore& window : out_.windows) {
      out_.documents[static_cast<std::size_t>(window.window.document)].score.add(window.score);
    }
    for (const DocumentScore& document : out_.documents) out_.all.add(document.score);
    if (options_.at_capacity && model_.config().capacity_factor && !full_.empty()) at_capacity();
    return std::move(out_);
  }

 private:
  /// A call of all ranks. @param places  Of the windows in the text.
  void score(std::span<const Window> windows, const std::size_t* places) {
    done_ += windows.size();
    if (ranks_ == nullptr) {
      score_here(windows, places);
    } else {
      const auto border = [&](int rank) {
        return windows.size() * static_cast<std::size_t>(rank) /
               static_cast<std::size_t>(ranks_->size());
      };
      const std::size_t first = border(ranks_->rank());
      score_here(windows.subspan(first, border(ranks_->rank() + 1) - first), places + first);
    }
    if (options_.progress) {
      options_.progress(static_cast<double>(done_) /
                        static_cast<double>(full_.size() + short_.size()));
    }
  }

  void score_here(std::span<const Window> windows, const std::size_t* places) {
    const ModelConfig& config = model_.config();
    if (windows.empty()) {  // other ranks' tokens may want this one's experts
      model_.forward({nullptr, {0, config.sequence}}, {nullptr, {0, config.vocabulary}});
      return;
    }
    // Short ones come one by one. Routers that choose tokens of a group want whole groups.
    const std::int64_t length =
        has_causal_router(config) ? windows.front().length : config.sequence;
    fill_batch(text_, windows, length, batch_);
    const std::int64_t vocabulary = config.vocabulary;
    const std::int64_t rows = std::ssize(batch_.tokens);
    logits_.resize(static_cast<std::size_t>(rows * vocabulary));
    model_.forward({batch_.tokens.data(), {batch_.sequences, batch_.length}},
                   {logits_.data(), {rows, vocabulary}});
    const auto add = [&](std::int64_t row, const Score& score) {
      const auto window = static_cast<std::size_t>(row / batch_.length);
      out_.windows[places[window]].score.add(score);
    };
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int32_t target = batch_.targets[static_cast<std::size_t>(row)];
      const bool correct = is_largest(logits_.data() + row * vocabulary, vocabulary, target);
      add(row, {.correct = correct ? 1 : 0});
    }
    nll_.resize(static_cast<std::size_t>(rows));
    cross_entropy({.logits = logits_.data(),  // which are gone behind this
                   .targets = batch_.targets.data(),
                   .rows = rows,
                   .vocabulary = vocabulary,
                   .nll = nll_.data(),
                   .backward = false,
                   .scale = 1,
                   .pool = &model_.pool()});
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto at = static_cast<std::size_t>(row);
      if (batch_.targets[at] < 0) continue;
      const std::int64_t bytes = text_.bytes_of({&batch_.targets[at], 1});
      add(row, {.targets = 1, .bytes = bytes, .nats = nll_[at]});
    }
  }

  /// Each window was one rank's, so the sums are what that rank has said.
  void add_over_ranks() {
    std::vector<double> values;
    for (const WindowScore& window : out_.windows) {
      values.push_back(static_cast<double>(window.score.targets));
      values.push_back(static_cast<double>(window.score.bytes));
      values.push_back(window.score.nats);
      values.push_back(static_cast<double>(window.score.correct));
    }
    values = sum_over_ranks(*ranks_, values);
    const double* next = values.data();
    for (WindowScore& window : out_.windows) {
      window.score.targets = static_cast<std::int64_t>(*next++);
      window.score.bytes = static_cast<std::int64_t>(*next++);
      window.score.nats = *next++;
      window.score.correct = static_cast<std::int64_t>(*next++);
    }
  }

  void at_capacity() {
    StepStats stats;
    std::int64_t bytes = 0;
    const auto most = static_cast<std::size_t>(options_.sequences);
    for (std::size_t i = 0; i < full_.size(); i += most) {
      fill_batch(text_, std::span(full_).subspan(i, std::min(most, full_.size() - i)),
                 model_.config().sequence, batch_);
      bytes += text_.bytes_of(batch_.targets);
      const std::array<std::int64_t, 2> shape{batch_.sequences, batch_.length};
      model_.loss_and_gradients({.tokens = {batch_.tokens.data(), shape},
                                 .targets = {batch_.targets.data(), shape},
                                 .accumulate = i > 0,
                                 .step = i / most,
                                 .stats = &stats});
    }
    double all = 0;
    double kept = 0;
    for (const RoutingStats& layer : stats.layers) {
      for (const std::int64_t n : layer.counts) all += static_cast<double>(n);
      for (const std::int64_t n : layer.counts_kept) kept += static_cast<double>(n);
    }
    out_.at_capacity = {.nats_per_byte = stats.nll / static_cast<double>(bytes),
                        .drop = all > 0 ? 1 - kept / all : 0};
  }

  Model& model_;
  const Text& text_;
  const EvaluateOptions& options_;
  Communicator* ranks_;
  std::vector<Window> full_, short_;
  std::vector<std::size_t> full_places_, short_places_;
  Batch batch_;
  std::vector<float> logits_;
  std::vector<double> nll_;
  std::size_t done_ = 0;
  Evaluation out_;
};

}  // namespace

double Score::nats_per_byte() const { return nats / static_cast<double>(bytes); }
double Score::nats_per_token() const { return nats / static_cast<double>(targets); }
double Score::bits_per_byte() const { return nats_per_byte() / std::log(2.0); }
double Score::perplexity() const { return std::exp(nats_per_token()); }
double Score::accuracy() const {
  return static_cast<double>(correct) / static_cast<double>(targets);
}

void Score::add(const Score& other) {
  targets += other.targets;
  bytes += other.bytes;
  nats += other.nats;
  correct += other.correct;
}

Evaluation evaluate(Model& model, const Text& text, const EvaluateOptions& options) {
  check_vocabulary(model.config().vocabulary, text);
  require(options.sequences >= 1, "{} sequences of a call", options.sequences);
  return Evaluator(model, text, options).evaluate();
}

bool has_causal_router(const ModelConfig& config) {
  if (const auto soft = soft_moe_config(config)) return soft->causal;
  const std::string_view spelling = config.router;
  return find_router_kind(spelling.substr(0, spelling.find(':'))).causal;
}

}  // namespace switchyard::models
