#pragma once

// The command line as one table: it is the parser, --help, the echo in every JSON result, the bash
// completion and docs/cli.md.

#include <cstdint>
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace switchyard::tool {

enum Command : unsigned {
  kRun = 1U,
  kVerify = 2U,
  kBench = 4U,
  kDevices = 8U,
  kMakeCheckpoint = 16U,
  kReport = 32U,
  kCompletion = 64U,
  kHelp = 128U,
  kRouters = 256U,
  kSweep = 512U,
  kTrain = 1024U,
  kEvaluate = 2048U,
  kGenerate = 4096U,
  kStudy = 8192U,
  kTokenizer = 16384U,
};

/// Every option of every command. A member's initial value is the option's default; an empty
/// optional, text or list means "not given".
struct Options {
  Command command = kHelp;

  // A layer: from a checkpoint, a named model, or sizes.
  std::string checkpoint;
  std::optional<std::int64_t> layer;
  std::string family;
  std::string model;
  std::optional<std::int64_t> hidden, inner, num_experts, top_k, shared_experts, groups, top_groups;
  std::int64_t layers = 1;
  std::int64_t shards = 1;
  std::string dtype = "bf16";
  std::string packing = "plain";  ///< --weights of make-checkpoint.
  std::string activation;
  bool plain = false;

  // What goes in and out.
  std::string tokens, text, output, output_dtype, routing_input, routing_output;
  std::optional<std::int64_t> max_tokens;
  std::string output_directory;

  // How it runs.
  std::string compute;
  std::string backend = "auto";
  std::optional<std::int64_t> threads;
  std::string isa;
  std::string weights = "exact";
  std::optional<std::int64_t> ranks;
  std::string engine;
  std::string combine_wire;
  std::string dispatch_wire;
  std::int64_t timeout_ms = 10000;
  std::optional<std::int64_t> train_timeout_ms;
  bool batch_invariant = false;
  bool rank_invariant = false;
  std::string layout = "compact";
  std::optional<double> capacity_factor;
  std::string drop_policy;
  std::string router;
  bool check = false;
  bool routing_stats = false;
  bool json = false;
  bool verbose = false;
  std::int64_t seed = 17;
  std::optional<std::int64_t> warmup, iterations;

  // verify
  std::int64_t cases = 1000;
  std::vector<std::int64_t> ranks_list, threads_list;
  std::string verify_case, fault;
  std::string verify_pass = "forward";
  std::string verify_weights, verify_compute;
  std::int64_t soak = 0;

  // bench
  std::string suite;
  std::vector<std::string> variants;
  std::vector<std::int64_t> num_tokens;
  std::vector<std::string> stages;
  std::vector<std::string> experts;  ///< Numbers (E) or words (ffn, identity).
  std::string skew = "uniform";
  std::string data = "scaled";
  std::string pass = "forward", recompute;
  std::vector<std::string> peers;
  std::vector<std::string> only;
  std::string results, csv;
  double scale = 1;

  // sweep
  std::string grid;
  bool estimate = false;
  std::optional<std::int64_t> samples, prompt, generate;
  std::optional<double> tokens_per_second;

  // train, evaluate, generate
  std::string preset, config;
  std::vector<std::string> texts, valid, ngram_floor;
  std::string tokenizer;
  std::int64_t vocab = 4096;
  std::optional<std::int64_t> steps, sequences, decay;
  std::int64_t accumulate = 1;
  std::optional<double> learning_rate, balance, router_z;
  std::vector<std::string> freeze;
  std::string init, adapters;
  std::string schedule = "cosine";
  std::string on_nan = "stop";
  bool resume = false;
  std::int64_t save_every = 0, keep = 0, valid_every = 0;
  std::int64_t jobs = 1;
  std::string model_directory;
  bool leak_audit = false;
  std::string prompt_text, prompt_file, prompt_ids, logits;
  std::optional<std::int64_t> max_new_tokens;
  std::int64_t batch = 1;
  double temperature = 1, top_p = 1;
  bool ids = false;

  // study, report, completion, help
  std::vector<std::string> positional;
  bool markdown = false;

  // evaluate: what a model's routers have come to, and what it takes for what.
  bool specialisation = false;
  std::vector<std::string> against;
  std::string ablate;
  std::vector<std::string> sources;
  std::optional<std::int64_t> passages;
};

using Field = std::variant<bool Options::*, std::int64_t Options::*, double Options::*,
                           std::string Options::*, std::optional<std::int64_t> Options::*,
                           std::optional<double> Options::*, std::vector<std::string> Options::*,
                           std::vector<std::int64_t> Options::*>;

inline constexpr double kLargestNumber = 9007199254740992.0;

/// A row of the table.
struct OptionSpec {
  const char* name;   ///< "--top-k"; a name without dashes is positional.
  const char* value;  ///< What stands for the value in help: "K"; "" for a switch.
  const char* help;
  unsigned commands;  ///< Commands that have it.
  Field field;
  unsigned required = 0;  ///< Commands that cannot do without it.
  std::string words{};    ///< "a|b:N": the words allowed, see matches_words().
  double min = 0;         ///< Of numbers.
  double max = kLargestNumber;
  const char* old_name = "";  ///< "--wire": understood as well, and said nowhere.
};

/// Whether all words up to the next option belong to it: "FILE...".
[[nodiscard]] inline bool takes_many_words(const OptionSpec& spec) {
  return std::string_view(spec.value).ends_with("...");
}

struct CommandSpec {
  Command command;
  const char* name;
  const char* help;
  const char* example;
};

[[nodiscard]] std::span<const OptionSpec> option_table();
[[nodiscard]] std::span<const CommandSpec> command_table();
[[nodiscard]] const char* to_string(Command command);

/// Set one option from a word.
/// @throws UsageError that names the option, the word, and what would be right.
void set_option(Options& options, const OptionSpec& spec, std::string_view word);

/// The value as it is printed: "" where not given.
[[nodiscard]] std::string value_text(const Options& options, const OptionSpec& spec);

/// Read the command line. Empty: help has been printed to stdout, and nothing is left to do.
/// @throws UsageError.
[[nodiscard]] std::optional<Options> parse_command_line(int argc, const char* const* argv);

/// Every option of the command with its value, as JSON: the echo in results.
[[nodiscard]] nlohmann::json echo(const Options& options);

void print_help(std::ostream& out, std::optional<Command> command);
void print_markdown(std::ostream& out);
void print_bash_completion(std::ostream& out);

}  // namespace switchyard::tool
