#pragma once

#include <cuda_runtime_api.h>

#include "layer/choice_gradients.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

// What the way back through a layer on a GPU has between its stages. Bound by memory.

/// give_choice_gradients(), all arrays on the device.
void give_choice_gradients_on_gpu(const ChoiceGradientsArgs& args, cudaStream_t stream);

/// dlogit [T] = dweight [T] * weight (1 - weight), of a sigmoid's weights [T].
void through_sigmoid(Vector<const float> weight, Vector<const float> dweight, Vector<float> dlogit,
                     cudaStream_t stream);

/// Parts of the tokens' gradient, [T, H] each.
struct TokenGradientParts {
  Matrix<const float> experts{};  ///< Or empty, of an f32 output.
  Matrix<const float> router{};   ///< Or empty.
  Matrix<const float> shared{};   ///< Or empty.
  /// With the shared experts' gate: dlogit [T] * gate [H] is added to `shared`. Or empty.
  Vector<const float> dlogit{}, gate{};
};
/// out [T, H] = experts + (router + shared), rounded once to f32, bf16 or f16; it may be a part.
/// H % 4 == 0.
void add_token_gradients(const TokenGradientParts& parts, RawMatrix out, cudaStream_t stream);

/// out [n] = values, or out + values, rounded once to f32, bf16 or f16.
void write_gradient_on_gpu(Vector<const float> values, DType dtype, void* out, bool accumulate,
                           cudaStream_t stream);

/// kept [R, R] = counts. By a kernel: copies of ranks that share a GPU also share queues.
void keep_counts(const std::int64_t* counts, Matrix<std::int64_t> kept, cudaStream_t stream);

/// parts [2 n] = the counts [n] as SplitCount has them,
void split_counts(Vector<const std::int64_t> counts, float* parts, cudaStream_t stream);
/// and back.
void join_counts(const float* parts, Vector<std::int64_t> counts, cudaStream_t stream);

/// Sets all to 1.
void fill_ones(Vector<float> values, cudaStream_t stream);

}  // namespace switchyard
