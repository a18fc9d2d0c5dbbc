#pragma once

// Layers of a few tokens with weights of their own, ready on the device, and the ways to run them.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "experts/gpu/grouped/gemm.hpp"
#include "experts/gpu/streaming/streaming.hpp"

namespace switchyard::bench {

struct StreamingCase {
  const char* name = "";  ///< The bar that it is of, and what sets it apart.
  DType dtype = DType::kBF16;
  std::int32_t num_experts = 0;
  std::int64_t hidden = 0, inner = 0;
  std::int32_t top_k = 0;
  std::int64_t num_tokens = 0;
  double zipf = 0;    ///< 0: uniform.
  double target = 0;  ///< Time over the floor; 0: no bar.
  WeightFormat format = WeightFormat::kExact;
  bool fp8_rows = false;  ///< Of e4m3: rows become e4m3 too, for the grouped products of both.
};

/// Device memory for the weights of several layers.
struct Arena {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// Bytes a second that this GPU reads 8 GiB of the arena with, by the best number of threads;
/// prints each. Overwrites them.
[[nodiscard]] double measure_read(Arena arena, cudaStream_t stream);

/// As many layers of a case as the arena holds (up to 10; 24 of one or two tokens), each with its
/// weights and its plan; they share the tokens and what the kernels write.
class StreamingLayers {
 public:
  /// @throws Error{kInvalidArgument}: not even one layer fits the arena.
  StreamingLayers(const StreamingCase& c, Arena arena, cudaStream_t stream);
  ~StreamingLayers();
  StreamingLayers(const StreamingLayers&) = delete;
  StreamingLayers& operator=(const StreamingLayers&) = delete;

  [[nodiscard]] const std::vector<StreamingParams>& params() const { return params_; }
  /// The last layer with weights of bf16, which its codes mean: for a reference. Overwrites those
  /// of the first layers. @throws Error{kInvalidArgument}: the arena has no room for both.
  [[nodiscard]] StreamingParams last_as_numbers(cudaStream_t stream) const;
  [[nodiscard]] double hit_bytes() const {
    return hit_bytes_;
  }  ///< Weights of a layer's hits, mean.
  [[nodiscard]] std::int64_t most_rows() const { return most_rows_; }  ///< Of any expert.

  /// kOrdered: rows of launch_coded() in the order of codes; MXFP4 has them as it must.
  enum Part : unsigned {
    kUp = 1,
    kDown = 2,
    kCombine = 4,
    kAll = 7,
    kOrdered = 8,
  };
  /// Enqueues both products by the grouped GEMM, then combine, or only some of these parts.
  void launch_grouped(const StreamingParams& params, GroupedPath path, unsigned parts,
                      cudaStream_t stream) const;
  /// The same by the grouped product with codes.
  void launch_coded(const StreamingParams& params, unsigned parts, cudaStream_t stream) const;
  /// The same by the grouped products of e4m3 rows: kUp with the rows' codes, which are made anew.
  void launch_fp8(const StreamingParams& params, unsigned parts, cudaStream_t stream) const;
  /// The same of codes: some experts at a time as numbers, then the grouped GEMM, then combine.
  void launch_expanded(const StreamingParams& params, cudaStream_t stream) const;
  /// Enqueues what a layer takes: the streaming kernels, or where worth_streaming() says no the
  /// grouped GEMM (of codes, their own product) and combine; rows of e4m3 these always.
  void launch_best(const StreamingParams& params, cudaStream_t stream) const;

 private:
  struct Memory;
  [[nodiscard]] GroupedGemmParams grouped_params(const StreamingParams& params) const;
  void launch_combine(const StreamingParams& params, cudaStream_t stream) const;
  std::unique_ptr<Memory> memory_;
  Arena arena_;
  std::vector<StreamingParams> params_;
  double hit_bytes_ = 0;
  std::int64_t most_rows_ = 0;
  bool fp8_rows_ = false;
};

/// Median microseconds of a layer: all of them captured in one graph, one behind the other.
/// @param launch  Enqueues one layer.
[[nodiscard]] double time_layers(
    const StreamingLayers& layers,
    const std::function<void(const StreamingParams&, cudaStream_t)>& launch, int repeats,
    cudaStream_t stream);

}  // namespace switchyard::bench
