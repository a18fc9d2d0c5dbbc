#include "layer/gpu/backward/arguments.hpp"

#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"

namespace switchyard {

void require_on_device(const BackwardArgs& args, bool has_tokens) {
  const auto check = [](const char* name, const void* data, std::uintptr_t alignment = 16) {
    if (data == nullptr) return;
    require(is_on_device(data), "{} lies in host memory, the layer on a GPU", name);
    require(reinterpret_cast<std::uintptr_t>(data) % alignment == 0,
            "{} is not aligned to {} bytes", name, alignment);
  };
  if (has_tokens) {
    check("dout", args.dout.data);
    check("dlogits", args.dlogits.data);
    check("loss_counts", args.loss_counts.data);
    check("dtokens", args.dtokens.data);
    check("dweight", args.dweight.data);
    check("dprevious_logits", args.dprevious_logits.data);
  }
  check("dgate", args.dgate.data);
  check("dnoise_gate", args.dnoise_gate.data);
  check("drouter_bias", args.drouter_bias.data, 4);
  check("drouter_network", args.drouter_network.data);
  check("dgating_residual", args.dgating_residual.data);
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
