// C interface: the layer and made-up checkpoints.
#include "capi/capi.hpp"
#include "checkpoint/models.hpp"
#include "core/check.hpp"
#include "core/gpu/device_scope.hpp"
#include "switchyard/checkpoint.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

struct sy_layer_t {
  MoeLayer layer;
  Backend backend;
  int device;  // CUDA; -1: the thread's current one
};

namespace {

LayerOptions to_options(const sy_layer_options& options) {
  require(options.layout >= 0 && options.layout <= 2, "layout={} is not in 0..2", options.layout);
  require(options.drop_policy >= 0 && options.drop_policy <= 3, "drop_policy={} is not in 0..3",
          options.drop_policy);
  LayerOptions result{
      .backend = options.device_type == SY_DEVICE_CUDA ? Backend::kCuda : Backend::kCpu,
      .layout = {.kind = static_cast<LayoutKind>(options.layout), .alignment = options.alignment},
      .drop_policy = static_cast<DropPolicy>(options.drop_policy),
      .combine_wire = capi::to_dtype("combine_wire", options.combine_wire),
      .batch_invariant = options.batch_invariant != 0,
      .rank_invariant = options.rank_invariant != 0,
      .max_tokens = options.max_tokens,
      .num_threads = options.num_threads};
  if (options.compute != -1) result.compute = capi::to_dtype("compute", options.compute);
  if (options.dispatch_wire != -1) {
    result.dispatch_wire = capi::to_dtype("dispatch_wire", options.dispatch_wire);
  }
  if (options.capacity_factor != 0) result.capacity_factor = options.capacity_factor;
  return result;
}

/// The values as they lie on `where`, or a copy: then they lie in host memory.
Parameter parameter(ConstRawMatrix values, Backend where, bool in_place) {
  if (in_place) return {values.data, values.dtype, values.rows * values.cols, where};
  const auto copy =
      std::make_shared<const std::vector<std::byte>>(values.data, values.data + values.bytes());
  return {copy->data(), values.dtype, values.rows * values.cols, Backend::kCpu, copy};
}

/// The router's arrays: checked, and copied unless they are used where they lie.
void set_router(const sy_layer_arrays& arrays, const sy_layer_options& options, LayerModel& model) {
  const bool in_place = arrays.router_in_place != 0;
  const Backend where =
      in_place && options.device_type == SY_DEVICE_CUDA ? Backend::kCuda : Backend::kCpu;
  const std::int64_t num_experts = arrays.router.num_experts;
  const auto bias = [&](const char* name, const sy_tensor* tensor) {
    const Vector<const float> values = capi::optional_vector(name, tensor, num_experts, where);
    if (values.data == nullptr) return Parameter();
    return parameter({reinterpret_cast<const std::byte*>(values.data), DType::kF32, 1, num_experts},
                     where, in_place);
  };
  model.gate =
      parameter(capi::raw_matrix("gate", arrays.gate, num_experts, arrays.experts.hidden, where),
                where, in_place);
  model.router_bias = bias("router_bias", arrays.router_bias);
  model.selection_bias = bias("selection_bias", arrays.selection_bias);
  if (where == Backend::kCpu || options.device_id < 0) return;
  for (const sy_tensor* tensor : {arrays.gate, arrays.router_bias, arrays.selection_bias}) {
    if (tensor == nullptr) continue;
    require(tensor->device_id == options.device_id,
            "gate or biases lie on GPU {}, the layer on GPU {}", tensor->device_id,
            options.device_id);
  }
}

void create(const LayerModel& model, const sy_layer_options* options, sy_communicator communicator,
            sy_layer* layer) {
  require(options != nullptr && layer != nullptr, "options or layer is NULL");
  const LayerOptions layer_options = to_options(*options);
  Communicator* ranks = communicator == nullptr ? nullptr : communicator->communicator.get();
  const int device =
      layer_options.backend == Backend::kCuda ? options->device_id : DeviceScope::kNone;
  require(device >= -1, "device_id={} is no device", device);
  const DeviceScope scope(device);
  *layer = new sy_layer_t{MoeLayer(model, layer_options, ranks), layer_options.backend, device};
}

}  // namespace

void sy_layer_options_init(sy_layer_options* options) {
  *options = {.device_type = SY_DEVICE_CPU,
              .compute = -1,
              .layout = 0,
              .alignment = 1,
              .capacity_factor = 0,
              .drop_policy = 0,
              .combine_wire = SY_F32,
              .batch_invariant = 0,
              .rank_invariant = 0,
              .max_tokens = 0,
              .num_threads = 1,
              .device_id = -1,
              .dispatch_wire = -1};
}

sy_status sy_layer_from_checkpoint(const char* path, int32_t layer_index,
                                   const sy_layer_options* options, sy_communicator communicator,
                                   sy_layer* layer) {
  return capi::guarded([&] {
    require(path != nullptr, "path is NULL");
    create(Checkpoint(path).layer(layer_index), options, communicator, layer);
  });
}

sy_status sy_layer_from_arrays(const sy_layer_arrays* arrays, const sy_layer_options* options,
                               sy_communicator communicator, sy_layer* layer) {
  return capi::guarded([&] {
    require(arrays != nullptr, "arrays is NULL");
    require(options != nullptr, "options is NULL");
    LayerModel model;
    model.config.router = capi::to_config(arrays->router);
    model.config.experts = capi::to_config(arrays->experts, arrays->b13 != nullptr);
    check(model.config);
    set_router(*arrays, *options, model);
    model.experts =
        capi::source_of(model.config.experts, arrays->w13, arrays->w2, arrays->b13, arrays->b2);
    create(model, options, communicator, layer);
  });
}

void sy_layer_free(sy_layer layer) {
  if (layer == nullptr) return;
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
    const DeviceScope scope(layer->device);
    const LayerConfig& config = layer->layer.config();
    const std::int64_t hidden = config.experts.hidden;
    ForwardArgs args{
        .tokens = capi::raw_matrix("tokens", tokens, capi::kAny, hidden, layer->backend),
        .stream = stream};
    args.out = capi::raw_matrix("out", out, args.tokens.rows, hidden, layer->backend);
    require((expert == nullptr) == (weight == nullptr),
            "expert and weight must both be given, or neither");
    if (expert != nullptr) {
      args.expert = capi::matrix<std::int32_t>("expert", expert, args.tokens.rows,
                                               config.router.top_k(), layer->backend);
      args.weight = capi::matrix<float>("weight", weight, args.tokens.rows, config.router.top_k(),
                                        layer->backend);
    }
    layer->layer.forward(args);
  });
}

void sy_checkpoint_recipe_init(sy_checkpoint_recipe* recipe) {
  *recipe = {.family = "",
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

sy_status sy_make_checkpoint(const sy_checkpoint_recipe* recipe, const char* directory) {
  return capi::guarded([&] {
    require(recipe != nullptr && recipe->family != nullptr && directory != nullptr,
            "recipe, its family or directory is NULL");
    CheckpointRecipe made = family_recipe(recipe->family, {.hidden = recipe->hidden,
                                                           .inner = recipe->inner,
                                                           .num_experts = recipe->num_experts,
                                                           .top_k = recipe->top_k,
                                                           .shared_experts = recipe->shared_experts,
                                                           .groups = recipe->groups,
                                                           .top_groups = recipe->top_groups});
    made.num_layers = recipe->num_layers;
    made.dtype = capi::to_dtype("dtype", recipe->dtype);
    made.seed = recipe->seed;
    made.shards = recipe->shards;
    make_checkpoint(made, directory);
  });
}
