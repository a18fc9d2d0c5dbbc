#pragma once

// Every PTX instruction that the kernels use, once each, under its own name. Addresses of shared
// memory are 32-bit (shared_address); `_cluster` ones may point into another CTA of the cluster.
// Wgmma has its own file: its operand lists are long.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace switchyard::ptx {

// ---- addresses -------------------------------------------------------------------------------

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// The same offset in the shared memory of CTA `rank` of this cluster.
__device__ __forceinline__ std::uint32_t map_to_cta(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ std::uint32_t cluster_cta_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// ---- the special function unit: one instruction, 2 ulp or so, subnormals are zero --------------

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// NaN where one is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Returns some `cycles` of the multiprocessor later.
__device__ __forceinline__ void wait_cycles(int cycles) {
  const auto begin = static_cast<std::uint32_t>(clock());
  while (static_cast<std::uint32_t>(clock()) - begin < static_cast<std::uint32_t>(cycles)) {
  }
}
/// Off by up to 2^-11 of the result, says PTX; on Hopper by 2^-16 of 1.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- cp.async: 16 or 4 bytes a thread, generic proxy -------------------------------------------

/// Copies `bytes` (0 or 16) and fills the rest of the 16 with zeros.
__device__ __forceinline__ void cp_async_16(std::uint32_t to, const void* from,
                                            std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/// The same of 4 bytes, which go where the others do not.
__device__ __forceinline__ void cp_async_4(std::uint32_t to, const void* from,
                                           std::uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ int4 load_shared_16(std::uint32_t from) {
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t load_shared_4(std::uint32_t from) {
  std::uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_16(std::uint32_t to, const int4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared_16(std::uint32_t to, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}

/// 16 bytes to global memory, aligned to them, as one store. Told as the store of a struct it may
/// become four: nvcc 13.0 takes it apart and does not always find together again.
__device__ __forceinline__ void store_global_16(void* to, int4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

/// The same where `holds`, without a branch that what follows would have to wait behind.
__device__ __forceinline__ void store_global_16_if(bool holds, void* to, int4 value) {
  asm volatile(
      "{\n"
      ".reg .pred holds;\n"
      "setp.ne.u32 holds, %0, 0;\n"
      "@holds st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(static_cast<std::uint32_t>(holds)),
      "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

/// 16 bytes of global memory that nobody writes while the kernel runs, and that are read once. Not
/// moved behind a barrier, as a plain load of such memory may be.
__device__ __forceinline__ int4 load_constant_16(const void* from) {
  int4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

/// The line at `address` of global memory into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---- mma.sync: m16n8k16, fp32 sums -------------------------------------------------------------

/// A warp's matrix of 8 x 8 values of 16 bits, of which lane l has row l / 4 at columns 2 (l % 4)
/// and the next: its transpose, held likewise.
__device__ __forceinline__ std::uint32_t transpose_8x8(std::uint32_t pair) {
  std::uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

/// Four 8x8 matrices of 16-bit values; each lane gives the address of one row of 16 bytes.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

/// The same, each matrix handed out as its transpose.
__device__ __forceinline__ void ldmatrix_x4_transposed(std::uint32_t (&r)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

/// Bytes of a word by the four digits of kSelector, lowest first: 0..3 a byte, 8..11 its sign in
/// all bits.
template <std::uint32_t kSelector>
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t word) {
  std::uint32_t out;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(out) : "r"(word), "n"(kSelector));
  return out;
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const std::uint32_t (&a)[4],
                                        std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- what only Hopper has ----------------------------------------------------------------------
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// A barrier of some of the CTA's threads; `id` 1..15.
__device__ __forceinline__ void named_barrier(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes the inits visible to the other CTAs of the cluster and to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// No `.release.cluster`: in a loop over k that form costs a MEMBAR.ALL.GPU (699 -> 522 TFLOP/s on
/// an H200). Enough where the arrival says only "I have read", not "I have written".
__device__ __forceinline__ void mbarrier_arrive_cluster(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives once, and the phase also waits for `bytes` of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// This thread's arrival happens when all its earlier cp.async have landed.
__device__ __forceinline__ void cp_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// 16 bytes into the shared memory of a CTA of the cluster, counted on a barrier there.
__device__ __forceinline__ void store_async_16(std::uint32_t to, int4 value,
                                               std::uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
}

/// 16 bytes of the shared memory of a CTA of the cluster.
__device__ __forceinline__ float4 load_cluster_16(std::uint32_t from) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

/// All threads of all CTAs of the cluster; what they wrote before is seen by all after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// What this thread wrote to shared memory before is seen by copies and wgmma issued after.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// A box of a 2-d tensor to shared memory; `column` runs along memory. Out of bounds gives zeros.
__device__ __forceinline__ void tma_load_2d(std::uint32_t to, const CUtensorMap* map, int column,
                                            int row, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

/// A box of a 3-d tensor to shared memory, `i0` along memory; out of bounds gives zeros.
__device__ __forceinline__ void tma_load_3d(std::uint32_t to, const CUtensorMap* map, int i0,
                                            int i1, int i2, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(barrier)
      : "memory");
}

/// The same box to the same offset in each CTA of `cta_mask`, each counted on its own barrier.
__device__ __forceinline__ void tma_load_3d_multicast(std::uint32_t to, const CUtensorMap* map,
                                                      int i0, int i1, int i2, std::uint32_t barrier,
                                                      std::uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(barrier), "h"(cta_mask)
      : "memory");
}

/// A box of a 4-d tensor to shared memory, `i0` along memory; out of bounds gives zeros.
__device__ __forceinline__ void tma_load_4d(std::uint32_t to, const CUtensorMap* map, int i0,
                                            int i1, int i2, int i3, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(barrier)
      : "memory");
}

/// The same box to the same offset in each CTA of `cta_mask`, each counted on its own barrier.
__device__ __forceinline__ void tma_load_2d_multicast(std::uint32_t to, const CUtensorMap* map,
                                                      int column, int row, std::uint32_t barrier,
                                                      std::uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(cta_mask)
      : "memory");
}

/// `bytes` (a multiple of 16) from shared to global memory; belongs to this thread's bulk group.
__device__ __forceinline__ void bulk_store(void* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

/// A box from shared memory to a 2-d tensor, what lies out of its bounds left out; belongs to this
/// thread's bulk group. One box of 64 rows costs the copy engine far less than 64 row copies.
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, int column, int row,
                                             std::uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Until at most kPending of this thread's bulk groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Until at most kPending of this thread's bulk groups are under way.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four 8x8 matrices of 16-bit values; each lane gives the address of one row of 16 bytes.
__device__ __forceinline__ void stmatrix_x4(std::uint32_t to, std::uint32_t r0, std::uint32_t r1,
                                            std::uint32_t r2, std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

/// The same, each matrix stored as its transpose.
__device__ __forceinline__ void stmatrix_x4_transposed(std::uint32_t to, std::uint32_t r0,
                                                       std::uint32_t r1, std::uint32_t r2,
                                                       std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

/// Registers of each thread of this warpgroup from here on; all its warps must come by.
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif

// ---- programmatic dependent launch: on Hopper, elsewhere nothing --------------------------------

/// Until the previous kernel of the stream has ended.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// The next kernel of the stream may start once all CTAs have come here.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Both. So a kernel may rely, before it calls this, on all that came before its predecessor.
__device__ __forceinline__ void start_after_previous_kernel() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}

// ---- weight streams: copies with a cache policy, TF32 -----------------------------

/// What this thread wrote to, or has seen in, global memory is seen by bulk copies after.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// Adds, and whoever sees it by load_acquire() sees what came before.
__device__ __forceinline__ void add_release(std::uint32_t* to, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* from) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

/// Words that are read while others write them: each whole, in no order with anything else.
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* from) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(unsigned long long* to, unsigned long long value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

/// Cache policy for what is read once: it leaves the L2 to others.
__device__ __forceinline__ std::uint64_t policy_evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// The nearest TF32 value.
__device__ __forceinline__ float round_tf32(float value) {
  std::uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

/// D += A B with A and B in TF32 (the low 13 bits of each operand are ignored), fp32 sums.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// `bytes` (a multiple of 16) of contiguous memory by the copy engine, counted on `barrier`.
__device__ __forceinline__ void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

/// The same with a cache policy.
__device__ __forceinline__ void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

/// A box of a 2-d tensor with a cache policy.
__device__ __forceinline__ void tma_load_2d(std::uint32_t to, const CUtensorMap* map, int column,
                                            int row, std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

/// A box of a 3-d tensor to shared memory, `i0` along memory; out of bounds gives zeros.
__device__ __forceinline__ void tma_load_3d(std::uint32_t to, const CUtensorMap* map, int i0,
                                            int i1, int i2, std::uint32_t barrier,
                                            std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(barrier), "l"(policy)
      : "memory");
}

#else  // mbarriers before Hopper: no expected bytes, no blocking wait

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}

__device__ __forceinline__ void cp_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void named_barrier(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

#endif

}  // namespace switchyard::ptx
