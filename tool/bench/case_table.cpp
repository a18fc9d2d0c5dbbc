// What `bench` prints and appends.
#include "tool/bench/case_table.hpp"

#include <fmt/core.h>

#include <cstdio>
#include <utility>

#include "bench/peers/stored.hpp"
#include "core/check.hpp"
#include "core/printable.hpp"
#include "tool/options/words.hpp"
#include "tool/run/stage_table.hpp"

namespace switchyard::tool {
namespace {

const bench::StageFigures* find(const bench::CaseResult& result, std::string_view stage) {
  for (const bench::StageFigures& f : result.stages) {
    if (f.stage == stage) return &f;
  }
  return nullptr;
}

/// Pack and combine together, by the two ways in which their bytes are counted.
void print_pack_bandwidth(const nlohmann::json& figures) {
  fmt::print("pack+combine {}: {:.3g} GB/s strict, 2(K+1)HTb; {:.3g} GB/s by 2KHTb\n",
             human_time(figures.at("pair_us").get<double>()),
             figures.at("bw_strict_gbps").get<double>(), figures.at("bw_32k_gbps").get<double>());
}

/// What torch took, or why it did not.
void print_torch(const bench::CaseResult& result) {
  if (!result.more.is_object() || !result.more.contains("torch")) return;
  const nlohmann::json& torch = result.more.at("torch");
  fmt::print("peer torch {}:", printable(torch.at("version").get<std::string>()));
  if (torch.contains("error")) {
    fmt::print(" {}", printable(torch.at("error").get<std::string>()));
  }
  const char* comma = "";
  for (const auto& [stage, us] : result.torch_us) {
    fmt::print("{} {} {}", std::exchange(comma, ";"), stage, human_time(us));
  }
  fmt::print("\n");
}

/// The rate of a layer's useful products, beside dense ones in turns with it.
void print_useful_rate(const bench::CaseResult& result) {
  if (!result.more.is_object() || !result.more.contains("useful_tflops")) return;
  const nlohmann::json& more = result.more;
  fmt::print("useful {:.0f} TFLOP/s, {:.1f}% of the {:.0f} of dense products in turns with it\n",
             more.at("useful_tflops").get<double>(), 100 * more.at("share_of_dense").get<double>(),
             more.at("dense_flops_in_turns").get<double>() * 1e-12);
}

/// Soft-MoE's way back to the tokens beside top-k's.
void print_write_back(const bench::CaseResult& result) {
  if (!result.more.is_object() || !result.more.contains("write_back_over_combine")) return;
  const nlohmann::json& more = result.more;
  fmt::print("{} slots an expert, groups of {}{}: writing back takes {:.1f} x top-{}'s combine\n",
             more.at("slots").get<std::int64_t>(), more.at("group").get<std::int64_t>(),
             more.at("causal").get<bool>() ? ", causal" : "",
             more.at("write_back_over_combine").get<double>(), result.what.top_k);
}

/// Why a peer in a Python process was not measured, or what it took beside ours there. (What
/// SonicMoE took is in the verdict.)
void print_python_peer(const bench::CaseResult& result, const char* name) {
  if (!result.more.is_object() || !result.more.contains(name)) return;
  const nlohmann::json& peer = result.more.at(name);
  const auto version = peer.at("version").get<std::string>();
  if (peer.contains("error")) {
    fmt::print("peer {} {}: {}\n", name, version, peer.at("error").get<std::string>());
  } else if (bench::StoredPeer::has(name)) {
    const nlohmann::json& us = peer.at("median_us");
    fmt::print("{} {}: {}, ours {}, in turns in one process: {:.3f}x\n", name, version,
               human_time(us.at(name)), human_time(us.at("ours")), peer.at("ratio").get<double>());
  }
}

/// What a layer takes among others, beside "layer", which stands alone.
void print_chain(const bench::CaseResult& result) {
  if (!result.more.is_object() || !result.more.contains("chain")) return;
  const nlohmann::json& chain = result.more.at("chain");
  if (!chain.is_object() || !chain.contains("graph_us")) return;
  fmt::print(
      "a chain of {} layers that route: {} each in one graph, {} enqueued one by one (host {})\n",
      chain.at("layers").get<int>(), human_time(chain.at("graph_us").get<double>()),
      human_time(chain.at("eager_us").get<double>()),
      human_time(chain.at("host_us").get<double>()));
}

}  // namespace

std::string label_of(const bench::LayerCase& c) {
  return fmt::format("{}: T={} E={} K={} H={} I={}", c.name, c.num_tokens,
                     c.config.router.num_experts, c.config.router.top_k(), c.config.experts.hidden,
                     c.config.experts.inner);
}

std::vector<bench::CaseResult> run_case_at(const std::string& place, const bench::SuiteCase& c,
                                           const bench::Machine& machine,
                                           const bench::Limits& limits) {
  try {
    return run_suite_case(c, machine, limits);
  } catch (const Error& error) {
    throw at_place(place, error);
  }
}

BenchReport::BenchReport(const Options& options, const bench::Machine& machine,
                         const bench::Limits& limits)
    : options_(options), machine_(machine) {
  if (options.json) return;
  fmt::print("{}, {}: memory {}, f32 {}, bf16 {}, f16 {}\n", machine.cpu, machine.isa,
             human_count(limits.bandwidth, "B/s"), human_count(limits.flops_f32, "FLOP/s"),
             human_count(limits.flops_bf16, "FLOP/s"), human_count(limits.flops_f16, "FLOP/s"));
}

void BenchReport::add(const bench::CaseResult& result) { add(std::vector{result}); }

void BenchReport::add(const std::vector<bench::CaseResult>& results) {
  record(results);
  if (options_.json) return;
  for (const bench::CaseResult& result : results) print_case(result);
}

void BenchReport::conclude(const bench::CaseResult& result) {
  record(result);
  const bool holds = result.more.value("holds", result.holds);
  if (!options_.json) fmt::print("\n{}: {}\n", holds ? "holds" : "MISS", result.verdict);
}

void BenchReport::record(const bench::CaseResult& result) { record(std::vector{result}); }

void BenchReport::record(const std::vector<bench::CaseResult>& results) {
  std::vector<nlohmann::json> lines;
  for (const bench::CaseResult& result : results) {
    for (nlohmann::json& line : to_lines(result, machine_)) lines.push_back(std::move(line));
  }
  if (!options_.results.empty()) bench::append_lines(options_.results, lines);
  if (!options_.json) return;
  for (const nlohmann::json& line : lines) lines_.push_back(line);
}

void BenchReport::print_case(const bench::CaseResult& result) const {
  const bench::Case& c = result.what;
  fmt::print("\n{}: T={} E={} K={} H={} I={} {} {} {}, {} rank{}, {} thread{}{}{}\n", c.name,
             c.num_tokens, c.num_experts, c.top_k, c.hidden, c.inner, c.compute, c.layout, c.skew,
             c.num_ranks, c.num_ranks == 1 ? "" : "s", c.num_threads, c.num_threads == 1 ? "" : "s",
             c.batch_invariant ? ", batch_invariant" : "",
             c.cold ? "" : ", weights fit into the caches");
  print_stage_table(result.stages);
  if (find(result, "layer") != nullptr) {
    fmt::print(
        "outside of the experts: {:.1f}%; load CV {:.3f} (uniform random {:.3f}), max/mean {:.2f}, "
        "dropped {:.2f}%\n",
        100 * result.routing_share, result.load.cv, result.load.cv_floor, result.load.max_over_mean,
        100 * result.load.dropped);
  }
  if (c.experts == "identity") print_pack_bandwidth(result.more);
  for (const auto& [name, us] : result.peers) fmt::print("peer {}: {}\n", name, human_time(us));
  print_chain(result);
  print_write_back(result);
  print_torch(result);
  print_useful_rate(result);
  for (const char* name : {"sonicmoe", "triton-mxfp4", "deepgemm"}) {
    print_python_peer(result, name);
  }
  if (!result.verdict.empty()) {
    const bool holds =
        result.more.is_object() ? result.more.value("holds", result.holds) : result.holds;
    fmt::print("{}: {}\n", holds ? "holds" : "MISS", result.verdict);
  }
  std::fflush(stdout);
}

void BenchReport::finish() {
  if (!options_.json) return;
  nlohmann::json all = {{"schema", 1}, {"options", echo(options_)}, {"lines", lines_}};
  all.update(notes_);
  fmt::print("{}\n", all.dump(2));
}

}  // namespace switchyard::tool
