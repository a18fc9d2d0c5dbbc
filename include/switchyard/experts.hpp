#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "switchyard/combine.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/tensor.hpp"
#include "switchyard/weight_format.hpp"

namespace switchyard {

/// The nonlinearity between an expert's two products. g: gate, u: up.
enum class Activation : std::uint8_t {
  kSilu,           ///< g * sigmoid(g)                        [* u when gated]
  kGelu,           ///< g * Phi(g), exact (erf)               [* u]
  kGeluTanh,       ///< gelu by tanh                          [* u]
  kRelu,           ///< max(g, 0)                             [* u]
  kRelu2,          ///< max(g, 0)^2                           [* u]
  kClampedSwiglu,  ///< gpt-oss: g' * sigmoid(alpha g') * (u' + 1), g' = min(g, limit),
                   ///< u' = clamp(u, -limit, limit); gated only.
  kIdentity,       ///< g: the product of two matrices, as of LoRA [* u].
};

/// "silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu", "identity".
[[nodiscard]] const char* to_string(Activation activation) noexcept;

/// The feed-forward network of one expert: y = W2 act(W1 x + b1 [, W3 x + b3]) + b2.
struct ExpertConfig {
  std::int32_t num_experts = 0;  ///< E, in the whole layer.
  std::int64_t hidden = 0;       ///< H.
  std::int64_t inner = 0;        ///< I.
  bool gated = true;             ///< Two input matrices (gate, up), or one.
  Activation activation = Activation::kSilu;
  float alpha = 1.702F;  ///< kClampedSwiglu.
  float limit = 7.0F;    ///< kClampedSwiglu.
  bool bias = false;     ///< b1 (and b3) [I] and b2 [H] per expert.
};

/// @throws Error{kInvalidArgument} that names the value out of range.
void check(const ExpertConfig& config);

/// The matrices of an expert. A plain expert has kGate and kDown.
enum class ExpertPart : std::uint8_t {
  kGate,  ///< W1 [I, H].
  kUp,    ///< W3 [I, H].
  kDown,  ///< W2 [H, I].
};

/// Where weights come from: a checkpoint (any storage: interleaved, transposed, quantised), or
/// memory. Reading is thread safe and has no side effect.
class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  /// The type the weights are stored in (of dequantised ones: what they dequantise to).
  [[nodiscard]] virtual DType dtype() const = 0;
  /// Rows [first_row, first_row + num_rows) of a matrix of expert `expert`, converted to `dtype`
  /// (f32, bf16, f16; round to nearest even) and written contiguously to `out`.
  virtual void read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                    std::int64_t num_rows, DType dtype, void* out) const = 0;
  /// The form in which read_stored() gives weights; kExact: as numbers of dtype().
  [[nodiscard]] virtual WeightFormat stored_format() const { return WeightFormat::kExact; }
  /// Where stored_format() is kInt4: the rest of it.
  [[nodiscard]] virtual Int4Form int4_form() const { return {}; }
  /// Where it is kNvfp4: the f32 that all scales of a matrix are multiplied with.
  [[nodiscard]] virtual float stored_factor(std::int32_t /*expert*/, ExpertPart /*part*/) const {
    return 1;
  }
  /// The same rows with their codes and scales as they are stored, laid out as StoredLayout{
  /// stored_format(), dtype(), num_rows, cols, int4_form()} says: interleaved and transposed
  /// storage is undone, so row r is row r of `part`, and columns run along the sum. Scales of kE4M3
  /// of another type are given as f32, which is exact. `decode` of what this gives, with
  /// stored_factor(), is what read() gives, bit for bit.
  /// @throws Error{kInvalidArgument}: first_row of kE4M3 is not a multiple of 128, which scale rows
  ///         belong to, and the rows do not share one either. (The last scale row may stand for
  ///         fewer rows.) {kBadFile}: a code, scale or factor is NaN or infinite; the tensor is
  ///         named.
  virtual void read_stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                           std::int64_t num_rows, const StoredRows& out) const {
    read(expert, part, first_row, num_rows, dtype(), out.values);
  }
  /// The bias that goes with `part`: [I], [I] or [H] values.
  virtual void read_bias(std::int32_t expert, ExpertPart part, float* out) const = 0;

  /// Advice around reading, in any order and from any thread; to ignore it changes no result.
  /// will_read: those rows are asked for soon, so a file may be read ahead. done_with: not again
  /// for now, so what holds them in memory beside the file itself may go.
  virtual void will_read(std::int32_t /*expert*/, ExpertPart /*part*/, std::int64_t /*first_row*/,
                         std::int64_t /*num_rows*/) const {}
  virtual void done_with(std::int32_t /*expert*/, ExpertPart /*part*/, std::int64_t /*first_row*/,
                         std::int64_t /*num_rows*/) const {}
};

