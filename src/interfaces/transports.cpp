// The variants over single assignments: what each makes of the rows that have arrived.
#include "interfaces/transports.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/ranks/agreement.hpp"
#include "comm/ranks/collectively.hpp"
#include "core/check.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Rows arrive in blocks per source, sorted by expert: one copy makes them contiguous per expert.
class SortedTransport final : public Transport {
 public:
  SortedTransport(Communicator& communicator, const TransportConfig& config)
      : communicator_(communicator),
        config_(config),
        exchange_(communicator, config, AssignmentExchange::Order::kExpert) {}

  ExpertInput dispatch(const TransportInput& input) override {
    return collectively(communicator_, [&] {
      exchange_.dispatch(input);
      place_.clear();
      expert_.clear();
      const std::int32_t rank = communicator_.rank();
      for (auto e = exchange_.first_expert(rank); e < exchange_.first_expert(rank + 1); ++e) {
        for (std::int32_t source = 0; source < communicator_.size(); ++source) {
          const std::int64_t first = exchange_.first_place(source, e);
          for (std::int64_t i = 0; i < exchange_.count(source, e); ++i) place_.push_back(first + i);
        }
        expert_.resize(place_.size(), e);
      }
      const ConstRawMatrix rows = exchange_.rows();
      if (std::ssize(buckets_) < rows.bytes()) buckets_.resize(at(rows.bytes()));
      parallel_for(config_.pool, rows.rows, [&](std::int64_t i, int) {
        std::memcpy(buckets_.data() + i * rows.row_bytes(), rows.row(place_[at(i)]),
                    at(rows.row_bytes()));
      });
      return ExpertInput{.x = {buckets_.data(), rows.dtype, rows.rows, rows.cols},
                         .x_row = {},
                         .expert = {expert_.data(), {std::ssize(expert_)}}};
    });
  }

  void combine(ConstRawMatrix rows, RawMatrix out) override {
    collectively(communicator_, [&] {
      require(rows.rows == std::ssize(place_), "rows is [{}, H], want {}", rows.rows,
              place_.size());
      if (std::ssize(blocks_) < rows.bytes()) blocks_.resize(at(rows.bytes()));
      parallel_for(config_.pool, rows.rows, [&](std::int64_t i, int) {
        std::memcpy(blocks_.data() + place_[at(i)] * rows.row_bytes(), rows.row(i),
                    at(rows.row_bytes()));
      });
      exchange_.combine({blocks_.data(), rows.dtype, rows.rows, rows.cols}, out);
    });
  }

  [[nodiscard]] std::int64_t wire_bytes() const override { return exchange_.wire_bytes(); }

 private:
  Communicator& communicator_;
  const TransportConfig config_;
  AssignmentExchange exchange_;
  std::vector<std::int64_t> place_;  // of each row per expert, among those that arrived
  std::vector<std::int32_t> expert_;
  std::vector<std::byte> buckets_;
  std::vector<std::byte> blocks_;
};

constexpr std::array<std::string_view, 5> kNames = {"reference", "sorted", "flat", "bucketed",
                                                    "native"};

void require_same(Communicator& communicator, std::string_view name,
                  const TransportConfig& config) {
  const AgreedValue values[] = {
      {"variant", std::ranges::find(kNames, name) - kNames.begin()},
      {"num_experts", config.num_experts},
      {"top_k", config.top_k},
      {"hidden", config.hidden},
      {"max_tokens", config.max_tokens},
      {"dtype", static_cast<std::int64_t>(config.dtype)},
      {"capacity", config.capacity},
  };
  require_agreement(communicator, values);
  require(config.num_experts >= 1 && config.top_k >= 1 && config.hidden >= 1 &&
              config.max_tokens >= 0 && config.capacity >= 0,
          "num_experts={}, top_k={}, hidden={}, max_tokens={}, capacity={}: all must be positive",
          config.num_experts, config.top_k, config.hidden, config.max_tokens, config.capacity);
}

}  // namespace

ExpertInput FlatTransport::dispatch(const TransportInput& input) {
  return collectively(communicator_, [&] {
    exchange_.dispatch(input);
    expert_.resize(at(exchange_.num_rows()));
    for (std::size_t i = 0; i < expert_.size(); ++i) expert_[i] = exchange_.meta()[i].expert;
    return ExpertInput{
        .x = exchange_.rows(), .x_row = {}, .expert = {expert_.data(), {std::ssize(expert_)}}};
  });
}

void FlatTransport::combine(ConstRawMatrix rows, RawMatrix out) {
  collectively(communicator_, [&] { exchange_.combine(rows, out); });
}

ExpertInput BucketedTransport::dispatch(const TransportInput& input) {
  return collectively(communicator_, [&] {
    exchange_.dispatch(input);
    const std::int32_t rank = communicator_.rank();
    const std::int32_t first = exchange_.first_expert(rank);
    const std::int32_t local = exchange_.first_expert(rank + 1) - first;
    num_tokens_.assign(at(local), 0);
    expert_.assign(at(exchange_.num_rows()), -1);
    meta_.assign(at(exchange_.num_rows() * kMetaWidth), -1);
    for (std::int32_t e = 0; e < local; ++e) {
      std::int64_t row = e * exchange_.capacity();
      for (std::int32_t source = 0; source < communicator_.size(); ++source) {
        for (std::int64_t i = 0; i < exchange_.count(source, first + e); ++i, ++row) {
          const std::int32_t position = exchange_.meta()[row].position;
          const std::array<std::int32_t, kMetaWidth> numbers = {
              first + e, source, position / top_k_, position % top_k_, 0};
          std::ranges::copy(numbers, meta_.begin() + row * kMetaWidth);
          expert_[at(row)] = first + e;
          ++num_tokens_[at(e)];
        }
      }
    }
    return ExpertInput{
        .x = exchange_.rows(), .x_row = {}, .expert = {expert_.data(), {std::ssize(expert_)}}};
  });
}

void BucketedTransport::combine(ConstRawMatrix rows, RawMatrix out) {
  collectively(communicator_, [&] { exchange_.combine(rows, out); });
}

std::unique_ptr<Transport> make_sorted_transport(Communicator& communicator,
                                                 const TransportConfig& config) {
  return std::make_unique<SortedTransport>(communicator, config);
}

std::span<const std::string_view> transport_names() { return kNames; }

std::unique_ptr<Transport> make_transport(std::string_view name, Communicator& communicator,
                                          const TransportConfig& config) {
  require(std::ranges::find(kNames, name) != kNames.end(),
          "variant '{}' does not exist, want reference, sorted, flat, bucketed or native", name);
  require_same(communicator, name, config);
  if (name == "reference") return make_reference_transport(communicator, config);
  if (name == "sorted") return make_sorted_transport(communicator, config);
  if (name == "flat") return std::make_unique<FlatTransport>(communicator, config);
  if (name == "bucketed") return std::make_unique<BucketedTransport>(communicator, config);
  return make_native_transport(communicator, config);
}

}  // namespace switchyard
