#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/execution.hpp"
#include "switchyard/models/evaluate.hpp"
#include "switchyard/models/generate.hpp"
#include "switchyard/models/model.hpp"
#include "switchyard/tensor.hpp"
#include "switchyard/weight_format.hpp"

namespace switchyard::models {

struct ReleasedOptions {
  int num_threads = 1;  ///< As LayerOptions::num_threads; no result depends on it.
  /// Of the experts' and dense networks' products: f32, bf16 or f16. All else is f32.
  DType compute = DType::kF32;
  /// Of the routed experts, as LayerOptions::weights: exact, or codes as they are stored.
  WeightFormat weights = WeightFormat::kExact;
  std::function<void(double)> progress{};  ///< Share of the layers that are there; may be empty.
};

/// Whether a model's directory is a ReleasedModel's: its config.json has no "switchyard" part, and
/// its model_type is not "switchyard".
/// @throws Error{kBadFile}: there is no config.json, or it is no JSON object.
[[nodiscard]] bool is_released(const std::filesystem::path& directory);

struct ReleasedSizes {
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;  ///< Most of a sequence.
};
/// Of config.json alone, before anything large is read.
/// @throws Error{kBadFile}: as ReleasedModel of its configuration.
[[nodiscard]] ReleasedSizes read_released_sizes(const std::filesystem::path& directory);

/// A whole model of transformers' families from their own files, for inference on a CPU: embedding,
/// attention, norms, dense networks, MoE blocks, head. docs/models.md lists the families. One
/// object, one caller at a time; same bits for any number of threads.
///
/// Memory: 4 bytes a number of attention and head, the experts' as MoeLayer packs them; the
/// embedding is read from the file as it is asked for.
class ReleasedModel {
 public:
  /// @param path  config.json beside model.safetensors or shards with their index: f32, bf16, f16
  ///              (experts also as Checkpoint reads them).
  /// @throws Error{kBadFile} that names file and key or tensor: what is missing, malformed, or says
  ///         what is not computed here, tensors of a layer that its family has not among them;
  ///         {kUnsupported}: what a MoeLayer does not do with such weights; {kIo}; {kOutOfMemory}.
  explicit ReleasedModel(const std::filesystem::path& path, const ReleasedOptions& options = {});
  ~ReleasedModel();
  ReleasedModel(ReleasedModel&&) noexcept;
  ReleasedModel& operator=(ReleasedModel&&) noexcept;

  [[nodiscard]] std::string_view family() const;  ///< As Checkpoint::family().
  [[nodiscard]] std::int64_t vocabulary() const;
  [[nodiscard]] std::int64_t positions() const;   ///< Most of a sequence.
  [[nodiscard]] std::string description() const;  ///< "olmoe L16 H2048 heads 16/16 E64 K8 I1024".

  /// Logits behind every position. @param logits  out [B*S, V].
  /// @throws Error{kInvalidArgument}: shapes, S beyond positions(), an id not in [0, V).
  void forward(Matrix<const std::int32_t> tokens, Matrix<float> logits);
  /// As Model::make_cache(). Latent attention is cached as keys and values of all heads.
  [[nodiscard]] Cache make_cache(std::int64_t batch, std::int64_t positions) const;
  /// As Model::decode(): the same bits as forward() of the whole sequences.
  void decode(Matrix<const std::int32_t> tokens, Cache& cache, Matrix<float> logits);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// As generate() of a Model. Ends after max_new_tokens: no token ends a sequence by itself.
[[nodiscard]] Generation generate(ReleasedModel& model, const GenerateArgs& args);

/// Tokens that belong together: none is predicted from another document's.
struct TokenDocument {
  std::string name{};
  std::vector<std::int32_t> tokens{};  ///< At least two.
};

struct ReleasedEvaluation {
  Score all{};  ///< Its bytes are tokens.
  std::vector<DocumentScore> documents{};
};

/// Every token but each document's first, predicted from those before it in windows of `window`
/// positions (the model's if it has fewer) that do not overlap. @param progress  Share of the
/// tokens; may be empty.
/// @throws Error{kInvalidArgument}: as forward(); a document of fewer than two tokens.
[[nodiscard]] ReleasedEvaluation evaluate(ReleasedModel& model,
                                          const std::vector<TokenDocument>& documents,
                                          std::int64_t window = 2048,
                                          const std::function<void(double)>& progress = {});

}  // namespace switchyard::models
