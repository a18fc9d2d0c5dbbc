#include "models/training/share_files.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "comm/ranks/gather.hpp"
#include "comm/ranks/packed.hpp"

namespace switchyard::models {
namespace {

using nlohmann::json;

constexpr std::size_t kPiece = std::size_t{4} << 20;
constexpr const char* kPhase = "checkpoint";

/// [entry][part] of {name, shape}.
json parts_of(std::span<const NamedNumbers> own) {
  json entries = json::array();
  for (const NamedNumbers& entry : own) {
    json parts = json::array();
    for (const TensorPart& part : entry.tensor->parts) {
      parts.push_back({entry.prefix + part.name, part.shape});
    }
    entries.push_back(std::move(parts));
  }
  return entries;
}

/// Rank r's parts in their order, whatever lies between them.
class Pieces {
 public:
  explicit Pieces(Communicator& ranks)
      : ranks_(ranks),
        window_(ranks.create_window(kPiece, ranks.size())),
        asked_(static_cast<std::size_t>(ranks.size()), 0) {}

  /// On rank 0: the next bytes of a rank, given to `use` as they come.
  template <class Use>
  void take(int from, std::size_t bytes, const Use& use) {
    std::uint64_t& asked = asked_[static_cast<std::size_t>(from)];
    for (std::size_t done = 0; done < bytes; done += kPiece) {
      window_->signal(from, 0, ++asked);
      window_->wait(from, asked, {.phase = kPhase, .rank = from});
      use(std::span<const std::byte>(window_->local(), std::min(kPiece, bytes - done)));
    }
  }

  /// Elsewhere.
  void give(std::span<const std::byte> bytes) {
    for (std::size_t done = 0; done < bytes.size(); done += kPiece) {
      window_->wait(0, ++given_, {.phase = kPhase, .rank = 0});
      window_->put(0, 0, bytes.data() + done, std::min(kPiece, bytes.size() - done));
      window_->signal(0, ranks_.rank(), given_);
    }
  }

 private:
  Communicator& ranks_;
  std::unique_ptr<switchyard::Window> window_;
  std::vector<std::uint64_t> asked_;
  std::uint64_t given_ = 0;
};

/// A tensor of the file; what is not here comes from `rank`.
struct Place {
  StoredTensor tensor;
  int rank = 0;
};

std::vector<Place> places_of(std::span<const NamedNumbers> own,
                             const std::vector<std::vector<std::byte>>& told) {
  std::vector<json> parts;
  parts.reserve(told.size());
  for (const auto& message : told) parts.push_back(unpack_message(message));
  std::vector<Place> places;
  for (std::size_t i = 0; i < own.size(); ++i) {
    for (StoredTensor& part : stored_parts(own.subspan(i, 1))) places.push_back({std::move(part)});
    if (!own[i].tensor->sharded) continue;
    for (std::size_t rank = 1; rank < parts.size(); ++rank) {
      for (const json& part : parts[rank].at(i)) {
        places.push_back({{{part[0].get<std::string>(), StoredType::kF32,
                            part[1].get<std::vector<std::int64_t>>()},
                           {}},
                          static_cast<int>(rank)});
      }
    }
  }
  return places;
}

}  // namespace

void write_shares(Communicator& ranks, std::span<const NamedNumbers> own,
                  const std::filesystem::path& file, std::span<const StoredTensor> others) {
  const auto told = gather(ranks, pack_message(parts_of(own)));
  Pieces pieces(ranks);
  if (ranks.rank() != 0) {
    for (const NamedNumbers& entry : own) {
      if (!entry.tensor->sharded) continue;
      for (const StoredTensor& part : stored_parts({&entry, 1})) pieces.give(part.bytes);
    }
    ranks.barrier(kPhase);  // the window stays while rank 0 reads
    return;
  }
  std::vector<Place> places = places_of(own, told);
  for (const StoredTensor& tensor : others) places.push_back({tensor});
  std::vector<TensorSpec> specs;
  specs.reserve(places.size());
  for (const Place& place : places) specs.push_back(place.tensor.spec);
  AtomicFile out(file);
  SafetensorsWriter writer(out, specs);
  // Shares are all f32: their order in the file is the one that they are given in.
  for (const std::size_t index : writer.order()) {
    const Place& place = places[index];
    if (place.rank == 0) {
      writer.append(place.tensor.bytes);
    } else {
      pieces.take(place.rank, static_cast<std::size_t>(place.tensor.spec.num_bytes()),
                  [&](std::span<const std::byte> bytes) { writer.append(bytes); });
    }
  }
  ranks.barrier(kPhase);
  writer.finish();
  out.commit();
}

std::set<std::string> names_of_shares(Communicator& ranks, std::span<const NamedNumbers> own) {
  std::set<std::string> names;
  for (const auto& message : gather_to_all(ranks, pack_message(parts_of(own)))) {
    for (const json& entry : unpack_message(message)) {
      for (const json& part : entry) names.insert(part[0].get<std::string>());
    }
  }
  return names;
}

}  // namespace switchyard::models
