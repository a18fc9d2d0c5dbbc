// The interfaces of the published all-to-all between GPUs against the same ones on the host, bit by
// bit. Ranks are threads; they share the devices there are.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "bench/variants/device_fixed_size.hpp"
#include "bench/variants/device_host_lists.hpp"
#include "bench/variants/transports.hpp"
#include "core/gpu/cuda_check.hpp"
#include "interfaces/device_transports.hpp"
#include "interfaces/transports.hpp"
#include "switchyard/error.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard {
namespace {

/// The driver reads these when it is first called: no kernel is loaded while another spins.
[[maybe_unused]] const bool kPrepared = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0 &&
                                        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0;

constexpr std::int64_t kHidden = 72;
constexpr std::int64_t kMaxTokens = 19;
constexpr std::int32_t kTopK = 3;
constexpr std::int32_t kExperts = 11;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// One rank's tokens, on the host and on its device; a quarter of the choices are unused.
struct Tokens {
  explicit Tokens(unsigned seed) {
    std::mt19937 random(seed);
    count = static_cast<std::int64_t>(random() % (kMaxTokens + 1));
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < count * kHidden; ++i) x.push_back(normal(random));
    for (std::int64_t t = 0; t < count; ++t) {
      const auto first = static_cast<std::int32_t>(random() % kExperts);
      for (std::int32_t k = 0; k < kTopK; ++k) {
        expert.push_back(random() % 4 == 0 ? -1 : (first + 3 * k) % kExperts);
        weight.push_back(normal(random));
      }
    }
  }
  [[nodiscard]] TransportInput input(const float* rows, const std::int32_t* ids,
                                     const float* weights) const {
    return {.x = {reinterpret_cast<const std::byte*>(rows), DType::kF32, count, kHidden},
            .expert = {ids, {count, kTopK}},
            .weight = {weights, {count, kTopK}}};
  }
  [[nodiscard]] TransportInput host() const {
    return input(x.data(), expert.data(), weight.data());
  }

  std::int64_t count = 0;
  std::vector<float> x, weight;
  std::vector<std::int32_t> expert;
};

float expert_of(float value, std::int32_t expert) { return value * static_cast<float>(expert + 2); }

/// What the experts make of the host's rows, in their places; 7 where no row is.
std::vector<float> outputs_of(const ExpertInput& in) {
  std::vector<float> rows(at(in.rows() * kHidden), 7.0F);
  for (std::int64_t i = 0; i < in.rows(); ++i) {
    if (in.expert[i] < 0) continue;
    const std::int64_t from = in.x_row.empty() ? i : in.x_row[i];
    const auto* const x = reinterpret_cast<const float*>(in.x.row(from));
    for (std::int64_t h = 0; h < kHidden; ++h) {
      rows[at(i * kHidden + h)] = expert_of(x[h], in.expert[i]);
    }
  }
  return rows;
}

class Rank {
 public:
  explicit Rank(Communicator& communicator) : communicator_(communicator) {
    SWITCHYARD_CUDA(cudaSetDevice(device()));
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    x_ = std::make_unique<DeviceArray<float>>(at(kMaxTokens * kHidden));
    expert_ = std::make_unique<DeviceArray<std::int32_t>>(at(kMaxTokens * kTopK));
    weight_ = std::make_unique<DeviceArray<float>>(at(kMaxTokens * kTopK));
    out_ = std::make_unique<DeviceArray<float>>(at(kMaxTokens * kHidden));
    rows_ = std::make_unique<DeviceArray<float>>(
        at(kExperts * communicator.size() * kMaxTokens * kTopK * kHidden));
    communicator.barrier("memory");
  }
  ~Rank() {
    try {
      communicator_.barrier("no kernel runs any more");
    } catch (const std::exception&) {
    }
    cudaStreamDestroy(stream_);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  [[nodiscard]] int device() const { return communicator_.rank() % std::max(1, num_devices()); }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  [[nodiscard]] DeviceExchangeOptions options() const {
    return {.device = device(), .timeout = std::chrono::seconds(20)};
  }
  [[nodiscard]] TransportConfig config() const {
    return {.num_experts = kExperts,
            .top_k = kTopK,
            .hidden = kHidden,
            .max_tokens = kMaxTokens,
            .dtype = DType::kF32};
  }

  TransportInput upload(const Tokens& tokens) {
    copy_in(tokens.x, x_->data());
    copy_in(tokens.expert, expert_->data());
    copy_in(tokens.weight, weight_->data());
    return tokens.input(x_->data(), expert_->data(), weight_->data());
  }
  RawMatrix upload_rows(const std::vector<float>& rows) {
    copy_in(rows, rows_->data());
    return {rows_->bytes(), DType::kF32, std::ssize(rows) / kHidden, kHidden};
  }
  [[nodiscard]] RawMatrix out(std::int64_t tokens) const {
    return {out_->bytes(), DType::kF32, tokens, kHidden};
  }
  template <typename T>
  std::vector<T> copy_out(const void* from, std::int64_t count) {
    std::vector<T> values(at(count));
    // A copy that is queued while an exchange runs may keep another rank's from what that waits
    // for.
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    SWITCHYARD_CUDA(cudaMemcpyAsync(values.data(), from, values.size() * sizeof(T),
                                    cudaMemcpyDeviceToHost, stream_));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    return values;
  }
  void expect_out(const std::vector<float>& want) {
    const auto got = copy_out<float>(out_->data(), std::ssize(want));
    ASSERT_EQ(std::memcmp(got.data(), want.data(), 4 * want.size()), 0);
  }

 private:
  template <typename T>
  void copy_in(const std::vector<T>& values, T* to) {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    SWITCHYARD_CUDA(cudaMemcpyAsync(to, values.data(), values.size() * sizeof(T),
                                    cudaMemcpyHostToDevice, stream_));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
  }

  Communicator& communicator_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<DeviceArray<float>> x_, weight_, out_, rows_;
  std::unique_ptr<DeviceArray<std::int32_t>> expert_;
};

void on_ranks_with_gpus(int num_ranks, const std::function<void(Communicator&)>& body) {
  SCOPED_TRACE(num_ranks);
  run_ranks(num_ranks, body, std::chrono::seconds(60));
}

class DeviceTransport : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (num_devices() == 0) GTEST_SKIP() << "no GPU";
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, DeviceTransport, testing::Values(1, 2, 3, 4));