/// Weights in plain arrays: `w13` [E, 2I, H] (gate rows, then up rows; [E, I, H] when plain), `w2`
/// [E, H, I], both of `dtype`; `b13` [E, 2I] (or [E, I]) and `b2` [E, H], or null.
/// The arrays must outlive the source.
std::unique_ptr<ExpertSource> make_memory_source(const ExpertConfig& config, DType dtype,
                                                 const void* w13, const void* w2,
                                                 const float* b13 = nullptr,
                                                 const float* b2 = nullptr);

/// Experts that are stored as codes with scales, in host memory, where they stay.
struct StoredExperts {
  WeightFormat format = WeightFormat::kE4M3;  ///< kE4M3 or kMxfp4.
  /// Codes of [E, 2] matrices [I, H] (gate, then up; [E] when plain), each as StoredLayout has its
  /// values: kE4M3 [E, 2I, H] bytes, kMxfp4 [E, 2I, H/2].
  const void* w13 = nullptr;
  /// Theirs, each matrix' as StoredLayout has them: kE4M3 f32 [E, 2 ceil(I/128), ceil(H/128)],
  /// kMxfp4 [E, 2I, H/32] bytes.
  const void* scales13 = nullptr;
  const void* w2 = nullptr;       ///< Codes of [E] matrices [H, I].
  const void* scales2 = nullptr;  ///< kE4M3 f32 [E, ceil(H/128), ceil(I/128)], kMxfp4 [E, H, I/32].
  const float* b13 = nullptr;     ///< [E, 2I] (or [E, I]), or null.
  const float* b2 = nullptr;      ///< [E, H], or null.
};

/// A source of such experts, which dequantise to bf16. The arrays must outlive it.
/// @throws Error{kInvalidArgument}: arrays missing; kMxfp4 whose H or I is no multiple of 32.
///         Later, where codes are used as they are: NaN, or a scale that is infinite, by its place.
///         {kUnsupported}: another format.
std::unique_ptr<ExpertSource> make_stored_source(const ExpertConfig& config,
                                                 const StoredExperts& stored);

/// The same as make_memory_source() of arrays on a GPU: a layer there, of compute type `dtype`,
/// uses them where they lie, without a copy; what is written to them counts from the next call on.
/// Over ranks they are those of the rank's own experts, and config.num_experts says how many.
/// @throws Error{kUnsupported}: built without CUDA.
std::unique_ptr<ExpertSource> make_device_source(const ExpertConfig& config, DType dtype,
                                                 const void* w13, const void* w2,
                                                 const float* b13 = nullptr,
                                                 const float* b2 = nullptr);

/// The experts of one rank in the form that its backend computes with.
class ExpertWeights {
 public:
  virtual ~ExpertWeights() = default;
  [[nodiscard]] const ExpertConfig& config() const { return config_; }
  [[nodiscard]] DType dtype() const { return dtype_; }  ///< Compute type.
  [[nodiscard]] WeightFormat format() const { return format_; }
  [[nodiscard]] Backend backend() const { return backend_; }
  [[nodiscard]] std::int32_t first_expert() const { return first_expert_; }
  [[nodiscard]] std::int32_t num_local() const { return num_local_; }  ///< El.
  /// Bytes of one expert's weights as they are streamed.
  [[nodiscard]] virtual double bytes_per_expert() const = 0;

