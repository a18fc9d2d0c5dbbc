// The stages of a layer on a GPU, one by one: all memory is made once for max_tokens (or grows,
// where that is 0); nothing waits, and what kernels find wrong stands in a status record.
#include "layer/gpu/stages.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/device_wide.hpp"
#include "layer/compute_check.hpp"
#include "layer/gpu/kernels.hpp"
#include "layer/gpu/wire_rows.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

std::int64_t num_scales(std::int64_t cols) { return (cols + kE4M3Block - 1) / kE4M3Block; }

}  // namespace

CudaScratch::CudaScratch() { SWITCHYARD_CUDA(cudaGetDevice(&device)); }

std::shared_ptr<CudaScratch> scratch_of(const LayerOptions& options) {
  if (options.scratch == nullptr) return std::make_shared<CudaScratch>();
  auto scratch = std::dynamic_pointer_cast<CudaScratch>(options.scratch);
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  require(scratch != nullptr && scratch->device == device,
          "the scratch is of GPU {}, and the layer is made on GPU {}",
          scratch == nullptr ? -1 : scratch->device, device);
  return scratch;
}

std::shared_ptr<LayerScratch> make_layer_scratch() { return std::make_shared<CudaScratch>(); }

CudaStages::CudaStages(const LayerModel& model, const LayerOptions& options, int rank,
                       int num_ranks)
    : options_(options),
      scratch_(scratch_of(options)),
      num_experts_(model.config.router.num_experts),
      num_logits_(model.config.router.num_logits()),
      top_k_(model.config.router.top_k()),
      hidden_(model.config.experts.hidden),
      compute_(compute_type(model, options)),
      router_(model, options, compute_),
      each_group_(options.rank_invariant && options.combine_wire != DType::kF32),
      expert_tokens_(model),
      shared_config_(model.config.shared),
      source_(model.experts),
      shared_source_(model.shared),
      status_(router_.num_gates()) {
  if (computes_fp8(options) && device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) {
    fail(ErrorCode::kUnsupported,
         "compute=fp8 wants a GPU of compute capability 9.0, this one has {}.{}",
         device_attribute(cudaDevAttrComputeCapabilityMajor),
         device_attribute(cudaDevAttrComputeCapabilityMinor));
  }
  if (options.rank_invariant && options.combine_wire == DType::kF8E4M3) {
    fail(ErrorCode::kUnsupported, "rank_invariant with a wire of fp8 runs on the backend cpu only");
  }
  execution_.backend = Backend::kCuda;
  execution_.batch_invariant = options.batch_invariant;
  experts_.emplace(model, options_, router_, compute_, execution_, *scratch_, rank, num_ranks);
  if (model.shared) {
    shared_.emplace(load_device_experts(*model.shared, model.config.shared, 0, 1, compute_,
                                        options_, execution_),
                    model.shared_gate, *scratch_);
  }
}

void CudaStages::reserve(std::int64_t num_tokens) {
  if (num_tokens <= reserved_tokens_) return;
  const std::int64_t received = experts_->most_received(num_tokens);
  workspace_.reserve(std::max(stage_workspace_bytes(received, top_k_, num_logits_, hidden_),
                              router_.workspace_bytes(num_tokens)));
  router_.reserve(num_tokens);
  (void)converted(num_tokens, hidden_);
  if (crosses()) (void)crossed(received, hidden_);
  if (experts_->computes_fp8()) {
    (void)codes_.matrix(DType::kF8E4M3, received, hidden_);
    (void)scales_.matrix<float>(received, num_scales(hidden_));
  }
  expert_tokens_.reserve(num_tokens, hidden_, compute_);
  experts_->reserve(num_tokens);
  if (shared_) shared_->reserve(num_tokens);
  execution_.workspace = workspace_.data();
  execution_.workspace_bytes = workspace_.bytes();
  execution_.status = status_.counted();
  reserved_tokens_ = num_tokens;
}

void CudaStages::begin(cudaStream_t stream, StageRecorder* recorder) {
  stream_ = stream;
  execution_.stream = stream;
  ranges_.forward_to(recorder);
  execution_.recorder = &ranges_;
  recorded_ = recorder != nullptr;
}

