// PERFT's adapters on a GPU: a layer of plain experts on each rank, in front of it the routing that
// the kind has, behind it the sum with the frozen layer's output. Bound by the passes over rows of
// [T, H]: an adapter's products are narrow. Memory is made once for max_tokens.
#include <algorithm>
#include <vector>

#include "comm/host/rank_sums.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/device_wide.hpp"
#include "experts/gpu/in_place.hpp"
#include "experts/raw_matrix.hpp"
#include "layer/gpu/backward/kernels.hpp"
#include "perft/adapters.hpp"
#include "perft/gpu/kernels.hpp"

namespace switchyard {
namespace {

void require_place(const char* name, const void* data, std::int64_t size, bool moved_by_16 = true) {
  if (data == nullptr || size == 0) return;
  require(is_on_device(data), "{} lies in host memory, the adapters on a GPU", name);
  require(!moved_by_16 || is_aligned_16(data), "{} is not aligned to 16 bytes", name);
}
void require_place(const char* name, const ConstRawMatrix& array) {
  require_place(name, array.data, array.rows * array.cols);
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SWITCHYARD_CUDA(cudaStreamIsCapturing(stream, &capture));
  return capture != cudaStreamCaptureStatusNone;
}

/// A and B of all adapters as the weights of experts.
class PackedAdapters {
 public:
  PackedAdapters(const PerftModel& model, DType compute)
      : config_(model.config),
        compute_(compute),
        layout_(model.config, compute),
        source_(model.adapters),
        on_device_(dynamic_cast<const DeviceSource*>(model.adapters.get())) {
    (void)w13_.reserve(layout_.cells() * size_of(compute));
    (void)w2_.reserve(layout_.cells() * size_of(compute));  // zeros
    if (!follows()) load();
  }

  /// Whether they lie on the GPU, where every forward reads them.
  [[nodiscard]] bool follows() const { return on_device_ != nullptr; }

  [[nodiscard]] const AdapterLayout& layout() const { return layout_; }
  [[nodiscard]] ExpertConfig experts() const {
    ExpertConfig experts = config_.experts();
    experts.num_experts = static_cast<std::int32_t>(layout_.experts);
    experts.inner = layout_.width;
    return experts;
  }
  [[nodiscard]] std::shared_ptr<const ExpertSource> source() const {
    return make_device_source(experts(), compute_, w13_.data(), w2_.data(), nullptr, nullptr);
  }
  /// From host memory. Waits.
  void load() {
    const std::int64_t size = size_of(compute_);
    std::vector<std::byte> w13(static_cast<std::size_t>(layout_.cells() * size));
    std::vector<std::byte> w2(w13.size());
    std::vector<std::byte> b(static_cast<std::size_t>(config_.hidden * config_.rank * size));
    for (std::int32_t j = 0; j < config_.num_adapters; ++j) {
      source_->read(j, ExpertPart::kGate, 0, config_.rank, compute_,
                    w13.data() + layout_.row_of_a(j, 0) * config_.hidden * size);
      source_->read(j, ExpertPart::kDown, 0, config_.hidden, compute_, b.data());
      for (std::int64_t h = 0; h < config_.hidden; ++h) {
        std::copy_n(b.data() + h * config_.rank * size, config_.rank * size,
                    w2.data() + layout_.place_of_b(j, h, 0) * size);
      }
    }
    SWITCHYARD_CUDA(wait_for_device());  // who still reads what was there
    copy_to_device(w13_.data(), w13.data(), w13.size());
    copy_to_device(w2_.data(), w2.data(), w2.size());
  }
  /// From where the caller has them on the GPU, on the stream: an optimiser's step is seen.
  void follow(cudaStream_t stream) {
    if (!follows()) return;
    const WeightsOnDevice& from = on_device_->weights();
    pack_adapters(layout_, on_device_->dtype(), from.w13, from.w2, compute_, w13_.data(),
                  w2_.data(), stream);
  }