unsigned seed_of(int epoch, const Communicator& communicator) {
  return static_cast<unsigned>(100 * epoch + communicator.rank());
}

TEST_P(DeviceTransport, FlatRowsMetaAndSumsHaveTheHostsBits) {
  on_ranks_with_gpus(GetParam(), [](Communicator& communicator) {
    Rank rank(communicator);
    FlatTransport host(communicator, rank.config());
    const auto device = make_device_assignments(communicator, rank.config(), rank.options());
    for (int epoch = 0; epoch < 5; ++epoch) {
      const Tokens tokens(seed_of(epoch, communicator));
      const ExpertInput want = host.dispatch(tokens.host());
      const auto flat = device->dispatch_flat(rank.upload(tokens), rank.stream());
      ASSERT_EQ(rank.copy_out<std::int64_t>(flat.num_rows, 1)[0], want.rows());
      device->check();
      const auto meta = rank.copy_out<AssignmentMeta>(flat.meta.data, flat.meta.shape[0]);
      for (std::int64_t i = 0; i < std::ssize(meta); ++i) {
        const bool used = i < want.rows();
        ASSERT_EQ(meta[at(i)].position, used ? host.exchange().meta()[i].position : -1);
        ASSERT_EQ(meta[at(i)].expert, used ? host.exchange().meta()[i].expert : -1);
      }
      const auto x = rank.copy_out<float>(flat.x.data, want.rows() * kHidden);
      ASSERT_EQ(std::memcmp(x.data(), want.x.data, 4 * x.size()), 0);
      const std::vector<float> rows = outputs_of(want);
      std::vector<float> out(at(tokens.count * kHidden));
      const RawMatrix host_out{reinterpret_cast<std::byte*>(out.data()), DType::kF32, tokens.count,
                               kHidden};
      host.combine(
          {reinterpret_cast<const std::byte*>(rows.data()), DType::kF32, want.rows(), kHidden},
          host_out);
      device->combine_flat(rank.upload_rows(rows), {}, rank.out(tokens.count), rank.stream());
      rank.expect_out(out);
      device->check();
    }
  });
}

