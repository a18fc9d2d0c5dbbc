// A rank's result as bytes.
#include "bench/measure/rank_result.hpp"

#include "layer/packed_result.hpp"

namespace switchyard::bench {
using nlohmann::json;

json pack_times(const StageTimes& times) {
  json stages = json::array();
  for (const StageSamples& stage : times.samples()) {
    stages.push_back({{"stage", stage.stage},
                      {"us", pack_array(stage.us)},
                      {"implementation", stage.implementation},
                      {"work", {stage.work.bytes, stage.work.flops, stage.work.flops_executed}}});
  }
  return stages;
}

StageTimes times_from(const json& packed) {
  std::vector<StageSamples> samples;
  for (const json& stage : packed) {
    const json& work = stage.at("work");
    samples.push_back({.stage = stage.at("stage"),
                       .work = {.bytes = work[0], .flops = work[1], .flops_executed = work[2]},
                       .us = array_of<double>(stage.at("us")),
                       .implementation = stage.at("implementation")});
  }
  return StageTimes(std::move(samples));
}

std::vector<std::byte> to_bytes(const RankResult& r) {
  return pack_message({{"out", pack_array(r.out)},
                       {"record", pack_record(r.record)},
                       {"traffic", pack_traffic(r.traffic)},
                       {"used", r.rows_used},
                       {"executed", r.rows_executed},
                       {"saved_bytes", r.saved_bytes},
                       {"compute", static_cast<int>(r.compute)},
                       {"stages", pack_times(r.times)}});
}

RankResult rank_result_from(const std::vector<std::byte>& bytes) {
  const json packed = unpack_message(bytes);
  RankResult r;
  r.out = array_of<std::byte>(packed.at("out"));
  r.record = record_of(packed.at("record"));
  r.traffic = traffic_of(packed.at("traffic"));
  r.rows_used = packed.at("used");
  r.rows_executed = packed.at("executed");
  r.saved_bytes = packed.at("saved_bytes");
  r.compute = static_cast<DType>(packed.at("compute").get<int>());
  r.times = times_from(packed.at("stages"));
  return r;
}

}  // namespace switchyard::bench
