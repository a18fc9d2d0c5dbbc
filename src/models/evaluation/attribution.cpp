// Which source a passage is from, by likelihood.
#include "switchyard/models/attribution.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "core/check.hpp"
#include "core/philox.hpp"
#include "core/printable.hpp"
#include "switchyard/models/evaluate.hpp"

namespace switchyard::models {
namespace {

__extension__ using Uint128 = unsigned __int128;

const Document& document_of(const Text& text, std::int64_t index) {
  return text.documents()[static_cast<std::size_t>(index)];
}

/// Places of `length` tokens inside of a document.
std::int64_t places_in(const Document& document, std::int64_t length) {
  return std::max<std::int64_t>(0, document.size() - length + 1);
}

/// Appends an excerpt of `length` tokens, drawn by the counter.
void append_excerpt(const Text& source, std::int64_t length, std::uint64_t seed,
                    std::array<std::uint32_t, 4> counter, std::vector<std::int32_t>& to) {
  std::int64_t places = 0;
  for (const Document& document : source.documents()) places += places_in(document, length);
  require(places > 0, "{} has no document of at least {} {}, the length of an excerpt",
          printable(source.documents().front().name), length, source.unit());
  const PhiloxWords words = philox4x32({{counter[0], counter[1], counter[2], counter[3]}},
                                       {low_word(seed), high_word(seed)});
  const std::uint64_t bits = std::uint64_t{words.word[0]} << 32 | words.word[1];
  auto place =
      static_cast<std::int64_t>((Uint128{bits} * static_cast<std::uint64_t>(places)) >> 64);
  for (const Document& document : source.documents()) {
    if (place < places_in(document, length)) {
      for (std::int64_t i = 0; i < length; ++i) to.push_back(document.token(place + i));
      return;
    }
    place -= places_in(document, length);
  }
}

/// The most likely source of each passage. @param nats  [passages, R] -ln of the likelihoods.
Attribution attribution_of(std::span<const Passage> passages, const std::vector<double>& nats,
                           std::size_t num_sources) {
  Attribution found{.num_sources = static_cast<std::int64_t>(num_sources),
                    .confusion = std::vector<std::int64_t>(num_sources * num_sources)};
  for (std::size_t i = 0; i < passages.size(); ++i) {
    const auto row = nats.begin() + static_cast<std::ptrdiff_t>(i * num_sources);
    const auto taken = std::min_element(row, row + static_cast<std::ptrdiff_t>(num_sources)) - row;
    const auto source = static_cast<std::size_t>(passages[i].source);
    ++found.confusion[source * num_sources + static_cast<std::size_t>(taken)];
  }
  return found;
}

void check_passages(std::span<const Text> sources, std::span<const Text> held_out,
                    std::span<const Passage> passages, std::int64_t length) {
  require(sources.size() == held_out.size() && sources.size() >= 2,
          "{} sources and held-out texts of {}, want as many, at least 2", sources.size(),
          held_out.size());
  for (const Passage& passage : passages) {
    require(passage.source >= 0 && passage.source < std::ssize(held_out),
            "a passage of source {}, there are {}", passage.source, held_out.size());
    const Text& text = held_out[static_cast<std::size_t>(passage.source)];
    require(passage.document >= 0 && passage.document < std::ssize(text.documents()) &&
                passage.first >= 0 &&
                passage.first + length <= document_of(text, passage.document).size(),
            "a passage of source {} at {} of document {} lies outside of it", passage.source,
            passage.first, passage.document);
  }
}

/// Sequences of an excerpt and a passage, of which the passage is predicted.
class Attributor {
 public:
  Attributor(Model& model, std::span<const Text> sources, std::span<const Text> held_out,
             std::span<const Passage> passages, const AttributionOptions& options)
      : model_(model),
        sources_(sources),
        held_out_(held_out),
        passages_(passages),
        options_(options),
        sizes_(attribution_sizes(model.config())),
        nats_(passages.size() * sources.size()) {}

  Attribution run() {
    const auto excerpts = static_cast<std::size_t>(options_.excerpts);
    const std::size_t all = nats_.size() * excerpts;
    const auto most = static_cast<std::size_t>(options_.sequences);
    for (std::size_t first = 0; first < all; first += most) {
      const std::size_t count = std::min(most, all - first);
      tokens_.clear();
      targets_.clear();
      for (std::size_t i = first; i < first + count; ++i) {
        append(i / excerpts / sources_.size(), i / excerpts % sources_.size(), i % excerpts);
      }
      score(first, count, excerpts);
      if (options_.progress) {
        options_.progress(static_cast<double>(first + count) / static_cast<double>(all));
      }
    }
    return attribution_of(passages_, nats_, sources_.size());
  }

 private:
  void append(std::size_t passage, std::size_t source, std::size_t excerpt) {
    sequence_.clear();
    append_excerpt(sources_[source], sizes_.excerpt, options_.seed,
                   {static_cast<std::uint32_t>(excerpt), static_cast<std::uint32_t>(source),
                    static_cast<std::uint32_t>(passage), 0},
                   sequence_);
    const Passage& of = passages_[passage];
    const Document& document =
        document_of(held_out_[static_cast<std::size_t>(of.source)], of.document);
    for (std::int64_t i = 0; i < sizes_.passage; ++i) {
      sequence_.push_back(document.token(of.first + i));
    }
    for (std::size_t i = 0; i + 1 < sequence_.size(); ++i) {
      tokens_.push_back(sequence_[i]);
      const bool predicted = static_cast<std::int64_t>(i) + 1 >= sizes_.excerpt;
      targets_.push_back(predicted ? sequence_[i + 1] : -1);
    }
  }