TEST_P(DeviceTransport, BucketsTheirMetaAndSumsHaveTheHostsBits) {
  on_ranks_with_gpus(GetParam(), [](Communicator& communicator) {
    Rank rank(communicator);
    BucketedTransport host(communicator, rank.config());
    const auto device = make_device_assignments(communicator, rank.config(), rank.options());
    const std::int64_t capacity = kMaxTokens * communicator.size();
    for (int epoch = 0; epoch < 5; ++epoch) {
      const Tokens tokens(seed_of(epoch, communicator));
      const ExpertInput want = host.dispatch(tokens.host());
      const auto buckets = device->dispatch_bucketed(rank.upload(tokens), capacity, rank.stream());
      const Vector<const std::int32_t> counts = host.expert_num_tokens();
      ASSERT_EQ(buckets.num_tokens.shape[0], counts.shape[0]);
      const auto num = rank.copy_out<std::int32_t>(buckets.num_tokens.data, counts.shape[0]);
      const auto meta = rank.copy_out<std::int32_t>(buckets.meta.data, buckets.meta.size());
      const auto x = rank.copy_out<float>(buckets.x.data, buckets.x.rows * kHidden);
      ASSERT_EQ(std::memcmp(meta.data(), host.expert_meta().data, 4 * meta.size()), 0);
      for (std::int64_t e = 0; e < counts.shape[0]; ++e) {
        ASSERT_EQ(num[at(e)], counts[e]);
        ASSERT_EQ(std::memcmp(&x[at(e * capacity * kHidden)], host.expert_x().row(e * capacity),
                              4 * at(counts[e] * kHidden)),
                  0);
      }
      const std::vector<float> rows = outputs_of(want);
      std::vector<float> out(at(tokens.count * kHidden));
      std::vector<float> other_weight = tokens.weight;
      for (float& weight : other_weight) weight *= 3;
      host.set_weight({other_weight.data(), {tokens.count, kTopK}});
      host.combine({reinterpret_cast<const std::byte*>(rows.data()), DType::kF32,
                    std::ssize(rows) / kHidden, kHidden},
                   {reinterpret_cast<std::byte*>(out.data()), DType::kF32, tokens.count, kHidden});
      const DeviceArray<float> weight(other_weight);
      device->combine_bucketed(rank.upload_rows(rows), {weight.data(), {tokens.count, kTopK}},
                               rank.out(tokens.count), rank.stream());
      rank.expect_out(out);
      device->check();
      communicator.barrier("epoch");  // the weights' memory goes
    }
  });
}

TEST_P(DeviceTransport, NativeSumsHaveTheHostsBitsInBothModes) {
  for (const ExchangeMode mode : {ExchangeMode::kThroughput, ExchangeMode::kLowLatency}) {
    on_ranks_with_gpus(GetParam(), [mode](Communicator& communicator) {
      Rank rank(communicator);
      const auto host = make_native_transport(communicator, rank.config());
      DeviceExchangeOptions options = rank.options();
      options.mode = mode;
      const auto device = make_device_native(communicator, {.exchange = {.num_experts = kExperts,
                                                                         .top_k = kTopK,
                                                                         .hidden = kHidden,
                                                                         .max_tokens = kMaxTokens},
                                                            .options = options});
      for (int epoch = 0; epoch < 5; ++epoch) {
        const Tokens tokens(seed_of(epoch, communicator));
        const ExpertInput want = host->dispatch(tokens.host());
        const std::vector<float> rows = outputs_of(want);
        std::vector<float> out(at(tokens.count * kHidden));
        host->combine(
            {reinterpret_cast<const std::byte*>(rows.data()), DType::kF32, want.rows(), kHidden},
            {reinterpret_cast<std::byte*>(out.data()), DType::kF32, tokens.count, kHidden});
        const TransportInput input = rank.upload(tokens);
        const auto received = device->dispatch({.x = input.x,
                                                .expert = input.expert,
                                                .weight = input.weight,
                                                .execution = {.stream = rank.stream()}});
        const PlanView& plan = received.plan;
        const auto begin =
            rank.copy_out<std::int32_t>(plan.expert_begin.data, plan.num_experts + 1);
        device->check();
        ASSERT_EQ(begin.back(), want.rows());
        const auto row_x = rank.copy_out<std::int32_t>(plan.row_token.data, want.rows());
        const auto x =
            rank.copy_out<float>(received.received.x.data, received.received.x.rows * kHidden);
        for (std::int64_t i = 0; i < want.rows(); ++i) {
          ASSERT_EQ(std::memcmp(&x[at(row_x[at(i)] * kHidden)], want.x.row(want.x_row[i]),
                                4 * at(kHidden)),
                    0);
        }
        device->combine(rank.upload_rows(rows), rank.out(tokens.count), rank.stream());
        rank.expect_out(out);
        device->check();
      }
    });
  }
}

/// Each token's sum over k, in ascending k, of what its experts make of it.
std::vector<float> sums_of(const Tokens& tokens) {
  std::vector<float> out(at(tokens.count * kHidden), 0.0F);
  for (std::int64_t i = 0; i < tokens.count * kTopK; ++i) {
    if (tokens.expert[at(i)] < 0) continue;
    for (std::int64_t h = 0; h < kHidden; ++h) {
      float& sum = out[at(i / kTopK * kHidden + h)];
      const float y = expert_of(tokens.x[at(i / kTopK * kHidden + h)], tokens.expert[at(i)]);
      sum = std::fma(tokens.weight[at(i)], y, sum);
    }
  }
  return out;
}

