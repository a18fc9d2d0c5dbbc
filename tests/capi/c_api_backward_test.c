/* The way back by the C interface: gradients are what finite differences give, what is saved serves
 * one backward, and experts are read again where the program has them. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tests/capi/c_api_support.h"

enum { T = 5, E = 4, K = 2, H = 12, I = 7 };

static float x[T * H], gate[E * H], w13[E * 2 * I * H], w2[E * H * I], out[T * H], dout[T * H];
static float dx[T * H], dgate[E * H], dw13[E * 2 * I * H], dw2[E * H * I], dweight[T * K];
static const int64_t shape_x[] = {T, H}, shape_gate[] = {E, H}, shape_w13[] = {E, 2 * I, H};
static const int64_t shape_w2[] = {E, H, I}, shape_k[] = {T, K}, shape_short[] = {T - 1, H};

static double auxiliary = 0; /* of a layer with losses */

/* sum of out * dout, and what losses add */
static double loss(void) {
  double sum = auxiliary;
  int i;
  for (i = 0; i < T * H; ++i) sum += (double)out[i] * dout[i];
  return sum;
}

/* The gradient of the loss by `value`, which run() reads again, is `gradient`. */
static void expect_slope(sy_status (*run)(void), float* value, float gradient) {
  const float kept = *value, step = 1.0f / 256;
  double above, below;
  *value = kept + step;
  EXPECT(run() == SY_OK);
  above = loss();
  *value = kept - step;
  EXPECT(run() == SY_OK);
  below = loss();
  *value = kept;
  EXPECT(fabs((above - below) / (2 * step) - gradient) < 0.01 + 0.01 * fabs(gradient));
}

static sy_layer layer = NULL;
static sy_tensor tx, tout;

static sy_status run_layer(void) {
  if (sy_layer_reload_experts(layer) != SY_OK) return SY_INTERNAL;
  return sy_layer_forward(layer, &tx, NULL, NULL, &tout, NULL);
}

static void check_layer(const sy_layer_arrays* arrays, const sy_layer_options* options,
                        int32_t recompute) {
  sy_tensor tdout = tensor(dout, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tdx = tensor(dx, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tdgate = tensor(dgate, 2, shape_gate, SY_CODE_FLOAT);
  sy_tensor tdw13 = tensor(dw13, 3, shape_w13, SY_CODE_FLOAT);
  sy_tensor tdw2 = tensor(dw2, 3, shape_w2, SY_CODE_FLOAT);
  static float first[E * H * I];
  sy_gradients gradients;
  sy_saved saved = NULL;
  int i;
  sy_gradients_init(&gradients, sizeof gradients);
  gradients.tokens = &tdx;
  gradients.gate = &tdgate;
  gradients.w13 = &tdw13;
  gradients.w2 = &tdw2;
  EXPECT(sy_layer_from_arrays(arrays, options, NULL, &layer) == SY_OK);
  EXPECT(sy_saved_create(recompute, &saved) == SY_OK);
  EXPECT(sy_saved_ready(saved) == 0);
  EXPECT(sy_layer_backward(layer, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(sy_layer_forward_saved(layer, &tx, NULL, NULL, &tout, saved, NULL) == SY_OK);
  EXPECT(sy_saved_ready(saved) == 1);
  EXPECT(sy_saved_logits(saved) != NULL);
  /* Tokens, logits, routing and, unless they are made again, pre-activations. */
  EXPECT(sy_saved_bytes(saved) == 4 * T * H + 4 * T * E + 8 * T * K +
                                      (recompute == SY_RECOMPUTE_NONE ? 4 * T * K * 2 * I : 0));
  EXPECT(sy_layer_backward(layer, saved, &tdout, &gradients, NULL) == SY_OK);
  EXPECT(sy_saved_ready(saved) == 0);
  EXPECT(sy_layer_backward(layer, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "used") != NULL);
  memcpy(first, dw2, sizeof first);
  for (i = 0; i < 5; ++i) {
    expect_slope(run_layer, &x[i * 11], dx[i * 11]);
    expect_slope(run_layer, &gate[i * 9], dgate[i * 9]);
    expect_slope(run_layer, &w13[i * 131], dw13[i * 131]);
    expect_slope(run_layer, &w2[i * 67], dw2[i * 67]);
  }
  /* Added to what is there, and only those that are asked for. */
  gradients.accumulate = 1;
  gradients.tokens = gradients.gate = gradients.w13 = NULL;
  EXPECT(sy_layer_forward_saved(layer, &tx, NULL, NULL, &tout, saved, NULL) == SY_OK);
  EXPECT(sy_layer_backward(layer, saved, &tdout, &gradients, NULL) == SY_OK);
  for (i = 0; i < E * H * I; ++i) EXPECT(dw2[i] == 2 * first[i]);
  /* Refusals name what is wrong. */
  EXPECT(sy_layer_forward_saved(layer, &tx, NULL, NULL, &tout, saved, NULL) == SY_OK);
  gradients.shared_w2 = &tdw2;
  EXPECT(sy_layer_backward(layer, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "shared experts") != NULL);
  gradients.shared_w2 = NULL;
  gradients.b2 = &tdx;
  EXPECT(sy_layer_backward(layer, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "no biases") != NULL);
  gradients.b2 = NULL;
  gradients.w2 = &tdw13;
  EXPECT(sy_layer_backward(layer, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "gradients.w2") != NULL);
  gradients.w2 = &tdw2;
  tdout.shape = shape_short;
  EXPECT(sy_layer_backward(layer, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "dout") != NULL);
  tdout.shape = shape_x;
  EXPECT(sy_saved_ready(saved) == 1); /* a call that is refused uses nothing up */
  EXPECT(sy_layer_reload_experts(layer) == SY_OK);
  EXPECT(sy_layer_backward(layer, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "reloaded") != NULL);
  sy_saved_free(saved);
  sy_layer_free(layer);
}

/* A layer with copies of its arrays has none to read again. */
static void check_copies(const sy_layer_arrays* in_place, const sy_layer_options* options) {
  sy_layer_arrays arrays = *in_place;
  arrays.experts_in_place = 0;
  EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &layer) == SY_OK);
  EXPECT(sy_layer_reload_experts(layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "experts_in_place") != NULL);
  sy_layer_free(layer);
  /* The struct of a program that was compiled before there was such a field. */
  arrays.struct_size = offsetof(sy_layer_arrays, experts_in_place);
  EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &layer) == SY_OK);
  sy_layer_free(layer);
}

