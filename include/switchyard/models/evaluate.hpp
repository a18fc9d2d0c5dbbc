#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/models/model.hpp"
#include "switchyard/models/text.hpp"

namespace switchyard::models {

/// Of tokens that were predicted.
struct Score {
  std::int64_t targets = 0;
  std::int64_t bytes = 0;    ///< That these stand for.
  double nats = 0;           ///< Sum of -ln of their probabilities.
  std::int64_t correct = 0;  ///< Those that had the largest logit; of equal ones the lowest id.

  [[nodiscard]] double nats_per_byte() const;  ///< What other tokens can be compared by.
  [[nodiscard]] double nats_per_token() const;
  [[nodiscard]] double bits_per_byte() const;
  [[nodiscard]] double perplexity() const;  ///< exp(nats a token).
  [[nodiscard]] double accuracy() const;    ///< correct / targets.
  void add(const Score& other);
};

struct DocumentScore {
  std::string name{};
  Score score{};
};

/// Of one window of the text.
struct WindowScore {
  Window window{};
  Score score{};
};

/// The loss where experts drop what they have no room for, as in training.
struct ScoreAtCapacity {
  double nats_per_byte = 0;
  double drop = 0;  ///< Share of the assignments, all layers together.
};

struct Evaluation {
  Score all{};
  std::vector<DocumentScore> documents{};
  std::vector<WindowScore> windows{};            ///< Those of held_out_windows(), in its order.
  std::optional<ScoreAtCapacity> at_capacity{};  ///< Of a model with a capacity, where asked for.
};

struct EvaluateOptions {
  std::int64_t sequences = 16;  ///< Windows of a call.
  bool at_capacity = false;     ///< Also ScoreAtCapacity, where the model has a capacity.
  std::function<void(double)> progress{};  ///< Share of the windows that are done; may be empty.
};

/// Every token of the text but each document's first, predicted from those before it in its window:
/// held_out_windows() of ModelConfig::sequence. Nothing is dropped. A router that is not causal
/// sees behind the end of a short window tokens 0, so that it has whole groups. ScoreAtCapacity is
/// taken with what Model::loss_and_gradients() says, so with the noise that a router has in
/// training; gradients are written over. Windows of full length only, `sequences` a call: a
/// capacity is a share of what is there. Over ranks collective, with the same text and options: the
/// windows of a call are dealt out, and every rank has the whole result.
/// @throws Error{kInvalidArgument}: the vocabulary is not that of the text's tokens; as
/// Model::forward(). Cost: a forward of the text; with a capacity a step without its optimiser
/// more.
[[nodiscard]] Evaluation evaluate(Model& model, const Text& text,
                                  const EvaluateOptions& options = {});

/// What logits at positions up to `position` did when something was replaced that they must not
/// depend on.
struct LeakProbe {
  enum class Replaced : std::uint8_t { kLaterTokens, kOtherSequences };
  Replaced replaced = Replaced::kLaterTokens;
  std::int64_t position = 0;
  bool same = true;           ///< Bit for bit.
  double largest_change = 0;  ///< Of a logit.
};

/// "later tokens", "other sequences".
[[nodiscard]] const char* to_string(LeakProbe::Replaced replaced) noexcept;

/// Whether the model looks where it must not: the first windows of the text as a batch, at three
/// positions (a quarter, a half, and three of S) the tokens behind it in one sequence, then all
/// other sequences, are replaced by other tokens. A loss of a model that leaks proves nothing.
/// Routers as in inference, where nothing is dropped: what a capacity leaks in training is not
/// seen.
/// @param sequences  Of the batch, at least 2 and at most 64; fewer where the text has fewer.
/// @throws Error{kInvalidArgument}: the text has fewer than two windows of S; as Model::forward().
/// Cost: 7 forwards of the batch.
[[nodiscard]] std::vector<LeakProbe> audit_leaks(Model& model, const Text& text,
                                                 std::int64_t sequences = 4);

/// By the table of routers: a token's experts do not depend on later tokens.
[[nodiscard]] bool has_causal_router(const ModelConfig& config);

}  // namespace switchyard::models