 private:
  PerftConfig config_;
  DType compute_;
  AdapterLayout layout_;
  std::shared_ptr<const ExpertSource> source_;
  const DeviceSource* on_device_;  ///< The same, or null: in host memory.
  DeviceBuffer w13_, w2_;
};

class CudaAdapters final : public AdaptersRunner {
 public:
  CudaAdapters(const PerftModel& model, const PerftOptions& options, Communicator* ranks)
      : config_(with_whole_rows(model.config, options.compute)),
        compute_(options.compute),
        communicator_(ranks),
        packed_(model, options.compute),
        columns_(model.config.kind == PerftKind::kEmbedded ? model.config.router.top_k() : 1),
        layer_(layer_of(model, packed_.experts(), packed_.source(), columns_),
               layer_options_of(options)) {
    if (options.max_tokens > 0) reserve(options.max_tokens);
  }

  void forward(const PerftForwardArgs& args) override {
    require_place("tokens", args.tokens);
    require_place("base", args.base);
    require_place("out", args.out);
    require_place("expert", args.expert.data, args.expert.size(), false);
    require_place("weight", args.weight.data, args.weight.size(), false);
    require_place("kept", args.kept.data, args.kept.size(), false);
    auto* const stream = static_cast<cudaStream_t>(args.stream);
    const std::int64_t num_tokens = args.tokens.rows;
    reserve(num_tokens);
    packed_.follow(stream);
    const RawMatrix added = rows_.matrix(DType::kF32, num_tokens, config_.hidden);
    ForwardArgs inner{.tokens = args.tokens,
                      .out = added,
                      .request = args.request,
                      .recorder = args.recorder,
                      .stream = args.stream,
                      .saved = args.saved};
    if (config_.kind != PerftKind::kRouted) give_routing(args, inner);
    layer_.forward(inner);
    write_sums(added, config_.scale(), args.base, args.out, args.recorder, args.stream);
  }

  void backward(const PerftBackwardArgs& args) override {
    require_place("dout", args.dout);
    require_place("base", args.base);
    require_place("dtokens", args.dtokens);
    require_place("da", args.da);
    require_place("db", args.db);
    require_place("dgate", args.dgate);
    require(args.saved != nullptr, "backward has no saved forward");
    reserve(args.dout.rows);
    // All gradients are linear in it, so the adapters' scale stands here once.
    const RawMatrix dout = dout_.matrix(compute_, args.dout.rows, config_.hidden);
    write_sums(args.dout, config_.scale(), {}, dout, args.recorder, args.stream);
    const bool adds = args.dtokens.data != nullptr && args.base.data != nullptr;
    BackwardArgs inner{.saved = args.saved,
                       .dout = dout,
                       .loss_counts = args.loss_counts,
                       .loss_scale = args.loss_scale,
                       .dtokens = args.dtokens,
                       .dweight = args.dweight,
                       .dgate = args.dgate,
                       .experts = {.w13 = args.da, .w2 = args.db},
                       .accumulate = args.accumulate,
                       .recorder = args.recorder,
                       .stream = args.stream};
    if (adds) inner.dtokens = rows_.matrix(DType::kF32, args.dout.rows, config_.hidden);
    if (communicator_ == nullptr) {
      backward_of_one(args, inner);
    } else {
      backward_of_ranks(args, inner);
    }
    if (adds) {
      write_sums(inner.dtokens, 1.0F, args.base, args.dtokens, args.recorder, args.stream);
    }
  }

  void reload() override {
    if (packed_.follows()) return;
    packed_.load();
    layer_.reload_experts();
  }
  void check() override { layer_.check(); }
  metrics::Routing stats() override { return layer_.stats(); }

