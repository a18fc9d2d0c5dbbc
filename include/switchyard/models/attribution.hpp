#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "switchyard/models/model.hpp"
#include "switchyard/models/ngrams.hpp"
#include "switchyard/models/text.hpp"

namespace switchyard::models {

// Source attribution: which of R texts a passage is from, by likelihood. What a model makes of what
// it has read, asked of held-out text; every source has as many passages, so chance is 1 / R.

/// A part of a held-out text that is to be attributed.
struct Passage {
  std::int64_t source = 0;    ///< That it is from.
  std::int64_t document = 0;  ///< Of that source's held-out text.
  std::int64_t first = 0;     ///< Its first token in the document.
};

/// Passages of `length` tokens that do not overlap and cross no border of a document: as many of
/// each source, at most `most`, at even distances among all that it has.
/// @param held_out  [R] of each source, with the same tokenizer.
/// @throws Error{kInvalidArgument}: fewer than two sources, length or most < 1; a source without
///         any such passage, by its first document's name.
[[nodiscard]] std::vector<Passage> passages_of(std::span<const Text> held_out, std::int64_t length,
                                               std::int64_t most);

/// Who was taken for whom.
struct Attribution {
  std::int64_t num_sources = 0;           ///< R.
  std::vector<std::int64_t> confusion{};  ///< [R, R]: passages of a row taken for a column.
  [[nodiscard]] std::int64_t passages() const;
  [[nodiscard]] std::int64_t correct() const;  ///< The diagonal's sum.
};

struct AttributionOptions {
  std::int64_t excerpts = 1;               ///< Of a source, before a passage.
  std::int64_t sequences = 16;             ///< Of a call.
  std::uint64_t seed = 0;                  ///< Of the excerpts.
  std::function<void(double)> progress{};  ///< Share that is done; may be empty.
};

/// Tokens of a passage, and of an excerpt before it, in a model of S positions: S / 2 rounded down,
/// and S + 1 less that, since the last token of a passage is not read.
struct AttributionSizes {
  std::int64_t passage = 0, excerpt = 0;
};
/// @throws Error{kInvalidArgument}: S < 2.
[[nodiscard]] AttributionSizes attribution_sizes(const ModelConfig& config);

/// Takes a passage x for the source s that has the largest sum over excerpts of ln p(x | excerpt of
/// s), of equal ones the first: the model's own likelihood of the text behind a context of that
/// source, uniform over sources. Excerpts are drawn from the sources uniformly among all places
/// inside of documents, by Philox keyed by (seed, passage, source, excerpt): all passages have
/// excerpts of their own, and the same in every run.
/// @param sources   [R] what excerpts are drawn from: text that the model may know.
/// @param held_out  [R] what `passages` (of attribution_sizes()) are of.
/// @throws Error{kInvalidArgument}: numbers of texts differ, the vocabulary is not theirs, a source
///         has no document as long as an excerpt, a passage lies outside of its document, an
///         option; {kUnsupported}: the router is not causal, which it names: such a likelihood is
///         none. On a GPU as Model::evaluate().
/// Cost: passages * R * excerpts sequences of S tokens.
[[nodiscard]] Attribution attribute(Model& model, std::span<const Text> sources,
                                    std::span<const Text> held_out,
                                    std::span<const Passage> passages,
                                    const AttributionOptions& options = {});

/// The same by byte n-grams counted in the whole of each source (witten_bell_nats()), without any
/// context before the passage: the usual baseline, which has read all of a source where a model has
/// one excerpt before it. [max_order], order 1 first.
/// Source: Peng, Schuurmans, Keselj and Wang 2003, "Language Independent Authorship Attribution
/// using Character Level Language Models".
/// @param sources   [R] texts of bytes.
/// @param held_out  [R] as in attribute(), `length` the tokens of a passage.
/// @throws Error{kInvalidArgument}: as witten_bell_nats(); numbers of texts differ.
/// Cost: witten_bell_nats() of each source.
[[nodiscard]] std::vector<Attribution> attribute_by_ngrams(std::span<const Text> sources,
                                                           std::span<const Text> held_out,
                                                           std::span<const Passage> passages,
                                                           std::int64_t length,
                                                           int max_order = kMaxNgramOrder);

}  // namespace switchyard::models
