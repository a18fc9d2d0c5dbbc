// C interface: the layer and made-up checkpoints.
#include "capi/capi_layer.hpp"

#include <array>
#include <optional>

#include "capi/capi_backward.hpp"
#include "checkpoint/models.hpp"
#include "core/check.hpp"
#include "core/gpu/device_scope.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/routing/router_kinds.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

sy_layer_options default_options() {
  return {.struct_size = sizeof(sy_layer_options),
          .device_type = SY_DEVICE_CPU,
          .compute = -1,
          .layout = SY_LAYOUT_COMPACT,
          .alignment = 1,
          .capacity_factor = 0,
          .drop_policy = SY_DROP_TOKEN,
          .combine_wire = SY_F32,
          .batch_invariant = 0,
          .rank_invariant = 0,
          .max_tokens = 0,
          .num_threads = 1,
          .device_id = -1,
          .dispatch_wire = -1,
          .device_engine = SY_ENGINE_AUTO,
          .weights = SY_WEIGHTS_EXACT,
          .leave_out_shared = 0,
          .router = nullptr,
          .losses = nullptr,
          .scratch = nullptr};
}

LayerOptions to_options(const sy_layer_options& options) {
  require(options.device_type == SY_DEVICE_CPU || options.device_type == SY_DEVICE_CUDA,
          "device_type={} is neither 1 (CPU) nor 2 (CUDA)", options.device_type);
  LayerOptions result{
      .backend = options.device_type == SY_DEVICE_CUDA ? Backend::kCuda : Backend::kCpu,
      .layout = capi::to_layout(options.layout, options.alignment),
      .drop_policy = capi::to_drop_policy(options.drop_policy),
      .combine_wire = capi::to_dtype("combine_wire", options.combine_wire),
      .batch_invariant = options.batch_invariant != 0,
      .rank_invariant = options.rank_invariant != 0,
      .max_tokens = options.max_tokens,
      .weights =
          capi::enumerator("weights", options.weights, "sy_weight_format", WeightFormat::kStored),
      .num_threads = options.num_threads,
      .device_engine = capi::to_engine(options.device_engine)};
  if (options.compute != -1) result.compute = capi::to_dtype("compute", options.compute);
  if (options.dispatch_wire != -1) {
    result.dispatch_wire = capi::to_dtype("dispatch_wire", options.dispatch_wire);
  }
  if (options.capacity_factor != 0) result.capacity_factor = options.capacity_factor;
  if (options.losses != nullptr) result.losses = capi::to_losses(*options.losses);
  if (options.scratch != nullptr) {
    require(result.backend == Backend::kCuda,
            "scratch is given to a layer on a CPU, which has none");
    result.scratch = options.scratch->memory;
  }
  return result;
}

/// A matrix as the weights of one expert: [1, rows, cols].
class OneExpert {
 public:
  OneExpert(const char* name, const sy_tensor* matrix) : tensor_(*matrix) {
    require(matrix->ndim == 2, "{} has {} dimensions, want 2", name, matrix->ndim);
    shape_ = {1, matrix->shape[0], matrix->shape[1]};
    if (matrix->strides != nullptr) strides_ = {0, matrix->strides[0], matrix->strides[1]};
    tensor_.ndim = 3;
    tensor_.shape = shape_.data();
    tensor_.strides = matrix->strides == nullptr ? nullptr : strides_.data();
  }
  OneExpert(const OneExpert&) = delete;
  OneExpert& operator=(const OneExpert&) = delete;
  [[nodiscard]] const sy_tensor* tensor() const { return &tensor_; }

 private:
  sy_tensor tensor_;
  std::array<std::int64_t, 3> shape_{}, strides_{};
};

/// Where the arrays of the experts lie: on the layer's GPU where they are used there.
Backend place_of_experts(const sy_layer_arrays& arrays, const sy_layer_options& options) {
  const bool in_place = arrays.experts_in_place != 0 && options.device_type == SY_DEVICE_CUDA;
  if (!in_place || capi::backend_of("w13", arrays.w13) == Backend::kCpu) return Backend::kCpu;
  for (const sy_tensor* tensor : {arrays.w13, arrays.w2, arrays.b13, arrays.b2, arrays.shared_w13,
                                  arrays.shared_w2, arrays.shared_gate}) {
    require(tensor == nullptr || options.device_id < 0 || tensor->device_id == options.device_id,
            "experts lie on GPU {}, the layer on GPU {}",
            tensor == nullptr ? -1 : tensor->device_id, options.device_id);
  }
  return Backend::kCuda;
}