 private:
  static const PerftConfig& with_whole_rows(const PerftConfig& config, DType compute) {
    const std::int64_t multiple = 16 / size_of(compute);
    if (config.hidden % multiple != 0) {
      fail(
          ErrorCode::kUnsupported,
          "PERFT's adapters on CUDA with hidden={} in {}: rows are read 16 bytes at a time; want a "
          "multiple of {}, or backend cpu",
          config.hidden, to_string(compute), multiple);
    }
    return config;
  }

  void reserve(std::int64_t num_tokens) {
    if (num_tokens <= reserved_) return;
    (void)rows_.matrix(DType::kF32, num_tokens, config_.hidden);
    (void)dout_.matrix(compute_, num_tokens, config_.hidden);
    const bool all = config_.kind == PerftKind::kDense || config_.kind == PerftKind::kShared;
    if (config_.kind == PerftKind::kEmbedded || all) {
      (void)ids_.matrix<std::int32_t>(num_tokens, columns_);  // zeros: the one expert of `all`
    }
    if (all) fill_ones(ones_.vector<float>(num_tokens), nullptr);
    if (!packed_.layout().is_plain()) {
      (void)dw13_.vector<float>(packed_.layout().cells());
      (void)dw2_.vector<float>(packed_.layout().cells());
    }
    SWITCHYARD_CUDA(cudaStreamSynchronize(nullptr));
    reserved_ = num_tokens;
  }

  void give_routing(const PerftForwardArgs& args, ForwardArgs& inner) {
    const std::int64_t num_tokens = args.tokens.rows;
    const Matrix<std::int32_t> ids = ids_.matrix<std::int32_t>(num_tokens, columns_);
    if (config_.kind != PerftKind::kEmbedded) {
      inner.expert = ids;
      inner.weight = ones_.matrix<float>(num_tokens, 1);
      return;
    }
    inner.expert = args.expert;
    inner.weight = args.weight;
    if (args.kept.data == nullptr) return;
    take_kept(args.expert.data, args.kept.data, ids.data, ids.size(),
              static_cast<cudaStream_t>(args.stream));
    inner.expert = ids;
  }

  void write_sums(ConstRawMatrix in, float scale, ConstRawMatrix base, RawMatrix out,
                  StageRecorder* recorder, void* stream) {
    Execution execution;
    execution.backend = Backend::kCuda;
    execution.recorder = recorder;
    execution.stream = stream;
    const ScopedStage stage(
        execution, "perft_sum",
        {.bytes = static_cast<double>(in.bytes() + base.bytes() + out.bytes())});
    scale_and_add(in, scale, base, out, static_cast<cudaStream_t>(stream));
  }

  /// Where the layer writes the gradients of its experts, if not to the caller at once.
  [[nodiscard]] ExpertGradients packed_gradients() {
    const AdapterLayout& layout = packed_.layout();
    return {.w13 = dw13_.matrix(DType::kF32, layout.experts * layout.width, layout.hidden),
            .w2 = dw2_.matrix(DType::kF32, layout.experts * layout.hidden, layout.width)};
  }

  void backward_of_one(const PerftBackwardArgs& args, BackwardArgs inner) {
    const bool wanted = args.da.data != nullptr || args.db.data != nullptr;
    if (packed_.layout().is_plain() || !wanted) return layer_.backward(inner);
    const ExpertGradients packed = packed_gradients();
    if (args.da.data != nullptr) inner.experts.w13 = packed.w13;
    if (args.db.data != nullptr) inner.experts.w2 = packed.w2;
    if (args.accumulate) {  // the gate's gradient is the caller's, these are added below
      auto* const stream = static_cast<cudaStream_t>(args.stream);
      for (const RawMatrix& array : {inner.experts.w13, inner.experts.w2}) {
        if (array.data == nullptr) continue;
        SWITCHYARD_CUDA(
            cudaMemsetAsync(array.data, 0, static_cast<std::size_t>(array.bytes()), stream));
      }
    }
    layer_.backward(inner);
    unpack(packed, args.da, args.db, args.accumulate, args.stream);
  }

