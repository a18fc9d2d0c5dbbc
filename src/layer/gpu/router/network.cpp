// The networks of a router on a GPU: products by router_gemm, rows by kernels of their own.
#include "layer/gpu/router/network.hpp"

#include "experts/raw_matrix.hpp"
#include "layer/gpu/router/network_kernels.hpp"
#include "route/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

ConstRawMatrix raw_in(const float* data, std::int64_t rows, std::int64_t cols) {
  return raw(Matrix<const float>{data, {rows, cols}});
}
RawMatrix raw_out(float* data, std::int64_t rows, std::int64_t cols) {
  return data == nullptr ? RawMatrix{} : raw(Matrix<float>{data, {rows, cols}});
}
Vector<float> vector_out(float* data, std::int64_t size) {
  return data == nullptr ? Vector<float>{} : Vector<float>{data, {size}};
}
cudaStream_t stream_of(const Execution& execution) {
  return static_cast<cudaStream_t>(execution.stream);
}

}  // namespace

void CudaRouterNetwork::reserve(std::int64_t num_tokens, std::int64_t num_logits) {
  if (network_.is_linear()) return;
  (void)inner_.matrix<float>(num_tokens, width_);
  (void)active_.matrix<float>(num_tokens, width_);
  if (is_hadamard()) {
    (void)factor_.matrix<float>(num_tokens, hidden_);
    (void)features_.matrix<float>(num_tokens, hidden_);
  }
  if (is_cosine()) (void)gate_.matrix<float>(num_logits, width_);
}

void CudaRouterNetwork::reserve_backward(std::int64_t num_tokens, std::int64_t num_logits) {
  if (network_.is_linear()) return;
  (void)dfeatures_.matrix<float>(num_tokens, network_.features(hidden_));
  if (is_hadamard()) {
    (void)dfactor_.matrix<float>(num_tokens, hidden_);
    (void)dinner_.matrix<float>(num_tokens, width_);
  }
  if (is_cosine()) {
    (void)dgate_.matrix<float>(num_logits, width_);
    (void)row_sums_.vector<float>(num_logits);
  }
}

std::int64_t CudaRouterNetwork::workspace_bytes(std::int64_t num_tokens) const {
  if (network_.is_linear()) return 0;
  return std::max(
      router_gemm_workspace_bytes(num_tokens, width_, hidden_),
      is_hadamard() ? router_gemm_workspace_bytes(num_tokens, hidden_, width_) : std::int64_t{0});
}

std::int64_t CudaRouterNetwork::backward_workspace_bytes(std::int64_t num_tokens,
                                                         std::int64_t num_logits) const {
  if (network_.is_linear()) return 0;
  return std::max(
      {router_gemm_backward_workspace_bytes(num_tokens, width_, hidden_),
       router_gemm_backward_workspace_bytes(num_tokens, num_logits, network_.features(hidden_)),
       is_hadamard() ? router_gemm_backward_workspace_bytes(num_tokens, hidden_, width_)
                     : std::int64_t{0}});
}

ConstRawMatrix CudaRouterNetwork::features(ConstRawMatrix tokens, const Execution& execution) {
  if (network_.is_linear()) return tokens;
  const std::int64_t rows = tokens.rows;
  const NetworkParts<const float> p = values();
  cudaStream_t stream = stream_of(execution);
  const Matrix<float> inner = inner_.matrix<float>(rows, width_);
  const Matrix<float> active = active_.matrix<float>(rows, width_);
  Vector<const float> bias{};
  if (!is_cosine()) bias = {p.b1, {width_}};
  router_gemm({.tokens = tokens,
               .gate = raw_in(p.w1, width_, hidden_),
               .gate_is_fresh = true,  // the caller may write parameters just before a call
               .gate_maps = &maps_,
               .bias = bias,
               .logits = inner,
               .execution = execution});
  if (is_cosine()) {
    unit_rows_on_gpu(inner, active, stream);
  } else {
    gelu_on_gpu(inner, active, stream);
  }
  if (!is_hadamard()) return raw(active);
  const Matrix<float> factor = factor_.matrix<float>(rows, hidden_);
  const Matrix<float> product = features_.matrix<float>(rows, hidden_);
  router_gemm({.tokens = raw(active),
               .gate = raw_in(p.w2, hidden_, width_),
               .gate_is_fresh = true,
               .gate_maps = &maps_,
               .bias = {p.b2, {hidden_}},
               .logits = factor,
               .execution = execution});
  multiply_rows_on_gpu(tokens, factor, product, stream);
  return raw(product);
}

