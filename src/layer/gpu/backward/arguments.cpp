#include "layer/gpu/backward/arguments.hpp"

#include "core/check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/cuda_memory.hpp"

namespace switchyard {

void require_on_device(const BackwardArgs& args, bool has_tokens) {
  const auto check = [](const char* name, const void* data) {
    if (data == nullptr) return;
    require(is_on_device(data), "{} lies in host memory, the layer on a GPU", name);
    require(is_aligned_16(data), "{} is not aligned to 16 bytes", name);
  };
  if (has_tokens) {
    check("dout", args.dout.data);
    check("dlogits", args.dlogits.data);
    check("loss_counts", args.loss_counts.data);
    check("dtokens", args.dtokens.data);
    check("dweight", args.dweight.data);
  }
  check("dgate", args.dgate.data);
  check("dnoise_gate", args.dnoise_gate.data);
  check("drouter_bias", args.drouter_bias.data);
  check("dconstant_experts", args.dconstant_experts.data);
  check("dshared_gate", args.dshared_gate.data);
  for (const ExpertGradients* experts : {&args.experts, &args.shared}) {
    const bool shared = experts == &args.shared;
    check(shared ? "shared dw13" : "dw13", experts->w13.data);
    check(shared ? "shared dw2" : "dw2", experts->w2.data);
    check(shared ? "shared db13" : "db13", experts->b13.data);
    check(shared ? "shared db2" : "db2", experts->b2.data);
  }
}

}  // namespace switchyard
