// The shortest complete use of the library: a Mixture-of-Experts layer from plain arrays, run on a
// few tokens.
#include <switchyard/switchyard.hpp>

#include <cstdio>
#include <vector>

int main() {
  constexpr std::int64_t kTokens = 4, kHidden = 8, kInner = 16, kExperts = 4, kTopK = 2;

  // Any weights will do here: a checkpoint's come from switchyard::Checkpoint(path).layer(0).
  const auto fill = [](std::size_t size) {
    std::vector<float> values(size);
    for (std::size_t i = 0; i < size; ++i)
      values[i] = static_cast<float>(i * 37 % 17) / 17.0F - 0.5F;
    return values;
  };
  const std::vector<float> w13 = fill(kExperts * 2 * kInner * kHidden);
  const std::vector<float> w2 = fill(kExperts * kHidden * kInner);

  switchyard::LayerModel model;
  model.config.router = {.num_experts = kExperts, .kind = switchyard::TopKRouter{.top_k = kTopK}};
  model.config.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = kInner};
  model.gate = fill(kExperts * kHidden);
  model.experts = switchyard::make_memory_source(model.config.experts, switchyard::DType::kF32,
                                                 w13.data(), w2.data());

  switchyard::MoeLayer layer(model, {.num_threads = 2});
  std::vector<float> tokens = fill(kTokens * kHidden);
  std::vector<float> out(tokens.size());
  const auto matrix = [](std::vector<float>& values) {
    return switchyard::RawMatrix{reinterpret_cast<std::byte*>(values.data()),
                                 switchyard::DType::kF32, kTokens, kHidden};
  };
  layer.forward({.tokens = matrix(tokens), .out = matrix(out)});

  for (std::int64_t t = 0; t < kTokens; ++t) {
    std::printf("token %d: %8.5f %8.5f %8.5f ...\n", static_cast<int>(t), out[t * kHidden],
                out[t * kHidden + 1], out[t * kHidden + 2]);
  }
}
