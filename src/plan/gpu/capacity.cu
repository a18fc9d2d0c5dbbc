// Which assignments an expert keeps, on a GPU. kToken and kChoice are one launch: the rank of each
// assignment in an order that all experts share, by the counting of counting.cuh. kBpr sorts the
// tokens by their score first, kProbs the assignments by (expert, weight): both sorts are stable
// radix sorts, so the result is the CPU's bit for bit. Bound by launches.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "core/gpu/cuda_device.hpp"
#include "core/shape_check.hpp"
#include "plan/gpu/counting.cuh"
#include "plan/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

using counting::kThreads;

struct CapacityParams {
  const std::int32_t* expert;         // [T, K]
  const float* weight;                // [T, K]
  const float* top_score;             // [T] or null
  const std::int32_t* sorted_tokens;  // [T] kBpr: tokens in descending score; else null
  std::uint8_t* kept;                 // [T, K]
  std::int64_t* counts;               // [E]
  std::int64_t* counts_kept;          // [E]
  StageWorkspace* workspace;
  std::uint32_t* block_counts;  // [blocks, E]
  DeviceStatus* status;         // or null
  std::int32_t num_tokens, top_k, num_experts;
  std::int32_t places_per_block;
  std::uint32_t capacity, other_capacity;  // the latter from first_other on
  std::int32_t first_other;
  bool by_choice;  // the order is (k, token), not (token, k)
};

__device__ __forceinline__ std::uint32_t slots_of(const CapacityParams& p, int e) {
  return e < p.first_other ? p.capacity : p.other_capacity;
}

/// The assignment at a place of the order.
__device__ __forceinline__ int assignment_at(const CapacityParams& p, int place) {
  if (!p.by_choice) return place;
  const int k = place / p.num_tokens;
  const int t = place - k * p.num_tokens;
  return (p.sorted_tokens != nullptr ? __ldg(p.sorted_tokens + t) : t) * p.top_k + k;
}

/// The expert of an assignment, or -1.
__device__ __forceinline__ int expert_of(const CapacityParams& p, int i, bool* bad) {
  const int e = __ldg(p.expert + i);
  *bad = e < -1 || e >= p.num_experts;
  return *bad ? -1 : e;
}

__global__ void __launch_bounds__(kThreads) capacity_kernel(const CapacityParams p) {
  __shared__ std::uint32_t total[counting::kMaxExperts];
  __shared__ std::uint32_t base[counting::kMaxExperts];   // rank of the next assignment
  __shared__ std::uint32_t count[counting::kMaxExperts];  // of this block, then of a tile
  extern __shared__ std::uint16_t tile[];                 // [32, E]
  const int thread = static_cast<int>(threadIdx.x);
  const int size = p.num_tokens * p.top_k;
  const int begin = min(static_cast<int>(blockIdx.x) * p.places_per_block, size);
  const int end = min(begin + p.places_per_block, size);
  for (int e = thread; e < p.num_experts; e += kThreads) total[e] = base[e] = count[e] = 0;
  __syncthreads();
  for (int place = begin + thread; place < end; place += kThreads) {
    bool bad = false;
    const int e = expert_of(p, assignment_at(p, place), &bad);
    if (e >= 0) atomicAdd(count + e, 1U);
    if (bad && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
  }
  __syncthreads();
  for (int e = thread; e < p.num_experts; e += kThreads) {
    p.block_counts[static_cast<int>(blockIdx.x) * p.num_experts + e] = count[e];
  }
  const unsigned ticket = counting::meet(p.workspace);
  counting::sum_blocks(p.block_counts, p.num_experts, total, base);
  if (blockIdx.x == 0) {
    for (int e = thread; e < p.num_experts; e += kThreads) {
      p.counts[e] = total[e];
      p.counts_kept[e] = min(total[e], slots_of(p, e));
    }
  }
  for (int at = begin; at < end; at += kThreads) {
    const int place = at + thread;
    const int i = place < end ? assignment_at(p, place) : 0;
    bool bad = false;
    const int e = place < end ? expert_of(p, i, &bad) : -1;
    const std::uint32_t rank = counting::rank_in_block(e, p.num_experts, tile, count);
    if (place < end) p.kept[i] = e >= 0 && base[e] + rank < slots_of(p, e) ? 1 : 0;
    __syncthreads();
    for (int other = thread; other < p.num_experts; other += kThreads) base[other] += count[other];
  }
  counting::leave(p.workspace, ticket);
}

/// Ascending keys mean descending values; both zeros are one.
__device__ __forceinline__ std::uint32_t descending_key(float x) {
  const std::uint32_t bits = __float_as_uint(x + 0.0F);
  return ~((bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U);
}

__global__ void token_keys(const CapacityParams p, std::uint32_t* key, std::int32_t* token) {
  const int t = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (t >= p.num_tokens) return;
  std::uint32_t best = 0xffffffffU;
  if (p.top_score != nullptr) {
    best = descending_key(p.top_score[t]);
  } else {
    for (int i = t * p.top_k; i < (t + 1) * p.top_k; ++i) {
      if (p.expert[i] >= 0) best = min(best, descending_key(p.weight[i]));
    }
  }
  key[t] = best;
  token[t] = t;
}

__global__ void assignment_keys(const CapacityParams p, std::uint64_t* key, std::int32_t* index) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= p.num_tokens * p.top_k) return;
  bool bad = false;
  const int e = expert_of(p, i, &bad);
  key[i] =
      static_cast<std::uint64_t>(e < 0 ? p.num_experts : e) << 32 | descending_key(p.weight[i]);
  index[i] = i;
}

