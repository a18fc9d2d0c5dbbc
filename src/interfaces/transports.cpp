// The flat and the bucketed interface: what each makes of the rows that have arrived.
#include "interfaces/transports.hpp"

#include <algorithm>
#include <array>

#include "comm/ranks/agreement.hpp"
#include "comm/ranks/collectively.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

void require_same(Communicator& communicator, const TransportConfig& config) {
  const AgreedValue values[] = {
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

}  // namespace switchyard
