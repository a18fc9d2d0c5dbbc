// A model's directory.
#include "switchyard/models/files.hpp"

#include "checkpoint/file_names.hpp"
#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "models/training/run_directory.hpp"
#include "models/training/tensor_files.hpp"

namespace switchyard::models {
namespace {

std::vector<NamedNumbers> all_values(const Model& model) {
  for (const ParameterTensor& tensor : model.parameters()) {
    require(!tensor.sharded, "files of a model: this one has a rank's share of {} alone",
            tensor.name);
  }
  std::vector<NamedNumbers> numbers = values_of(model.parameters());
  append_values(numbers, model.buffers());
  return numbers;
}

}  // namespace

std::filesystem::path model_directory(const std::filesystem::path& path) {
  if (kind_of(path / kConfigFile) == FileKind::kFile) return path;
  require_file(kind_of(path) == FileKind::kDirectory, path.string(), "is no directory");
  const std::vector<std::int64_t> steps = checkpoint_steps(path);
  require_file(!steps.empty(), path.string(), "has no {} and no checkpoint of a run (step-000001)",
               kConfigFile);
  return path / checkpoint_name(steps.back());
}

ModelConfig read_model_config(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / kConfigFile;
  return parse_model_config(read_text(file), file.string());
}

std::shared_ptr<const Tokenizer> find_tokenizer(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / kTokenizerFile;
  return kind_of(file) == FileKind::kNothing ? nullptr : load_tokenizer(file);
}

std::shared_ptr<const Tokenizer> tokenizer_of(const std::filesystem::path& directory,
                                              std::int64_t vocabulary) {
  auto tokenizer = find_tokenizer(directory);
  if (!tokenizer) return vocabulary == kByteVocabulary ? byte_tokenizer() : nullptr;
  require_file(tokenizer->vocabulary() == vocabulary, (directory / kTokenizerFile).string(),
               "has {} pieces, but the model beside it a vocabulary of {}", tokenizer->vocabulary(),
               vocabulary);
  return tokenizer;
}

void write_tokenizer(const Tokenizer& tokenizer, const std::filesystem::path& directory) {
  if (!tokenizer.is_bytes()) write_text(directory / kTokenizerFile, tokenizer.file());
}

void load_parameters(Model& model, const std::filesystem::path& directory) {
  load_parts(all_values(model), directory / kSingleFile);
  model.parameters_changed();
}

Model load_model(const std::filesystem::path& directory, const ModelOptions& options) {
  Model model(read_model_config(directory), options);
  load_parameters(model, directory);
  return model;
}

void save_model(Model& model, const std::filesystem::path& directory) {
  write_safetensors(directory / kSingleFile, stored_parts(all_values(model)));
  write_text(directory / kConfigFile, to_json(model.config()));
}

}  // namespace switchyard::models