static sy_expert_config config;
static sy_tensor tw13, tw2, tids, tweight;

static sy_status run_experts(void) {
  sy_experts experts = NULL;
  sy_status status = sy_experts_create(&config, &tw13, &tw2, NULL, NULL, 1, &experts);
  if (status == SY_OK) status = sy_experts_run(experts, &tx, &tids, &tweight, &tout, NULL);
  sy_experts_free(experts);
  return status;
}

static void check_experts(int32_t recompute) {
  static int32_t ids[T * K] = {0, 1, 2, 2, -1, 3, 1, 0, -1, -1}; /* twice the same, and none */
  static float weight[T * K], want[T * H];
  sy_tensor tdout = tensor(dout, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tdx = tensor(dx, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tdw13 = tensor(dw13, 3, shape_w13, SY_CODE_FLOAT);
  sy_tensor tdw2 = tensor(dw2, 3, shape_w2, SY_CODE_FLOAT);
  sy_tensor tdweight = tensor(dweight, 2, shape_k, SY_CODE_FLOAT);
  sy_experts experts = NULL, others = NULL;
  sy_gradients gradients;
  sy_saved saved = NULL;
  int i;
  tids = tensor(ids, 2, shape_k, SY_CODE_INT);
  tweight = tensor(weight, 2, shape_k, SY_CODE_FLOAT);
  fill(weight, T * K, 8);
  sy_gradients_init(&gradients, sizeof gradients);
  gradients.tokens = &tdx;
  gradients.weight = &tdweight;
  gradients.w13 = &tdw13;
  gradients.w2 = &tdw2;
  EXPECT(sy_experts_create(&config, &tw13, &tw2, NULL, NULL, 1, &experts) == SY_OK);
  EXPECT(sy_experts_create(&config, &tw13, &tw2, NULL, NULL, 1, &others) == SY_OK);
  EXPECT(sy_saved_create(recompute, &saved) == SY_OK);
  EXPECT(sy_experts_backward(experts, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(sy_experts_run(experts, &tx, &tids, &tweight, &tout, NULL) == SY_OK);
  memcpy(want, out, sizeof want);
  EXPECT(sy_experts_run_saved(experts, &tx, &tids, &tweight, &tout, saved, NULL) == SY_OK);
  EXPECT(memcmp(want, out, sizeof want) == 0);
  EXPECT(sy_saved_ready(saved) == 1 && sy_saved_bytes(saved) > 4 * T * H);
  EXPECT(sy_experts_backward(others, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "other experts") != NULL);
  EXPECT(sy_experts_backward(experts, saved, &tdout, &gradients, NULL) == SY_OK);
  EXPECT(sy_experts_backward(experts, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "used by a backward already") != NULL);
  for (i = 0; i < T * K; ++i) {
    if (ids[i] < 0) {
      EXPECT(dweight[i] == 0);
    } else {
      expect_slope(run_experts, &weight[i], dweight[i]);
    }
  }
  for (i = 0; i < 5; ++i) {
    expect_slope(run_experts, &x[i * 11], dx[i * 11]);
    expect_slope(run_experts, &w13[i * 131], dw13[i * 131]);
    expect_slope(run_experts, &w2[i * 67], dw2[i * 67]);
  }
  EXPECT(sy_experts_run_saved(experts, &tx, &tids, &tweight, &tout, saved, NULL) == SY_OK);
  tdout.shape = shape_short;
  EXPECT(sy_experts_backward(experts, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "dy: dimension 0 is 4, want 5") != NULL);
  tdout.shape = shape_x;
  gradients.gate = &tdx;
  EXPECT(sy_experts_backward(experts, saved, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "router") != NULL);
  sy_saved_free(saved);
  sy_experts_free(experts);
  sy_experts_free(others);
}

static sy_saved losing = NULL;

static sy_status run_losing(void) {
  const sy_status status = sy_layer_forward_saved(layer, &tx, NULL, NULL, &tout, losing, NULL);
  if (status == SY_OK) auxiliary = sy_saved_losses(losing)[6];
  return status;
}

/* A layer's own losses are in its gradients; what they are is told, and refused by name. */
static void check_losses(const sy_layer_arrays* arrays, sy_layer_options options) {
  sy_tensor tdout = tensor(dout, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tdx = tensor(dx, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tdgate = tensor(dgate, 2, shape_gate, SY_CODE_FLOAT);
  static int64_t all[E];
  static const int64_t shape_e[] = {E};
  sy_tensor tall = tensor(all, 1, shape_e, SY_CODE_INT);
  static float once[E * H];
  sy_loss_config losses;
  sy_gradients gradients;
  const double* values;
  const int64_t* counts;
  int64_t groups = 0;
  int i;
  tall.type_bits = 64;
  sy_loss_config_init(&losses, sizeof losses);
  losses.balance = 0.5;
  losses.z = 2;
  options.losses = &losses;
  sy_gradients_init(&gradients, sizeof gradients);
  EXPECT(gradients.loss_scale == 1);
  gradients.tokens = &tdx;
  gradients.gate = &tdgate;
  EXPECT(sy_saved_create(SY_RECOMPUTE_NONE, &losing) == SY_OK);
  EXPECT(sy_layer_from_arrays(arrays, &options, NULL, &layer) == SY_OK);
  EXPECT(run_losing() == SY_OK);
  values = sy_saved_losses(losing);
  EXPECT(fabs(values[6] - 0.5 * values[0] - 2 * values[1]) < 1e-12);
  counts = sy_saved_counts(losing, &groups);
  EXPECT(groups == 1 && counts[0] + counts[1] + counts[2] + counts[3] == T * K);
  for (i = 0; i < E; ++i) all[i] = 3 * counts[i] + i;
  gradients.loss_counts = &tall;
  EXPECT(sy_layer_backward(layer, losing, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "loss_counts") != NULL);
  gradients.loss_counts = NULL;
  EXPECT(sy_layer_backward(layer, losing, &tdout, &gradients, NULL) == SY_OK);
  for (i = 0; i < 5; ++i) {
    expect_slope(run_losing, &x[i * 11], dx[i * 11]);
    expect_slope(run_losing, &gate[i * 9], dgate[i * 9]);
  }
  memcpy(once, dgate, sizeof once);
  for (i = 0; i < T * H; ++i) dout[i] *= 64;
  gradients.loss_scale = 64;
  EXPECT(run_losing() == SY_OK);
  EXPECT(sy_layer_backward(layer, losing, &tdout, &gradients, NULL) == SY_OK);
  for (i = 0; i < E * H; ++i) EXPECT(dgate[i] == 64 * once[i]);
  for (i = 0; i < T * H; ++i) dout[i] /= 64;
  sy_layer_free(layer);
  losses.scope = SY_LOSS_GLOBAL;
  EXPECT(sy_layer_from_arrays(arrays, &options, NULL, &layer) == SY_OK);
  EXPECT(run_losing() == SY_OK);
  tall.type_bits = 32;
  gradients.loss_counts = &tall;
  EXPECT(sy_layer_backward(layer, losing, &tdout, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "loss_counts is not i64") != NULL);
  tall.type_bits = 64;
  EXPECT(sy_layer_backward(layer, losing, &tdout, &gradients, NULL) == SY_OK);
  EXPECT(memcmp(once, dgate, sizeof once) != 0);
  sy_layer_free(layer);
  layer = NULL;
  losses.scope = 3;
  EXPECT(sy_layer_from_arrays(arrays, &options, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "losses.scope=3 is no sy_loss_scope") != NULL);
  EXPECT(strcmp(sy_enumerator_name("sy_balance_share", 2), "first-choice") == 0);
  options.losses = NULL;
  EXPECT(sy_layer_from_arrays(arrays, &options, NULL, &layer) == SY_OK);
  EXPECT(sy_layer_forward_saved(layer, &tx, NULL, NULL, &tout, losing, NULL) == SY_OK);
  EXPECT(sy_saved_losses(losing) == NULL && sy_saved_counts(losing, NULL) == NULL);
  sy_layer_free(layer);
  sy_saved_free(losing);
  auxiliary = 0;
}

static void check_stats(const sy_layer_arrays* arrays, sy_layer_options options) {
  int64_t counts[E];
  double by_choice[K];
  sy_routing_stats stats;
  memset(&stats, 0, sizeof stats);
  EXPECT(sy_layer_from_arrays(arrays, &options, NULL, &layer) == SY_OK);
  EXPECT(sy_layer_stats(layer, &stats) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "stats.struct_size is 0") != NULL);
  stats.struct_size = sizeof stats;
  EXPECT(sy_layer_stats(layer, &stats) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "there was no forward yet") != NULL);
  EXPECT(sy_layer_forward(layer, &tx, NULL, NULL, &tout, NULL) == SY_OK);
  EXPECT(sy_layer_stats(layer, &stats) == SY_OK);
  EXPECT(fabs(stats.cv_floor - sqrt((E - 1) / (double)(T * K))) < 1e-12);
  EXPECT(stats.entropy_router > 0 && stats.entropy_router < log(E));
  EXPECT(isnan(stats.dropped_mass) && isnan(stats.rank_imbalance));
  sy_layer_free(layer);
  options.capacity_factor = 0.5;
  EXPECT(sy_layer_from_arrays(arrays, &options, NULL, &layer) == SY_OK);
  EXPECT(sy_layer_forward(layer, &tx, NULL, NULL, &tout, NULL) == SY_OK);
  stats.counts = counts;
  stats.dropped_by_choice = by_choice;
  EXPECT(sy_layer_stats(layer, &stats) == SY_OK);
  EXPECT(counts[0] + counts[1] + counts[2] + counts[3] == T * K);
  EXPECT(stats.dropped_assignments > 0);
  EXPECT(fabs((by_choice[0] + by_choice[1]) / K - stats.dropped_assignments) < 1e-12);
  sy_layer_free(layer);
}

int main(void) {
  sy_tensor tgate = tensor(gate, 2, shape_gate, SY_CODE_FLOAT);
  sy_router_config router;
  sy_layer_options options;
  sy_layer_arrays arrays;
  sy_saved saved = NULL;
  int32_t recompute;

  tx = tensor(x, 2, shape_x, SY_CODE_FLOAT);
  tout = tensor(out, 2, shape_x, SY_CODE_FLOAT);
  tw13 = tensor(w13, 3, shape_w13, SY_CODE_FLOAT);
  tw2 = tensor(w2, 3, shape_w2, SY_CODE_FLOAT);
  fill(x, T * H, 1);
  fill(gate, E * H, 2);
  fill(w13, E * 2 * I * H, 3);
  fill(w2, E * H * I, 4);
  fill(dout, T * H, 5);
  sy_router_config_init(&router, sizeof router);
  router.num_experts = E;
  router.top_k = K;
  sy_expert_config_init(&config, sizeof config);
  config.num_experts = E;
  config.hidden = H;
  config.inner = I;
  sy_layer_options_init(&options, sizeof options);
  memset(&arrays, 0, sizeof arrays);
  arrays.struct_size = sizeof arrays;
  arrays.router = &router;
  arrays.experts = &config;
  arrays.gate = &tgate;
  arrays.w13 = &tw13;
  arrays.w2 = &tw2;
  arrays.router_in_place = arrays.experts_in_place = 1;

  EXPECT(sy_saved_create(2, &saved) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "recompute=2 is no sy_recompute") != NULL);
  sy_saved_free(NULL);
  for (recompute = SY_RECOMPUTE_NONE; recompute <= SY_RECOMPUTE_ACTIVATION_INPUT; ++recompute) {
    check_layer(&arrays, &options, recompute);
    check_experts(recompute);
  }
  check_losses(&arrays, options);
  check_stats(&arrays, options);
  check_copies(&arrays, &options);
  if (failures == 0) printf("gradients by the C interface hold\n");
  return failures == 0 ? 0 : 1;
}
