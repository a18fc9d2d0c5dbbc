// What `run` prints: for people a table, for programs JSON.
#include "tool/run/stage_table.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "bench/measure/results.hpp"
#include "tool/options/words.hpp"

namespace switchyard::tool {
namespace {

using bench::StageFigures;

nlohmann::json to_json(const StageFigures& f) {
  return {{"stage", f.stage},
          {"samples", f.samples},
          {"median_us", f.us.median},
          {"p95_us", f.us.p95},
          {"bytes", f.work.bytes},
          {"flops", f.work.flops},
          {"gbps", f.gbps()},
          {"gflops", f.gflops()},
          {"limit_us", f.limit_us},
          {"limit_by", f.limit_by},
          {"share", f.share},
          {"share_of_layer", f.share_of_layer},
          {"implementation", f.implementation}};
}

void print_json(const RunReport& report, const std::vector<StageFigures>& stages) {
  const LayerConfig& config = report.args.model->config;
  const bench::LayerRunResult& result = report.result;
  const bench::Load load = bench::load_of(result.record.counts, result.record.counts_kept);
  nlohmann::json out;
  out["schema"] = 1;
  out["options"] = echo(report.options);
  out["layer"] = {{"family", report.family},
                  {"index", report.layer},
                  {"E", config.router.num_experts},
                  {"K", config.router.top_k()},
                  {"H", config.experts.hidden},
                  {"I", config.experts.inner},
                  {"compute", to_string(result.compute)}};
  out["tokens"] = result.rank_begin.back();
  out["ranks"] = report.args.num_ranks;
  out["engine"] = report.engine;
  for (const StageFigures& stage : stages) out["stages"].push_back(to_json(stage));
  out["limits"] = {{"bandwidth", report.limits.bandwidth},
                   {"flops_f32", report.limits.flops_f32},
                   {"flops_compute", report.limits.flops(result.compute)}};
  out["rows"] = {{"used", result.rows_used}, {"executed", result.rows_executed}};
  out["load"] = bench::load_json(load);
  if (report.routing) {
    out["routing"] = to_json(*report.routing);
    out["routing"]["layer"] = report.layer;
  }
  if (report.args.num_ranks > 1) {
    out["traffic"] = {{"rows", result.traffic.rows},
                      {"payload_bytes", result.traffic.payload_bytes},
                      {"meta_bytes", result.traffic.meta_bytes}};
  }
  if (report.verdict) {
    const Verdict& v = *report.verdict;
    out["check"] = {{"holds", v.holds},
                    {"miss", v.miss},
                    {"tokens_routed", v.tokens_routed},
                    {"tokens_computed", v.tokens_computed},
                    {"largest_error", v.largest_error},
                    {"largest_bound", v.largest_bound}};
  }
  fmt::print("{}\n", out.dump(2));
}

void print_traffic(const bench::LayerRunResult& result, int num_ranks) {
  fmt::print("\nrows sent, from (down) to (across):\n      ");
  const auto ranks = static_cast<std::size_t>(num_ranks);
  for (std::size_t to = 0; to < ranks; ++to) fmt::print("{:>8}", to);
  fmt::print("\n");
  for (std::size_t from = 0; from < ranks; ++from) {
    fmt::print("{:>6}", from);
    for (std::size_t to = 0; to < ranks; ++to) {
      fmt::print("{:>8}", result.traffic.rows[from * ranks + to]);
    }
    fmt::print("\n");
  }
  const auto sum = [](const std::vector<std::int64_t>& v) {
    return static_cast<double>(std::accumulate(v.begin(), v.end(), std::int64_t{0}));
  };
  fmt::print("payload {}, meta {}\n", human_count(sum(result.traffic.payload_bytes), "B"),
             human_count(sum(result.traffic.meta_bytes), "B"));
}

void print_verdict(const Verdict& verdict) {
  if (!verdict.holds) {
    fmt::print("\ncheck: FAILED: {}\n", verdict.miss);
    return;
  }
  fmt::print(
      "\ncheck: holds: routing of {} tokens and output of {} within the bounds of the reference\n"
      "       (largest error {:.2g}, largest bound {:.2g})\n",
      verdict.tokens_routed, verdict.tokens_computed, verdict.largest_error, verdict.largest_bound);
}

void print_tables(const RunReport& report, const std::vector<StageFigures>& stages) {
  const LayerConfig& config = report.args.model->config;
  const bench::LayerRunResult& result = report.result;
  const bench::Load load = bench::load_of(result.record.counts, result.record.counts_kept);
  fmt::print("{} layer {}: E={} K={} H={} I={}, {}, {} tokens, {} rank{} ({}), {} thread{}\n",
             report.family, report.layer, config.router.num_experts, config.router.top_k(),
             config.experts.hidden, config.experts.inner, to_string(result.compute),
             result.rank_begin.back(), report.args.num_ranks, report.args.num_ranks == 1 ? "" : "s",
             report.engine, report.args.num_threads, report.args.num_threads == 1 ? "" : "s");
  fmt::print("limits: memory {}, f32 {}, {} {}\n\n", human_count(report.limits.bandwidth, "B/s"),
             human_count(report.limits.flops_f32, "FLOP/s"), to_string(result.compute),
             human_count(report.limits.flops(result.compute), "FLOP/s"));
  print_stage_table(stages);
  fmt::print(
      "\nload: CV {:.3f} (uniform random {:.3f}), max/mean {:.2f}, dropped {:.2f}%; rows used {}, "
      "computed {}\n",
      load.cv, load.cv_floor, load.max_over_mean, 100 * load.dropped, result.rows_used,
      result.rows_executed);
  if (report.routing) print_routing_stats(*report.routing);
  if (report.args.num_ranks > 1) print_traffic(result, report.args.num_ranks);
  if (report.verdict) print_verdict(*report.verdict);
}

}  // namespace

void print_stage_table(const std::vector<StageFigures>& stages) {
  fmt::print("{:<18}{:>10}{:>10}{:>8}{:>9}{:>9}{:>10} {:<8}{:>7}\n", "stage", "median", "p95",
             "layer", "GB/s", "GFLOP/s", "limit", "by", "share");
  for (const StageFigures& f : stages) {
    fmt::print("{:<18}{:>10}{:>10}{:>7.1f}%{:>9.3g}{:>9.3g}{:>10} {:<8}{:>6.1f}%\n", f.stage,
               human_time(f.us.median), human_time(f.us.p95), 100 * f.share_of_layer, f.gbps(),
               f.gflops(), human_time(f.limit_us), f.limit_by, 100 * f.share);
  }
}

void print_report(const RunReport& report) {
  const auto stages = bench::judge(report.result.stages, report.limits, report.result.compute);
  if (report.options.json) {
    print_json(report, stages);
  } else {
    print_tables(report, stages);
  }
}

}  // namespace switchyard::tool
