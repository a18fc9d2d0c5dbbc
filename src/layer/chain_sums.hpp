#pragma once

#include <cstddef>
#include <memory>

#include "switchyard/execution.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// What a chain does between its iterations, where its layer runs: the sums, in f32, and the memory
/// of what goes from one to the next.
class ChainSums {
 public:
  struct Sum {
    Matrix<float> part{};    ///< [T, H] what an iteration has made; used up.
    ConstRawMatrix from{};   ///< [T, H] what it was given; may be `to`.
    Matrix<float> to{};      ///< out [T, H] = part, with the inner residual + from; where `out` is
                             ///< given of no use any more.
    ConstRawMatrix whole{};  ///< [T, H] what the layer was given; of the last one alone.
    RawMatrix out{};         ///< out [T, H] = to, with the outer residual + whole; or empty.
    RawMatrix next{};        ///< out [T, H] = to; or empty.
  };

  explicit ChainSums(const ChainConfig& chain) : chain_(chain) {}
  virtual ~ChainSums() = default;
  ChainSums(const ChainSums&) = delete;
  ChainSums& operator=(const ChainSums&) = delete;

  /// A call. @returns The stream of its iterations and of what is between: the call's, or, on CUDA,
  /// one of this object's where the call has none and all of it is in host memory.
  virtual void* begin(const ForwardArgs& args) = 0;
  virtual void begin(const BackwardArgs& args) = 0;
  /// [T, H] of what goes on, and of what an iteration makes; of the call.
  [[nodiscard]] virtual Matrix<float> going_on(std::int64_t rows, std::int64_t cols) = 0;
  [[nodiscard]] virtual Matrix<float> made(std::int64_t rows, std::int64_t cols) = 0;
  /// The same in the compute type where the next iteration takes it in that; else empty.
  [[nodiscard]] virtual RawMatrix next(std::int64_t rows, std::int64_t cols) = 0;
  /// The caller's tokens where the sums can read them.
  [[nodiscard]] virtual ConstRawMatrix within_reach(ConstRawMatrix tokens) = 0;
  /// Where the sums can write what belongs in `out`.
  [[nodiscard]] virtual RawMatrix place_of(RawMatrix out) = 0;
  /// Brings it there. @returns Whether that is under way until finish(), behind the stream's end.
  [[nodiscard]] virtual bool bring(ConstRawMatrix placed, RawMatrix out) = 0;
  virtual void finish() = 0;
  /// Reports "residual".
  virtual void add(const Sum& sum) = 0;
  /// Values and counts of the losses of one iteration are added to those of a chain, or, of the
  /// first, are these.
  struct LossSum {
    Vector<const double> values{};
    Matrix<const std::int64_t> counts{};  ///< [G, E].
    Vector<double> to{};
    Matrix<std::int64_t> to_counts{};
    bool first = false;
  };
  virtual void add(const LossSum& sum) = 0;
  /// Sets so many bytes to 0.
  virtual void clear(void* from, std::size_t bytes) = 0;

 protected:
  [[nodiscard]] const ChainConfig& chain() const { return chain_; }
  /// What a sum reads and writes.
  [[nodiscard]] static StageWork work_of(const Sum& sum) {
    const double size = static_cast<double>(sum.to.size());
    return {.bytes = 8 * size + static_cast<double>(sum.from.bytes() + sum.whole.bytes() +
                                                    sum.out.bytes() + sum.next.bytes()),
            .flops = size,
            .flops_executed = size};
  }

 private:
  ChainConfig chain_;
};

/// cpu/chain_sums.cpp
[[nodiscard]] std::unique_ptr<ChainSums> make_cpu_chain_sums(const ChainConfig& chain,
                                                             ThreadPool* pool);
/// gpu/chain_sums.cu: on the current device. @param max_tokens  Memory is made for so many now,
/// @param max_host_tokens  and for so many in host memory.
[[nodiscard]] std::unique_ptr<ChainSums> make_cuda_chain_sums(const ChainConfig& chain,
                                                              DType compute,
                                                              std::int64_t max_tokens,
                                                              std::int64_t max_host_tokens,
                                                              std::int64_t hidden);

}  // namespace switchyard
