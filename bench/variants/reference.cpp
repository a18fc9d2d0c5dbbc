// The published reference, on purpose as naive as it is there: a list per destination that grows
// row by row, five numbers of meta a row in a message of their own, buckets filled and emptied row
// by row. Bound by allocation and by copies; the first rung of the ladder.
#include <array>
#include <cstring>
#include <vector>

#include "bench/variants/byte_exchange.hpp"
#include "bench/variants/transports.hpp"
#include "comm/ranks/collectively.hpp"
#include "core/row_ops.hpp"
#include "switchyard/combine.hpp"

namespace switchyard {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Global expert, source rank, source token, source k, padding.
using Meta = std::array<std::int32_t, 5>;

template <typename Value>
void append(std::vector<std::byte>& list, const Value* value, std::size_t bytes) {
  const auto* begin = reinterpret_cast<const std::byte*>(value);
  list.insert(list.end(), begin, begin + bytes);
}

class ReferenceTransport final : public Transport {
 public:
  ReferenceTransport(Communicator& communicator, const TransportConfig& config)
      : communicator_(communicator),
        config_(config),
        row_bytes_(at(config.hidden * size_of(config.dtype))),
        max_rows_(at(communicator.size() * config.max_tokens * config.top_k)),
        rows_(communicator, max_rows_ * row_bytes_),
        meta_(communicator, max_rows_ * sizeof(Meta)) {}

  ExpertInput dispatch(const TransportInput& input) override {
    return collectively(communicator_, [&] {
      weight_.assign(input.weight.data, input.weight.data + input.weight.size());
      num_tokens_ = input.x.rows;
      std::vector<std::vector<std::byte>> rows(at(communicator_.size()));
      std::vector<std::vector<std::byte>> meta(at(communicator_.size()));
      for (std::int32_t token = 0; token < num_tokens_; ++token) {
        for (std::int32_t k = 0; k < config_.top_k; ++k) {
          const std::int32_t expert = input.expert.row(token)[k];
          if (expert < 0) continue;
          const Meta numbers = {expert, communicator_.rank(), token, k, 0};
          append(rows[at(rank_of(expert))], input.x.row(token), row_bytes_);
          append(meta[at(rank_of(expert))], &numbers, sizeof(numbers));
        }
      }
      send(rows, meta);
      return fill_buckets();
    });
  }

  void combine(ConstRawMatrix rows, RawMatrix out) override {
    collectively(communicator_, [&] {
      std::vector<std::vector<std::byte>> back(at(communicator_.size()));
      std::vector<std::vector<std::byte>> meta(at(communicator_.size()));
      for (std::int64_t i = 0; i < rows.rows; ++i) {
        const Meta& numbers = bucket_meta_[at(i)];
        append(back[at(numbers[1])], rows.row(i), row_bytes_);
        append(meta[at(numbers[1])], &numbers, sizeof(numbers));
      }
      const std::int64_t before = wire_bytes_;
      send(back, meta);
      wire_bytes_ += before;
      std::vector<float> sums(at(num_tokens_ * config_.hidden), 0.0F);
      for (std::size_t i = 0; i < received_meta_.size(); ++i) {
        const Meta& numbers = received_meta_[i];
        const float weight = weight_[at(std::int64_t{numbers[2]} * config_.top_k + numbers[3])];
        row_ops::accumulate(config_.dtype, weight, &received_rows_[i * row_bytes_],
                            &sums[at(numbers[2] * config_.hidden)], config_.hidden);
      }
      row_ops::narrow(out.dtype, sums.data(), out.data, num_tokens_ * config_.hidden);
    });
  }

  [[nodiscard]] std::int64_t wire_bytes() const override { return wire_bytes_; }

 private:
  [[nodiscard]] std::int32_t rank_of(std::int32_t expert) const {
    std::int32_t rank = 0;
    while (first_expert_of(config_.num_experts, communicator_.size(), rank + 1) <= expert) ++rank;
    return rank;
  }

  void send(const std::vector<std::vector<std::byte>>& rows,
            const std::vector<std::vector<std::byte>>& meta) {
    received_rows_.clear();
    std::vector<std::byte> numbers;
    for (const auto& list : rows_.all_to_all(rows))
      append(received_rows_, list.data(), list.size());
    for (const auto& list : meta_.all_to_all(meta)) append(numbers, list.data(), list.size());
    received_meta_.resize(numbers.size() / sizeof(Meta));
    if (!numbers.empty()) std::memcpy(received_meta_.data(), numbers.data(), numbers.size());
    wire_bytes_ = 0;
    for (int to = 0; to < communicator_.size(); ++to) {
      if (to == communicator_.rank()) continue;
      wire_bytes_ += std::ssize(rows[at(to)]) + std::ssize(meta[at(to)]);
    }
  }

  ExpertInput fill_buckets() {
    bucket_rows_.clear();
    bucket_meta_.clear();
    expert_.clear();
    for (std::int32_t e = 0; e < config_.num_experts; ++e) {
      for (std::size_t i = 0; i < received_meta_.size(); ++i) {
        if (received_meta_[i][0] != e) continue;
        append(bucket_rows_, &received_rows_[i * row_bytes_], row_bytes_);
        bucket_meta_.push_back(received_meta_[i]);
        expert_.push_back(e);
      }
    }
    return {.x = {bucket_rows_.data(), config_.dtype, std::ssize(expert_), config_.hidden},
            .x_row = {},
            .expert = {expert_.data(), {std::ssize(expert_)}}};
  }

  Communicator& communicator_;
  const TransportConfig config_;
  const std::size_t row_bytes_;
  const std::size_t max_rows_;
  ByteExchange rows_;
  ByteExchange meta_;
  std::int64_t num_tokens_ = 0;
  std::int64_t wire_bytes_ = 0;
  std::vector<float> weight_;
  std::vector<std::byte> received_rows_;
  std::vector<Meta> received_meta_;
  std::vector<std::byte> bucket_rows_;
  std::vector<Meta> bucket_meta_;
  std::vector<std::int32_t> expert_;
};

}  // namespace

std::unique_ptr<Transport> make_reference_transport(Communicator& communicator,
                                                    const TransportConfig& config) {
  require_same(communicator, config);
  return std::make_unique<ReferenceTransport>(communicator, config);
}

}  // namespace switchyard
