#pragma once

#include <memory>
#include <vector>

#include "switchyard/backward.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// Memory of a saved forward on a backend: a piece for each of its parts, which only grow.
class SavedMemory {
 public:
  static constexpr const char* kWhose = "a saved forward";
  enum Part : std::uint8_t {
    kTokens,
    kLogits,
    kPreviousLogits,
    kExpert,
    kWeight,
    kKept,
    kPreactivation,
    kSharedPreactivation,
    kReceived,
    kReceivedExpert,
    kReceivedWeight,
    kSent,
    kLosses,
    kLossWorkspace,  ///< CUDA: zero between calls.
    kChainLosses,    ///< Of a chain's first iteration: what those of all come to.
    kParts
  };

  virtual ~SavedMemory() = default;
  [[nodiscard]] virtual std::byte* reserve(Part part, std::int64_t bytes) = 0;
};

/// What a layer keeps, in the memory of its backend. Rows of `preactivation` are those of the
/// layout, which is made again from ids and kept.
struct SavedForward::State {
  enum class Use : std::uint8_t { kNothing, kReady, kUsed };

  Recompute recompute = Recompute::kNone;
  Use use = Use::kNothing;
  std::uint64_t layer = 0;   ///< Number of the layer whose forward it was.
  std::int64_t reloads = 0;  ///< Of its experts, until then.
  std::int64_t bytes = 0;
  std::int64_t num_tokens = 0;
  bool routed = false;  ///< By a router with logits; else the routing was given, or is no rule's.
  RouteRequest request{};  ///< What the forward drew upon; no memory of the caller.

  RawMatrix tokens{};  ///< [T, H] compute type.
  Matrix<float> logits{};
  Matrix<float> previous_logits{};  ///< Of a gating residual; else empty.
  Matrix<std::int32_t> expert{};
  Matrix<float> weight{};
  Matrix<std::uint8_t> kept{};       ///< Empty: all.
  RawMatrix preactivation{};         ///< Empty: made again.
  RawMatrix shared_preactivation{};  ///< Likewise; or no shared experts.

  /// Of the router's auxiliary losses; empty: none.
  struct Losses {
    RoutingSums sums{};
    Vector<double> values{};
    Matrix<float> score_prices{};
    LossPrices prices{};      ///< For a gradient that is not scaled, by the call's own counts.
    bool are_summed = false;  ///< The sums came with the choice.
  } losses;

  /// Over ranks: what came for this rank's experts, N rows.
  struct Received {
    RawMatrix x{};                  ///< [N, H] compute type; wire values where they differ.
    Matrix<std::int32_t> expert{};  ///< [N, K] global ids; -1 where not this rank's.
    Matrix<float> weight{};         ///< [N, K].
    Matrix<std::int64_t> sent{};    ///< [R, R] rows from rank to rank.
    std::uint64_t forward = 0;      ///< Number since the ranks' last recovery, alike on all.
    std::uint64_t recoveries = 0;   ///< Of the ranks, until then.
  } received;

  /// Of a chain: what each of its iterations keeps, and nothing of the above but values and counts
  /// of losses, which are sums.
  std::vector<SavedForward> iterations;

  std::unique_ptr<SavedMemory> memory;

  /// What the layer `number` keeps of a forward comes next. @param of_layer  Its reloads.
  void begin(std::uint64_t number, std::int64_t of_layer);
  /// What of a call's request its rule and its noise are functions of.
  void draws_upon(const RouteRequest& from);
  /// Tokens of the caller's, which stay until the backward: neither copied nor counted.
  void refer_to(ConstRawMatrix from) {
    tokens = {const_cast<std::byte*>(from.data), from.dtype, from.rows, from.cols};
  }
  /// Room for a part, counted in `bytes`.
  [[nodiscard]] RawMatrix room(SavedMemory::Part part, DType dtype, std::int64_t rows,
                               std::int64_t cols);
  template <typename T>
  [[nodiscard]] Matrix<T> room(SavedMemory::Part part, std::int64_t rows, std::int64_t cols) {
    return {reinterpret_cast<T*>(reserve(part, rows * cols * std::int64_t{sizeof(T)})),
            {rows, cols}};
  }
  /// @throws Error{kInvalidArgument}: it is not that of a forward of this layer, or is too old.
  void require_of(std::uint64_t number, std::int64_t of_layer) const;

 private:
  std::byte* reserve(SavedMemory::Part part, std::int64_t size);
};

/// Layers are told apart by number: one may be made where another has ended.
[[nodiscard]] std::uint64_t next_layer_number();

}  // namespace switchyard
