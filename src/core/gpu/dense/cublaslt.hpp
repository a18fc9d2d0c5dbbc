#pragma once

// cuBLASLt, opened when it is first needed: a library that is built with CUDA runs where CUDA's
// libraries are not, as long as nobody wants products of it.

#include <cublasLt.h>

#include <string>

namespace switchyard {

/// What of cuBLASLt is used.
struct CublasLt {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtGetVersion) get_version = nullptr;
  decltype(&cublasLtGetStatusString) get_status_string = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) matmul_desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) matmul_desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) matmul_desc_set_attribute = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) matrix_layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) matrix_layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set_attribute = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic = nullptr;
  std::string path{};
};

/// @throws Error{kUnsupported} with what was tried: it is not here.
[[nodiscard]] const CublasLt& cublaslt();
/// Whether cublaslt() has it.
[[nodiscard]] bool has_cublaslt();

/// @throws Error{kDevice} that names the call.
void require_success(cublasStatus_t status, const char* call);

}  // namespace switchyard
