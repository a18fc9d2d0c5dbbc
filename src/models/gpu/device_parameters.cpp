#include "models/gpu/device_parameters.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr std::int64_t kAlign = 128;
constexpr std::int64_t kStaged = std::int64_t{1} << 20;

std::int64_t aligned(std::int64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

}  // namespace

DeviceParameters::DeviceParameters(const ModelConfig& config, const Parameters& host, bool bf16,
                                   Communicator* ranks)
    : host_(&host),
      bf16_(bf16),
      rank_(ranks == nullptr ? 0 : ranks->rank()),
      num_ranks_(ranks == nullptr ? 1 : ranks->size()),
      layers_(config.layers),
      experts_(std::max(config.experts, 1)) {
  const std::int64_t summed = place(config);
  values_.reserve(4 * place_values(config));
  if (bf16) {
    typed_.reserve(2 * size_);
    low_.reserve(2 * size_);
    staging_.reserve(4 * std::min(kStaged, size_));
  }
  if (ranks == nullptr) {
    own_gradients_.reserve(4 * size_);
    gradients_ = floats(own_gradients_);
  } else {
    m_.reserve(4 * size_);
    v_.reserve(4 * size_);
    counts_.reserve(8 * layers_ * experts_);
    sums_over_ranks_.emplace(*ranks, size_, summed);
    gradients_ = sums_over_ranks_->memory();
  }
  std::int64_t all = 0;
  for (const ParameterTensor& buffer : host.buffers()) {
    buffer_offsets_.push_back(all);
    all = aligned(all + buffer.size());
  }
  if (all > 0) buffers_.reserve(4 * all);
  make_pieces();
}

std::int64_t DeviceParameters::place(const ModelConfig& config) {
  const std::vector<ParameterTensor>& tensors = host_->tensors();
  std::vector<bool> follows(tensors.size());
  for (std::int32_t l = 0; l < config.layers; ++l) {
    const auto qkv = static_cast<std::size_t>(host_->layer(l).qkv);
    follows[qkv + 1] = follows[qkv + 2] = true;
  }
  offsets_.resize(tensors.size());
  const auto place_those = [&](bool summed) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (num_ranks_ > 1 && sums_once_a_step(tensors[i]) != summed) continue;
      if (!follows[i]) size_ = aligned(size_);
      offsets_[i] = size_;
      size_ += tensors[i].size();
    }
    size_ = aligned(size_);
  };
  place_those(true);
  if (num_ranks_ == 1) return 0;
  totals_ = size_;
  size_ += rank_totals(num_ranks_, layers_ * experts_);
  const std::int64_t summed = size_;
  place_those(false);
  return summed;
}

std::int64_t DeviceParameters::place_values(const ModelConfig& config) {
  std::vector<bool> split(offsets_.size());
  const auto mark = [&](std::int64_t index) {
    if (bf16_ && index >= 0) split[static_cast<std::size_t>(index)] = true;
  };
  for (std::int32_t l = 0; l < config.layers; ++l) {
    const LayerTensors& of = host_->layer(l);
    for (const std::int64_t index :
         {of.qkv, of.qkv + 1, of.qkv + 2, of.o, of.w13, of.w2, of.shared_w13, of.shared_w2}) {
      mark(index);
    }
  }
  if (host_->head() != host_->embedding()) mark(host_->head());
  std::int64_t size = 0;
  for (std::size_t i = 0; i < offsets_.size(); ++i) {
    value_offsets_.push_back(split[i] ? -1 : size);
    if (!split[i]) size = aligned(size + host_->tensors()[i].size());
  }
  return size;
}

/// Those of what all ranks have first, whose norm is each rank's to make.
void DeviceParameters::make_pieces() {
  std::vector<Piece> pieces;
  for (const bool sharded : {false, true}) {
    for (std::size_t i = 0; i < offsets_.size(); ++i) {
      const ParameterTensor& tensor = host_->tensors()[i];
      if (tensor.frozen || tensor.sharded != sharded) continue;  // Neither in the norm nor moved.
      for (std::int64_t first = 0; first < tensor.size(); first += kPiece) {
        pieces.push_back({offsets_[i] + first,
                          static_cast<std::int32_t>(std::min(kPiece, tensor.size() - first)),
                          tensor.decay ? 1 : 0, is_split(i) ? -1 : value_offsets_[i] + first});
      }
    }
    if (!sharded) num_alike_ = std::ssize(pieces);
  }
  num_pieces_ = std::ssize(pieces);
  const auto bytes = static_cast<std::int64_t>(pieces.size() * sizeof(Piece));
  copy_to_device(pieces_.reserve(bytes), pieces.data(), static_cast<std::size_t>(bytes));
  sums_.reserve(8 * num_pieces_);
}

float* DeviceParameters::at(float* first, std::int64_t index) const {
  return index < 0 ? nullptr : first + offsets_[static_cast<std::size_t>(index)];
}

float* DeviceParameters::value(std::int64_t index) const {
  if (index < 0) return nullptr;
  const std::int64_t offset = value_offsets_[static_cast<std::size_t>(index)];
  require(offset >= 0, "tensor {} has no values in f32", index);
  return floats(values_) + offset;
}

Dense DeviceParameters::typed(std::int64_t index) const {
  if (!bf16_) return {value(index), false};
  return {typed_.data() + 2 * offsets_[static_cast<std::size_t>(index)], true};
}

float* DeviceParameters::buffer(std::int64_t index) const {
  if (index < 0) return nullptr;
  return floats(buffers_) + buffer_offsets_[static_cast<std::size_t>(index)];
}

