// The instruction set in use: forced by a call or by the environment, else the best one here.
#include "switchyard/cpu_isa.hpp"

#include <fmt/core.h>

#include <atomic>

#include "core/cpu/features.hpp"
#include "core/environment.hpp"
#include "core/say.hpp"
#include "switchyard/names.hpp"

namespace switchyard {
namespace {

cpu::IsaTable& table() {
  static cpu::IsaTable isas(
      cpu::read_cpu_features(), cpu::ask_for_tiles,
      [](const std::string& notice) { say(fmt::format("switchyard: {}\n", notice)); });
  return isas;
}

std::atomic<int> forced{-1};

}  // namespace

std::optional<CpuIsa> parse_cpu_isa(std::string_view name) noexcept { return parse<CpuIsa>(name); }

std::vector<CpuIsaStatus> cpu_isas() { return table().statuses(); }

std::vector<CpuIsa> available_isas() {
  std::vector<CpuIsa> list;
  for (const CpuIsaStatus& entry : table().statuses()) {
    if (entry.reason.empty()) list.push_back(entry.isa);
  }
  return list;
}

CpuIsa isa_in_use() {
  const int isa = forced.load();
  return isa >= 0 ? static_cast<CpuIsa>(isa) : table().choose(value_of(Variable::kIsa));
}

void force_isa(std::optional<CpuIsa> isa) {
  forced.store(isa ? static_cast<int>(table().resolve(*isa)) : -1);
}

}  // namespace switchyard
