#include "core/gpu/dense/products.hpp"

#include <memory>

#include "core/check.hpp"
#include "core/gpu/dense/cublaslt.hpp"

namespace switchyard {
namespace {

#define SWITCHYARD_CUBLASLT(call) require_success((call), #call)

cudaDataType type_of(bool bf16) { return bf16 ? CUDA_R_16BF : CUDA_R_32F; }

}  // namespace

/// A product of one shape, ready to run.
struct DenseProducts::Plan {
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (desc != nullptr) lt->matmul_desc_destroy(desc);
    for (cublasLtMatrixLayout_t layout : {a, b, c}) {
      if (layout != nullptr) lt->matrix_layout_destroy(layout);
    }
  }
  const CublasLt* lt = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algo{};
  bool ready = false;
};

DenseProducts::DenseProducts(std::int64_t alignment, bool own_workspace) : alignment_(alignment) {
  cublasLtHandle_t handle = nullptr;
  SWITCHYARD_CUBLASLT(cublaslt().create(&handle));
  handle_ = handle;
  if (own_workspace) workspace_.reserve(kWorkspace);
}

DenseProducts::~DenseProducts() {
  plans_.clear();
  if (handle_ != nullptr) cublaslt().destroy(static_cast<cublasLtHandle_t>(handle_));
}

void DenseProducts::forward(Dense x, Dense w, Dense y, std::int64_t rows, std::int64_t in,
                            std::int64_t out, cudaStream_t stream, void* workspace) {
  run({true, false, x.bf16, y.bf16, out, rows, in}, w.data, x.data, y.data, false, stream,
      workspace);
}

void DenseProducts::backward_input(Dense dy, Dense w, Dense dx, std::int64_t rows, std::int64_t in,
                                   std::int64_t out, cudaStream_t stream, void* workspace) {
  run({false, false, dy.bf16, dx.bf16, in, rows, out}, w.data, dy.data, dx.data, false, stream,
      workspace);
}

void DenseProducts::backward_weights(Dense dy, Dense x, Dense dw, std::int64_t rows,
                                     std::int64_t in, std::int64_t out, bool accumulate,
                                     cudaStream_t stream, void* workspace) {
  run({false, true, x.bf16, dw.bf16, in, out, rows}, x.data, dy.data, dw.data, accumulate, stream,
      workspace);
}

void DenseProducts::run(const Shape& shape, const void* a, const void* b, void* c, bool accumulate,
                        cudaStream_t stream, void* workspace) {
  const Plan& plan = plan_of(shape);
  const float one = 1, beta = accumulate ? 1 : 0;
  SWITCHYARD_CUBLASLT(cublaslt().matmul(static_cast<cublasLtHandle_t>(handle_), plan.desc, &one, a,
                                        plan.a, b, plan.b, &beta, c, plan.c, c, plan.c, &plan.algo,
                                        workspace == nullptr ? workspace_.data() : workspace,
                                        static_cast<std::size_t>(kWorkspace), stream));
}

const DenseProducts::Plan& DenseProducts::plan_of(const Shape& shape) {
  const std::lock_guard lock(mutex_);
  Plan& plan = plans_[shape];
  if (plan.ready) return plan;
  const CublasLt& lt = cublaslt();
  plan.lt = &lt;
  SWITCHYARD_CUBLASLT(lt.matmul_desc_create(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  if (shape.a_transposed) {
    SWITCHYARD_CUBLASLT(lt.matmul_desc_set_attribute(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA,
                                                     &transposed, sizeof(transposed)));
  }
  if (shape.b_transposed) {
    SWITCHYARD_CUBLASLT(lt.matmul_desc_set_attribute(plan.desc, CUBLASLT_MATMUL_DESC_TRANSB,
                                                     &transposed, sizeof(transposed)));
  }
  const auto layout = [&](cublasLtMatrixLayout_t& of, bool bf16, bool is_transposed,
                          std::int64_t rows, std::int64_t cols) {
    if (is_transposed) std::swap(rows, cols);
    SWITCHYARD_CUBLASLT(lt.matrix_layout_create(&of, type_of(bf16),
                                                static_cast<std::uint64_t>(rows),
                                                static_cast<std::uint64_t>(cols), rows));
  };
  layout(plan.a, shape.bf16_in, shape.a_transposed, shape.m, shape.k);
  layout(plan.b, shape.bf16_in, shape.b_transposed, shape.k, shape.n);
  layout(plan.c, shape.bf16_out, false, shape.m, shape.n);
  cublasLtMatmulPreference_t preference = nullptr;
  SWITCHYARD_CUBLASLT(lt.preference_create(&preference));
  const auto most = static_cast<std::uint64_t>(kWorkspace);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  cublasStatus_t status = lt.preference_set_attribute(
      preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof(most));
  // No choice depends on an address.
  const auto alignment = static_cast<std::uint32_t>(alignment_);
  for (const cublasLtMatmulPreferenceAttributes_t of :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    if (status != CUBLAS_STATUS_SUCCESS) break;
    status = lt.preference_set_attribute(preference, of, &alignment, sizeof(alignment));
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt.get_heuristic(static_cast<cublasLtHandle_t>(handle_), plan.desc, plan.a, plan.b,
                              plan.c, plan.c, preference, 1, &found, &count);
  }
  lt.preference_destroy(preference);
  require_success(status, "cublasLtMatmulAlgoGetHeuristic");
  if (count == 0) {
    fail(ErrorCode::kUnsupported, "cuBLASLt has no product of {} x {} x {}", shape.m, shape.n,
         shape.k);
  }
  plan.algo = found.algo;
  plan.ready = true;
  return plan;
}

DenseProducts* shared_dense_products() {
  if (!has_cublaslt()) return nullptr;
  constexpr std::int64_t kAlignment = 16;
  static std::mutex mutex;
  // Never destroyed: at the end of a process there may be no CUDA any more.
  static auto* const by_device = new std::map<int, std::unique_ptr<DenseProducts>>;
  int device = 0;
  SWITCHYARD_CUDA(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  std::unique_ptr<DenseProducts>& products = (*by_device)[device];
  if (products == nullptr) products = std::make_unique<DenseProducts>(kAlignment, false);
  return products.get();
}

}  // namespace switchyard
