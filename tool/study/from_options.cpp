#include "tool/study/from_options.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <string>
#include <tuple>

#include "checkpoint/files/mapped_file.hpp"
#include "switchyard/device.hpp"
#include "tool/models/common.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {

namespace fs = std::filesystem;

StudyConfig study_of(const Options& options) {
  const fs::path source = options.positional.front();
  StudyConfig study = parse_study(read_text(source), source);
  if (!options.texts.empty()) study.texts = options.texts;
  if (!options.valid.empty()) study.valid = options.valid;
  for (const auto& [files, key, option] :
       {std::tuple{&study.texts, "text", "--text"}, {&study.valid, "valid", "--valid"}}) {
    if (files->empty()) {
      throw UsageError("{}: the key '{}' is missing, and no {} FILE is given", source.string(), key,
                       option);
    }
  }
  check_held_out(study.texts, study.valid);
  return study;
}

std::vector<std::size_t> arms_of(const Options& options, const StudyConfig& study) {
  std::vector<std::size_t> arms(study.arms.size());
  std::iota(arms.begin(), arms.end(), std::size_t{0});
  if (options.only.empty()) return arms;
  for (const std::string& name : options.only) {
    try {
      static_cast<void>(study.find(name));
    } catch (const UsageError& error) {
      throw UsageError("--only: {}", error.what());
    }
  }
  std::erase_if(arms, [&](std::size_t arm) {
    return std::find(options.only.begin(), options.only.end(), study.arms[arm].name) ==
           options.only.end();
  });
  return arms;
}

int threads_of_a_run(const Options& options, const StudyConfig& study) {
  const auto jobs = static_cast<int>(options.jobs);
  const int threads = choose_threads(options);
  const bool on_gpus = jobs > 1 && choose_backend(options) == Backend::kCuda;
  const auto places = on_gpus ? static_cast<int>(std::ssize(find_gpus().list)) : threads;
  if (!on_gpus && jobs > threads) {
    throw UsageError("--jobs {}: there {} to be dealt out (--threads)", jobs,
                     threads == 1 ? "is 1 thread" : fmt::format("are {} threads", threads));
  }
  if (study.equal_time && jobs > (on_gpus ? places : 1)) {
    throw UsageError("--jobs {}: equal_time wants runs that have {} to themselves, want {}", jobs,
                     on_gpus ? "a GPU each" : "the machine", on_gpus ? places : 1);
  }
  return std::max(1, threads / jobs);
}

}  // namespace switchyard::tool
