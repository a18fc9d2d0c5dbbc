// C interface: the flat and the bucketed interface of the published all-to-all benchmark.
#include "capi/capi_ep.hpp"
#include "core/check.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

TransportConfig config_of(const sy_ep_t& ep, std::int64_t capacity) {
  return {.num_experts = ep.config.num_experts,
          .top_k = ep.config.top_k,
          .hidden = ep.config.hidden,
          .max_tokens = ep.config.max_tokens,
          .dtype = ep.config.dtype,
          .capacity = capacity};
}

TransportInput input_of(sy_ep_t& ep, const sy_tensor* x, const sy_tensor* expert,
                        const sy_tensor* weight, Backend backend) {
  const TransportInput input = capi::exchange_input(ep, x, expert, weight, backend);
  require(input.x.dtype == ep.config.dtype, "x is {}, want {}", to_string(input.x.dtype),
          to_string(ep.config.dtype));
  ep.num_tokens = input.x.rows;
  return input;
}

/// The weights of combine() take the place of those of dispatch().
template <typename Interface>
void combine_with(sy_ep_t& ep, Interface& transport, const RawMatrix& rows, const sy_tensor* weight,
                  const sy_tensor* y) {
  require(rows.dtype == ep.config.dtype, "rows are {}, want {}", to_string(rows.dtype),
          to_string(ep.config.dtype));
  if (weight != nullptr) {
    transport.set_weight(
        capi::matrix<float>("weight", weight, ep.num_tokens, ep.config.top_k, Backend::kCpu));
  }
  transport.combine(rows, capi::raw_matrix("y", y, ep.num_tokens, ep.config.hidden, Backend::kCpu));
}

}  // namespace

sy_status sy_ep_dispatch_flat(sy_ep ep, const sy_tensor* x, const sy_tensor* expert,
                              const sy_tensor* weight, sy_flat* flat, void* stream) {
  return capi::guarded([&] {
    require(ep != nullptr, "ep is NULL");
    const auto call = ep->calls.begin();
    capi::check_struct("flat", flat);
    const Backend backend = ep->backend_for("x", x);
    const TransportInput input = input_of(*ep, x, expert, weight, backend);
    if (backend == Backend::kCuda) {
      capi::give(flat, capi::device_dispatch_flat(*ep, input, stream), flat->struct_size);
      return;
    }
    if (ep->flat == nullptr) {
      ep->flat = std::make_unique<FlatTransport>(*ep->ranks, config_of(*ep, 0));
    }
    const ExpertInput rows = ep->flat->dispatch(input);
    const AssignmentMeta* meta = ep->flat->exchange().meta();
    capi::give(flat,
               sy_flat{.struct_size = 0,
                       .x = rows.x.data,
                       .num_rows = rows.rows(),
                       .meta = reinterpret_cast<const std::int32_t*>(meta),
                       .rows_received = nullptr},
               flat->struct_size);
  });
}

sy_status sy_ep_combine_flat(sy_ep ep, const sy_tensor* rows, const sy_tensor* weight,
                             const sy_tensor* y, void* stream) {
  return capi::guarded([&] {
    require(ep != nullptr, "ep is NULL");
    const auto call = ep->calls.begin();
    if (ep->backend_for("rows", rows) == Backend::kCuda) {
      capi::device_combine_flat(*ep, rows, weight, y, stream);
      return;
    }
    require(ep->flat != nullptr, "ep has dispatched nothing by sy_ep_dispatch_flat");
    combine_with(*ep, *ep->flat,
                 capi::raw_matrix("rows", rows, ep->flat->exchange().num_rows(), ep->config.hidden,
                                  Backend::kCpu),
                 weight, y);
  });
}

sy_status sy_ep_dispatch_bucketed(sy_ep ep, const sy_tensor* x, const sy_tensor* expert,
                                  const sy_tensor* weight, int64_t capacity, sy_bucketed* bucketed,
                                  void* stream) {
  return capi::guarded([&] {
    require(ep != nullptr, "ep is NULL");
    const auto call = ep->calls.begin();
    capi::check_struct("bucketed", bucketed);
    require(capacity >= 0, "capacity={} is negative", capacity);
    const Backend backend = ep->backend_for("x", x);
    const TransportInput input = input_of(*ep, x, expert, weight, backend);
    const std::int64_t rows = capacity > 0 ? capacity : ep->config.max_tokens * ep->ranks->size();
    if (backend == Backend::kCuda) {
      capi::give(bucketed, capi::device_dispatch_bucketed(*ep, input, rows, stream),
                 bucketed->struct_size);
      return;
    }
    if (ep->bucketed == nullptr || ep->capacity != rows) {
      ep->bucketed = std::make_unique<BucketedTransport>(*ep->ranks, config_of(*ep, rows));
      ep->capacity = rows;
    }
    ep->bucketed->dispatch(input);
    const BucketedTransport& buckets = *ep->bucketed;
    capi::give(bucketed,
               sy_bucketed{.struct_size = 0,
                           .expert_num_tokens = buckets.expert_num_tokens().data,
                           .expert_x = buckets.expert_x().data,
                           .expert_meta = buckets.expert_meta().data,
                           .num_local_experts = ep->num_local,
                           .capacity = rows},
               bucketed->struct_size);
  });
}

sy_status sy_ep_combine_bucketed(sy_ep ep, const sy_tensor* rows, const sy_tensor* weight,
                                 const sy_tensor* y, void* stream) {
  return capi::guarded([&] {
    require(ep != nullptr, "ep is NULL");
    const auto call = ep->calls.begin();
    if (ep->backend_for("rows", rows) == Backend::kCuda) {
      capi::device_combine_bucketed(*ep, rows, weight, y, stream);
      return;
    }
    require(ep->bucketed != nullptr, "ep has dispatched nothing by sy_ep_dispatch_bucketed");
    const std::int64_t hidden = ep->config.hidden;
    capi::check_tensor("rows", rows, {ep->num_local, ep->capacity, hidden}, Backend::kCpu);
    const RawMatrix matrix{capi::data_of(*rows), capi::dtype_of("rows", *rows),
                           ep->num_local * ep->capacity, hidden};
    combine_with(*ep, *ep->bucketed, matrix, weight, y);
  });
}
