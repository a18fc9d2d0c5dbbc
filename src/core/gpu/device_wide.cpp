#include "core/gpu/device_wide.hpp"

#include <array>
#include <mutex>

#include "core/gpu/cuda_device.hpp"

namespace switchyard {
namespace {

constexpr std::size_t kPlaces = 64;  // more devices share some, and wait for each other's captures
std::array<std::shared_mutex, kPlaces> turns;
thread_local int captures = 0;  // of this thread

std::shared_mutex& turn_of(int device) { return turns[static_cast<std::size_t>(device) % kPlaces]; }

}  // namespace

cudaError_t wait_for_device() noexcept {
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  if (captures > 0) return cudaDeviceSynchronize();
  const std::shared_lock no_capture(turn_of(device));
  return cudaDeviceSynchronize();
}

CaptureTurn::CaptureTurn() : turn_(turn_of(current_device())) { ++captures; }

CaptureTurn::~CaptureTurn() { --captures; }

}  // namespace switchyard
