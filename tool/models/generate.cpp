// `switchyard generate`: a prompt continued.
#include "switchyard/models/generate.hpp"

#include <filesystem>
#include <memory>
#include <vector>

#include "checkpoint/files/matrix_file.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/models/released.hpp"
#include "tool/commands.hpp"
#include "tool/models/common.hpp"
#include "tool/models/tokens.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/output_files.hpp"
#include "tool/progress.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {
namespace {

/// Of both kinds of models: those of train, and those of transformers' families.
template <class AnyModel>
int continue_prompt(const Options& options, const std::filesystem::path& directory, AnyModel& model,
                    const std::vector<std::int32_t>& prompt, const models::ReleasedSizes& sizes,
                    const models::Tokenizer* tokenizer) {
  const std::int64_t new_tokens = new_tokens_of(options, prompt.size(), sizes.positions);
  const std::int64_t vocabulary = sizes.vocabulary;
  if (!options.logits.empty()) {
    const std::int64_t rows = std::ssize(prompt);
    std::vector<float> logits(static_cast<std::size_t>(rows * vocabulary));
    model.forward({prompt.data(), {1, rows}}, {logits.data(), {rows, vocabulary}});
    write_matrix(options.logits, {reinterpret_cast<const std::byte*>(logits.data()), DType::kF32,
                                  rows, vocabulary});
  }
  ProgressBar bar(static_cast<int>(new_tokens));
  models::GenerateArgs args = generate_args(options, prompt, new_tokens);
  args.on_token = [&](std::int64_t done) {
    bar.show(static_cast<int>(done), "tokens");
    return false;
  };
  const models::Generation made = models::generate(model, args);
  bar.clear();
  print_generation(options, directory, prompt, made, tokenizer);
  return kFine;
}

models::ReleasedSizes sizes_of(const std::filesystem::path& directory, bool released) {
  if (released) return models::read_released_sizes(directory);
  const models::ModelConfig config = models::read_model_config(directory);
  return {.vocabulary = config.vocabulary, .positions = config.sequence};
}

/// Null: numbers alone. Those of a released model have rules of their own (a first token, a
/// prefix), which are not applied here.
std::shared_ptr<const models::Tokenizer> tokenizer_for(const Options& options,
                                                       const std::filesystem::path& directory,
                                                       std::int64_t vocabulary, bool released) {
  const bool numbers_alone = options.ids && !options.prompt_ids.empty();
  if (!released && !numbers_alone) return models::tokenizer_of(directory, vocabulary);
  return vocabulary == models::kByteVocabulary ? models::byte_tokenizer() : nullptr;
}

/// The prompt, and all that is of the model: its shards, its index, an optimiser beside it.
std::vector<NamedFile> inputs_of(const Options& options, const std::filesystem::path& directory) {
  std::vector<NamedFile> inputs = {{"--prompt-file", options.prompt_file}};
  std::error_code none;
  for (std::filesystem::directory_iterator entry(directory, none), end; !none && entry != end;
       entry.increment(none)) {
    const std::filesystem::path kind = entry->path().extension();
    if (kind == ".safetensors" || kind == ".json" || kind == ".model")
      inputs.push_back({"--model", entry->path()});
  }
  return inputs;
}

}  // namespace

int generate_command(const Options& options) {
  check_place(options);
  check_matrix_output("--logits", options.logits, DType::kF32);
  check_output_place({"--logits", options.logits});
  const std::filesystem::path directory = models::model_directory(options.model_directory);
  check_outputs_apart({{"--logits", options.logits}}, inputs_of(options, directory));
  const bool released = models::is_released(directory);
  const models::ReleasedSizes sizes = sizes_of(directory, released);
  const auto tokenizer = tokenizer_for(options, directory, sizes.vocabulary, released);
  const std::vector<std::int32_t> prompt = prompt_of(options, tokenizer.get(), sizes.vocabulary);
  if (released) {
    models::ReleasedModel model = open_released(options, directory);
    return continue_prompt(options, directory, model, prompt, sizes, tokenizer.get());
  }
  models::Model model = open_model(options, directory);
  return continue_prompt(options, directory, model, prompt, sizes, tokenizer.get());
}

}  // namespace switchyard::tool