  /// Back out of that form: rows [first_row, first_row + num_rows) of a matrix of expert `expert`
  /// of the layer, in the order in which ExpertSource::read() gave them, converted to `dtype` (f32,
  /// bf16, f16) into host memory. Of exact weights in dtype() these are the bits that were loaded,
  /// rounded to dtype() where the source had others; of other formats what they dequantise to.
  /// @throws Error{kInvalidArgument}: an expert of another rank, rows that there are not.
  virtual void read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                    std::int64_t num_rows, DType dtype, void* out) const = 0;
  /// The bias that goes with `part`: [I], [I] or [H] values; config().bias says whether there is
  /// one.
  virtual void read_bias(std::int32_t expert, ExpertPart part, float* out) const = 0;

 protected:
  ExpertWeights(const ExpertConfig& config, DType dtype, WeightFormat format, Backend backend,
                std::int32_t first_expert, std::int32_t num_local)
      : config_(config),
        dtype_(dtype),
        format_(format),
        backend_(backend),
        first_expert_(first_expert),
        num_local_(num_local) {}
  /// Of read() and read_bias(): the expert's place among the local ones.
  [[nodiscard]] std::int32_t local_of(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                                      std::int64_t num_rows) const;

 private:
  ExpertConfig config_{};
  DType dtype_;
  WeightFormat format_;
  Backend backend_;
  std::int32_t first_expert_;
  std::int32_t num_local_;
};

struct LoadExpertsArgs {
  ExpertConfig config{};
  const ExpertSource* source = nullptr;
  DType dtype = DType::kF32;      ///< Compute type: f32, bf16, f16.
  std::int32_t first_expert = 0;  ///< Load [first_expert, first_expert + num_local).
  std::int32_t num_local = 0;
  /// What is computed with. kQ8: CPU only. Formats with codes are the source's own, kept as they
  /// are stored; kStored: whichever the source has, exact ones too.
  WeightFormat format = WeightFormat::kExact;
  Execution execution{};
  std::function<void(double)> progress{};  ///< Called with the share done, in (0, 1]; may be empty.
};

/// Read, convert and place the weights once, some MiB at a time: at no time do two copies of all
/// exist, and the pages of a checkpoint that have been read are given back on the way.
/// Stored weights take their bytes in the source, rounded up to whole panels, and with 8 bytes for
/// each 1 or 2 KiB of e4m3. The results are those of exact weights of the same compute type, bit
/// for bit: a weight is the code times its scale in f32, rounded to the compute type.
/// @throws Error{kInvalidArgument}, {kOutOfMemory}; {kUnsupported}: the backend does not compute
///         with the format, or the source does not store it, by name.
std::unique_ptr<ExpertWeights> load_experts(const LoadExpertsArgs& args);

/// Everything experts() reads and writes. Exactly one of `rows` and `reduced` is given.
struct ExpertsArgs {
  ConstRawMatrix x{};  ///< [N, H] of the weights' compute type, gathered by plan.row_token; or, if
                       ///< `x_is_packed`, [rows of the layout, H] as pack() leaves them.
  bool x_is_packed = false;
  /// CUDA, compute capability 9.0, weights stored as e4m3 of gated experts, `rows`: x may be fp8
  /// with a scale for each 128 values of a row, [N, ceil(H/128)], as an fp8 wire has them
  /// (DeviceReceived). Then both products multiply e4m3, the intermediate becomes e4m3 by the same
  /// rule, and a sum goes from the tensor cores, which keep 13 bits of it, into fp32 after every
  /// 128 products. Empty: x is of the compute type.
  Matrix<const float> x_scale{};
  PlanView plan{};
  Layout layout{};  ///< Which rows are worked on: used ones, whole blocks, or all C.
  const ExpertWeights* weights = nullptr;
  RawMatrix rows{};  ///< out [rows of the layout, H], unweighted; f32 (CPU), compute type (CUDA).
  ReducedRows reduced{};  ///< out: fused combine, weighted sums by the fixed order.
  /// out [rows of the layout, 2I], gate then up with their biases (plain [., I]), rounded to the
  /// compute type: what experts_backward() takes; or empty. CUDA: with `rows` only.
  RawMatrix preactivation{};
  Execution execution{};
};

/// Apply each row's expert. Reports the stages "gemm1+activation" and "gemm2" (or "gemm2+combine").
/// Sums run over ascending h, then ascending i, in fp32; products of 16-bit inputs are exact. The
/// intermediate is rounded to the compute type. No row's bits depend on other rows, but for weights
/// that a GPU streams as they are stored: there on how many rows the expert has, unless
/// batch_invariant is set.
/// @throws Error{kInvalidArgument}: shapes or dtypes disagree. {kUnsupported}: nobody accepts it,
///         with each one's reason (a fused combine is optional: callers fall back to rows and
///         combine()).
/// Cost: 2*(2 or 3)*H*I operations a row; the weights of the experts hit are read once.
void experts(const ExpertsArgs& args);

/// True if an implementation accepts these arguments.
[[nodiscard]] bool experts_supported(const ExpertsArgs& args);

}  // namespace switchyard
