#pragma once

#include <memory>

#include "switchyard/layer.hpp"
#include "switchyard/perft.hpp"

namespace switchyard {

/// What runs adapters on a backend. Arguments are checked before they come here, but for what only
/// the backend knows of.
class AdaptersRunner {
 public:
  AdaptersRunner() = default;
  virtual ~AdaptersRunner() = default;
  AdaptersRunner(const AdaptersRunner&) = delete;
  AdaptersRunner& operator=(const AdaptersRunner&) = delete;

  virtual void forward(const PerftForwardArgs& args) = 0;
  virtual void backward(const PerftBackwardArgs& args) = 0;
  virtual void reload() = 0;
  virtual void check() = 0;
  [[nodiscard]] virtual metrics::Routing stats() = 0;
};

/// The layer that the adapters are, of `experts`: routed by their own rule, else by a routing that
/// is given, of so many columns a token.
[[nodiscard]] LayerModel layer_of(const PerftModel& model, const ExpertConfig& experts,
                                  std::shared_ptr<const ExpertSource> source, std::int32_t columns);
[[nodiscard]] LayerOptions layer_options_of(const PerftOptions& options);

/// @param communicator  Null: one rank.
[[nodiscard]] std::unique_ptr<AdaptersRunner> make_cpu_adapters(const PerftModel& model,
                                                                const PerftOptions& options,
                                                                Communicator* communicator);
[[nodiscard]] std::unique_ptr<AdaptersRunner> make_cuda_adapters(const PerftModel& model,
                                                                 const PerftOptions& options,
                                                                 Communicator* communicator);

}  // namespace switchyard
