// What an exchange between GPUs is made with: defaults, sizes, and what is refused.
#include "comm/device/setup.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <string>

#include "comm/device/exchange.hpp"
#include "comm/expert_parallel_check.hpp"
#include "comm/ranks/agreement.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"

namespace switchyard {

ExchangeMode mode_of(const ExpertParallelConfig& config, const DeviceExchangeOptions& options) {
  if (options.mode != ExchangeMode::kAuto) return options.mode;
  if (config.max_recv_rows > 0) return ExchangeMode::kThroughput;  // the other has fixed places
  return config.max_tokens <= 512 ? ExchangeMode::kLowLatency : ExchangeMode::kThroughput;
}

int ctas_of(const DeviceExchangeOptions& options, const DeviceSharing& sharing) {
  if (options.ctas != 0) return options.ctas;
  if (sharing.most > 1) return 4;  // to be right, not fast: room is left for the other stages
  return 64;  // of 8 to 128 the fastest pair, or within 5% of it, at 8 to 4096 tokens on 4 H200s
}

int ctas_of(const ExpertParallelConfig& config, const DeviceExchangeOptions& options,
            const DeviceSharing& sharing) {
  const bool chosen = options.ctas != 0 || sharing.most > 1;
  if (chosen || mode_of(config, options) != ExchangeMode::kLowLatency) {
    return ctas_of(options, sharing);
  }
  // Pairs on 4 H200s by blocks, 32, 64, 128: 13.6, 14.3, 15.2 us for one token of 7168 values,
  // 20.4, 20.0, 20.3 for 32, 44, 39, 36 (fp8) for 128.
  if (config.max_tokens * config.hidden <= std::int64_t{32} * 7168) return 32;
  int multiprocessors = 0;
  SWITCHYARD_CUDA(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, options.device));
  return std::min(128, multiprocessors);
}

Subtree subtree_of(const ExpertParallelConfig& config, int rank, int num_ranks) {
  return subtree_of_rank({config.num_experts, config.reduction_groups}, rank, num_ranks);
}

int groups_per_row(const ExpertParallelConfig& config, int num_ranks) {
  return config.rank_invariant ? subtree_of(config, 0, num_ranks).num_groups : 1;
}

bool by_pairs(const DeviceExchangeOptions& options, int num_ranks) {
  return options.engine == DeviceEngine::kNcclPairs && num_ranks > 1;
}

ExchangeLayout layout_of(const ExpertParallelConfig& config, const DeviceExchangeOptions& options,
                         int num_ranks) {
  const ExchangeMode mode = mode_of(config, options);
  const std::int64_t all = num_ranks * config.max_tokens;
  // A graph holds the places that ncclRecv writes to.
  const bool one_place =
      options.one_place || (by_pairs(options, num_ranks) && mode == ExchangeMode::kLowLatency);
  const bool bounded = mode == ExchangeMode::kThroughput && config.max_recv_rows > 0;
  return {.num_ranks = num_ranks,
          .top_k = config.top_k,
          .hidden = config.hidden,
          .max_rows = bounded ? std::min(all, config.max_recv_rows) : all,
          // Fixed places: group g of rank r's row j for this rank is (r * max_tokens + j) * G + g.
          .max_results = all * groups_per_row(config, num_ranks),
          .dispatch_wire = dispatch_wire_of(config),
          .combine_wire = config.combine_wire,
          .num_buffers = one_place ? 1 : static_cast<std::int32_t>(ExchangeLayout::kBuffers)};
}

DeviceSharing check_device_exchange(Communicator& communicator, const ExpertParallelConfig& config,
                                    const DeviceExchangeOptions& options,
                                    const DeviceExchangeExtent& extent) {
  require_same_config(communicator, config);
  const DeviceSharing sharing = device_sharing(communicator, options.device);
  const int ctas = ctas_of(config, options, sharing);
  const ExchangeMode mode = mode_of(config, options);
  const AgreedValue values[] = {{"mode", static_cast<std::int64_t>(mode)},
                                {"engine", static_cast<std::int64_t>(options.engine)},
                                {"ctas", ctas},
                                {"one_place", options.one_place ? 1 : 0},
                                {"copies", extent.copies},
                                {"most_summed", extent.most_summed}};
  require_agreement(communicator, values);
  check_config(config, communicator.size());
  const auto supported = [](bool holds, const std::string& why) {
    if (!holds) fail(ErrorCode::kUnsupported, "the exchange between GPUs: {}", why);
  };
  supported(communicator.size() <= kMaxDeviceRanks,
            fmt::format("{} ranks, at most {}: its kernels keep a set of ranks in {} bits",
                        communicator.size(), kMaxDeviceRanks, kRankMaskBits));
  supported(config.num_experts <= kMaxDeviceExperts,
            fmt::format("{} experts, at most {}", config.num_experts, kMaxDeviceExperts));
  supported(config.top_k <= kMaxDeviceTopK,
            fmt::format("top_k={}, at most {}", config.top_k, kMaxDeviceTopK));
  supported(config.hidden % 8 == 0, fmt::format("hidden={} is no multiple of 8", config.hidden));
  supported(config.max_tokens <= kMaxDeviceTokens,
            fmt::format("max_tokens={}, at most {}", config.max_tokens, kMaxDeviceTokens));
  const bool pairs = by_pairs(options, communicator.size());
  const bool by_nccl = pairs || options.engine == DeviceEngine::kNccl;
  supported(!by_nccl || sharing.most == 1,
            fmt::format("NCCL takes one rank a GPU, but {} share one: engine peer lets them",
                        sharing.most));
  supported(config.max_recv_rows == 0 || mode == ExchangeMode::kThroughput,
            "low latency has a place for every row and takes no max_recv_rows");
  supported(!pairs || extent.most_summed == 0,
            "engine nccl-pairs has no way back: its ranks do not reach each other's windows");
  supported(!pairs || config.max_recv_rows == 0, "engine nccl-pairs takes no max_recv_rows");
  const int groups = groups_per_row(config, communicator.size());
  supported(communicator.size() * groups <= kMaxDeviceRanks &&
                std::has_single_bit(static_cast<unsigned>(groups)),
            fmt::format("rank_invariant with {} groups on each of {} ranks, together at most {}",
                        groups, communicator.size(), kMaxDeviceRanks));
  require(ctas >= 1 && ctas <= 128, "ctas={}, want 1 to 128", ctas);
  require(extent.copies >= 1, "copies={}, want at least 1", extent.copies);
  // A block may take a whole multiprocessor, and each waits for all others of its direction.
  int room = 0;
  SWITCHYARD_CUDA(cudaDeviceGetAttribute(&room, cudaDevAttrMultiProcessorCount, options.device));
  supported(sharing.here * ctas <= room,
            fmt::format("{} blocks of each of {} ranks on a GPU of {} multiprocessors", ctas,
                        sharing.here, room));
  return sharing;
}

}  // namespace switchyard