/// Drops what stands beyond the capacity in the sorted list.
__global__ void drop_small_weights(const CapacityParams p, const std::uint64_t* key,
                                   const std::int32_t* index) {
  const int size = p.num_tokens * p.top_k;
  const int place = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (place >= size) return;
  const std::uint64_t expert = key[place] >> 32;
  int low = 0;  // first place of the expert
  for (int high = place; low < high;) {
    const int middle = low + (high - low) / 2;
    if (key[middle] >> 32 < expert) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const bool used = expert < static_cast<std::uint64_t>(p.num_experts);
  const std::uint32_t slots = slots_of(p, static_cast<int>(expert));
  p.kept[index[place]] = used && static_cast<std::uint32_t>(place - low) < slots ? 1 : 0;
}

constexpr std::int64_t kAlign = 256;
constexpr std::int64_t align(std::int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int blocks_for(std::int64_t size, int multiprocessors) {
  return static_cast<int>(
      std::clamp<std::int64_t>((size + kThreads - 1) / kThreads, 1, multiprocessors));
}

/// Workspace of a sort: keys and values twice, then what the sort itself wants.
struct SortSpace {
  std::int64_t keys, values, own;
  [[nodiscard]] std::int64_t bytes() const { return 2 * (keys + values) + own; }
};

template <typename Key>
SortSpace sort_space(std::int64_t size) {
  std::size_t own = 0;
  SWITCHYARD_CUDA(cub::DeviceRadixSort::SortPairs(
      nullptr, own, static_cast<const Key*>(nullptr), static_cast<Key*>(nullptr),
      static_cast<const std::int32_t*>(nullptr), static_cast<std::int32_t*>(nullptr), size));
  return {align(size * std::int64_t{sizeof(Key)}), align(size * 4),
          align(static_cast<std::int64_t>(own))};
}

/// The arrays of a sort in the workspace.
template <typename Key>
struct SortArrays {
  Key *key, *sorted_key;
  std::int32_t *value, *sorted_value;
  void* own;
  std::size_t own_bytes;

  SortArrays(std::byte* at, const SortSpace& space) {
    key = reinterpret_cast<Key*>(at);
    sorted_key = reinterpret_cast<Key*>(at += space.keys);
    value = reinterpret_cast<std::int32_t*>(at += space.keys);
    sorted_value = reinterpret_cast<std::int32_t*>(at += space.values);
    own = at + space.values;
    own_bytes = static_cast<std::size_t>(space.own);
  }

  void sort(std::int64_t size, int bits, cudaStream_t stream) {
    SWITCHYARD_CUDA(cub::DeviceRadixSort::SortPairs(own, own_bytes, key, sorted_key, value,
                                                    sorted_value, size, 0, bits, stream));
  }
};

std::uint32_t any_if_0(std::int64_t capacity) {
  return capacity == 0 ? 0xffffffffU : static_cast<std::uint32_t>(capacity);
}

constexpr unsigned kSimpleThreads = 256;
unsigned simple_blocks(std::int64_t size) {
  return static_cast<unsigned>((size + kSimpleThreads - 1) / kSimpleThreads);
}

std::optional<std::string> reject(const CapacityArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (!std::holds_alternative<DenseAssignments>(args.assignments)) {
    return "takes a dense routing, not a list of assignments";
  }
  if (args.num_experts > counting::kMaxExperts) return "num_experts exceeds 1024";
  return std::nullopt;
}

void run(const CapacityArgs& args) {
  const auto& dense = std::get<DenseAssignments>(args.assignments);
  const std::int64_t num_tokens = dense.expert.shape[0];
  const std::int64_t top_k = dense.expert.shape[1];
  const std::int64_t size = num_tokens * top_k;
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const int blocks = blocks_for(size, num_multiprocessors());
  const std::int64_t counting_bytes = align(counting::workspace_bytes(blocks, args.num_experts));
  const bool sorts_tokens = args.policy == DropPolicy::kBpr && args.capacity > 0 && size > 0;
  const bool sorts_weights = args.policy == DropPolicy::kProbs && args.capacity > 0 && size > 0;
  SortSpace space{0, 0, 0};
  if (sorts_tokens) space = sort_space<std::uint32_t>(num_tokens);
  if (sorts_weights) space = sort_space<std::uint64_t>(size);
  require(args.execution.workspace != nullptr &&
              counting_bytes + space.bytes() <= args.execution.workspace_bytes,
          "capacity needs {} bytes of workspace, has {}", counting_bytes + space.bytes(),
          args.execution.workspace_bytes);
  auto* workspace = static_cast<std::byte*>(args.execution.workspace);
  CapacityParams params{
      .expert = dense.expert.data,
      .weight = dense.weight.data,
      .top_score = args.top_score.data,
      .sorted_tokens = nullptr,
      .kept = args.kept.data,
      .counts = args.counts.data,
      .counts_kept = args.counts_kept.data,
      .workspace = reinterpret_cast<StageWorkspace*>(workspace),
      .block_counts = reinterpret_cast<std::uint32_t*>(workspace + sizeof(StageWorkspace)),
      .status = args.execution.status,
      .num_tokens = static_cast<std::int32_t>(num_tokens),
      .top_k = static_cast<std::int32_t>(top_k),
      .num_experts = args.num_experts,
      .places_per_block = static_cast<std::int32_t>((size + blocks - 1) / blocks),
      .capacity = any_if_0(args.capacity),
      .other_capacity = any_if_0(args.zero_computation_capacity),
      .first_other = args.num_experts - args.zero_computation,
      .by_choice = args.policy == DropPolicy::kChoice || args.policy == DropPolicy::kBpr};
  if (sorts_tokens) {
    SortArrays<std::uint32_t> arrays(workspace + counting_bytes, space);
    token_keys<<<simple_blocks(num_tokens), kSimpleThreads, 0, stream>>>(params, arrays.key,
                                                                         arrays.value);
    arrays.sort(num_tokens, 32, stream);
    params.sorted_tokens = arrays.sorted_value;
  }
  launch_together(capacity_kernel, blocks, kThreads,
                  static_cast<std::size_t>(args.num_experts) * 32 * sizeof(std::uint16_t), stream,
                  params);
  if (sorts_weights) {
    SortArrays<std::uint64_t> arrays(workspace + counting_bytes, space);
    assignment_keys<<<simple_blocks(size), kSimpleThreads, 0, stream>>>(params, arrays.key,
                                                                        arrays.value);
    arrays.sort(size, 32 + 11, stream);
    drop_small_weights<<<simple_blocks(size), kSimpleThreads, 0, stream>>>(
        params, arrays.sorted_key, arrays.sorted_value);
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<CapacityArgs> kCapacityCuda{"cuda.counting", reject, run};

std::int64_t capacity_workspace_bytes(std::int64_t max_tokens, std::int64_t top_k,
                                      std::int64_t num_experts) {
  const std::int64_t size = max_tokens * top_k;
  const int blocks = blocks_for(size, num_multiprocessors());
  const std::int64_t sort =
      std::max(sort_space<std::uint32_t>(std::max<std::int64_t>(1, max_tokens)).bytes(),
               sort_space<std::uint64_t>(std::max<std::int64_t>(1, size)).bytes());
  return align(counting::workspace_bytes(blocks, num_experts)) + sort;
}

}  // namespace switchyard
