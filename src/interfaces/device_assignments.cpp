// The flat and the bucketed interface between GPUs: every (token, k) is a token of its own of an
// exchange with one expert a token, which carries its number in the place of its weight. Received
// rows are then in the flat order; buckets are one copy further, and what comes back is read where
// the experts have left it. Bound by the wire, K times the native exchange's bytes and more.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "comm/device/device_exchange.hpp"
#include "comm/device/windows/sharing.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/device_wide.hpp"
#include "core/gpu/stacks.hpp"
#include "interfaces/device_assignment_kernels.hpp"
#include "interfaces/device_transports.hpp"
#include "plan/gpu/device_plan.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kMetaWidth = 5;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

class Assignments final : public DeviceAssignments {
 public:
  Assignments(Communicator& communicator, const TransportConfig& config,
              const DeviceExchangeOptions& options)
      : communicator_(communicator),
        config_(config),
        rank_(communicator.rank()),
        num_ranks_(communicator.size()),
        max_assignments_(config.max_tokens * config.top_k),
        max_rows_(num_ranks_ * max_assignments_),
        exchange_(communicator, exchange_config(config), exchange_options(options),
                  {.copies = config.top_k}) {
    first_expert_ = first_expert_of(config.num_experts, num_ranks_, rank_);
    num_local_ = first_expert_of(config.num_experts, num_ranks_, rank_ + 1) - first_expert_;
    std::vector<std::int32_t> numbers(size(max_assignments_));
    std::iota(numbers.begin(), numbers.end(), 0);
    position_ = positions_.matrix<float>(max_assignments_, 1).data;
    copy_to_device(position_, numbers.data(), numbers.size() * 4);
    (void)expert_.matrix<std::int32_t>(config.max_tokens, config.top_k);
    (void)weight_.matrix<float>(config.max_tokens, config.top_k);
    (void)flat_meta_.matrix<std::int32_t>(max_rows_, 2);
    (void)row_of_place_.vector<std::int32_t>(max_rows_);
    (void)home_.matrix(config.dtype, max_assignments_, config.hidden);
    workspace_.reserve(stage_workspace_bytes(max_rows_, 1, std::max(num_local_, 1), config.hidden));
    status_.reserve(sizeof(DeviceStatus));
    reset_status();
    if (exchange_.ranks_on_device() > 1) make_room_for_stacks();
    shares_device_ = device_sharing(communicator, options.device).most > 1;
    communicator.barrier("assignments");
  }

  Flat dispatch_flat(const TransportInput& input, void* stream) override {
    const DeviceReceived received = send(input, {}, stream);
    const Matrix<std::int32_t> meta = flat_meta_.matrix<std::int32_t>(max_rows_, 2);
    make_flat_meta(assignments_of(received), meta.data, static_cast<cudaStream_t>(stream));
    bucketed_ = false;
    return {.x = received.x, .meta = meta, .num_rows = received.num_rows};
  }

  void combine_flat(ConstRawMatrix rows, Matrix<const float> weight, RawMatrix out,
                    void* stream) override {
    require(!bucketed_, "combine_flat after a bucketed dispatch");
    // Rows behind those that came are not read, whether they are there or not.
    bring_home({rows.data, rows.dtype, max_rows_, rows.cols}, {}, weight, out, stream);
  }

  Buckets dispatch_bucketed(const TransportInput& input, std::int64_t capacity,
                            void* stream) override {
    const std::int64_t bucket_rows = num_local_ * capacity;
    make_buckets(capacity);
    auto* const meta = reinterpret_cast<std::int32_t*>(bucket_meta_.data());
    const DeviceReceived received = send(input, {meta, {kMetaWidth * bucket_rows}}, stream);
    bucketed_ = true;
    const PlanView& view = plan_.view();
    if (num_local_ > 0) {
      plan({.assignments = DenseAssignments{.expert = received.expert, .weight = received.weight},
            .first_expert = first_expert_,
            .layout = {.kind = LayoutKind::kPadded},
            .padded_rows = capacity,
            .plan = view,
            .execution = execution_on(stream)});
      fill_buckets({.received = assignments_of(received),
                    .x = received.x,
                    .token_begin = view.token_begin.data,
                    .token_row = view.token_row.data,
                    .counts = received.counts,
                    .rank = rank_,
                    .num_ranks = num_ranks_,
                    .top_k = config_.top_k,
                    .rows = buckets_.data(),
                    .meta = meta,
                    .row_of_place = reinterpret_cast<std::int32_t*>(row_of_place_.data()),
                    .status = reinterpret_cast<const DeviceStatus*>(status_.data()),
                    .found = &*found_},
                   static_cast<cudaStream_t>(stream));
    }
    return {.num_tokens = view.expert_rows,
            .x = {buckets_.data(), config_.dtype, bucket_rows, config_.hidden},
            .meta = {meta, {bucket_rows, kMetaWidth}}};
  }

  void combine_bucketed(ConstRawMatrix rows, Matrix<const float> weight, RawMatrix out,
                        void* stream) override {
    require(bucketed_, "combine_bucketed after a flat dispatch");
    require(rows.rows == num_local_ * capacity_, "rows are {}, want {} buckets of {}", rows.rows,
            num_local_, capacity_);
    bring_home(rows, {reinterpret_cast<const std::int32_t*>(row_of_place_.data()), {max_rows_}},
               weight, out, stream);
  }

