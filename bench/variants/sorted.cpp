// Rows go to their ranks in one sort by expert; the receiver groups them by expert once more, by a
// copy of each row, which the other variants do not need. Bound by memory bandwidth.
#include <cstring>
#include <vector>

#include "bench/variants/transports.hpp"
#include "comm/ranks/collectively.hpp"
#include "core/check.hpp"
#include "interfaces/assignments.hpp"
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

}  // namespace

std::unique_ptr<Transport> make_sorted_transport(Communicator& communicator,
                                                 const TransportConfig& config) {
  return std::make_unique<SortedTransport>(communicator, config);
}

}  // namespace switchyard
