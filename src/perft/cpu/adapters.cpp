// PERFT's adapters on a CPU: a layer of plain experts of width r on each rank, in front of it the
// routing that the kind has, behind it the sum with the frozen layer's output. Bound by the passes
// over rows of [T, H]: an adapter's products are narrow.
#include <algorithm>

#include "comm/host/rank_sums.hpp"
#include "core/row_ops.hpp"
#include "experts/raw_matrix.hpp"
#include "layer/cpu/buffers.hpp"
#include "perft/adapters.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

class CpuAdapters final : public AdaptersRunner {
 public:
  CpuAdapters(const PerftModel& model, const PerftOptions& options, Communicator* ranks)
      : config_(model.config),
        communicator_(ranks),
        pool_(options.num_threads),
        layer_(layer_of(model, model.config.experts(), model.adapters,
                        model.config.kind == PerftKind::kEmbedded ? model.config.router.top_k()
                                                                  : model.config.num_adapters),
               layer_options_of(options)) {}

  void forward(const PerftForwardArgs& args) override {
    const Matrix<float> added = rows_.matrix(args.tokens.rows, config_.hidden);
    ForwardArgs inner{.tokens = args.tokens,
                      .out = raw(added),
                      .request = args.request,
                      .recorder = args.recorder,
                      .saved = args.saved};
    if (config_.kind != PerftKind::kRouted) give_routing(args, inner);
    layer_.forward(inner);
    const float scale = config_.scale();
    write_sums(added, args.base, args.out, args.recorder, [&](float* row) {
      for (std::int64_t h = 0; h < config_.hidden; ++h) row[h] *= scale;
    });
  }

  void backward(const PerftBackwardArgs& args) override {
    const bool wants_tokens = args.dtokens.data != nullptr;
    const Matrix<float> part = rows_.matrix(wants_tokens ? args.dout.rows : 0, config_.hidden);
    BackwardArgs inner{.saved = args.saved,
                       .dout = scaled(args.dout),
                       .loss_counts = args.loss_counts,
                       .loss_scale = args.loss_scale,
                       .dtokens = wants_tokens ? raw(part) : RawMatrix{},
                       .dweight = args.dweight,
                       .dgate = args.dgate,
                       .experts = {.w13 = args.da, .w2 = args.db},
                       .accumulate = args.accumulate,
                       .recorder = args.recorder};
    if (communicator_ == nullptr) {
      layer_.backward(inner);
    } else {
      backward_of_ranks(args, inner);
    }
    if (wants_tokens) write_sums(part, args.base, args.dtokens, args.recorder, [](float*) {});
  }

  void reload() override { layer_.reload_experts(); }
  void check() override { layer_.check(); }
  metrics::Routing stats() override { return layer_.stats(); }

 private:
  void give_routing(const PerftForwardArgs& args, ForwardArgs& inner) {
    const std::int64_t num_tokens = args.tokens.rows;
    if (config_.kind == PerftKind::kEmbedded) {
      inner.expert = args.expert;
      inner.weight = args.weight;
      if (args.kept.data == nullptr) return;
      const Matrix<std::int32_t> kept = ids_.matrix(num_tokens, args.expert.shape[1]);
      for (std::int64_t i = 0; i < kept.size(); ++i) {
        kept.data[i] = args.kept[i] != 0 ? args.expert.data[i] : -1;
      }
      inner.expert = kept;
      return;
    }
    const Matrix<std::int32_t> all = ids_.matrix(num_tokens, config_.num_adapters);
    const Matrix<float> ones = weights_.matrix(num_tokens, config_.num_adapters);
    for (std::int64_t i = 0; i < all.size(); ++i) {
      all.data[i] = static_cast<std::int32_t>(i % config_.num_adapters);
      ones.data[i] = 1.0F;
    }
    inner.expert = all;
    inner.weight = ones;
  }

  /// out = part, made ready row by row, + base. Rows of `part` are used up.
  template <typename Prepare>
  void write_sums(Matrix<float> part, ConstRawMatrix base, RawMatrix out, StageRecorder* recorder,
                  const Prepare& prepare) {
    const std::int64_t n = config_.hidden;
    const ScopedStage stage(
        {.pool = &pool_, .recorder = recorder}, "perft_sum",
        {.bytes = static_cast<double>(4 * part.size() + base.bytes() + out.bytes())});
    parallel_for(&pool_, part.shape[0], [&](std::int64_t t, int) {
      float* const row = part.row(t);
      prepare(row);
      if (base.data != nullptr) row_ops::accumulate(base.dtype, 1.0F, base.row(t), row, n);
      row_ops::narrow(out.dtype, row, out.row(t), n);
    });
  }

  /// All gradients are linear in it, so the adapters' scale stands here once.
  ConstRawMatrix scaled(ConstRawMatrix dout) {
    const float scale = config_.scale();
    if (scale == 1.0F) return dout;
    const Matrix<float> result = scaled_dout_.matrix(dout.rows, dout.cols);
    parallel_for(&pool_, dout.rows, [&](std::int64_t t, int) {
      float* const row = result.row(t);
      row_ops::widen(dout.dtype, dout.row(t), row, dout.cols);
      for (std::int64_t h = 0; h < dout.cols; ++h) row[h] *= scale;
    });
    return raw(result);
  }

  /// Every rank adds up all of its parameters' gradients, so that ranks need not ask for the same.
  void backward_of_ranks(const PerftBackwardArgs& args, BackwardArgs inner) {
    const std::int64_t down = config_.num_adapters * config_.rank * config_.hidden;
    const std::int64_t logits =
        config_.kind == PerftKind::kRouted ? config_.router.num_logits() : 0;
    const Vector<float> all = parts_.vector(config_.num_parameters());
    const auto matrix = [&](std::int64_t first, std::int64_t num, std::int64_t cols) {
      return raw(Matrix<float>{all.data + first, {num, cols}});
    };
    const RawMatrix da = matrix(0, config_.num_adapters * config_.rank, config_.hidden);
    const RawMatrix db = matrix(down, config_.num_adapters * config_.hidden, config_.rank);
    const RawMatrix dgate = matrix(2 * down, logits, config_.hidden);
    inner.experts = {.w13 = da, .w2 = db};
    inner.dgate = logits > 0 ? dgate : RawMatrix{};
    inner.accumulate = false;
    layer_.backward(inner);
    if (!sums_ || !sums_->usable()) sums_ = std::make_unique<RankSums>(*communicator_, all.size());
    sums_->add_up(all.data, all.size());
    const auto write = [&](RawMatrix sum, RawMatrix out) {
      if (out.data == nullptr) return;
      row_ops::write_gradient(reinterpret_cast<const float*>(sum.data), out.dtype, out.data,
                              sum.rows * sum.cols, args.accumulate);
    };
    write(da, args.da);
    write(db, args.db);
    write(dgate, args.dgate);
  }

  PerftConfig config_;
  Communicator* communicator_;  ///< Null: one rank.
  ThreadPool pool_;
  MoeLayer layer_;
  ArrayBuffer<float> rows_, scaled_dout_, weights_, parts_;
  ArrayBuffer<std::int32_t> ids_;
  std::unique_ptr<RankSums> sums_;
};

}  // namespace

std::unique_ptr<AdaptersRunner> make_cpu_adapters(const PerftModel& model,
                                                  const PerftOptions& options,
                                                  Communicator* communicator) {
  return std::make_unique<CpuAdapters>(model, options, communicator);
}

}  // namespace switchyard
