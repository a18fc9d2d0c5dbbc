// What an expert-parallel exchange accepts: the configuration, compared between ranks, and a call.
#include "comm/expert_parallel_check.hpp"

#include <cmath>

#include "comm/exchange_layout.hpp"
#include "comm/ranks/agreement.hpp"
#include "core/shape_check.hpp"

namespace switchyard {

DType dispatch_wire_of(const ExpertParallelConfig& config) {
  return config.dispatch_wire.value_or(config.dtype);
}

void require_same_config(Communicator& communicator, const ExpertParallelConfig& config,
                         std::int64_t version) {
  constexpr auto kTypeName = [](std::int64_t value) {
    return to_string(static_cast<DType>(value));
  };
  const AgreedValue values[] = {
      {"protocol version", version},
      {"num_experts", config.num_experts},
      {"top_k", config.top_k},
      {"hidden", config.hidden},
      {"max_tokens", config.max_tokens},
      {"dtype", static_cast<std::int64_t>(config.dtype), kTypeName},
      {"dispatch_wire", static_cast<std::int64_t>(dispatch_wire_of(config)), kTypeName},
      {"combine_wire", static_cast<std::int64_t>(config.combine_wire), kTypeName},
      {"reduction_groups", config.reduction_groups},
      {"rank_invariant", config.rank_invariant ? 1 : 0},
      {"max_recv_rows", config.max_recv_rows},
  };
  require_agreement(communicator, values);
}

void check_config(const ExpertParallelConfig& config, int num_ranks) {
  const auto travels = [](DType t) { return is_float(t) || t == DType::kF8E4M3; };
  require(num_ranks <= kMaxRanks, "{} ranks, at most {} are possible", num_ranks, kMaxRanks);
  require(config.num_experts >= 1, "num_experts={}, want at least 1", config.num_experts);
  require(config.top_k >= 1, "top_k={}, want at least 1", config.top_k);
  require(config.hidden >= 1, "hidden={}, want at least 1", config.hidden);
  const std::int64_t most = (std::int64_t{1} << 31) / config.top_k / num_ranks - 1;
  require(config.max_tokens >= 0 && config.max_tokens <= most,
          "max_tokens={} on {} ranks with top_k={}, want 0 to {}", config.max_tokens, num_ranks,
          config.top_k, most);
  require(is_float(config.dtype), "dtype={}, want f32, bf16 or f16", to_string(config.dtype));
  require(travels(dispatch_wire_of(config)), "dispatch_wire={}, want f32, bf16, f16 or fp8",
          to_string(dispatch_wire_of(config)));
  require(travels(config.combine_wire), "combine_wire={}, want f32, bf16, f16 or fp8",
          to_string(config.combine_wire));
  require(config.reduction_groups >= 1, "reduction_groups={}, want at least 1",
          config.reduction_groups);
  require(config.max_recv_rows >= 0, "max_recv_rows={} is negative", config.max_recv_rows);
}

void check_assignments(Matrix<const std::int32_t> expert, Matrix<const float> weight,
                       std::int32_t num_experts) {
  const std::int64_t top_k = expert.shape[1];
  for (std::int64_t i = 0; i < expert.size(); ++i) {
    const std::int32_t id = expert.data[i];
    require(id >= -1 && id < num_experts, "token {} has expert {}, want -1 to {}", i / top_k, id,
            num_experts - 1);
    require(id < 0 || !std::isnan(weight.data[i]), "token {} has a NaN weight for expert {}",
            i / top_k, id);
  }
}

void check_dispatch(const DispatchArgs& args, const ExpertParallelConfig& config) {
  const std::int64_t num_tokens = args.x.rows;
  require(args.execution.backend == Backend::kCpu,
          "these ranks exchange host memory, the call asks for {}",
          to_string(args.execution.backend));
  require(num_tokens <= config.max_tokens, "{} tokens exceed max_tokens={}", num_tokens,
          config.max_tokens);
  require(num_tokens == 0 || args.x.cols == config.hidden, "x is [{}, {}], want [T, {}]",
          num_tokens, args.x.cols, config.hidden);
  require(num_tokens == 0 || args.x.dtype == config.dtype, "x is {}, want {}",
          to_string(args.x.dtype), to_string(config.dtype));
  const auto fits = [&](const auto& matrix) {
    return matrix.shape[0] == num_tokens && (num_tokens == 0 || matrix.shape[1] == config.top_k);
  };
  require(fits(args.expert), "expert is [{}, {}], want [{}, {}]", args.expert.shape[0],
          args.expert.shape[1], num_tokens, config.top_k);
  require(fits(args.weight), "weight is [{}, {}], want [{}, {}]", args.weight.shape[0],
          args.weight.shape[1], num_tokens, config.top_k);
  require(args.kept.data == nullptr || fits(args.kept), "kept is [{}, {}], want [{}, {}]",
          args.kept.shape[0], args.kept.shape[1], num_tokens, config.top_k);
  check_assignments(args.expert, args.weight, config.num_experts);
}

}  // namespace switchyard
