#pragma once

#include "layer/gpu/exchange.hpp"
#include "layer/replicated_parts.hpp"
#include "layer/saved_forward.hpp"

namespace switchyard {

/// What a layer over ranks on GPUs adds to the way back of one: gradients of sums go to the ranks
/// of the experts by the forward's routing, to the forward's places; gradients of weights and of
/// tokens come home; gradients of parameters that every rank has are added up. What the forward's
/// wires round to plays no part: dout travels in the compute type, the rest as f32.
/// Nothing waits on the host but in the first backward, and each kernel's waits have the forward's
/// deadline. A backward is send(), bring_weights_home(), bring_home(), add_up_parts(), in this
/// order: the last one ends once all ranks have come there, so that the next send() finds nobody
/// who still reads the rows of dout. Memory: R max_tokens rows [H] of the compute type and as many
/// of f32, and an f32 for each value of those parameters.
class CudaGradientExchange {
 public:
  /// Collective. @param forward  Of the same layer. @throws As DeviceExchange and SharedGpu;
  /// {kUnsupported}: over nccl-pairs.
  CudaGradientExchange(Communicator& communicator, const LayerConfig& config,
                       const LayerOptions& options, DType compute, const CudaExchange& forward);
  ~CudaGradientExchange();
  CudaGradientExchange(const CudaGradientExchange&) = delete;
  CudaGradientExchange& operator=(const CudaGradientExchange&) = delete;

  /// dout [T, H] to the places of the forward's rows, by what it has sent them by. Reports
  /// "exchange", as all that follow.
  DeviceReceived send(ConstRawMatrix dout, const Routing& sent, const SavedForward::State& saved,
                      const Execution& execution);
  /// Where gradients of the weights that came are made, [N max, K] by choice,
  [[nodiscard]] Matrix<float> place_of_weights() const { return exchange_.place_of_weights(); }
  /// from where they come home. @param dweight  out [T, K], or empty: not wanted here.
  void bring_weights_home(const Routing& sent, const SavedForward::State& saved,
                          Matrix<float> dweight, const Execution& execution);
  /// Where the rows' sums are best made, or empty.
  [[nodiscard]] RawMatrix place_of_sums() const { return exchange_.place_of_partials(); }
  /// out [T, H] = the rows' sums [N max, H] f32 by the forward's tree, then `rest` [T, H] or empty,
  /// and one rounding.
  /// @param beside  It need not have ended for what follows on the stream until wait_for_home():
  ///                where it can, it runs on a stream of its own.
  void bring_home(ConstRawMatrix sums, Matrix<const float> rest, RawMatrix out, bool beside,
                  const Execution& execution);
  void wait_for_home(const Execution& execution);

  /// `all` [n] = `own` [n] of all ranks, exact. Before the parts of a backward are written, whose
  /// place it takes; n is at most the layer's E.
  void add_up_counts(Vector<const std::int64_t> own, Vector<std::int64_t> all,
                     const Execution& execution);
  /// The arguments with this rank's window in place of gradients that ranks add up.
  [[nodiscard]] BackwardArgs parts_of(const BackwardArgs& args);
  /// From there to the caller's memory, written or added. All ranks meet here, also for nothing.
  void add_up_parts(bool accumulate, const Execution& execution);

  void check() const { exchange_.check(); }

 private:
  /// As SharedGpu; in the first backward on any GPU, so that kernels which are loaded then find no
  /// kernel that waits for another rank.
  void settle(const Execution& execution) const;
  /// Of work that is enqueued on `to` from here on: it comes after that of `from`.
  void let_follow(cudaStream_t from, cudaStream_t to);

  DeviceExchange exchange_;
  std::unique_ptr<SharedGpu> shared_gpu_;
  ReplicatedParts parts_;
  cudaStream_t beside_ = nullptr;
  cudaEvent_t event_ = nullptr;
  bool under_way_ = false;  ///< On the stream of its own.
  bool has_run_ = false;    ///< A whole backward.
};

}  // namespace switchyard
