#pragma once

#include <vector>

#include "interfaces/assignments.hpp"
#include "interfaces/transport.hpp"

namespace switchyard {

/// Received rows in the order source, token, k, with their meta: the benchmark's flat interface.
class FlatTransport final : public Transport {
 public:
  FlatTransport(Communicator& communicator, const TransportConfig& config)
      : communicator_(communicator),
        exchange_(communicator, config, AssignmentExchange::Order::kToken) {}

  ExpertInput dispatch(const TransportInput& input) override;
  void combine(ConstRawMatrix rows, RawMatrix out) override;
  void set_weight(Matrix<const float> weight) { exchange_.set_weight(weight); }
  [[nodiscard]] std::int64_t wire_bytes() const override { return exchange_.wire_bytes(); }
  [[nodiscard]] const AssignmentExchange& exchange() const { return exchange_; }

 private:
  Communicator& communicator_;
  AssignmentExchange exchange_;
  std::vector<std::int32_t> expert_;
};

/// The benchmark's bucketed interface.
class BucketedTransport final : public Transport {
 public:
  static constexpr std::int64_t kMetaWidth = 5;  ///< Expert, source rank, token, k, padding.

  BucketedTransport(Communicator& communicator, const TransportConfig& config)
      : communicator_(communicator),
        top_k_(config.top_k),
        exchange_(communicator, config, AssignmentExchange::Order::kBuckets) {}

  ExpertInput dispatch(const TransportInput& input) override;
  void combine(ConstRawMatrix rows, RawMatrix out) override;
  void set_weight(Matrix<const float> weight) { exchange_.set_weight(weight); }
  [[nodiscard]] std::int64_t wire_bytes() const override { return exchange_.wire_bytes(); }

  /// [El]: rows of each local expert.
  [[nodiscard]] Vector<const std::int32_t> expert_num_tokens() const {
    return {num_tokens_.data(), {std::ssize(num_tokens_)}};
  }
  /// [El * capacity, H]: row c of local expert e is e * capacity + c; later rows are undefined.
  [[nodiscard]] ConstRawMatrix expert_x() const { return exchange_.rows(); }
  /// [El * capacity, 5]; -1 where no row is.
  [[nodiscard]] Matrix<const std::int32_t> expert_meta() const {
    return {meta_.data(), {std::ssize(meta_) / kMetaWidth, kMetaWidth}};
  }

 private:
  Communicator& communicator_;
  const std::int32_t top_k_;
  AssignmentExchange exchange_;
  std::vector<std::int32_t> num_tokens_;
  std::vector<std::int32_t> meta_;
  std::vector<std::int32_t> expert_;
};

}  // namespace switchyard
