// The variants of the benchmark on a GPU behind one interface.
#include "bench/exchange/device_trips.hpp"

#include <cuda_runtime_api.h>

#include "bench/variants/device_host_lists.hpp"
#include "core/gpu/cuda_check.hpp"
#include "interfaces/device_transports.hpp"

namespace switchyard::bench {
namespace {

class NativeTrip final : public Trip {
 public:
  NativeTrip(Communicator& communicator, const TransportCase& c, const TransportInput& input,
             RawMatrix out)
      : Trip(communicator, c, input, out),
        exchange_(make_device_native(communicator, {.exchange = {.num_experts = shape_.num_experts,
                                                                 .top_k = shape_.top_k,
                                                                 .hidden = shape_.hidden,
                                                                 .max_tokens = shape_.max_tokens,
                                                                 .dtype = shape_.dtype,
                                                                 .combine_wire = shape_.dtype},
                                                    .options = options_})) {
    make_results(communicator.size() * shape_.max_tokens * shape_.top_k);
  }
  void check() override { exchange_->check(); }
  void dispatch(void* stream) override {
    rows_ = exchange_->dispatch({.x = input_.x,
                                 .expert = input_.expert,
                                 .weight = input_.weight,
                                 .execution = {.stream = stream}});
  }
  void combine(void* stream) override { exchange_->combine(results_, out_, stream); }

 private:
  [[nodiscard]] StandIn experts() const override {
    return {.x = rows_.received.x,
            .x_row = rows_.plan.row_token.data,
            .rows = rows_.plan.expert_begin.data + rows_.plan.num_experts};
  }

  std::unique_ptr<DeviceNative> exchange_;
  DeviceNative::Rows rows_;
};

/// The flat and the bucketed interface.
class AssignmentTrip final : public Trip {
 public:
  AssignmentTrip(Communicator& communicator, const TransportCase& c, const TransportInput& input,
                 RawMatrix out, bool bucketed)
      : Trip(communicator, c, input, out),
        exchange_(make_device_assignments(communicator,
                                          {.num_experts = shape_.num_experts,
                                           .top_k = shape_.top_k,
                                           .hidden = shape_.hidden,
                                           .max_tokens = shape_.max_tokens,
                                           .dtype = shape_.dtype},
                                          options_)),
        capacity_(bucketed ? shape_.max_tokens * communicator.size() : 0) {
    const int rank = communicator.rank();
    const std::int64_t local = first_expert_of(shape_.num_experts, communicator.size(), rank + 1) -
                               first_expert_of(shape_.num_experts, communicator.size(), rank);
    make_results(bucketed ? local * capacity_
                          : communicator.size() * shape_.max_tokens * shape_.top_k);
  }
  void check() override { exchange_->check(); }
  [[nodiscard]] std::int64_t capacity() const override { return capacity_; }
  void dispatch(void* stream) override {
    if (capacity_ > 0) {
      buckets_ = exchange_->dispatch_bucketed(input_, capacity_, stream);
    } else {
      flat_ = exchange_->dispatch_flat(input_, stream);
    }
  }
  void combine(void* stream) override {
    if (capacity_ > 0) {
      exchange_->combine_bucketed(results_, input_.weight, out_, stream);
    } else {
      exchange_->combine_flat(results_, input_.weight, out_, stream);
    }
  }

 private:
  [[nodiscard]] StandIn experts() const override {
    if (capacity_ == 0) return {.x = flat_.x, .rows_64 = flat_.num_rows};
    return {.x = buckets_.x, .bucket_rows = buckets_.num_tokens.data, .capacity = capacity_};
  }

  std::unique_ptr<DeviceAssignments> exchange_;
  const std::int64_t capacity_;
  DeviceAssignments::Flat flat_;
  DeviceAssignments::Buckets buckets_;
};

/// The lower steps of the ladder: the host makes the lists.
class HostListsTrip final : public Trip {
 public:
  HostListsTrip(Communicator& communicator, const TransportCase& c, const TransportInput& input,
                RawMatrix out, HostLists lists)
      : Trip(communicator, c, input, out),
        exchange_(communicator,
                  {.num_experts = shape_.num_experts,
                   .top_k = shape_.top_k,
                   .hidden = shape_.hidden,
                   .max_tokens = shape_.max_tokens,
                   .dtype = shape_.dtype},
                  lists, options_) {
    make_results(communicator.size() * shape_.max_tokens * shape_.top_k);
  }
  [[nodiscard]] bool only_enqueues() const override { return false; }
  void dispatch(void* stream) override {
    rows_ = exchange_.dispatch(input_, stream);
    results_.rows = rows_.rows;
  }
  void combine(void* stream) override { exchange_.combine(results_, out_, stream); }

 private:
  [[nodiscard]] StandIn experts() const override { return {.x = rows_}; }

  DeviceHostLists exchange_;
  ConstRawMatrix rows_;
};

}  // namespace

Trip::Trip(Communicator& communicator, const TransportCase& c, const TransportInput& input,
           RawMatrix out)
    : shape_(c.shape),
      input_(input),
      out_(out),
      factor_(static_cast<float>(1 + communicator.rank())) {
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  options_ = {.device = device, .engine = c.engine, .timeout = c.where.timeout};
}

void Trip::run_experts(void* stream) {
  StandIn stand_in = experts();
  stand_in.out = results_;
  stand_in.factor = factor_;
  launch_stand_in(stand_in, static_cast<cudaStream_t>(stream));
}

void Trip::run(StageRecorder* recorder, void* stream) {
  const Execution execution{.backend = Backend::kCuda, .stream = stream, .recorder = recorder};
  {
    const ScopedStage stage(execution, "dispatch", {});
    dispatch(stream);
  }
  {
    const ScopedStage stage(execution, "experts", {});
    run_experts(stream);
  }
  const ScopedStage stage(execution, "combine", {});
  combine(stream);
}

std::unique_ptr<Trip> make_trip(const std::string& variant, Communicator& communicator,
                                const TransportCase& c, const TransportInput& input,
                                RawMatrix out) {
  if (variant == "native") return std::make_unique<NativeTrip>(communicator, c, input, out);
  if (variant == "flat" || variant == "bucketed") {
    return std::make_unique<AssignmentTrip>(communicator, c, input, out, variant == "bucketed");
  }
  const HostLists lists = variant == "sorted" ? HostLists::kSorted : HostLists::kReference;
  return std::make_unique<HostListsTrip>(communicator, c, input, out, lists);
}

}  // namespace switchyard::bench
