#pragma once

// The all-to-all between GPUs for those who bring their own experts: by the native interface, and
// by the flat and the bucketed one of the published benchmark. Calls only enqueue and may be
// captured in a graph; what a dispatch leaves is valid until the next one on the object, always in
// the same place, and every dispatch must be followed by its combine.

#include <cstdint>
#include <memory>

#include "interfaces/transport.hpp"
#include "switchyard/device_dispatch.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {

struct DeviceNativeConfig {
  ExpertParallelConfig exchange{};
  DeviceExchangeOptions options{};
  double capacity_factor = 0;  ///< 0: dropless.
  DropPolicy drop_policy = DropPolicy::kToken;
};

/// DeviceExpertParallel with index lists for the experts and sums where the experts are.
class DeviceNative {
 public:
  struct Rows {
    DeviceReceived received{};
    /// Over the N max rows, sorted by expert. Of its S max rows the first expert_begin[El] count;
    /// those behind them name some row of x all the same.
    PlanView plan{};
    std::int64_t max_assignments = 0;  ///< S max: N max * min(K, El).
  };

  virtual ~DeviceNative() = default;
  virtual Rows dispatch(const DispatchArgs& args) = 0;
  /// @param rows  Outputs of the experts, unweighted, in the order of the plan; f32, bf16 or f16;
  ///              at least expert_begin[El] rows.
  virtual void combine(ConstRawMatrix rows, RawMatrix out, void* stream) = 0;
  /// What kernels that have run found wrong. @throws As DeviceExpertParallel::check().
  virtual void check() = 0;
  [[nodiscard]] virtual const DeviceExpertParallel& exchange() const = 0;
};

/// One row for each (token, k), there and back; weights are used at home only. Tokens times K are
/// at most 16384 a rank.
class DeviceAssignments {
 public:
  /// In the order source rank, token, k, without a gap.
  struct Flat {
    ConstRawMatrix x{};                 ///< [N max, H].
    Matrix<const std::int32_t> meta{};  ///< [N max, 2]: token * K + k, expert; -1, -1: no row.
    const std::int64_t* num_rows = nullptr;
  };
  /// Of each local expert in the order source rank, token, k.
  struct Buckets {
    Vector<const std::int32_t> num_tokens{};  ///< [El].
    ConstRawMatrix x{};                       ///< [El * C, H]; rows beyond num_tokens: undefined.
    Matrix<const std::int32_t> meta{};        ///< [El * C, 5]: expert, rank, token, k, 0; or -1.
  };

  virtual ~DeviceAssignments() = default;
  virtual Flat dispatch_flat(const TransportInput& input, void* stream) = 0;
  /// @param rows    In the order of the flat rows; at least those that count.
  /// @param weight  [T, K], or empty: those of dispatch.
  virtual void combine_flat(ConstRawMatrix rows, Matrix<const float> weight, RawMatrix out,
                            void* stream) = 0;
  /// @param capacity  C. The first call with another one takes memory: not while capturing, and
  ///                  where ranks share a GPU by all of them together.
  virtual Buckets dispatch_bucketed(const TransportInput& input, std::int64_t capacity,
                                    void* stream) = 0;
  virtual void combine_bucketed(ConstRawMatrix rows, Matrix<const float> weight, RawMatrix out,
                                void* stream) = 0;
  /// Also @throws Error{kInvalidArgument}: an expert has got more rows than its bucket holds.
  virtual void check() = 0;
};

/// Collective; all memory is taken and all kernels are loaded here. The calling thread's current
/// device becomes that of the options. @throws As DeviceExpertParallel.
std::unique_ptr<DeviceNative> make_device_native(Communicator& communicator,
                                                 const DeviceNativeConfig& config);
/// The same; `options.mode` and `one_place` are not looked at.
std::unique_ptr<DeviceAssignments> make_device_assignments(Communicator& communicator,
                                                           const TransportConfig& config,
                                                           DeviceExchangeOptions options);

}  // namespace switchyard
