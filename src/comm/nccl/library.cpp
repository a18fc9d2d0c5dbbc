// Where NCCL's library is, and what of it is here. CUDA's images have it among the system's
// libraries, Python environments in a package of its own.
#include "comm/nccl/library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <vector>

#include "comm/nccl/nccl.hpp"
#include "core/check.hpp"
#include "core/environment.hpp"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

/// The first version with windows and a device API.
constexpr int kDeviceApi = NCCL_VERSION(2, 28, 0);
/// From here on a peer's address can be asked on the host; the headers' device code fits no other
/// minor version.
constexpr int kPointersOnHost = NCCL_VERSION(2, 29, 0);

std::string text_of(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return value == nullptr ? "" : value;
}

/// Libraries of the Python packages nvidia-nccl-* of the environment that has `bin`.
void add_packages(const fs::path& bin, std::vector<std::string>& names) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(bin.parent_path() / "lib", error)) {
    if (!entry.path().filename().string().starts_with("python3")) continue;
    for (const char* packages : {"site-packages", "dist-packages"}) {
      const fs::path file = entry.path() / packages / "nvidia/nccl/lib/libnccl.so.2";
      if (fs::exists(file, error)) names.push_back(file.string());
    }
  }
}

std::vector<std::string> candidates() {
  const char* const given = value_of(Variable::kNcclLibrary);
  if (given != nullptr && *given != '\0') return {given};
  std::vector<std::string> names = {"libnccl.so.2", "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
                                    "/usr/local/cuda/lib64/libnccl.so.2",
                                    "/usr/local/cuda/lib/libnccl.so.2"};
  if (const std::string home = text_of("VIRTUAL_ENV"); !home.empty()) {
    add_packages(fs::path(home) / "bin", names);
  }
  std::istringstream path(text_of("PATH"));
  for (std::string bin; std::getline(path, bin, ':');) {
    if (!bin.empty()) add_packages(bin, names);
  }
  return names;
}

template <typename Function>
void look_up(void* handle, const char* name, Function& function, std::string* missing) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr && missing != nullptr && missing->empty()) *missing = name;
}

/// All functions of `handle`; "" or why it is no use.
std::string read_functions(void* handle, NcclLibrary& nccl) {
  std::string lacks;
  look_up(handle, "ncclGetVersion", nccl.get_version, &lacks);
  look_up(handle, "ncclGetUniqueId", nccl.get_unique_id, &lacks);
  look_up(handle, "ncclCommInitRankConfig", nccl.comm_init_rank_config, &lacks);
  look_up(handle, "ncclCommGetAsyncError", nccl.comm_get_async_error, &lacks);
  look_up(handle, "ncclGetErrorString", nccl.get_error_string, &lacks);
  look_up(handle, "ncclGetLastError", nccl.get_last_error, &lacks);
  look_up(handle, "ncclCommFinalize", nccl.comm_finalize, &lacks);
  look_up(handle, "ncclCommDestroy", nccl.comm_destroy, &lacks);
  look_up(handle, "ncclCommAbort", nccl.comm_abort, &lacks);
  look_up(handle, "ncclGroupStart", nccl.group_start, &lacks);
  look_up(handle, "ncclGroupEnd", nccl.group_end, &lacks);
  look_up(handle, "ncclSend", nccl.send, &lacks);
  look_up(handle, "ncclRecv", nccl.recv, &lacks);
  if (!lacks.empty()) return "has no " + lacks;
  look_up(handle, "ncclMemAlloc", nccl.mem_alloc, nullptr);
  look_up(handle, "ncclMemFree", nccl.mem_free, nullptr);
  look_up(handle, "ncclCommWindowRegister", nccl.comm_window_register, nullptr);
  look_up(handle, "ncclCommWindowDeregister", nccl.comm_window_deregister, nullptr);
  look_up(handle, "ncclDevCommCreate", nccl.dev_comm_create, nullptr);
  look_up(handle, "ncclDevCommDestroy", nccl.dev_comm_destroy, nullptr);
  look_up(handle, "ncclGetPeerDevicePointer", nccl.get_peer_device_pointer, nullptr);
  return nccl.get_version(&nccl.version) == ncclSuccess ? "" : "does not tell its version";
}

struct Found {
  NcclLibrary nccl;
  std::string missing;
};

/// The first library with a device API, or else the first that can be used at all.
Found find() {
  // NCCL reads it once. Multicast is of no use here, and what it leaves behind in a driver when a
  // program dies is of harm.
  const std::string multicast = text_of("NCCL_NVLS_ENABLE");
  if (multicast.empty()) {
    setenv("NCCL_NVLS_ENABLE", "0", 1);  // NOLINT(concurrency-mt-unsafe)
  } else if (multicast != "0") {
    return {{},
            fmt::format("NCCL_NVLS_ENABLE={}, want 0: NVLink multicast is never used", multicast)};
  }
  Found found;
  std::string tried;
  for (const std::string& name : candidates()) {
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* words = dlerror();  // NOLINT(concurrency-mt-unsafe)
      tried += (tried.empty() ? "" : "; ") + std::string(words == nullptr ? name : words);
      continue;
    }
    NcclLibrary nccl;
    nccl.path = name;
    const std::string unfit = read_functions(handle, nccl);
    if (!unfit.empty()) {
      tried += fmt::format("{}{} {}", tried.empty() ? "" : "; ", name, unfit);
    } else if (nccl.version >= kDeviceApi) {
      return {std::move(nccl), ""};
    } else if (found.nccl.path.empty()) {
      found.nccl = std::move(nccl);
      continue;
    }
    dlclose(handle);
  }
  if (found.nccl.path.empty()) found.missing = "no libnccl.so.2 can be opened: " + tried;
  return found;
}

const Found& found() {
  static const Found found = find();
  return found;
}

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

const NcclLibrary& nccl_library() {
  if (!found().missing.empty()) fail(ErrorCode::kUnsupported, "engine nccl: {}", found().missing);
  return found().nccl;
}

std::string nccl_missing() { return found().missing; }

std::string nccl_windows_missing() {
  if (!found().missing.empty()) return found().missing;
  const NcclLibrary& nccl = found().nccl;
  const std::string here = fmt::format("NCCL {} of {}", version_text(nccl.version), nccl.path);
  if (nccl.mem_alloc == nullptr || nccl.comm_window_register == nullptr ||
      nccl.dev_comm_create == nullptr) {
    return here + " has no device API, want 2.28 or later";
  }
  const bool same_minor = nccl.version / 100 == NCCL_VERSION_CODE / 100;
  if (nccl.version >= kPointersOnHost ? nccl.get_peer_device_pointer != nullptr : same_minor) {
    return "";
  }
  return fmt::format("{} does not fit the headers of {} that this is built with", here,
                     version_text(NCCL_VERSION_CODE));
}

std::string nccl_description() {
  if (!found().missing.empty()) return "";
  return fmt::format("NCCL {} ({})", version_text(found().nccl.version), found().nccl.path);
}

}  // namespace switchyard
