#pragma once

#include <cstdint>

#include "switchyard/device_dispatch.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {

/// Index lists for the experts that a dispatch makes in the same launch, of what it receives.
struct DeviceExpertLists {
  /// As plan() makes them of all N max rows, without the lists by token: expert_begin, expert_rows,
  /// row_token and row_weight.
  PlanView plan{};
  Vector<std::int32_t> assignment_row{};  ///< [N max * K]: for combine_rows().
};

/// For who works beside a dispatch: in throughput mode counter (s, c), at ready + (s *
/// chunks_stride + c) * 4, has reached n * ctas() of the object's n-th dispatch, those of graphs
/// counted, once all rows of tokens [c, c+1) * tokens_per_chunk of source s are here (release at
/// the scope of the system). Dispatch itself ends when all are; recover() begins with n = 1 again.
struct DeviceReadiness {
  const std::uint64_t* ready = nullptr;
  std::int64_t chunks = 0;
  std::int64_t chunks_stride = 0;
  std::int64_t tokens_per_chunk = 0;
};

/// What an exchange is made for beside rows there and sums home.
struct DeviceExchangeExtent {
  /// So many tokens in a row share a row of x: [T / copies, H]. With the K choices of a token as
  /// tokens of their own (top_k 1) every assignment travels, and comes home, by itself.
  int copies = 1;
  /// A way back: it also brings gradients of weights home and adds up so many values over ranks.
  std::int64_t most_summed = 0;
};

/// Gradients of the weights that the last dispatch has brought.
struct WeightGradientsArgs {
  Matrix<const std::int32_t> expert{};  ///< [T, K], and
  Matrix<const std::uint8_t> kept{};    ///< [T, K] or empty, as dispatched.
  Matrix<float> dweight{};       ///< out [T, K], 0 where unused or dropped; empty: not wanted here.
  std::uint64_t forward = 0;     ///< Which forward is gone back through, and
  std::uint64_t parameters = 0;  ///< which sums will be asked for: the same on all ranks.
  Execution execution{};
};

/// The exchange between GPUs with what the library's own layer and interfaces use of it beside
/// what others need: steps of theirs that its kernels take over, and where its memory lies.
class DeviceExchange final : public DeviceExpertParallel {
 public:
  DeviceExchange(Communicator& communicator, const ExpertParallelConfig& config,
                 const DeviceExchangeOptions& options, const DeviceExchangeExtent& extent = {});

  /// With `lists` (where makes_lists()) also those, for this rank's experts.
  /// @param counts  Those that an earlier dispatch of the same routing has left on the device, kept
  ///                as long as this one runs, on all ranks or none: in throughput mode they are
  ///                then not exchanged again.
  DeviceReceived dispatch(const DispatchArgs& args, const DeviceExpertLists& lists = {},
                          const std::int64_t* counts = nullptr);
  /// Where `partials` are at place_of_partials() the tokens' ranks read them there; else they are
  /// sent home first. Both give the same bits. On all ranks alike: else some wait for what does not
  /// come, and check() says kTimeout.
  ///
  /// With `partial_row` [N max] row i is row partial_row[i] of `partials`, which may then have any
  /// number of rows (not with rank_invariant).
  void combine(const ReturnArgs& args, Vector<const std::int32_t> partial_row = {});
  /// Where makes_lists(): `partials` is [S max, H] f32, bf16 or f16, the experts' outputs,
  /// unweighted, in the order of the lists of the last dispatch; they are summed while they are
  /// sent, to the bits of switchyard::combine() in combine_wire and combine() here.
  void combine_rows(const ReturnArgs& args, const DeviceExpertLists& lists);
  /// Low latency, without rank_invariant, and no more groups in the tree over all ranks than its
  /// kernels add up.
  [[nodiscard]] bool makes_lists() const;

  /// Room in this rank's part of the window for `partials` as combine() takes them, the same for
  /// all epochs: to be written between a dispatch and its combine, on the stream of both. Empty
  /// where sums are always sent: in low latency, on a wire of fp8, unless all GPUs are Hopper's.
  [[nodiscard]] RawMatrix place_of_partials() const;
  /// Of a way back, which has one place: room in this rank's window for gradients of weights [N
  /// max, K] by choice, to be written between a dispatch and bring_weights_home(): over the weights
  /// that the dispatch has brought.
  [[nodiscard]] Matrix<float> place_of_weights() const;
  /// Once for each dispatch, before its combine. Ranks that differ in `forward` or `parameters`
  /// find kCommunication in check(), which names both.
  void bring_weights_home(const WeightGradientsArgs& args);
  /// Of a way back: room in this rank's window for its part of what ranks add up [most_summed].
  [[nodiscard]] Vector<float> place_of_summed() const;
  /// The first `count` values become the sums over all ranks by the tree ((0+1)+(2+3))+..., with
  /// the same bits on every rank. It ends once all ranks have come here: what they have read before
  /// may be written over. So it comes, for no values even, between a combine behind which rows are
  /// still read and the next dispatch.
  void sum_over_ranks(std::int64_t count, const Execution& execution);

  /// The same counters for all dispatches.
  [[nodiscard]] DeviceReadiness readiness() const;
};

}  // namespace switchyard
