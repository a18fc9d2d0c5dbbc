#pragma once

#include <map>
#include <memory>

#include "capi/capi.hpp"
#include "core/gpu/device_scope.hpp"
#include "layer/cpu/buffers.hpp"
#include "layer/expert_runner.hpp"
#include "layer/gpu/stage_calls.hpp"
#include "switchyard/thread_pool.hpp"

struct sy_experts_t {
  switchyard::ExpertConfig config;
  switchyard::DType dtype = switchyard::DType::kF32;  // of the weights, and of x
  bool is_stored = false;  // given as codes: on a CPU x is then rounded to dtype
  int device = switchyard::DeviceScope::kNone;
  // On the CPU:
  std::unique_ptr<switchyard::ThreadPool> pool;
  std::unique_ptr<switchyard::ExpertWeights> weights;
  switchyard::ExpertRunner<switchyard::RawBuffer> runner;
  switchyard::Plan plan;
  switchyard::RawBuffer rounded;
  // On a GPU:
  std::unique_ptr<switchyard::FusedExperts> fused;
  switchyard::ExpertsOnDevice on_device;
  // By experts a token: layers whose routing is given, on the same weights, of runs that save.
  std::map<std::int64_t, switchyard::MoeLayer> training;

  std::uint64_t number = 0;  // no other object has it
  switchyard::capi::Calls calls{"the experts object"};

  [[nodiscard]] switchyard::Execution execution() const { return {.pool = pool.get()}; }
};
