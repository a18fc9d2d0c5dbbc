#pragma once

#include <memory>

#include "switchyard/device_dispatch.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// A GPU that ranks of a layer share, as tests of several ranks on one have it: kernels of one rank
/// wait for those of another, which must find room and be started meanwhile. Where every rank has a
/// GPU of its own there is none of these.
class SharedGpu {
 public:
  /// Null where no other rank is on this one's GPU.
  /// @throws Error{kUnsupported}: one might wait for room, or for a kernel to be loaded, until
  /// another has ended.
  static std::unique_ptr<SharedGpu> of(const DeviceExpertParallel& exchange,
                                       const LayerConfig& config, const LayerOptions& options,
                                       int num_ranks);

  /// Waits for the stream (unless it is captured): a kernel that waits for other ranks then has
  /// nothing queued before or behind it, which with many ranks could keep the kernel of another
  /// from being started.
  static void settle(const Execution& execution);

 private:
  SharedGpu() = default;
};

}  // namespace switchyard
