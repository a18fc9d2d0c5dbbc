// Experts by a token's id or place on a GPU: hash layers and forced loads, a thread a token, by the
// functions of the CPU. Bound by writing the routing.
#include <limits>

#include "core/gpu/cuda_device.hpp"
#include "route/forced_loads.hpp"
#include "route/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxExperts = 1024;  // whose places are parameters of a kernel

enum class How : std::uint8_t { kHash, kTable, kDrawn, kInTurn, kDealt };

struct PlacedParams {
  std::int32_t* expert;  // [T, K]
  float* weight;         // [T, K]
  DeviceStatus* status;  // or null
  std::int64_t num_tokens;
  std::int32_t num_experts, top_k;
  How how;
  const std::int32_t* token_ids;  // [T] of the first two
  const std::int32_t* table;      // [ids, K]
  std::int64_t ids;               // how many have experts
  std::uint64_t salt;
  std::int64_t first_token;
  Draws draws;
  DealtPlaces places;
};

/// Where each expert's places end. In the parameters of a kernel of its own: they are 4 KB.
struct LastPlaces {
  std::int32_t of[kMaxExperts];
};

__device__ __forceinline__ void report_id(DeviceStatus* status, std::int64_t token,
                                          std::int32_t id) {
  if (status == nullptr) return;
  const auto place = static_cast<unsigned long long>(token) << 32 |
                     static_cast<unsigned long long>(static_cast<std::uint32_t>(id));
  atomicMin(reinterpret_cast<unsigned long long*>(&status->bad_token_id), place);
}

/// False: the token has an id without experts.
__device__ __forceinline__ bool place_by_id(const PlacedParams& p, std::int64_t token,
                                            std::int32_t* expert) {
  const std::int32_t id = p.token_ids[token];
  if (id < 0 || id >= p.ids) {
    report_id(p.status, token, id);
    return false;
  }
  if (p.how == How::kHash) {
    hash_of_id(p.salt, p.num_experts, id, p.top_k, expert);
    return true;
  }
  for (int k = 0; k < p.top_k; ++k) expert[k] = p.table[std::int64_t{id} * p.top_k + k];
  return true;
}

__device__ __forceinline__ void weigh_alike(const PlacedParams& p, std::int64_t token, bool has) {
  for (int k = 0; k < p.top_k; ++k) {
    const std::int64_t at = token * p.top_k + k;
    if (!has) p.expert[at] = -1;
    p.weight[at] = has ? 1.0F / static_cast<float>(p.top_k) : 0.0F;
  }
}

__global__ void __launch_bounds__(kThreads) placed_kernel(const __grid_constant__ PlacedParams p) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= p.num_tokens) return;
  std::int32_t* const expert = p.expert + token * p.top_k;
  bool has = true;
  if (p.how == How::kDrawn) {
    draw_experts(p.draws, p.num_experts, token, p.top_k, expert);
  } else if (p.how == How::kInTurn) {
    for (int k = 0; k < p.top_k; ++k) {
      expert[k] = expert_in_turn(p.first_token + token, k, p.top_k, p.num_experts);
    }
  } else {
    has = place_by_id(p, token, expert);
  }
  weigh_alike(p, token, has);
}

__global__ void __launch_bounds__(kThreads)
    dealt_kernel(const __grid_constant__ PlacedParams p, const __grid_constant__ LastPlaces last) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= p.num_tokens) return;
  const std::int64_t first = p.places.first_of(token);
  for (int k = 0; k < p.top_k; ++k) {
    p.expert[token * p.top_k + k] = expert_at(first + k * p.num_tokens, last.of, p.num_experts);
  }
  weigh_alike(p, token, true);
}

bool is_dealt(ForcedRouter::Load load) {
  return load != ForcedRouter::Load::kUniform && load != ForcedRouter::Load::kRoundRobin;
}

std::optional<std::string> reject(const RouteArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (const auto* router = std::get_if<HashRouter>(&args.config.kind)) {
    const bool lacks = router->table != nullptr && args.hash_table.data == nullptr &&
                       args.routing.expert.size() > 0 && !router->table->empty();
    if (lacks) return "the hash router's table is not on the GPU: want hash_table";
    return std::nullopt;
  }
  const auto* router = std::get_if<ForcedRouter>(&args.config.kind);
  if (router == nullptr) return "is for hash and loads for benchmarks";
  if (!is_dealt(router->load)) return std::nullopt;
  if (args.config.num_experts > kMaxExperts) return "num_experts exceeds 1024";
  if (args.routing.expert.size() > std::numeric_limits<std::int32_t>::max()) {
    return "assignments exceed 2^31 - 1";
  }
  return std::nullopt;
}

PlacedParams params_of(const RouteArgs& args) {
  return {.expert = args.routing.expert.data,
          .weight = args.routing.weight.data,
          .status = args.execution.status,
          .num_tokens = args.routing.expert.shape[0],
          .num_experts = args.config.num_experts,
          .top_k = args.config.top_k(),
          .how = How::kHash,
          .token_ids = args.request.token_ids.data,
          .table = args.hash_table.data,
          .ids = std::int64_t{1} << 31,
          .salt = 0,
          .first_token = args.request.first_token,
          .draws = Draws(args.request, Draws::For::kUniform),
          .places = {.num_tokens = 1, .factor = 1, .offset = 0}};
}

void run(const RouteArgs& args) {
  PlacedParams params = params_of(args);
  if (params.num_tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const auto blocks = static_cast<unsigned>((params.num_tokens + kThreads - 1) / kThreads);
  if (const auto* router = std::get_if<HashRouter>(&args.config.kind)) {
    params.salt = router->salt;
    if (router->table != nullptr) {
      params.how = How::kTable;
      params.ids = std::ssize(*router->table) / router->top_k;
    }
  } else {
    const auto& forced = std::get<ForcedRouter>(args.config.kind);
    if (is_dealt(forced.load)) {
      const Deal deal = deal_out(forced, params.num_experts, args.request, params.num_tokens);
      params.how = How::kDealt;
      params.places = deal.places;
      LastPlaces last{};
      for (std::size_t e = 0; e < deal.last.size(); ++e) {
        last.of[e] = static_cast<std::int32_t>(deal.last[e]);
      }
      dealt_kernel<<<blocks, kThreads, 0, stream>>>(params, last);
      SWITCHYARD_CUDA(cudaGetLastError());
      return;
    }
    params.how = forced.load == ForcedRouter::Load::kUniform ? How::kDrawn : How::kInTurn;
  }
  placed_kernel<<<blocks, kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<RouteArgs> kRouteCudaPlaced{"cuda.placed", reject, run};

}  // namespace switchyard
