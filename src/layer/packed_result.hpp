#pragma once

// What a rank's forward has left behind, as a part of a message to another process.

#include "comm/ranks/packed.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

inline nlohmann::json pack_record(const RoutingRecord& record) {
  return {{"expert", pack_array(record.expert)},
          {"weight", pack_array(record.weight)},
          {"kept", pack_array(record.kept)},
          {"counts", pack_array(record.counts)},
          {"counts_kept", pack_array(record.counts_kept)}};
}

inline RoutingRecord record_of(const nlohmann::json& packed) {
  return {.expert = array_of<std::int32_t>(packed.at("expert")),
          .weight = array_of<float>(packed.at("weight")),
          .kept = array_of<std::uint8_t>(packed.at("kept")),
          .counts = array_of<std::int64_t>(packed.at("counts")),
          .counts_kept = array_of<std::int64_t>(packed.at("counts_kept"))};
}

inline nlohmann::json pack_traffic(const Traffic& traffic) {
  return {{"rows", pack_array(traffic.rows)},
          {"payload", pack_array(traffic.payload_bytes)},
          {"meta", pack_array(traffic.meta_bytes)},
          {"return_rows", pack_array(traffic.return_rows)},
          {"return_payload", pack_array(traffic.return_payload_bytes)},
          {"return_meta", pack_array(traffic.return_meta_bytes)}};
}

inline Traffic traffic_of(const nlohmann::json& packed) {
  return {.rows = array_of<std::int64_t>(packed.at("rows")),
          .payload_bytes = array_of<std::int64_t>(packed.at("payload")),
          .meta_bytes = array_of<std::int64_t>(packed.at("meta")),
          .return_rows = array_of<std::int64_t>(packed.at("return_rows")),
          .return_payload_bytes = array_of<std::int64_t>(packed.at("return_payload")),
          .return_meta_bytes = array_of<std::int64_t>(packed.at("return_meta"))};
}

}  // namespace switchyard
