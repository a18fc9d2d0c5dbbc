// A layer on a GPU: alone, or over ranks.
#include "layer/gpu/exchange_layer.hpp"
#include "layer/gpu/local_layer.hpp"

namespace switchyard {

std::unique_ptr<LayerRunner> make_cuda_layer(const LayerModel& model, const LayerOptions& options,
                                             Communicator* communicator) {
  if (communicator == nullptr || communicator->size() == 1) {
    return std::make_unique<LocalLayer>(model, options);
  }
  return std::make_unique<ExchangeLayer>(model, options, *communicator);
}

}  // namespace switchyard