/// The shared experts of the arrays, if there are any. @param where  place_of_experts().
void take_shared_experts(const sy_layer_arrays& arrays, Backend where, LayerModel& model) {
  require((arrays.shared_w13 == nullptr) == (arrays.shared_w2 == nullptr),
          "shared_w13 and shared_w2 must both be given, or neither");
  if (arrays.shared_w2 == nullptr) {
    require(arrays.shared_gate == nullptr, "shared_gate is given without shared_w13 and shared_w2");
    return;
  }
  const OneExpert w13("shared_w13", arrays.shared_w13), w2("shared_w2", arrays.shared_w2);
  ExpertConfig& shared = model.config.shared;
  shared = model.config.experts;
  shared.num_experts = 1;
  shared.bias = false;
  shared.inner = arrays.shared_w2->shape[1];
  if (arrays.w13_scales == nullptr) {
    require(capi::dtype_of("shared_w13", *arrays.shared_w13) == capi::dtype_of("w13", *arrays.w13),
            "shared_w13 is {}, want {} as w13",
            to_string(capi::dtype_of("shared_w13", *arrays.shared_w13)),
            to_string(capi::dtype_of("w13", *arrays.w13)));
  }
  model.shared =
      capi::source_of(shared, w13.tensor(), w2.tensor(), nullptr, nullptr, "shared_", where);
  const Vector<const float> gate =
      capi::optional_vector("shared_gate", arrays.shared_gate, shared.hidden, where);
  if (gate.data != nullptr) {
    model.shared_gate = capi::parameter(
        {reinterpret_cast<const std::byte*>(gate.data), DType::kF32, 1, shared.hidden}, where,
        arrays.experts_in_place != 0);
  }
  model.config.shared_gated = !model.shared_gate.empty();
}

std::shared_ptr<const ExpertSource> experts_of(const sy_layer_arrays& arrays,
                                               const ExpertConfig& config, Backend where) {
  require((arrays.w13_scales == nullptr) == (arrays.w2_scales == nullptr),
          "w13_scales and w2_scales must both be given, or neither");
  if (arrays.w13_scales == nullptr) {
    return capi::source_of(config, arrays.w13, arrays.w2, arrays.b13, arrays.b2, "", where);
  }
  require(arrays.experts_in_place == 0,
          "w13_scales are given: experts that are stored as codes are not used in place");
  return capi::stored_source_of(config, {.w13 = arrays.w13,
                                         .w13_scales = arrays.w13_scales,
                                         .w2 = arrays.w2,
                                         .w2_scales = arrays.w2_scales,
                                         .b13 = arrays.b13,
                                         .b2 = arrays.b2});
}

capi::StaysBehind stays_behind(const LayerOptions& options, const Communicator* ranks) {
  if (options.backend == Backend::kCuda) return capi::StaysBehind::kGpu;
  if (ranks != nullptr && ranks->size() > 1) return capi::StaysBehind::kRanks;
  return capi::StaysBehind::kNothing;
}

/// The lock of all layers that share a scratch: that of the first, of a communicator or the
/// scratch's.
/// @param of_ranks  Of the communicator of one more; may be null.
std::shared_ptr<capi::CallLock> shared_lock(sy_scratch_t& scratch,
                                            const std::shared_ptr<capi::CallLock>& of_ranks) {
  const auto call = scratch.calls.begin();
  if (scratch.of_layers == nullptr) {
    scratch.of_layers = of_ranks != nullptr ? of_ranks : scratch.calls.lock();
  }
  require(of_ranks == nullptr || scratch.of_layers == of_ranks,
          "the scratch is shared by layers of another communicator, or of none");
  return scratch.of_layers;
}

/// @param can_reload  The sources of the experts can be read as long as the layer lives.
void create(const LayerModel& model, bool can_reload, const sy_layer_options* options,
            sy_communicator communicator, sy_layer* layer) {
  require(layer != nullptr, "layer is NULL");
  const sy_layer_options given = capi::taken("options", options, default_options());
  const LayerOptions layer_options = to_options(given);
  Communicator* ranks = communicator == nullptr ? nullptr : communicator->communicator.get();
  const int device = layer_options.backend == Backend::kCuda ? given.device_id : DeviceScope::kNone;
  require(device >= -1, "device_id={} is no device", device);
  const DeviceScope scope(device);
  // Layers of one communicator take turns, and those that share a scratch.
  std::shared_ptr<capi::CallLock> lock;
  if (ranks != nullptr) lock = communicator->calls.lock();
  if (given.scratch != nullptr) lock = shared_lock(*given.scratch, lock);
  std::unique_lock<capi::CallLock> call;
  if (ranks != nullptr) {
    call = communicator->calls.begin();
  } else if (lock != nullptr) {
    call = std::unique_lock(*lock);
  }
  *layer = new sy_layer_t{MoeLayer(model, layer_options, ranks), layer_options.backend, device,
                          can_reload,
                          capi::Calls("the layer", stays_behind(layer_options, ranks), lock)};
}