TEST_P(DeviceTransport, RowsByListsOfTheHostAreThoseOfTheReferenceAndTheSumsAreRight) {
  for (const HostLists lists : {HostLists::kReference, HostLists::kSorted}) {
    on_ranks_with_gpus(GetParam(), [lists](Communicator& communicator) {
      Rank rank(communicator);
      const auto host = make_reference_transport(communicator, rank.config());
      DeviceHostLists device(communicator, rank.config(), lists, rank.options());
      for (int epoch = 0; epoch < 5; ++epoch) {
        const Tokens tokens(seed_of(epoch, communicator));
        const ExpertInput want = host->dispatch(tokens.host());
        const ConstRawMatrix got = device.dispatch(rank.upload(tokens), rank.stream());
        ASSERT_EQ(got.rows, want.rows());
        const auto x = rank.copy_out<float>(got.data, got.rows * kHidden);
        ASSERT_EQ(std::memcmp(x.data(), want.x.data, 4 * x.size()), 0);
        const std::vector<float> rows = outputs_of(want);
        std::vector<float> out(at(tokens.count * kHidden));
        host->combine(
            {reinterpret_cast<const std::byte*>(rows.data()), DType::kF32, want.rows(), kHidden},
            {reinterpret_cast<std::byte*>(out.data()), DType::kF32, tokens.count, kHidden});
        device.combine(rank.upload_rows(rows), rank.out(tokens.count), rank.stream());
        rank.expect_out(sums_of(tokens));
      }
    });
  }
}

TEST_P(DeviceTransport, ABucketWithTooFewPlacesIsAnErrorOfALaterCallAndTheNextIsRight) {
  on_ranks_with_gpus(GetParam(), [](Communicator& communicator) {
    Rank rank(communicator);
    const auto device = make_device_assignments(communicator, rank.config(), rank.options());
    Tokens tokens(1);
    tokens.count = 4;
    tokens.x.assign(at(tokens.count * kHidden), 1.0F);
    tokens.weight.assign(at(tokens.count * kTopK), 1.0F);
    tokens.expert.assign(at(tokens.count * kTopK), -1);
    for (std::int64_t t = 0; t < tokens.count; ++t) tokens.expert[at(t * kTopK)] = 0;
    const std::int64_t rows = tokens.count * communicator.size();  // all of expert 0, on rank 0
    for (const std::int64_t capacity : {rows - 1, rows}) {
      const auto buckets = device->dispatch_bucketed(rank.upload(tokens), capacity, rank.stream());
      std::vector<float> outputs(at(buckets.x.rows * kHidden), 5.0F);
      const RawMatrix y = rank.upload_rows(outputs);  // waits for the stream
      if (communicator.rank() == 0 && capacity < rows) {
        try {
          device->check();
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
        }
      }
      device->combine_bucketed(y, {}, rank.out(tokens.count), rank.stream());
      SWITCHYARD_CUDA(cudaStreamSynchronize(rank.stream()));
      device->check();
      communicator.barrier("capacity");  // other buckets are memory that is given back
    }
    rank.expect_out(std::vector<float>(at(tokens.count * kHidden), 5.0F));
  });
}

TEST_P(DeviceTransport, FixedSizeMessagesComeAsOnTheHostZerosIncluded) {
  on_ranks_with_gpus(GetParam(), [](Communicator& communicator) {
    Rank rank(communicator);
    const FixedSizeConfig config{
        .tokens = kMaxTokens, .local_experts = 2, .top_k = 2, .hidden = kHidden};
    const FixedSizeRouting routing = make_fixed_size_routing(communicator, config, nullptr);
    FixedSizeExchange host(communicator, routing.rows_per_pair, kHidden, DType::kF32);
    DeviceFixedSize device(communicator, routing, kHidden, DType::kF32, rank.options());
    for (int epoch = 0; epoch < 5; ++epoch) {
      Tokens tokens(seed_of(epoch, communicator));
      tokens.count = kMaxTokens;
      tokens.x.resize(at(kMaxTokens * kHidden), 0.5F);
      tokens.expert.resize(at(kMaxTokens * kTopK), -1);
      tokens.weight.resize(at(kMaxTokens * kTopK), 1.0F);
      const ConstRawMatrix want = host.exchange(tokens.host().x, routing, nullptr);
      device.exchange(rank.upload(tokens).x, rank.stream());
      SWITCHYARD_CUDA(cudaStreamSynchronize(rank.stream()));
      device.check();
      communicator.barrier("all have ended");  // received() waits for the whole device
      const ConstRawMatrix got = device.received();
      ASSERT_EQ(got.rows, want.rows);
      const auto values = rank.copy_out<float>(got.data, got.rows * kHidden);
      ASSERT_EQ(std::memcmp(values.data(), want.data, 4 * values.size()), 0);
      communicator.barrier("compared");
    }
    EXPECT_EQ(device.wire_bytes(), host.wire_bytes());
  });
}

}  // namespace
}  // namespace switchyard
