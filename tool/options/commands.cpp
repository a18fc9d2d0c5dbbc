// The commands: what each is for, and an example.
#include "tool/options/options.hpp"

namespace switchyard::tool {
namespace {

const CommandSpec kCommands[] = {
    {kRun, "run", "run a layer of a checkpoint on tokens from a file, or on text",
     "switchyard run --checkpoint DIR --text book.txt --max-tokens 256 --check"},
    {kVerify, "verify", "check random layers, or a fault, against the reference in double",
     "switchyard verify --cases 1000 --ranks 1,2,3 --threads 1,2"},
    {kBench, "bench", "measure each stage against the limit of this machine",
     "switchyard bench --model olmoe-1b-7b --num-tokens 1,16,256"},
    {kSweep, "sweep",
     "measure a grid of cases, with an estimate before, and resume it where it ended",
     "switchyard sweep --suite capacity --results capacity.jsonl"},
    {kTrain, "train", "train a small Mixture-of-Experts language model on text",
     "switchyard train --preset smoke --text book.txt --output run"},
    {kTokenizer, "tokenizer",
     "learn a vocabulary of byte pairs from text, for train, by sentencepiece",
     "switchyard tokenizer --text book.txt --vocab 4096 --output book.model"},
    {kEvaluate, "evaluate",
     "measure a model on held-out text: loss by document, n-gram floors, leaks, its routers",
     "switchyard evaluate --model run --text held_out.txt --leak-audit"},
    {kGenerate, "generate", "continue a prompt by a model that was trained here, or a released one",
     "switchyard generate --model run --prompt 'All happy families' --max-new-tokens 40 "
     "--temperature 0.8"},
    {kStudy, "study",
     "train the arms of a study side by side, and say what their differences carry",
     "switchyard study studies/smoke.json --output smoke"},
    {kDevices, "devices", "show processors, instruction sets, caches, bandwidth and peak",
     "switchyard devices --json"},
    {kRouters, "routers", "list the routers with their options, properties and sources",
     "switchyard routers --json"},
    {kMakeCheckpoint, "make-checkpoint", "write a small checkpoint with made-up weights",
     "switchyard make-checkpoint --family olmoe --hidden 64 --inner 32 --experts 8 --top-k 2 "
     "--output DIR"},
    {kReport, "report",
     "turn result files into one HTML page: overview, bars, rooflines, plots, every line",
     "switchyard report results.jsonl --output report.html"},
    {kCompletion, "completion", "print the completion script of a shell",
     "switchyard completion bash > /etc/bash_completion.d/switchyard"},
    {kHelp, "help", "print this help, or docs/cli.md with --markdown",
     "switchyard help --markdown"},
};

}  // namespace

std::span<const CommandSpec> command_table() { return kCommands; }

const char* to_string(Command command) {
  for (const CommandSpec& spec : kCommands) {
    if (spec.command == command) return spec.name;
  }
  return "";
}

}  // namespace switchyard::tool
