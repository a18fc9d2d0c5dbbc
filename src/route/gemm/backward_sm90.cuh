#pragma once

// The router product's way back on Hopper: dlogits as three bf16 terms, split once into memory, and
// tokens or gate in bf16 (a gate in f32: three terms too), multiplied by wgmma; products are exact,
// sums those of the tensor cores' fp32, the smallest terms first.
//
// dgate: a block makes 128 experts x 256 columns, or 64 x 512, of a part of the tokens. One warp
// loads by TMA, two warpgroups multiply 64 x 256 each; both operands have the tokens across memory
// and are turned by wgmma. Bound by the tensor cores, or by reading the tokens where E is small.
//
// dtokens: a block keeps 256 columns of the gate in shared memory and goes over tiles of 64 tokens,
// the two warpgroups taking turns: one stores its sums while the other multiplies. Bound by the
// tensor cores and by writing [T, H] in f32, about alike at E = 128.

#include "route/gemm/backward.cuh"
#include "route/gemm/backward_ring.cuh"

namespace switchyard::router_backward::sm90 {

// ---- dgate -------------------------------------------------------------------------------------

struct GateParams {
  float* parts;  // [parts, E, H]
  std::int64_t num_tokens;
  std::int32_t num_experts, hidden;
  std::int32_t part_tokens;  // a multiple of kBox
};

/// kExperts: of a tile, 64 or 128.
template <int kExperts_>
struct GateTile {
  static constexpr int kExperts = kExperts_;
  static constexpr int kExpertBoxes = kExperts / kBox;
  static constexpr int kColumns = 2 / kExpertBoxes * kWide;
  static constexpr int kTokensAt = kLogitTerms * kExpertBoxes * kBoxBytes;
  static constexpr int kStageBytes = kTokensAt + kColumns / kBox * kBoxBytes;
  static constexpr int kStages = 2;
  static constexpr int kBarriersAt = kStages * kStageBytes;
  static constexpr int kSharedBytes = kBarriersAt + kStages * 16;
  static_assert(kSharedBytes <= 232448);
};

/// Coordinates of terms: (expert, token, term).
template <typename Tile>
__global__ void __launch_bounds__(kThreads, 1)
    gate_kernel(const __grid_constant__ CUtensorMap terms,
                const __grid_constant__ CUtensorMap tokens, const __grid_constant__ GateParams p) {
  extern __shared__ __align__(1024) std::byte shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const Ring ring{base, base + Tile::kBarriersAt, Tile::kStageBytes, Tile::kStages};
  if (threadIdx.x == 0) {
    ring.init(kMultiplyThreads / 32);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int first_column = static_cast<int>(blockIdx.x) * Tile::kColumns;
  const int first_expert = static_cast<int>(blockIdx.y) * Tile::kExperts;
  const std::int64_t begin = std::int64_t{blockIdx.z} * p.part_tokens;
  const std::int64_t end = min(p.num_tokens, begin + p.part_tokens);
  const auto steps = static_cast<int>((end - begin + kBox - 1) / kBox);

  if (threadIdx.x >= kMultiplyThreads) {
    if (threadIdx.x != kMultiplyThreads) return;
    Place place;
    for (int step = 0; step < steps; ++step) {
      const auto token = static_cast<int>(begin) + step * kBox;
      ring.open(place);
      std::uint32_t to = ring.slot(place);
      for (int term = 0; term < kLogitTerms; ++term) {
        for (int box = 0; box < Tile::kExpertBoxes; ++box, to += kBoxBytes) {
          ptx::tma_load_3d(to, &terms, first_expert + box * kBox, token, term, ring.full(place));
        }
      }
      for (int box = 0; box < Tile::kColumns / kBox; ++box, to += kBoxBytes) {
        ptx::tma_load_2d(to, &tokens, first_column + box * kBox, token, ring.full(place));
      }
      place.advance(1, Tile::kStages);
    }
    return;
  }

  const int group = static_cast<int>(threadIdx.x) / 128;
  const int expert_box = group % Tile::kExpertBoxes;
  const int column_block = group / Tile::kExpertBoxes;
  float sums[kWide / 2];
#pragma unroll
  for (int i = 0; i < kWide / 2; ++i) sums[i] = 0.0F;
  Place place;
  Place last;
  for (int step = 0; step < steps; ++step) {
    ptx::mbarrier_wait(ring.full(place), place.phase);
    const std::uint32_t at = ring.slot(place);
    const std::uint64_t b = ptx::wgmma_turned_operand(
        at + static_cast<std::uint32_t>(Tile::kTokensAt + column_block * kWide / kBox * kBoxBytes));
    ptx::wgmma_fence();
#pragma unroll
    for (int term = kLogitTerms - 1; term >= 0; --term) {
      const std::uint64_t a = ptx::wgmma_turned_operand(
          at + static_cast<std::uint32_t>((term * Tile::kExpertBoxes + expert_box) * kBoxBytes));
#pragma unroll
      for (int k = 0; k < kBox / 16; ++k) {
        ptx::wgmma<__nv_bfloat16, kWide, ptx::WgmmaTurned::kBoth>(sums, a + k * ptx::kTurnedStep,
                                                                  b + k * ptx::kTurnedStep, 1);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (step > 0) ring.release(last);
    last = place;
    place.advance(1, Tile::kStages);
  }
  ptx::wgmma_wait<0>();
  hold(sums);
  const int expert = first_expert + expert_box * kBox;
  const int column = first_column + column_block * kWide;
  float* const out =
      p.parts + (std::int64_t{blockIdx.z} * p.num_experts + expert) * p.hidden + column;
  store_sums(out, p.hidden, p.num_experts - expert, p.hidden - column, sums);
}

// ---- dtokens -----------------------------------------------------------------------------------

struct TokenParams {
  float* out;  // [T, H]
  std::int64_t num_tokens;
  std::int32_t hidden;
  std::int32_t chunks;  // of 64 experts
  std::int32_t token_tiles, column_tiles;
  std::uint32_t slots;  // of each warpgroup's ring, a box each
};

/// A block's tiles, of all by columns and then by tokens: [begin, end), at most some of its first
/// and last column's.
struct TokenTiles {
  int begin, end, per_column;

  explicit __device__ TokenTiles(const TokenParams& p) : per_column(p.token_tiles) {
    const std::int64_t all = std::int64_t{p.token_tiles} * p.column_tiles;
    begin = static_cast<int>(all * blockIdx.x / gridDim.x);
    end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  }
  [[nodiscard]] __device__ int column(int tile) const { return tile / per_column; }
  [[nodiscard]] __device__ int token(int tile) const { return tile % per_column * kBox; }
};

/// One for each warpgroup: who waited for a slot's turn after next would take it for the last one.
struct Rings {
  std::uint32_t data, barriers, slots;
  [[nodiscard]] __device__ Ring of(std::uint32_t group) const {
    return {data + group * slots * kBoxBytes, barriers + group * slots * 16, kBoxBytes, slots};
  }
};

/// The columns of the gate that are in shared memory, one set after the other.
struct GateColumns {
  std::uint32_t data, full, empty, bytes;
  [[nodiscard]] __device__ std::uint64_t operand(int box_row) const {
    return ptx::wgmma_turned_operand(
        data + static_cast<std::uint32_t>(box_row * (kWide / kBox) * kBoxBytes));
  }
};

template <int kGateTerms>
__device__ __forceinline__ void load_for_tokens(const TokenParams& p, const TokenTiles& tiles,
                                                const Rings& rings, const GateColumns& gate,
                                                const CUtensorMap* terms,
                                                const CUtensorMap* gate_map) {
  Place place;
  Place of_other;
  int column = -1;
  std::uint32_t set = 0;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const Ring ring = rings.of(static_cast<std::uint32_t>(tile - tiles.begin) % 2);
    if (tiles.column(tile) != column) {
      column = tiles.column(tile);
      if (set > 0) ptx::mbarrier_wait(gate.empty, (set - 1) & 1U);
      ++set;
      ptx::mbarrier_arrive_expect(gate.full, gate.bytes);
      std::uint32_t to = gate.data;
      for (int term = 0; term < kGateTerms; ++term) {
        for (int chunk = 0; chunk < p.chunks; ++chunk) {
          for (int box = 0; box < kWide / kBox; ++box, to += kBoxBytes) {
            ptx::tma_load_3d(to, gate_map, column * kWide + box * kBox, chunk * kBox, term,
                             gate.full);
          }
        }
      }
    }
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      for (int term = kLogitTerms - 1; term >= 0; --term) {
        ring.open(place);
        ptx::tma_load_3d(ring.slot(place), terms, chunk * kBox, tiles.token(tile), term,
                         ring.full(place));
        place.advance(1, ring.slots);
      }
    }
    const Place done = place;
    place = of_other;
    of_other = done;
  }
}

template <int kGateTerms>
__device__ __forceinline__ void multiply_for_tokens(const TokenParams& p, const TokenTiles& tiles,
                                                    const Ring& ring, const GateColumns& gate) {
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int first_column = tiles.column(tiles.begin);
  int set = 0;
  ptx::mbarrier_wait(gate.full, 0);
  const auto go_to_column = [&](int column) {
    while (set < column - first_column) {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(gate.empty);
      ++set;
      ptx::mbarrier_wait(gate.full, static_cast<std::uint32_t>(set) & 1U);
    }
  };
  float sums[kWide / 2];
  Place place;
  for (int tile = tiles.begin + group; tile < tiles.end; tile += 2) {
    go_to_column(tiles.column(tile));
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i) sums[i] = 0.0F;
    Place last = place;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
#pragma unroll
      for (int term = kLogitTerms - 1; term >= 0; --term) {
        ptx::mbarrier_wait(ring.full(place), place.phase);
        const std::uint64_t a = ptx::wgmma_operand(ring.slot(place));
        ptx::wgmma_fence();
        // Terms of the gate that count with this one: products below the last of dlogits' do not.
#pragma unroll
        for (int of_gate = kGateTerms - 1; of_gate >= 0; --of_gate) {
          if (of_gate + term >= kLogitTerms) continue;
          const std::uint64_t b = gate.operand(of_gate * p.chunks + chunk);
#pragma unroll
          for (int k = 0; k < kBox / 16; ++k) {
            ptx::wgmma<__nv_bfloat16, kWide, ptx::WgmmaTurned::kB>(sums, a + 2 * k,
                                                                   b + k * ptx::kTurnedStep, 1);
          }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (chunk > 0 || term < kLogitTerms - 1) ring.release(last);
        last = place;
        place.advance(1, ring.slots);
      }
    }
    ptx::wgmma_wait<0>();
    hold(sums);
    ring.release(last);
    const std::int64_t token = tiles.token(tile);
    const int column = tiles.column(tile) * kWide;
    store_sums(p.out + token * p.hidden + column, p.hidden,
               static_cast<int>(min(std::int64_t{kBox}, p.num_tokens - token)), p.hidden - column,
               sums);
  }
  go_to_column(tiles.column(tiles.end - 1));
}

/// kGateTerms: 1 or kLogitTerms. Shared memory: the gate's boxes, the ring's, barriers.
template <int kGateTerms>
__global__ void __launch_bounds__(kThreads, 1)
    token_kernel(const __grid_constant__ CUtensorMap terms,
                 const __grid_constant__ CUtensorMap gate_map,
                 const __grid_constant__ TokenParams p) {
  extern __shared__ __align__(1024) std::byte shared[];
  const TokenTiles tiles(p);
  if (tiles.begin == tiles.end) return;
  const std::uint32_t base = ptx::shared_address(shared);
  const auto gate_bytes =
      static_cast<std::uint32_t>(kGateTerms * p.chunks * (kWide / kBox) * kBoxBytes);
  const std::uint32_t barriers = base + gate_bytes + 2 * p.slots * kBoxBytes;
  const Rings rings{base + gate_bytes, barriers, p.slots};
  const std::uint32_t of_gate = barriers + 2 * p.slots * 16;
  const GateColumns gate{base, of_gate, of_gate + 8, gate_bytes};
  if (threadIdx.x == 0) {
    for (std::uint32_t i = 0; i < 2; ++i) rings.of(i).init(kMultiplyThreads / 32 / 2);
    ptx::mbarrier_init(gate.full, 1);
    ptx::mbarrier_init(gate.empty, kMultiplyThreads / 32);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kMultiplyThreads) {
    multiply_for_tokens<kGateTerms>(p, tiles, rings.of(threadIdx.x / 128), gate);
  } else if (threadIdx.x == kMultiplyThreads) {
    load_for_tokens<kGateTerms>(p, tiles, rings, gate, &terms, &gate_map);
  }
}

// ---- terms -------------------------------------------------------------------------------------

struct SplitParams {
  const void* from;   // [rows, cols]
  std::byte* to;      // [terms, rows, padded] bf16
  std::int64_t size;  // rows * padded / 8
  std::int64_t plane_bytes;
  std::int32_t cols, padded;  // to a multiple of 8, zeros behind
  bool vector_rows;           // of `from`: whole 16 bytes
};

/// A thread eight values.
template <typename In>
__global__ void __launch_bounds__(router_backward::kThreads)
    split_kernel(const __grid_constant__ SplitParams p) {
  const std::int64_t i =
      std::int64_t{blockIdx.x} * router_backward::kThreads + static_cast<int>(threadIdx.x);
  if (i >= p.size) return;
  const std::int32_t per_row = p.padded / 8;
  const std::int64_t row = i / per_row;
  const auto col = static_cast<std::int32_t>(i - row * per_row) * 8;
  const In* const from = static_cast<const In*>(p.from) + row * p.cols + col;
  float x[8];
  if (p.vector_rows && col + 8 <= p.cols) {
#pragma unroll
    for (int c = 0; c < 8; c += kPack<In>) {
      float part[kPack<In>];
      unpack16(*reinterpret_cast<const int4*>(from + c), part, In{});
#pragma unroll
      for (int j = 0; j < kPack<In>; ++j) x[c + j] = part[j];
    }
  } else {
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = col + c < p.cols ? static_cast<float>(from[c]) : 0.0F;
  }
  store_terms<kLogitTerms>(p.to + i * 16, p.plane_bytes, x);
}

}  // namespace switchyard::router_backward::sm90
