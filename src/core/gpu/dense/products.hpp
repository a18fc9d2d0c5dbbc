#pragma once

// Dense products on a GPU, by cuBLASLt: x [T, in], a matrix w [out, in], y = x w^T. Sums in f32,
// f32 products as f32 (no TF32). The algorithm is the first that the library names for a shape,
// asked once: the same one, and so the same bits, in every call and every run on a machine.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "core/gpu/device_buffer.hpp"

namespace switchyard {

/// A matrix of f32 or bf16, row-major without gaps, aligned as its DenseProducts wants it.
struct Dense {
  void* data = nullptr;
  bool bf16 = false;
};

class DenseProducts {
 public:
  static constexpr std::int64_t kWorkspace = std::int64_t{32} << 20;  ///< Bytes.

  /// @param alignment  Of all matrices, in bytes.
  /// @param own_workspace  Else every call brings one of kWorkspace bytes, aligned to 256: then any
  ///        thread may call, for any stream.
  /// @throws Error{kUnsupported}: cuBLASLt is not here.
  explicit DenseProducts(std::int64_t alignment = 256, bool own_workspace = true);
  ~DenseProducts();
  DenseProducts(const DenseProducts&) = delete;
  DenseProducts& operator=(const DenseProducts&) = delete;

  /// y [rows, out] = x [rows, in] w [out, in]^T.
  void forward(Dense x, Dense w, Dense y, std::int64_t rows, std::int64_t in, std::int64_t out,
               cudaStream_t stream, void* workspace = nullptr);
  /// dx [rows, in] = dy [rows, out] w [out, in].
  void backward_input(Dense dy, Dense w, Dense dx, std::int64_t rows, std::int64_t in,
                      std::int64_t out, cudaStream_t stream, void* workspace = nullptr);
  /// dw [out, in] = dy^T x, or is added to.
  void backward_weights(Dense dy, Dense x, Dense dw, std::int64_t rows, std::int64_t in,
                        std::int64_t out, bool accumulate, cudaStream_t stream,
                        void* workspace = nullptr);

 private:
  struct Plan;
  /// c = a b of columns' matrices [m, k] [k, n], as cuBLAS has them.
  struct Shape {
    bool a_transposed, b_transposed, bf16_in, bf16_out;
    std::int64_t m, n, k;
    [[nodiscard]] auto key() const {
      return std::tuple(a_transposed, b_transposed, bf16_in, bf16_out, m, n, k);
    }
    bool operator<(const Shape& other) const { return key() < other.key(); }
  };
  void run(const Shape& shape, const void* a, const void* b, void* c, bool accumulate,
           cudaStream_t stream, void* workspace);
  const Plan& plan_of(const Shape& shape);

  std::int64_t alignment_;
  void* handle_ = nullptr;
  std::mutex mutex_;  ///< Of the plans, which stay where they are.
  std::map<Shape, Plan> plans_;
  DeviceBuffer workspace_;
};

/// Those of the current device for whoever brings a workspace, of matrices aligned to 16 bytes;
/// null where cuBLASLt is not here.
[[nodiscard]] DenseProducts* shared_dense_products();

}  // namespace switchyard
