#include "models/gpu/device_parameters.hpp"

#include <algorithm>

#include "core/gpu/cuda_memory.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr std::int64_t kAlign = 128;

std::int64_t aligned(std::int64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

}  // namespace

DeviceParameters::DeviceParameters(const ModelConfig& config, const Parameters& host, bool bf16)
    : host_(&host), bf16_(bf16) {
  std::vector<bool> follows(host.tensors().size());
  for (std::int32_t l = 0; l < config.layers; ++l) {
    const auto qkv = static_cast<std::size_t>(host.layer(l).qkv);
    follows[qkv + 1] = follows[qkv + 2] = true;
  }
  for (std::size_t i = 0; i < host.tensors().size(); ++i) {
    if (!follows[i]) size_ = aligned(size_);
    offsets_.push_back(size_);
    size_ += host.tensors()[i].size();
  }
  size_ = aligned(size_);
  values_.reserve(4 * size_);
  gradients_.reserve(4 * size_);
  if (bf16) typed_.reserve(2 * size_);
  std::int64_t all = 0;
  for (const ParameterTensor& buffer : host.buffers()) {
    buffer_offsets_.push_back(all);
    all = aligned(all + buffer.size());
  }
  if (all > 0) buffers_.reserve(4 * all);
  make_pieces();
}

void DeviceParameters::make_pieces() {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < offsets_.size(); ++i) {
    const ParameterTensor& tensor = host_->tensors()[i];
    if (tensor.frozen) continue;  // Neither in the norm nor moved.
    for (std::int64_t first = 0; first < tensor.size(); first += kPiece) {
      pieces.push_back({offsets_[i] + first,
                        static_cast<std::int32_t>(std::min(kPiece, tensor.size() - first)),
                        tensor.decay ? 1 : 0});
    }
  }
  num_pieces_ = std::ssize(pieces);
  const auto bytes = static_cast<std::int64_t>(pieces.size() * sizeof(Piece));
  copy_to_device(pieces_.reserve(bytes), pieces.data(), static_cast<std::size_t>(bytes));
  sums_.reserve(8 * num_pieces_);
}

float* DeviceParameters::at(const DeviceBuffer& buffer, std::int64_t index) const {
  if (index < 0) return nullptr;
  return reinterpret_cast<float*>(buffer.data()) + offsets_[static_cast<std::size_t>(index)];
}

Dense DeviceParameters::typed(std::int64_t index) const {
  if (!bf16_) return {value(index), false};
  return {typed_.data() + 2 * offsets_[static_cast<std::size_t>(index)], true};
}

float* DeviceParameters::buffer(std::int64_t index) const {
  if (index < 0) return nullptr;
  return reinterpret_cast<float*>(buffers_.data()) +
         buffer_offsets_[static_cast<std::size_t>(index)];
}

std::vector<float*> DeviceParameters::host_places(bool gradients) const {
  std::vector<float*> places;
  for (const ParameterTensor& tensor : host_->tensors()) {
    // Of what is frozen the gradient stays 0, whatever the device has made on the way.
    float* const gradient = tensor.frozen ? nullptr : tensor.gradient;
    places.push_back(gradients ? gradient : tensor.value);
  }
  return places;
}

void DeviceParameters::copy(const DeviceBuffer& device, const std::vector<float*>& host,
                            bool to_device, cudaStream_t stream) const {
  for (std::size_t i = 0; i < offsets_.size(); ++i) {
    if (host[i] == nullptr) continue;
    float* const there = at(device, static_cast<std::int64_t>(i));
    const auto bytes = static_cast<std::size_t>(4 * host_->tensors()[i].size());
    SWITCHYARD_CUDA(cudaMemcpyAsync(to_device ? there : host[i], to_device ? host[i] : there, bytes,
                                    cudaMemcpyDefault, stream));
  }
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
}

void DeviceParameters::copy_buffers(bool to_device, cudaStream_t stream) const {
  for (std::size_t i = 0; i < buffer_offsets_.size(); ++i) {
    const ParameterTensor& host = host_->buffers()[i];
    float* const there = buffer(static_cast<std::int64_t>(i));
    SWITCHYARD_CUDA(cudaMemcpyAsync(to_device ? there : host.value, to_device ? host.value : there,
                                    static_cast<std::size_t>(4 * host.size()), cudaMemcpyDefault,
                                    stream));
  }
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
}

void DeviceParameters::upload_values(cudaStream_t stream) const {
  copy(values_, host_places(false), true, stream);
  copy_buffers(true, stream);
  if (bf16_) {
    to_bf16(reinterpret_cast<const float*>(values_.data()), size_, typed_.data(), stream);
  }
}

void DeviceParameters::download_values(cudaStream_t stream) const {
  copy(values_, host_places(false), false, stream);
  copy_buffers(false, stream);
}

void DeviceParameters::download_gradients(cudaStream_t stream) const {
  copy(gradients_, host_places(true), false, stream);
}

/// Those of frozen tensors are nowhere on the host, and nobody reads them on the device.
void DeviceParameters::copy_moments(AdamW& optimizer, bool to_device, cudaStream_t stream) const {
  std::vector<float*> m, v;
  for (std::size_t i = 0; i < offsets_.size(); ++i) {
    const bool frozen = host_->tensors()[i].frozen;
    m.push_back(frozen ? nullptr : optimizer.m(i).data());
    v.push_back(frozen ? nullptr : optimizer.v(i).data());
  }
  copy(m_, m, to_device, stream);
  copy(v_, v, to_device, stream);
}

void DeviceParameters::upload_moments(AdamW& optimizer, cudaStream_t stream) {
  m_.reserve(4 * size_);
  v_.reserve(4 * size_);
  copy_moments(optimizer, true, stream);
}

void DeviceParameters::download_moments(AdamW& optimizer, cudaStream_t stream) const {
  copy_moments(optimizer, false, stream);
}

void DeviceParameters::step(const StepInputs* inputs, StepFactors* factors,
                            cudaStream_t stream) const {
  adamw({.pieces = reinterpret_cast<const Piece*>(pieces_.data()),
         .num_pieces = num_pieces_,
         .p = reinterpret_cast<float*>(values_.data()),
         .g = reinterpret_cast<const float*>(gradients_.data()),
         .m = reinterpret_cast<float*>(m_.data()),
         .v = reinterpret_cast<float*>(v_.data()),
         .typed = typed_.data(),
         .inputs = inputs,
         .factors = factors,
         .sums = reinterpret_cast<double*>(sums_.data()),
         .stream = stream});
}

}  // namespace switchyard::models::gpu