ConstRawMatrix CudaStages::to_compute(ConstRawMatrix tokens) {
  if (tokens.dtype == compute_) return tokens;
  const RawMatrix out = converted(tokens.rows, tokens.cols);
  const ScopedStage stage(execution_, "pack", {});
  convert(tokens, out, stream_);
  return out;
}

ConstRawMatrix CudaStages::keep(ConstRawMatrix tokens, const ForwardArgs& args,
                                SavedForward::State& saved) {
  if (args.tokens_stay && tokens.dtype == compute_ && tokens.data == args.tokens.data) {
    saved.refer_to(tokens);
    return tokens;
  }
  const RawMatrix out = saved.room(SavedMemory::kTokens, compute_, tokens.rows, tokens.cols);
  saved.tokens = out;
  const ScopedStage stage(execution_, "pack",
                          {.bytes = static_cast<double>(tokens.bytes() + out.bytes())});
  if (tokens.dtype != compute_) {
    convert(tokens, out, stream_);
  } else if (tokens.rows > 0) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(out.data, tokens.data, static_cast<std::size_t>(out.bytes()),
                                    cudaMemcpyDeviceToDevice, stream_));
  }
  return out;
}

Matrix<const float> CudaStages::run_shared(ConstRawMatrix tokens, SavedForward::State* saved) {
  if (!shared_) return {};
  RawMatrix preactivation{};
  if (saved != nullptr && saved->recompute == Recompute::kNone) {
    preactivation = saved->shared_preactivation = saved->room(
        SavedMemory::kSharedPreactivation, compute_, tokens.rows, shared_->preactivation_cols());
  }
  return shared_->run(tokens, preactivation, execution_);
}

void CudaStages::reload_experts() {
  SWITCHYARD_CUDA(wait_for_device());
  experts_->drop();  // until all are new the layer has none
  if (shared_) {
    shared_->weights().reset();  // never two copies
    shared_->weights() =
        load_device_experts(*shared_source_, shared_config_, 0, 1, compute_, options_, execution_);
  }
  experts_->reload(*source_, execution_);
}

std::int32_t CudaStages::groups_per_row() const {
  return each_group_ ? experts_->subtree().num_groups : 1;
}

std::int64_t CudaStages::rows_of_sums(std::int64_t num_tokens) const {
  return experts_->most_received(num_tokens) * groups_per_row();
}

bool CudaStages::crosses() const { return options_.dispatch_wire.value_or(compute_) != compute_; }

RawMatrix CudaStages::crossed(std::int64_t rows, std::int64_t cols) {
  return crossed_.matrix(compute_, rows, cols);
}

RowsForExperts CudaStages::quantised(ConstRawMatrix x, Matrix<const std::int32_t> expert) {
  const RawMatrix codes = codes_.matrix(DType::kF8E4M3, x.rows, x.cols);
  const Matrix<float> scales = scales_.matrix<float>(x.rows, num_scales(x.cols));
  const ScopedStage stage(execution_, "quantize",
                          {.bytes = static_cast<double>(x.bytes() + codes.bytes())});
  quantise_rows({.x = x, .expert = expert}, codes, scales, stream_);
  return {.x = codes, .scale = scales};
}

RawMatrix CudaStages::converted(std::int64_t rows, std::int64_t cols) {
  return scratch_->converted.matrix(compute_, rows, cols);
}

void CudaStages::report(const std::int32_t* rows_used, const std::int64_t* rows_between_ranks,
                        std::int32_t num_rank_pairs) {
  const PlanView& view = experts_->plan();
  switchyard::report({.status = execution_.status,
                      .rows_used = rows_used,
                      .rows_executed = view.expert_begin.data + view.num_experts,
                      .rows_between_ranks = rows_between_ranks,
                      .num_rank_pairs = num_rank_pairs},
                     &status_.place(), stream_);
}

void CudaStages::raise_status() {
  const std::optional<DeviceStatus> found = status_.take(stream_);
  if (!found) return;
  require(found->nan_logit == DeviceStatus::kNone, "the logit of token {} for expert {} is NaN",
          found->nan_logit >> 32, found->nan_logit & 0xffffffffU);
  require_token_ids(*found, router_.config());
  require(found->bad_ids == 0, "{} expert ids are not in -1 to {}", found->bad_ids,
          num_experts_ - 1);
  require(found->lost_rows == 0, "{} rows are more than the padded layout has room for",
          found->lost_rows);
}

}  // namespace switchyard