  void score(std::size_t first, std::size_t count, std::size_t excerpts) {
    const std::array<std::int64_t, 2> shape{static_cast<std::int64_t>(count),
                                            model_.config().sequence};
    nll_.resize(tokens_.size());
    model_.evaluate({tokens_.data(), shape}, {targets_.data(), shape}, {nll_.data(), shape});
    const std::size_t length = tokens_.size() / count;
    for (std::size_t row = 0; row < count; ++row) {
      double& sum = nats_[(first + row) / excerpts];
      for (std::size_t i = row * length; i < (row + 1) * length; ++i) sum += double{nll_[i]};
    }
  }

  Model& model_;
  std::span<const Text> sources_, held_out_;
  std::span<const Passage> passages_;
  const AttributionOptions& options_;
  AttributionSizes sizes_;
  std::vector<double> nats_;
  std::vector<std::int32_t> sequence_, tokens_, targets_;
  std::vector<float> nll_;
};

}  // namespace

std::int64_t Attribution::passages() const {
  return std::accumulate(confusion.begin(), confusion.end(), std::int64_t{0});
}

std::int64_t Attribution::correct() const {
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < num_sources; ++i) {
    sum += confusion[static_cast<std::size_t>(i * num_sources + i)];
  }
  return sum;
}

std::vector<Passage> passages_of(std::span<const Text> held_out, std::int64_t length,
                                 std::int64_t most) {
  require(held_out.size() >= 2, "passages of {} sources, want at least 2", held_out.size());
  require(length >= 1 && most >= 1, "{} passages of {} tokens, want at least 1", most, length);
  std::vector<std::vector<Passage>> all(held_out.size());
  auto each = static_cast<std::size_t>(most);
  for (std::size_t source = 0; source < held_out.size(); ++source) {
    const Text& text = held_out[source];
    for (std::int64_t d = 0; d < std::ssize(text.documents()); ++d) {
      for (std::int64_t first = 0; first + length <= document_of(text, d).size(); first += length) {
        all[source].push_back({static_cast<std::int64_t>(source), d, first});
      }
    }
    require(!all[source].empty(), "{} has no document of at least {} {}, the length of a passage",
            printable(text.documents().front().name), length, text.unit());
    each = std::min(each, all[source].size());
  }
  std::vector<Passage> passages;
  for (const std::vector<Passage>& of : all) {
    for (std::size_t i = 0; i < each; ++i) passages.push_back(of[i * of.size() / each]);
  }
  return passages;
}

AttributionSizes attribution_sizes(const ModelConfig& config) {
  require(config.sequence >= 2, "a model of sequence={} has no room for an excerpt and a passage",
          config.sequence);
  const std::int64_t passage = config.sequence / 2;
  return {.passage = passage, .excerpt = config.sequence + 1 - passage};
}

Attribution attribute(Model& model, std::span<const Text> sources, std::span<const Text> held_out,
                      std::span<const Passage> passages, const AttributionOptions& options) {
  const ModelConfig& config = model.config();
  check_passages(sources, held_out, passages, attribution_sizes(config).passage);
  for (const std::span<const Text> texts : {sources, held_out}) {
    for (const Text& text : texts) check_vocabulary(config.vocabulary, text);
  }
  require(options.excerpts >= 1 && options.sequences >= 1,
          "{} excerpts in calls of {} sequences, want at least 1", options.excerpts,
          options.sequences);
  if (config.first_dense < config.layers && !has_causal_router(config)) {
    fail(ErrorCode::kUnsupported,
         "likelihoods of passages: the router {} looks at later tokens, so they are none",
         config.router);
  }
  return Attributor(model, sources, held_out, passages, options).run();
}

std::vector<Attribution> attribute_by_ngrams(std::span<const Text> sources,
                                             std::span<const Text> held_out,
                                             std::span<const Passage> passages, std::int64_t length,
                                             int max_order) {
  check_passages(sources, held_out, passages, length);
  std::vector<Document> documents;
  for (const Passage& passage : passages) {
    const Text& text = held_out[static_cast<std::size_t>(passage.source)];
    const Document& document = document_of(text, passage.document);
    std::int64_t begin = passage.first, bytes = length;
    if (!document.tokens.empty()) {
      const auto first = static_cast<std::size_t>(passage.first);
      begin = text.bytes_of(document.tokens.first(first));
      bytes = text.bytes_of(document.tokens.subspan(first, static_cast<std::size_t>(length)));
    }
    documents.push_back({.name = document.name,
                         .bytes = document.bytes.subspan(static_cast<std::size_t>(begin),
                                                         static_cast<std::size_t>(bytes))});
  }
  std::vector<std::vector<double>> nats;  // [order] of [passages, R]
  for (std::size_t source = 0; source < sources.size(); ++source) {
    const auto of = witten_bell_nats(sources[source], documents, max_order);
    nats.resize(of.size(), std::vector<double>(passages.size() * sources.size()));
    for (std::size_t order = 0; order < of.size(); ++order) {
      for (std::size_t i = 0; i < passages.size(); ++i) {
        nats[order][i * sources.size() + source] = of[order][i];
      }
    }
  }
  std::vector<Attribution> found;
  found.reserve(nats.size());
  for (const std::vector<double>& of : nats) {
    found.push_back(attribution_of(passages, of, sources.size()));
  }
  return found;
}

}  // namespace switchyard::models
