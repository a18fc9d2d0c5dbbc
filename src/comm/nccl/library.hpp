#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <string>

namespace switchyard {

/// The functions of NCCL that are used here: from a library that is opened when it is first needed,
/// so that a program runs where there is none.
struct NcclLibrary {
  std::string path;
  int version = 0;  ///< As NCCL_VERSION_CODE.
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGetLastError) get_last_error = nullptr;
  decltype(&ncclCommFinalize) comm_finalize = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
  // Null where the library has no device API.
  decltype(&ncclMemAlloc) mem_alloc = nullptr;
  decltype(&ncclMemFree) mem_free = nullptr;
  decltype(&ncclCommWindowRegister) comm_window_register = nullptr;
  decltype(&ncclCommWindowDeregister) comm_window_deregister = nullptr;
  decltype(&ncclDevCommCreate) dev_comm_create = nullptr;
  decltype(&ncclDevCommDestroy) dev_comm_destroy = nullptr;
  /// ncclGetPeerDevicePointer, which the headers of 2.28 do not have: a peer's address, asked on
  /// the host.
  ncclResult_t (*get_peer_device_pointer)(ncclWindow_t, std::size_t, int, void**) = nullptr;
};

/// Opened at the first call; NVLink multicast is switched off before (NCCL_NVLS_ENABLE=0).
/// SWITCHYARD_NCCL_LIBRARY names the file; without it the loader's paths are searched, then CUDA's
/// own, then the Python packages beside the programs of PATH.
/// @throws Error{kUnsupported}: nccl_missing() says why.
[[nodiscard]] const NcclLibrary& nccl_library();

}  // namespace switchyard
