#pragma once

/// For functions that host code, tests and kernels share.
#ifdef __CUDACC__
#define SWITCHYARD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SWITCHYARD_HOST_DEVICE inline
#endif