  void unpack(const ExpertGradients& packed, RawMatrix da, RawMatrix db, bool accumulate,
              void* stream) {
    unpack_gradients(packed_.layout(),
                     {.w13 = reinterpret_cast<const float*>(packed.w13.data),
                      .w2 = reinterpret_cast<const float*>(packed.w2.data),
                      .da = da,
                      .db = db},
                     accumulate, static_cast<cudaStream_t>(stream));
  }

  /// Every rank adds up all of its parameters' gradients, so that ranks need not ask for the same.
  /// Through host memory: adapters are small, and each rank may be anywhere.
  void backward_of_ranks(const PerftBackwardArgs& args, BackwardArgs inner) {
    auto* const stream = static_cast<cudaStream_t>(args.stream);
    require(!is_captured(stream),
            "a backward of adapters over {} ranks waits on the host, which a graph cannot hold",
            communicator_->size());
    const std::int64_t down = config_.num_adapters * config_.rank * config_.hidden;
    const std::int64_t logits =
        config_.kind == PerftKind::kRouted ? config_.router.num_logits() : 0;
    const Vector<float> all = parts_.vector<float>(config_.num_parameters());
    const auto matrix = [&](std::int64_t first, std::int64_t num, std::int64_t cols) {
      return raw(Matrix<float>{all.data + first, {num, cols}});
    };
    const RawMatrix da = matrix(0, config_.num_adapters * config_.rank, config_.hidden);
    const RawMatrix db = matrix(down, config_.num_adapters * config_.hidden, config_.rank);
    const RawMatrix dgate = matrix(2 * down, logits, config_.hidden);
    const bool plain = packed_.layout().is_plain();
    if (plain) {
      inner.experts = {.w13 = da, .w2 = db};
    } else {
      inner.experts = packed_gradients();
    }
    inner.dgate = logits > 0 ? dgate : RawMatrix{};
    inner.accumulate = false;
    layer_.backward(inner);
    if (!plain) unpack(inner.experts, da, db, false, args.stream);
    on_host_.resize(static_cast<std::size_t>(all.size()));
    const std::size_t bytes = on_host_.size() * sizeof(float);
    SWITCHYARD_CUDA(
        cudaMemcpyAsync(on_host_.data(), all.data, bytes, cudaMemcpyDeviceToHost, stream));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    if (!sums_ || !sums_->usable()) sums_ = std::make_unique<RankSums>(*communicator_, all.size());
    sums_->add_up(on_host_.data(), all.size());
    SWITCHYARD_CUDA(
        cudaMemcpyAsync(all.data, on_host_.data(), bytes, cudaMemcpyHostToDevice, stream));
    const auto write = [&](const RawMatrix& sum, const RawMatrix& out) {
      if (out.data == nullptr) return;
      const std::int64_t size = sum.rows * sum.cols;
      write_gradient_on_gpu({reinterpret_cast<const float*>(sum.data), {size}}, out.dtype, out.data,
                            args.accumulate, stream);
    };
    write(da, args.da);
    write(db, args.db);
    write(dgate, args.dgate);
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));  // the copy reads pageable memory of this call
  }

  PerftConfig config_;
  DType compute_;
  Communicator* communicator_;  ///< Null: one rank.
  PackedAdapters packed_;
  std::int32_t columns_;
  MoeLayer layer_;
  std::int64_t reserved_ = 0;
  DeviceBuffer rows_, dout_, ids_, ones_, dw13_, dw2_, parts_;
  std::vector<float> on_host_;
  std::unique_ptr<RankSums> sums_;
};

}  // namespace

std::unique_ptr<AdaptersRunner> make_cuda_adapters(const PerftModel& model,
                                                   const PerftOptions& options,
                                                   Communicator* communicator) {
  return std::make_unique<CudaAdapters>(model, options, communicator);
}

}  // namespace switchyard
