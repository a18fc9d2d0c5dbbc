// The sums of a chain on a CPU: a row of f32 after the other, bound by memory.
#include "layer/chain_sums.hpp"

#include <algorithm>
#include <cstring>

#include "core/row_ops.hpp"
#include "layer/cpu/buffers.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

class CpuChainSums final : public ChainSums {
 public:
  CpuChainSums(const ChainConfig& chain, ThreadPool* pool) : ChainSums(chain), pool_(pool) {}

  void* begin(const ForwardArgs& args) override {
    recorder_ = args.recorder;
    return args.stream;
  }
  void begin(const BackwardArgs& args) override { recorder_ = args.recorder; }
  Matrix<float> going_on(std::int64_t rows, std::int64_t cols) override {
    return going_on_.matrix(rows, cols);
  }
  Matrix<float> made(std::int64_t rows, std::int64_t cols) override {
    return made_.matrix(rows, cols);
  }
  RawMatrix next(std::int64_t /*rows*/, std::int64_t /*cols*/) override { return {}; }
  ConstRawMatrix within_reach(ConstRawMatrix tokens) override { return tokens; }
  RawMatrix place_of(RawMatrix out) override { return out; }
  bool bring(ConstRawMatrix /*placed*/, RawMatrix /*out*/) override { return false; }
  void finish() override {}

  void add(const Sum& sum) override {
    const std::int64_t n = sum.to.shape[1];
    const Execution execution{.pool = pool_, .recorder = recorder_};
    const ScopedStage stage(execution, "residual", work_of(sum));
    parallel_for(pool_, sum.to.shape[0], [&](std::int64_t t, int) {
      float* const to = sum.to.row(t);
      float* const part = sum.part.row(t);
      if (chain().inner_residual) {
        if (sum.from.row(t) != reinterpret_cast<const std::byte*>(to)) {
          row_ops::widen(sum.from.dtype, sum.from.row(t), to, n);
        }
        row_ops::add(part, to, n);
      } else {
        std::copy_n(part, n, to);
      }
      if (sum.out.data == nullptr) return;
      if (chain().outer_residual) {
        row_ops::widen(sum.whole.dtype, sum.whole.row(t), part, n);
        row_ops::add(part, to, n);
      }
      row_ops::narrow(sum.out.dtype, to, sum.out.row(t), n);
    });
  }
  void add(const LossSum& sum) override {
    const auto add_all = [&](const auto* from, std::int64_t size, auto* to) {
      for (std::int64_t i = 0; i < size; ++i) to[i] = sum.first ? from[i] : to[i] + from[i];
    };
    add_all(sum.values.data, sum.values.size(), sum.to.data);
    add_all(sum.counts.data, sum.counts.size(), sum.to_counts.data);
  }
  void clear(void* from, std::size_t bytes) override { std::memset(from, 0, bytes); }

 private:
  ThreadPool* pool_;
  StageRecorder* recorder_ = nullptr;
  ArrayBuffer<float> going_on_, made_;
};

}  // namespace

std::unique_ptr<ChainSums> make_cpu_chain_sums(const ChainConfig& chain, ThreadPool* pool) {
  return std::make_unique<CpuChainSums>(chain, pool);
}

}  // namespace switchyard
