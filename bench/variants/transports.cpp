// The variants by name.
#include "bench/variants/transports.hpp"

#include <algorithm>
#include <array>

#include "comm/ranks/agreement.hpp"
#include "core/check.hpp"
#include "interfaces/transports.hpp"

namespace switchyard {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"reference", "sorted", "flat", "bucketed",
                                                    "native"};

}  // namespace

std::span<const std::string_view> transport_names() { return kNames; }

std::unique_ptr<Transport> make_transport(std::string_view name, Communicator& communicator,
                                          const TransportConfig& config) {
  const auto* const known = std::ranges::find(kNames, name);
  require(known != kNames.end(),
          "variant '{}' does not exist, want reference, sorted, flat, bucketed or native", name);
  const AgreedValue variant[] = {{"variant", known - kNames.begin()}};
  require_agreement(communicator, variant);
  if (name == "reference") return make_reference_transport(communicator, config);
  if (name == "sorted") return make_sorted_transport(communicator, config);
  if (name == "flat") return std::make_unique<FlatTransport>(communicator, config);
  if (name == "bucketed") return std::make_unique<BucketedTransport>(communicator, config);
  return make_native_transport(communicator, config);
}

}  // namespace switchyard