sy_checkpoint_recipe default_recipe() {
  return {.struct_size = sizeof(sy_checkpoint_recipe),
          .family = "",
          .hidden = 0,
          .inner = 0,
          .num_experts = 0,
          .top_k = 0,
          .shared_experts = 0,
          .groups = 1,
          .top_groups = 1,
          .num_layers = 1,
          .dtype = SY_BF16,
          .seed = 0,
          .shards = 1};
}

}  // namespace

ForwardArgs capi::forward_args(const sy_layer_t& layer, const sy_tensor* tokens,
                               const sy_tensor* expert, const sy_tensor* weight,
                               const sy_tensor* out, void* stream) {
  const LayerConfig& config = layer.layer.config();
  const std::int64_t hidden = config.experts.hidden;
  ForwardArgs args{.tokens = raw_matrix("tokens", tokens, kAny, hidden, layer.backend),
                   .stream = stream,
                   .on_device = layer.backend == Backend::kCuda};  // as is checked here
  args.out = raw_matrix("out", out, args.tokens.rows, hidden, layer.backend);
  require((expert == nullptr) == (weight == nullptr),
          "expert and weight must both be given, or neither");
  if (expert != nullptr) {
    args.expert = matrix<std::int32_t>("expert", expert, args.tokens.rows, config.router.top_k(),
                                       layer.backend);
    args.weight =
        matrix<float>("weight", weight, args.tokens.rows, config.router.top_k(), layer.backend);
  }
  return args;
}

void sy_layer_options_init(sy_layer_options* options, size_t struct_size) {
  capi::give(options, default_options(), struct_size);
}

sy_status sy_scratch_create(int32_t device_id, sy_scratch* scratch) {
  return capi::guarded([&] {
    require(scratch != nullptr, "scratch is NULL");
    require(device_id >= -1, "device_id={} is no device", device_id);
    const DeviceScope scope(device_id);
    *scratch = new sy_scratch_t{make_layer_scratch(), device_id,
                                capi::Calls("the scratch", capi::StaysBehind::kGpu), nullptr};
  });
}

void sy_scratch_free(sy_scratch scratch) {
  if (scratch == nullptr || !scratch->calls.may_free()) return;
  const DeviceScope scope(scratch->device);
  delete scratch;
}

sy_status sy_layer_from_checkpoint(const char* path, int32_t layer_index,
                                   const sy_layer_options* options, sy_communicator communicator,
                                   sy_layer* layer) {
  return capi::guarded([&] {
    require(path != nullptr, "path is NULL");
    LayerModel model = Checkpoint(path).layer(layer_index);
    if (capi::taken("options", options, default_options()).leave_out_shared != 0) {
      model.shared = nullptr;
      model.shared_gate = {};
      model.config.shared = {};
      model.config.shared_gated = false;
    }
    const sy_layer_options given = capi::taken("options", options, default_options());
    if (given.router != nullptr && *given.router != 0) {
      use_router(model, parse_router(given.router, model.config.router));
    }
    create(model, true, options, communicator, layer);
  });
}

sy_status sy_layer_from_arrays(const sy_layer_arrays* arrays, const sy_layer_options* options,
                               sy_communicator communicator, sy_layer* layer) {
  return capi::guarded([&] {
    const sy_layer_arrays given = capi::taken("arrays", arrays);
    const sy_layer_options given_options = capi::taken("options", options, default_options());
    require(given_options.leave_out_shared == 0,
            "leave_out_shared is for checkpoints: give no arrays of shared experts");
    require(given_options.router == nullptr || *given_options.router == 0,
            "options.router is for checkpoints: give it in the router of the arrays");
    LayerModel model;
    model.config.router = capi::to_config(capi::taken("router", given.router));
    model.config.experts =
        capi::to_config(capi::taken("experts", given.experts), given.b13 != nullptr);
    capi::set_copies(given.identity_experts, model.config.router);
    model.config.weight_on_input = given.weight_on_input != 0;
    const Backend where = place_of_experts(given, given_options);
    take_shared_experts(given, where, model);
    check(model.config);
    capi::set_router(given, given_options, model);
    model.experts = experts_of(given, model.config.experts, where);
    create(model, given.experts_in_place != 0, options, communicator, layer);
  });
}