  void check() override {
    exchange_.check();
    const std::uint32_t lost = found_->lost_rows;
    if (lost == 0) return;
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    reset_status();
    fail(ErrorCode::kInvalidArgument,
         "{} rows are more than the buckets of capacity={} hold, want a larger capacity", lost,
         capacity_);
  }

 private:
  static ExpertParallelConfig exchange_config(const TransportConfig& config) {
    return {.num_experts = config.num_experts,
            .top_k = 1,
            .hidden = config.hidden,
            .max_tokens = config.max_tokens * config.top_k,
            .dtype = config.dtype,
            .dispatch_wire = std::nullopt,
            .combine_wire = config.dtype};
  }
  static DeviceExchangeOptions exchange_options(DeviceExchangeOptions options) {
    options.mode = ExchangeMode::kThroughput;  // without gaps: the order of the flat rows
    options.one_place = true;
    return options;
  }

  [[nodiscard]] Execution execution_on(void* stream) const {
    Execution execution{.backend = Backend::kCuda,
                        .stream = stream,
                        .status = reinterpret_cast<DeviceStatus*>(status_.data())};
    return with_workspace(execution, workspace_);
  }

  [[nodiscard]] ReceivedAssignments assignments_of(const DeviceReceived& received) const {
    return {received.expert.data, received.weight.data, max_rows_};
  }

  void make_buckets(std::int64_t capacity) {
    require(capacity > 0, "capacity={} is not positive", capacity);
    if (capacity == capacity_) return;
    const std::int64_t rows = num_local_ * capacity;
    plan_.reserve(max_rows_, 1, num_local_, rows);
    (void)buckets_.matrix(config_.dtype, rows, config_.hidden);
    (void)bucket_meta_.matrix<std::int32_t>(rows, kMetaWidth);
    // Places whose rows are lost must not name one beyond a smaller bucket.
    SWITCHYARD_CUDA(cudaMemset(row_of_place_.data(), 0, size(4 * max_rows_)));
    SWITCHYARD_CUDA(wait_for_device());
    // Who takes memory waits for all kernels of the device: none may wait for this rank meanwhile.
    if (shares_device_) communicator_.barrier("buckets");
    capacity_ = capacity;
  }

  /// `meta` of the buckets becomes -1.
  DeviceReceived send(const TransportInput& input, Vector<std::int32_t> meta, void* stream) {
    check();
    stream_ = static_cast<cudaStream_t>(stream);
    const std::int64_t tokens = input.x.rows;
    const std::int64_t count = tokens * config_.top_k;
    require(tokens <= config_.max_tokens, "{} tokens exceed max_tokens={}", tokens,
            config_.max_tokens);
    keep_input({.expert = input.expert.data,
                .weight = input.weight.data,
                .count = count,
                .kept_expert = reinterpret_cast<std::int32_t*>(expert_.data()),
                .kept_weight = reinterpret_cast<float*>(weight_.data()),
                .meta = meta.data,
                .meta_size = meta.shape[0]},
               static_cast<cudaStream_t>(stream));
    num_tokens_ = tokens;
    return exchange_.dispatch({.x = input.x,
                               .expert = {input.expert.data, {count, 1}},
                               .weight = {position_, {count, 1}},
                               .execution = {.backend = Backend::kCuda, .stream = stream}});
  }

  void bring_home(ConstRawMatrix rows, Vector<const std::int32_t> row_of_place,
                  Matrix<const float> weight, RawMatrix out, void* stream) {
    check();
    require(out.rows == num_tokens_, "out has {} rows, want {}", out.rows, num_tokens_);
    const std::int64_t count = num_tokens_ * config_.top_k;
    const RawMatrix home{home_.data(), config_.dtype, count, config_.hidden};
    exchange_.combine(
        {.partials = rows, .out = home, .execution = {.backend = Backend::kCuda, .stream = stream}},
        row_of_place);
    add_assignments(
        {.rows = home,
         .expert = reinterpret_cast<const std::int32_t*>(expert_.data()),
         .weight =
             weight.data != nullptr ? weight.data : reinterpret_cast<const float*>(weight_.data()),
         .top_k = config_.top_k,
         .out = out},
        static_cast<cudaStream_t>(stream));
  }

  void reset_status() {
    const DeviceStatus fresh;
    copy_to_device(status_.data(), &fresh, sizeof(fresh));
    *found_ = fresh;
  }

  Communicator& communicator_;
  const TransportConfig config_;
  const int rank_;
  const int num_ranks_;
  const std::int64_t max_assignments_;  ///< Of a rank.
  const std::int64_t max_rows_;         ///< N max.
  DevicePlan plan_;
  DeviceBuffer positions_, expert_, weight_, flat_meta_, row_of_place_, home_, workspace_, status_;
  DeviceBuffer buckets_, bucket_meta_;
  PinnedValue<DeviceStatus> found_;
  DeviceExchange exchange_;  ///< Ends first: all ranks' kernels have left then.
  float* position_ = nullptr;
  std::int32_t first_expert_ = 0;
  std::int32_t num_local_ = 0;
  std::int64_t num_tokens_ = 0;
  std::int64_t capacity_ = 0;
  bool bucketed_ = false;
  bool shares_device_ = false;     ///< Any two ranks do.
  cudaStream_t stream_ = nullptr;  ///< Of the last dispatch.
};

}  // namespace

std::unique_ptr<DeviceAssignments> make_device_assignments(Communicator& communicator,
                                                           const TransportConfig& config,
                                                           DeviceExchangeOptions options) {
  return std::make_unique<Assignments>(communicator, config, options);
}

}  // namespace switchyard