void DeviceParameters::copy(float* device, const std::vector<float*>& host, bool to_device,
                            cudaStream_t stream) const {
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

void DeviceParameters::upload_value(std::size_t index, cudaStream_t stream) const {
  const ParameterTensor& tensor = host_->tensors()[index];
  const std::int64_t size = tensor.size();
  if (!is_split(index)) {
    float* const to = value(static_cast<std::int64_t>(index));
    SWITCHYARD_CUDA(cudaMemcpyAsync(to, tensor.value, static_cast<std::size_t>(4 * size),
                                    cudaMemcpyDefault, stream));
    if (bf16_) to_bf16(to, aligned(size), typed_.data() + 2 * offsets_[index], stream);
    return;
  }
  float* const staged = floats(staging_);
  for (std::int64_t first = 0; first < size; first += kStaged) {
    const std::int64_t count = std::min(kStaged, size - first), to = offsets_[index] + first;
    SWITCHYARD_CUDA(cudaMemcpyAsync(staged, tensor.value + first,
                                    static_cast<std::size_t>(4 * count), cudaMemcpyDefault,
                                    stream));
    split_floats(staged, count, typed_.data() + 2 * to, low() + to, stream);
  }
}

void DeviceParameters::download_value(std::size_t index, cudaStream_t stream) const {
  const ParameterTensor& tensor = host_->tensors()[index];
  const std::int64_t size = tensor.size();
  if (!is_split(index)) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(tensor.value, value(static_cast<std::int64_t>(index)),
                                    static_cast<std::size_t>(4 * size), cudaMemcpyDefault, stream));
    return;
  }
  float* const staged = floats(staging_);
  for (std::int64_t first = 0; first < size; first += kStaged) {
    const std::int64_t count = std::min(kStaged, size - first), from = offsets_[index] + first;
    join_floats(typed_.data() + 2 * from, low() + from, count, staged, stream);
    SWITCHYARD_CUDA(cudaMemcpyAsync(tensor.value + first, staged,
                                    static_cast<std::size_t>(4 * count), cudaMemcpyDefault,
                                    stream));
  }
}

void DeviceParameters::upload_values(cudaStream_t stream) const {
  for (std::size_t i = 0; i < offsets_.size(); ++i) upload_value(i, stream);
  copy_buffers(true, stream);
}

void DeviceParameters::download_values(cudaStream_t stream) const {
  for (std::size_t i = 0; i < offsets_.size(); ++i) download_value(i, stream);
  copy_buffers(false, stream);
}

/// Of what is frozen the gradient stays 0, whatever the device has made on the way.
void DeviceParameters::download_gradients(cudaStream_t stream) const {
  std::vector<float*> places;
  for (const ParameterTensor& tensor : host_->tensors()) {
    places.push_back(tensor.frozen ? nullptr : tensor.gradient);
  }
  copy(gradients_, places, false, stream);
}

/// Those of frozen tensors are nowhere on the host, and nobody reads them on the device.
void DeviceParameters::copy_moments(AdamW& optimizer, bool to_device, cudaStream_t stream) const {
  std::vector<float*> m, v;
  for (std::size_t i = 0; i < offsets_.size(); ++i) {
    const bool frozen = host_->tensors()[i].frozen;
    m.push_back(frozen ? nullptr : optimizer.m(i).data());
    v.push_back(frozen ? nullptr : optimizer.v(i).data());
  }
  copy(floats(m_), m, to_device, stream);
  copy(floats(v_), v, to_device, stream);
}

void DeviceParameters::upload_moments(AdamW& optimizer, cudaStream_t stream) {
  m_.reserve(4 * size_);
  v_.reserve(4 * size_);
  has_moments_ = true;
  copy_moments(optimizer, true, stream);
}

void DeviceParameters::download_moments(AdamW& optimizer, cudaStream_t stream) const {
  copy_moments(optimizer, false, stream);
}

DeviceParameters::Counts DeviceParameters::add_up(const Counts& counts, cudaStream_t stream) {
  const auto* const pieces = reinterpret_cast<const Piece*>(pieces_.data());
  auto* const sums = reinterpret_cast<double*>(sums_.data());
  const std::int64_t of_experts = num_pieces_ - num_alike_;
  float* const totals = gradients_ + totals_;
  squares_of_pieces(pieces + num_alike_, of_experts, gradients_, sums + num_alike_, stream);
  make_rank_totals({.squares = sums + num_alike_,
                    .num_squares = of_experts,
                    .rank = rank_,
                    .num_ranks = num_ranks_,
                    .counts = counts.data,
                    .layers = counts.data == nullptr ? 0 : layers_,
                    .experts = experts_,
                    .stride = counts.stride,
                    .totals = totals,
                    .stream = stream});
  sums_over_ranks_->add_up(stream);
  if (counts.data == nullptr) return counts;
  auto* const all = reinterpret_cast<std::int64_t*>(counts_.data());
  read_rank_counts(totals, num_ranks_, layers_ * experts_, all, stream);
  return {all, experts_};
}

DeviceParameters::Counts DeviceParameters::step(const StepInputs* inputs, StepFactors* factors,
                                                const Counts& counts, cudaStream_t stream) {
  const bool over_ranks = sums_over_ranks_.has_value();
  const Counts of_all = over_ranks ? add_up(counts, stream) : counts;
  adamw({.pieces = reinterpret_cast<const Piece*>(pieces_.data()),
         .num_pieces = num_pieces_,
         .num_normed = num_alike_,
         .rank_totals = over_ranks ? gradients_ + totals_ : nullptr,
         .num_ranks = num_ranks_,
         .p = floats(values_),
         .g = gradients_,
         .m = floats(m_),
         .v = floats(v_),
         .typed = typed_.data(),
         .low = low(),
         .inputs = inputs,
         .factors = factors,
         .sums = reinterpret_cast<double*>(sums_.data()),
         .stream = stream});
  return of_all;
}

}  // namespace switchyard::models::gpu