ConstRawMatrix CudaRouterNetwork::scaled(ConstRawMatrix gate, const Execution& execution) {
  if (!is_cosine()) return gate;
  const Matrix<float> rows = gate_.matrix<float>(gate.rows, gate.cols);
  scale_gate_on_gpu(gate, values().b1, rows, stream_of(execution));
  return raw(rows);
}

void CudaRouterNetwork::backward(const RouterGemmBackwardArgs& args, Vector<float> dparameters,
                                 const Execution& scratch) {
  if (network_.is_linear()) return router_gemm_backward(args);
  const std::int64_t rows = args.tokens.rows;
  const bool inside = args.dtokens.data != nullptr || dparameters.data != nullptr;
  const NetworkParts<const float> p = values();
  const auto d = NetworkParts<float>::of(network_, hidden_, dparameters.data);
  cudaStream_t stream = stream_of(args.execution);

  RouterGemmBackwardArgs last = args;
  last.tokens = features(args.tokens, scratch);
  last.gate = scaled(args.gate, scratch);
  last.dtokens = {};
  if (inside) last.dtokens = dfeatures_.matrix<float>(rows, last.tokens.cols);
  if (is_cosine()) {
    const Matrix<float> dgate = dgate_.matrix<float>(args.gate.rows, width_);
    // The bias alone is added to what is there.
    if (args.accumulate) {
      SWITCHYARD_CUDA(
          cudaMemsetAsync(dgate.data, 0, static_cast<std::size_t>(4 * dgate.size()), stream));
    }
    last.dgate = raw_out(dgate.data, args.gate.rows, width_);
    router_gemm_backward(last);
    scale_gate_backward_on_gpu({.gate = args.gate,
                                .s = p.b1,
                                .dscaled = dgate,
                                .dgate = args.dgate,
                                .ds = d.b1,
                                .row_sums = row_sums_.vector<float>(args.gate.rows),
                                .accumulate = args.accumulate},
                               stream);
  } else {
    router_gemm_backward(last);
  }
  if (!inside) return;

  const Matrix<float> inner = inner_.matrix<float>(rows, width_);
  Matrix<float> dactive = last.dtokens;
  if (is_hadamard()) {
    const Matrix<float> dfactor = dfactor_.matrix<float>(rows, hidden_);
    multiply_rows_on_gpu(args.tokens, last.dtokens, dfactor, stream);
    dactive = dinner_.matrix<float>(rows, width_);
    router_gemm_backward({.tokens = raw(active_.matrix<float>(rows, width_)),
                          .gate = raw_in(p.w2, hidden_, width_),
                          .dlogits = dfactor,
                          .dtokens = dactive,
                          .dgate = raw_out(d.w2, hidden_, width_),
                          .dbias = vector_out(d.b2, hidden_),
                          .accumulate = args.accumulate,
                          .execution = args.execution});
  }
  if (is_cosine()) {
    unit_rows_backward_on_gpu(inner, dactive, stream);
  } else {
    gelu_backward_on_gpu(inner, dactive, stream);
  }
  router_gemm_backward({.tokens = args.tokens,
                        .gate = raw_in(p.w1, width_, hidden_),
                        .dlogits = dactive,
                        .dtokens = args.dtokens,
                        .dgate = raw_out(d.w1, width_, hidden_),
                        .dbias = is_cosine() ? Vector<float>{} : vector_out(d.b1, width_),
                        .accumulate = args.accumulate,
                        .execution = args.execution});
  if (!is_hadamard() || args.dtokens.data == nullptr) return;
  multiply_add_on_gpu(last.dtokens, factor_.matrix<float>(rows, hidden_), args.dtokens, stream);
}

}  // namespace switchyard
