// The one table of options; that of commands is beside it.
#include "checkpoint/families/family.hpp"
#include "comm/ranks/engine_words.hpp"
#include "switchyard/models/config.hpp"
#include "switchyard/models/optimizer.hpp"
#include "switchyard/models/tokenizer.hpp"
#include "tool/options/options.hpp"
#include "tool/options/words.hpp"

namespace switchyard::tool {
namespace {

constexpr unsigned kSizes = kMakeCheckpoint | kBench;
constexpr unsigned kLayerRuns = kRun | kBench;
constexpr unsigned kMeasures = kRun | kBench | kSweep;
constexpr unsigned kModels = kTrain | kEvaluate | kGenerate;
constexpr double kMost = 1 << 20;

/// "a|b".
template <class Range, class Name>
std::string joined(const Range& range, Name name) {
  std::string all;
  for (const auto& one : range) all.append(all.empty() ? "" : "|").append(name(one));
  return all;
}

using Schedule = models::Schedule::Kind;
constexpr Schedule kSchedules[] = {Schedule::kConstant, Schedule::kCosine, Schedule::kWsd};
const std::string kScheduleNames = joined(kSchedules, [](Schedule k) { return to_string(k); });
const std::string kPresetNames = joined(models::presets(), [](const auto& p) { return p.name; });
const std::string kComputed = words_of({DType::kF32, DType::kBF16, DType::kF16});
const std::string kStoredWeights = "exact|q8|fp8|mxfp4|int4|nvfp4";
const std::string kSent = words_of({DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3});

const OptionSpec kOptions[] = {
    // The layer.
    {"--checkpoint", "PATH", "directory or .safetensors file of a checkpoint", kRun | kBench,
     &Options::checkpoint, kRun},
    {"--layer", "N", "layer of the checkpoint; without it the first that is a MoE layer", kRun,
     &Options::layer, 0, "", 0, kMost},
    {"--family", "NAME", "family of the checkpoint", kMakeCheckpoint, &Options::family,
     kMakeCheckpoint, family_names()},
    {"--model", "NAME", "take the sizes and the router of this public model", kSizes,
     &Options::model},
    {"--model", "DIR",
     "directory of a model, of train or of transformers; or a run of train: its newest checkpoint",
     kEvaluate | kGenerate, &Options::model_directory, kEvaluate | kGenerate},
    {"--preset", "NAME",
     "a model with the numbers that it is trained by; without it and --config smoke", kTrain,
     &Options::preset, 0, kPresetNames},
    {"--config", "FILE", "the model from a config.json, as checkpoints of train have it", kTrain,
     &Options::config},
    {"--hidden", "H", "hidden size", kSizes, &Options::hidden, 0, "", 1, kMost},
    {"--inner", "I", "width of an expert", kSizes, &Options::inner, 0, "", 1, kMost},
    {"--experts", "E", "number of experts", kMakeCheckpoint, &Options::num_experts, 0, "", 1,
     kMost},
    {"--experts", "E|KIND", "number of experts; or ffn, or identity: y = x, no weights", kBench,
     &Options::experts, 0, "N|ffn|identity"},
    {"--top-k", "K", "experts of each token", kSizes, &Options::top_k, 0, "", 1, kMost},
    {"--shared-experts", "S", "shared experts", kSizes, &Options::shared_experts, 0, "", 0, 1024},
    {"--groups", "G", "groups of experts", kSizes, &Options::groups, 0, "", 1, kMost},
    {"--top-groups", "N", "groups that a token may choose from", kSizes, &Options::top_groups, 0,
     "", 1, kMost},
    {"--layers", "N", "number of layers", kMakeCheckpoint, &Options::layers, 0, "", 1, 1024},
    {"--shards", "N", "number of files that the tensors are spread over", kMakeCheckpoint,
     &Options::shards, 0, "", 1, 1024},
    {"--dtype", "D",
     "type of the weights; of gpt-oss bf16 is MXFP4; fp8, with scales of 128 x 128, is for "
     "deepseek-v3 and qwen3-moe",
     kMakeCheckpoint, &Options::dtype, 0, kSent},
    {"--activation", "NAME", "nonlinearity of the experts; without it the model's, or silu", kBench,
     &Options::activation, 0, words_of<Activation>()},
    {"--plain", "", "experts without a gate matrix", kBench, &Options::plain},

    // In and out.
    {"--tokens", "FILE[:TENSOR]", "tokens [T,H] from a .npy or .safetensors file", kRun,
     &Options::tokens},
    {"--text", "FILE", "take the bytes of a file as tokens, through the checkpoint's embedding",
     kRun, &Options::text},
    {"--text", "FILE...", "text; each file is a document, or those between its NUL bytes",
     kTrain | kEvaluate, &Options::texts, kTrain | kEvaluate},
    {"--text", "FILE...", "text to learn from; what of it is not UTF-8 is not counted", kTokenizer,
     &Options::texts, kTokenizer},
    {"--vocab", "N", "pieces of the vocabulary, 257 of them for bytes and what is unknown",
     kTokenizer, &Options::vocab, 0, "", models::kSmallestVocabulary, kMost},
    {"--valid", "FILE...", "held-out text, of which the loss is logged", kTrain, &Options::valid},
    {"--tokenizer", "FILE",
     "a lossless sentencepiece model whose pieces are the tokens; without it that of the run which "
     "goes on or of --init, else tokens are bytes",
     kTrain, &Options::tokenizer},
    {"--text", "FILE...", "text to train on; without it the study's", kStudy, &Options::texts},
    {"--valid", "FILE...", "held-out text, all losses are of it; without it the study's", kStudy,
     &Options::valid},
    {"--max-tokens", "T", "use at most so many tokens", kRun, &Options::max_tokens, 0, "", 0, 1e9},
    {"--output", "FILE", "write the layer's result [T,H] to a .npy or .safetensors file", kRun,
     &Options::output},
    {"--output", "DIR", "directory to write", kMakeCheckpoint, &Options::output_directory,
     kMakeCheckpoint},
    {"--output", "DIR", "directory of the run: checkpoints step-NNNNNN, and log.jsonl", kTrain,
     &Options::output_directory, kTrain},
    {"--output", "DIR", "directory of the study: its runs, study.json and results.jsonl", kStudy,
     &Options::output_directory, kStudy},
    {"--output", "FILE", "sentencepiece model to write", kTokenizer, &Options::output, kTokenizer},
    {"--output", "FILE", "HTML page to write", kReport, &Options::output, kReport},
    {"--output-dtype", "D", "type of the result; without it the tokens' (bf16: .safetensors only)",
     kRun, &Options::output_dtype, 0, kComputed},
    {"--routing-input", "FILE", "skip the router: `expert` and `weight` of this .safetensors file",
     kRun, &Options::routing_input},
    {"--routing-output", "FILE", "write what routing decided to a .safetensors file", kRun,
     &Options::routing_output},

    // How it runs.
    {"--compute", "D",
     "type that is computed in; without it the weights'; fp8, on cuda with weights stored in fp8: "
     "bf16, but many rows of an expert are multiplied in e4m3",
     kLayerRuns, &Options::compute, 0, kSent},
    {"--compute", "D", "of all layers with --weights fp8 on cuda: many rows in e4m3", kVerify,
     &Options::verify_compute, 0, "fp8"},
    {"--compute", "D",
     "type that the experts' products are computed in, bf16 also the dense ones of a model of "
     "train; without it f32",
     kModels, &Options::compute, 0, kComputed},
    {"--backend", "B", "where it runs; auto is the CPU", kMeasures | kVerify | kModels | kStudy,
     &Options::backend, 0, "auto|" + words_of<Backend>()},
    {"--threads", "N", "CPU threads of all ranks of this process; without it one per core",
     kMeasures | kDevices | kModels | kStudy, &Options::threads, 0, "", 1, 4096},
    {"--threads", "LIST", "numbers of threads to mix", kVerify, &Options::threads_list, 0, "", 1,
     256},
    {"--isa", "NAME", "instruction set of the CPU kernels; without it the one that reaches most",
     kMeasures | kVerify | kDevices | kModels | kStudy, &Options::isa},
    {"--weights", "W",
     "how experts are stored: plain, as --dtype says; int4 as gptq, awq or compressed-tensors "
     "(pack-quantized) have it; NVFP4 of compressed-tensors (nvfp4-pack-quantized) or modelopt",
     kMakeCheckpoint, &Options::packing, 0, words_of<WeightPacking>()},
    {"--weights", "W",
     "exact: numbers, quantised ones dequantised as they are read (dequantised says the same); "
     "stored: codes and scales as they are, the same bits in less memory; or q8: int8 with a scale "
     "per 32 values (an approximation, off by about 1%)",
     kRun | kEvaluate | kGenerate, &Options::weights, 0, "exact|stored|dequantised|q8"},
    {"--weights", "W",
     "made-up weights: numbers (exact), as checkpoints in fp8 (128 x 128), MXFP4, int4 (groups of "
     "32 to 128) or NVFP4 store them and computed with so, or q8: int8 with a scale per 32 values "
     "(off by about 1%), on a CPU; of --suite load also stored: as the checkpoint has them",
     kBench, &Options::weights, 0, kStoredWeights + "|stored"},
    {"--weights", "W",
     "of all layers: numbers (exact), as fp8, MXFP4, int4 (of all forms) or NVFP4 are stored, or "
     "q8, on a CPU; without it mostly numbers",
     kVerify, &Options::verify_weights, 0, kStoredWeights},
    {"--ranks", "R", "ranks that share the experts; without it 1, or the launcher's world",
     kLayerRuns, &Options::ranks, 0, "", 1, 64},
    {"--ranks", "R",
     "ranks that share experts and sequences; without it 1, or the launcher's world", kTrain,
     &Options::ranks, 0, "", 1, 64},
    {"--ranks", "R", "ranks that share the work; so far 1", kModels & ~kTrain, &Options::ranks, 0,
     "", 1, 64},
    {"--ranks", "LIST", "numbers of ranks to mix", kVerify, &Options::ranks_list, 0, "", 1, 64},
    {"--engine", "E", "what moves data between ranks; without it threads, or the launcher's",
     kMeasures | kVerify, &Options::engine, 0,
     std::string(kThreadsEngine) + "|" + kMpiEngine + "|" +
         words_of({DeviceEngine::kNccl, DeviceEngine::kNcclPairs})},
    {"--combine-wire", "D", "type of partial sums between ranks; without it f32 on the CPU",
     kLayerRuns, &Options::combine_wire, 0, kSent, 0, kLargestNumber, "--wire"},
    {"--dispatch-wire", "D",
     "type of tokens on the way to the experts, one rank's too; without it the compute type",
     kLayerRuns, &Options::dispatch_wire, 0, kSent},
    {"--timeout", "MS", "milliseconds that a rank waits for another", kMeasures | kVerify,
     &Options::timeout_ms, 0, "", 1, 86400000},
    {"--timeout", "MS", "milliseconds that a rank waits for another; without it ten minutes",
     kTrain, &Options::train_timeout_ms, 0, "", 1, 86400000},
    {"--batch-invariant", "", "a token's bits do not depend on the rest of the batch", kLayerRuns,
     &Options::batch_invariant},
    {"--rank-invariant", "", "the same bits for any number of ranks, whatever the wire", kLayerRuns,
     &Options::rank_invariant},
    {"--layout", "L", "how the experts' rows lie", kLayerRuns, &Options::layout, 0, layout_words()},
    {"--capacity-factor", "C", "slots of an expert: C*T*K/E; without it nothing is dropped",
     kLayerRuns | kTrain, &Options::capacity_factor, 0, "", 1e-6, 1e6},
    {"--drop-policy", "P",
     "which assignments go when an expert is full; without it token (needs --capacity-factor)",
     kLayerRuns | kTrain, &Options::drop_policy, 0, words_of<DropPolicy>()},
    {"--router", "NAME[:OPTION=VALUE,...]",
     "route by this rule instead of the model's; see switchyard routers", kLayerRuns | kTrain,
     &Options::router},
    {"--router", "NAME[:OPTION=VALUE,...]|all",
     "router of all layers; all: each of switchyard routers in turn; without it mostly top-k",
     kVerify, &Options::router},
    {"--check", "", "compare routing, plan and output with the reference in double", kRun,
     &Options::check},
    {"--routing-stats", "",
     "print statistics of the routing: load, entropies, drops, types of tokens", kRun,
     &Options::routing_stats},
    {"--seed", "S", "seed of everything that is made up",
     kMakeCheckpoint | kVerify | kBench | kSweep, &Options::seed},
    {"--seed", "S", "seed of initial values, batches and routers", kTrain, &Options::seed},
    {"--seed", "S", "seed of what is drawn", kGenerate, &Options::seed},
    {"--seed", "S", "seed of permutations and shuffles", kEvaluate, &Options::seed},
    {"--warmup", "N", "runs before the measured ones", kMeasures, &Options::warmup, 0, "", 0, 1e6},
    {"--iterations", "N", "measured runs", kMeasures, &Options::iterations, 0, "", 1, 1e6},

    // verify
    {"--cases", "N", "random layers to check", kVerify, &Options::cases, 0, "", 1, 1e9},
    {"--pass", "P",
     "what is checked of a layer; backward: all gradients, where there is a way back", kVerify,
     &Options::verify_pass, 0, "forward|backward|both"},
    {"--case", "JSON", "check this one, as a miss prints it", kVerify, &Options::verify_case},
    {"--fault", "F", "let a rank fail, and check that all leave in time and recover", kVerify,
     &Options::fault, 0, "absent|late|throw|corrupt-count"},
    {"--soak", "N",
     "exchanges on the same objects, compared by bits, without growth of memory; 0: "
     "cases instead",
     kVerify, &Options::soak, 0, "", 0, 1e9},

    // bench
    {"--suite", "NAME", "a named grid of shapes", kBench, &Options::suite, 0,
     "topk|pack|layer|forward|training|fused-moe|cpu-experts|load|soft-moe|chain|generate|all2all|"
     "fixed-size"},
    {"--only", "LIST", "of a suite of layers the cases of these names; of generate, presets",
     kBench, &Options::only},
    {"--variant", "LIST",
     "of --suite all2all: reference, sorted, flat, bucketed, native; without it all, on GPUs the "
     "last three",
     kBench, &Options::variants},
    {"--num-tokens", "LIST", "numbers of tokens, all ranks together; without it 1,16,256", kBench,
     &Options::num_tokens, 0, "", 0, 1e8},
    {"--stages", "LIST", "print only these stages", kBench, &Options::stages},
    {"--skew", "S", "who chooses whom: uniform, Zipf weights, or a share F with a hot expert",
     kBench, &Options::skew, 0, "uniform|zipf:S|hot:F"},
    {"--data", "D",
     "of --suite fused-moe: weights scaled by 1/sqrt(fan-in), or as published: nothing is scaled, "
     "ids may repeat, 5% of the outputs may differ",
     kBench, &Options::data, 0, "scaled|published"},
    {"--pass", "P",
     "what is timed: forward, the same with all that training keeps, every gradient, or both (of "
     "--suite training by itself both)",
     kBench, &Options::pass, 0, "forward|forward-train|backward|both"},
    {"--recompute", "R", "what training does not keep but makes again; without it none",
     kBench | kTrain, &Options::recompute, 0, words_of<Recompute>()},
    {"--peer", "NAME",
     "time this peer in the same run: onednn, torch, sonicmoe (of --suite forward and training), "
     "triton-mxfp4 (of --weights mxfp4), deepgemm (of --weights fp8), or mpi (exchanges; on GPUs "
     "nccl); may be given again",
     kBench, &Options::peers},
    {"--scale", "F", "divide the suite's tokens and sizes by F (small machines)", kBench | kSweep,
     &Options::scale, 0, "", 1, 1024},
    {"--results", "FILE", "append one JSON object per line", kBench | kSweep | kTrain,
     &Options::results},
    {"--csv", "FILE", "write the table as CSV", kBench, &Options::csv},

    // sweep
    {"--suite", "NAME", "a named grid: of data/sweeps.json, or pack, topk and layer of bench",
     kSweep, &Options::suite, 0,
     "pack|capacity|topk|layer|routers|padding|strong-scaling|weak-scaling"},
    {"--grid", "FILE",
     "a grid of one's own, in JSON: bench's options with lists of values, and work: layer, pack, "
     "router or capacity",
     kSweep, &Options::grid},
    {"--estimate", "", "say what time and memory it will take, and measure nothing", kSweep,
     &Options::estimate},
    {"--samples", "N", "with --estimate: of texts instead of a grid, so many", kSweep,
     &Options::samples, 0, "", 1},
    {"--prompt", "L", "tokens that each of them begins with", kSweep, &Options::prompt, 0, "", 0,
     1e9},
    {"--generate", "L", "tokens that each of them gets", kSweep, &Options::generate, 0, "", 0, 1e9},
    {"--tokens-per-second", "X", "rate of both", kSweep, &Options::tokens_per_second, 0, "", 1e-9,
     1e15},

    // train
    {"--steps", "N", "steps of the whole run; without it the preset's", kTrain, &Options::steps, 0,
     "", 1, 1e9},
    {"--sequences", "N", "sequences of a step; without it the preset's, or 16", kTrain,
     &Options::sequences, 0, "", 1, kMost},
    {"--accumulate", "N", "calls that a step's sequences are cut into: less memory", kTrain,
     &Options::accumulate, 0, "", 1, kMost},
    {"--learning-rate", "X", "at its peak; without it the preset's, or 0.001", kTrain,
     &Options::learning_rate, 0, "", 0, 1e30},
    {"--schedule", "NAME", "how the learning rate falls behind the warm-up", kTrain,
     &Options::schedule, 0, kScheduleNames},
    {"--warmup", "N", "steps with a rising learning rate; without it the preset's, or a tenth",
     kTrain, &Options::warmup, 0, "", 0, 1e9},
    {"--decay", "N",
     "of --schedule wsd: last steps, with a falling learning rate; without it a tenth", kTrain,
     &Options::decay, 0, "", 0, 1e9},
    {"--balance", "X", "coefficient of the routers' balance loss; without it the model's", kTrain,
     &Options::balance, 0, "", 0, 1e6},
    {"--z", "X", "coefficient of the routers' z-loss; without it the model's", kTrain,
     &Options::router_z, 0, "", 0, 1e6},
    {"--freeze", "LIST",
     "groups of parameters that stay as they begin: router, experts, embedding, norm, attention, "
     "dense, head",
     kTrain, &Options::freeze},
    {"--adapters", "perft[:OPTION=VALUE,...]",
     "train adapters alone, beside the model of --init (needs --init); see switchyard routers",
     kTrain, &Options::adapters},
    {"--init", "DIR", "a run or a checkpoint to begin with the weights of; without it random ones",
     kTrain, &Options::init},
    {"--on-nan", "WORD",
     "where a number is not finite: end before anything is changed, or leave out the step", kTrain,
     &Options::on_nan, 0, "stop|skip"},
    {"--resume", "", "go on where the newest checkpoint of --output ends, with the same bytes",
     kTrain, &Options::resume},
    {"--save-every", "N", "steps between checkpoints; 0: only at the end", kTrain,
     &Options::save_every, 0, "", 0, 1e9},
    {"--keep", "N", "newest checkpoints that stay; 0: all", kTrain, &Options::keep, 0, "", 0, 1e9},
    {"--valid-every", "N", "steps between losses of --valid; 0: only at the end", kTrain,
     &Options::valid_every, 0, "", 0, 1e9},
    {"--estimate", "", "say what time and memory it will take, and train nothing", kTrain,
     &Options::estimate},

    // study
    {"--only", "LIST", "train only these arms", kStudy, &Options::only},
    {"--jobs", "N", "runs at a time: the GPUs take turns, on a CPU the threads are dealt out",
     kStudy, &Options::jobs, 0, "", 1, 1024},
    {"--estimate", "", "say how long it will take, and train nothing", kStudy, &Options::estimate},

    // evaluate
    {"--ngram-floor", "FILE...", "also what byte n-grams counted in this text lose, orders 1 to 8",
     kEvaluate, &Options::ngram_floor},
    {"--ids", "", "the files of --text have numbers of tokens, for vocabularies that are not bytes",
     kEvaluate, &Options::ids},
    {"--leak-audit", "",
     "also whether logits depend on later tokens or other sequences: 1 if they do", kEvaluate,
     &Options::leak_audit},

    {"--specialisation", "",
     "also what the routers of each layer have specialised in: information about tokens beside "
     "chance and an untrained router, loads, pairs (--json: specialisation)",
     kEvaluate, &Options::specialisation},
    {"--against", "DIR...",
     "with --specialisation: other checkpoints of the model, or a run of train: all of its before "
     "this one; saturation and churn",
     kEvaluate, &Options::against},
    {"--ablate", "HOW",
     "also what is lost with routing shuffled, and with each expert left out: of its weight drop "
     "it, or renormalise the token's others (--json: ablations)",
     kEvaluate, &Options::ablate, 0, "drop|renormalise"},
    {"--sources", "FILE...",
     "also which of these a passage of --text is from, by likelihood: as many files, the first one "
     "that the first of --text is from, and so on (--json: attribution)",
     kEvaluate, &Options::sources},
    {"--passages", "N", "with --sources: passages of each; without it 64", kEvaluate,
     &Options::passages, 0, "", 1, 1e6},
    {"--max-tokens", "T",
     "tokens of the text that --specialisation and --ablate read, in windows at even distances; "
     "without it 32768 and "
     "16384",
     kEvaluate, &Options::max_tokens, 0, "", 1, 1e9},

    // generate
    {"--batch-invariant", "",
     "a sequence's tokens do not depend on the rest of the batch; on a GPU one sequence after the "
     "other",
     kGenerate, &Options::batch_invariant},
    {"--prompt", "TEXT", "what is continued", kGenerate, &Options::prompt_text},
    {"--prompt-file", "FILE", "the same, the bytes of a file", kGenerate, &Options::prompt_file},
    {"--prompt-ids", "LIST", "the same as numbers of tokens", kGenerate, &Options::prompt_ids},
    {"--logits", "FILE", "also write the logits behind each token of the prompt, [T,V], .npy",
     kGenerate, &Options::logits},
    {"--max-new-tokens", "N",
     "tokens to make; without it 128, or fewer where the model has no more positions", kGenerate,
     &Options::max_new_tokens, 0, "", 1, 1e9},
    {"--temperature", "X", "divides the logits; 0: always the likeliest token", kGenerate,
     &Options::temperature, 0, "", 0, 1e6},
    {"--top-k", "N", "draw from the N likeliest; without it from all", kGenerate, &Options::top_k,
     0, "", 1, kMost},
    {"--top-p", "P", "draw from the likeliest that together reach this probability", kGenerate,
     &Options::top_p, 0, "", 1e-9, 1},
    {"--batch", "N", "sequences behind the same prompt", kGenerate, &Options::batch, 0, "", 1,
     65536},
    {"--ids", "", "print numbers of tokens, not text", kGenerate, &Options::ids},

    {"--verbose", "",
     "say on stderr, for every call of a stage, what runs it, for which sizes, and why nothing "
     "else",
     kMeasures, &Options::verbose},
    {"--json", "", "print JSON to stdout instead of a table",
     kRun | kVerify | kBench | kSweep | kModels | kTokenizer | kStudy | kDevices | kRouters,
     &Options::json},
    {"--markdown", "", "print docs/cli.md", kHelp, &Options::markdown},
    {"FILE", "FILE", "the study, in JSON", kStudy, &Options::positional, kStudy},
    {"FILE", "FILE...",
     "result files of `bench --results`, documents of `run --json`; or one directory of a study",
     kReport, &Options::positional, kReport},
    {"SHELL", "SHELL", "bash", kCompletion, &Options::positional, kCompletion, "bash"},
    {"COMMAND", "COMMAND", "the command to explain", kHelp, &Options::positional},
};

}  // namespace

std::span<const OptionSpec> option_table() { return kOptions; }

}  // namespace switchyard::tool
