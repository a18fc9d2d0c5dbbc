// Where cuBLASLt is. CUDA's toolkit has it, the loader's paths, and Python environments in a
// package of its own.
#include "core/gpu/dense/cublaslt.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <vector>

#include "core/check.hpp"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

static_assert(CUBLAS_VER_MAJOR == 13, "the name of the library below is that of CUDA 13");
constexpr const char* kName = "libcublasLt.so.13";

void add_packages(const fs::path& bin, std::vector<std::string>& names) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(bin.parent_path() / "lib", error)) {
    if (!entry.path().filename().string().starts_with("python3")) continue;
    for (const char* packages : {"site-packages", "dist-packages"}) {
      const fs::path file = entry.path() / packages / "nvidia/cu13/lib" / kName;
      if (fs::exists(file, error)) names.push_back(file.string());
    }
  }
}

std::vector<std::string> candidates() {
  std::vector<std::string> names = {kName};
  for (const char* folder : {"/usr/local/cuda/lib64/", "/usr/local/cuda/lib/",
                             "/usr/local/cuda/targets/x86_64-linux/lib/"}) {
    names.push_back(std::string(folder) + kName);
  }
  const char* const paths = std::getenv("PATH");  // NOLINT(concurrency-mt-unsafe)
  std::istringstream path(paths == nullptr ? "" : paths);
  for (std::string bin; std::getline(path, bin, ':');) {
    if (!bin.empty()) add_packages(bin, names);
  }
  return names;
}

template <typename Function>
void look_up(void* handle, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr && missing.empty()) missing = name;
}

/// "" or the first function that is missing.
std::string read_functions(void* handle, CublasLt& lt) {
  std::string missing;
  look_up(handle, "cublasLtCreate", lt.create, missing);
  look_up(handle, "cublasLtDestroy", lt.destroy, missing);
  look_up(handle, "cublasLtGetVersion", lt.get_version, missing);
  look_up(handle, "cublasLtGetStatusString", lt.get_status_string, missing);
  look_up(handle, "cublasLtMatmul", lt.matmul, missing);
  look_up(handle, "cublasLtMatmulDescCreate", lt.matmul_desc_create, missing);
  look_up(handle, "cublasLtMatmulDescDestroy", lt.matmul_desc_destroy, missing);
  look_up(handle, "cublasLtMatmulDescSetAttribute", lt.matmul_desc_set_attribute, missing);
  look_up(handle, "cublasLtMatrixLayoutCreate", lt.matrix_layout_create, missing);
  look_up(handle, "cublasLtMatrixLayoutDestroy", lt.matrix_layout_destroy, missing);
  look_up(handle, "cublasLtMatmulPreferenceCreate", lt.preference_create, missing);
  look_up(handle, "cublasLtMatmulPreferenceDestroy", lt.preference_destroy, missing);
  look_up(handle, "cublasLtMatmulPreferenceSetAttribute", lt.preference_set_attribute, missing);
  look_up(handle, "cublasLtMatmulAlgoGetHeuristic", lt.get_heuristic, missing);
  return missing;
}

struct Found {
  CublasLt lt;
  std::string tried;  ///< Without one.
};

Found find() {
  Found found;
  for (const std::string& name : candidates()) {
    void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* const words = dlerror();  // NOLINT(concurrency-mt-unsafe)
      found.tried += (found.tried.empty() ? "" : "; ") + std::string(words == nullptr ? "" : words);
      continue;
    }
    const std::string missing = read_functions(handle, found.lt);
    if (missing.empty()) {
      found.lt.path = name;
      found.tried.clear();
      return found;
    }
    if (!found.tried.empty()) found.tried += "; ";
    found.tried.append(name).append(" has no ").append(missing);
  }
  return found;
}

const Found& found_once() {
  static const Found found = find();
  return found;
}

}  // namespace

const CublasLt& cublaslt() {
  const Found& found = found_once();
  if (!found.tried.empty()) {
    fail(ErrorCode::kUnsupported, "dense products on a GPU need cuBLASLt: {}", found.tried);
  }
  return found.lt;
}

bool has_cublaslt() { return found_once().tried.empty(); }

void require_success(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(ErrorCode::kDevice, "{}: {}", call, cublaslt().get_status_string(status));
}

}  // namespace switchyard