sy_status sy_layer_check(sy_layer layer) {
  return capi::guarded([&] {
    require(layer != nullptr, "layer is NULL");
    const auto call = layer->calls.begin();
    const DeviceScope scope(layer->device);
    layer->layer.check();
  });
}

sy_status sy_layer_read_expert(sy_layer layer, int32_t expert, const sy_tensor* w13,
                               const sy_tensor* w2, const sy_tensor* b13, const sy_tensor* b2) {
  return capi::guarded([&] {
    require(layer != nullptr, "layer is NULL");
    const auto call = layer->calls.begin();
    const DeviceScope scope(layer->device);
    capi::read_expert(layer->layer.weights(), expert, w13, w2, b13, b2);
  });
}

void sy_layer_free(sy_layer layer) {
  if (layer == nullptr || !layer->calls.may_free()) return;
  const DeviceScope scope(layer->device);
  delete layer;
}

int64_t sy_layer_hidden(sy_layer layer) { return layer->layer.config().experts.hidden; }
int32_t sy_layer_top_k(sy_layer layer) { return layer->layer.config().router.top_k(); }
int32_t sy_layer_num_experts(sy_layer layer) { return layer->layer.config().router.num_experts; }

sy_status sy_layer_forward(sy_layer layer, const sy_tensor* tokens, const sy_tensor* expert,
                           const sy_tensor* weight, const sy_tensor* out, void* stream) {
  return capi::guarded([&] {
    require(layer != nullptr, "layer is NULL");
    const auto call = layer->calls.begin();
    const DeviceScope scope(layer->device);
    layer->layer.forward(capi::forward_args(*layer, tokens, expert, weight, out, stream));
  });
}

sy_status sy_layer_forward_with(sy_layer layer, const sy_tensor* tokens,
                                const sy_route_request* request, const sy_tensor* out,
                                sy_saved saved, void* stream) {
  return capi::guarded([&] {
    require(layer != nullptr, "layer is NULL");
    const auto call = layer->calls.begin();
    std::optional<decltype(saved->calls.begin())> filling;
    const DeviceScope scope(layer->device);
    ForwardArgs args = capi::forward_args(*layer, tokens, nullptr, nullptr, out, stream);
    const auto given = capi::taken("request", request, sy_route_request{});
    const bool ids_on_gpu =
        layer->backend == Backend::kCuda && given.token_ids != nullptr &&
        capi::backend_of("request.token_ids", given.token_ids) == Backend::kCuda;
    args.request =
        capi::to_request(request, args.tokens.rows, ids_on_gpu ? Backend::kCuda : Backend::kCpu);
    const std::int64_t columns = layer->layer.config().router.num_logits();
    args.request.logits = capi::optional_floats("request.logits", given.logits, args.tokens.rows,
                                                columns, layer->backend);
    args.request.previous_logits =
        capi::optional_floats("request.previous_logits", given.previous_logits, args.tokens.rows,
                              columns, layer->backend);
    require(given.noise_logits == nullptr,
            "request.noise_logits is given to a layer, which makes its own of its noise_gate");
    require(given.selection_bias == nullptr,
            "request.selection_bias is given to a layer, which has its own of its arrays");
    if (saved != nullptr) {
      filling.emplace(saved->calls.begin());
      args.saved = &saved->of_layer;
      saved->of_experts.owner = 0;
    }
    layer->layer.forward(args);
  });
}

void sy_checkpoint_recipe_init(sy_checkpoint_recipe* recipe, size_t struct_size) {
  capi::give(recipe, default_recipe(), struct_size);
}

sy_status sy_make_checkpoint(const sy_checkpoint_recipe* recipe, const char* directory) {
  return capi::guarded([&] {
    const sy_checkpoint_recipe given = capi::taken("recipe", recipe, default_recipe());
    require(given.family != nullptr && directory != nullptr, "family or directory is NULL");
    CheckpointRecipe made = family_recipe(given.family, {.hidden = given.hidden,
                                                         .inner = given.inner,
                                                         .num_experts = given.num_experts,
                                                         .top_k = given.top_k,
                                                         .shared_experts = given.shared_experts,
                                                         .groups = given.groups,
                                                         .top_groups = given.top_groups});
    made.num_layers = given.num_layers;
    made.dtype = capi::to_dtype("dtype", given.dtype);
    made.seed = given.seed;
    made.shards = given.shards;
    make_checkpoint(made, directory);
  });
}
