#pragma once

// The all-to-all of the published benchmark in the steps of its ladder.

#include <memory>
#include <span>
#include <string_view>

#include "interfaces/transport.hpp"

namespace switchyard {

/// "reference": lists on the host and a row at a time, as the published reference does it.
/// "sorted": one sort by expert, blocks per rank, regrouped by the receiver.
/// "flat": rows in the order source, token, k, with 8 bytes of meta; never regrouped.
/// "bucketed": every row straight into its expert's bucket.
/// "native": ExpertParallel: once per rank, index lists, sums where the experts are.
[[nodiscard]] std::span<const std::string_view> transport_names();

/// Collective. @throws Error{kInvalidArgument}: no such name; {kCommunication}: ranks disagree.
std::unique_ptr<Transport> make_transport(std::string_view name, Communicator& communicator,
                                          const TransportConfig& config);

std::unique_ptr<Transport> make_reference_transport(Communicator& communicator,
                                                    const TransportConfig& config);
std::unique_ptr<Transport> make_sorted_transport(Communicator& communicator,
                                                 const TransportConfig& config);
std::unique_ptr<Transport> make_native_transport(Communicator& communicator,
                                                 const TransportConfig& config);

}  // namespace switchyard
