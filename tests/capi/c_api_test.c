/* The C interface from a C99 program: routing, experts, a layer, ranks, errors. Exits 1 and says
 * which line failed; the numbers are checked against loops written here. */
#define _POSIX_C_SOURCE 200112L /* setenv */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/capi/c_api_support.h"

enum { T = 5, E = 4, K = 2, H = 12, I = 7 };

static double silu(double x) { return x / (1.0 + exp(-x)); }

/* The largest difference between out and the weighted sum of the experts in double. */
static double worst(const float* x, const float* w13, const float* w2, const int32_t* expert,
                    const float* weight, const float* out) {
  double most = 0;
  int t, k, h, i;
  for (t = 0; t < T; ++t) {
    double sum[H] = {0};
    for (k = 0; k < K; ++k) {
      const int e = expert[t * K + k];
      double inner[I];
      if (e < 0) continue;
      for (i = 0; i < I; ++i) {
        double gate = 0, up = 0;
        for (h = 0; h < H; ++h) {
          gate += (double)x[t * H + h] * w13[(e * 2 * I + i) * H + h];
          up += (double)x[t * H + h] * w13[(e * 2 * I + I + i) * H + h];
        }
        inner[i] = silu(gate) * up;
      }
      for (h = 0; h < H; ++h) {
        double y = 0;
        for (i = 0; i < I; ++i) y += inner[i] * w2[(e * H + h) * I + i];
        sum[h] += weight[t * K + k] * y;
      }
    }
    for (h = 0; h < H; ++h) most = fmax(most, fabs(sum[h] - out[t * H + h]));
  }
  return most;
}

/* One rank alone: both interfaces of the published benchmark, with the identity as expert. */
static void check_exchanges(void) {
  enum { T = 3, E = 4, K = 2, H = 4 };
  float x[T * H], y[T * H], weight[T * K], buckets[E * T * H];
  int32_t expert[T * K] = {3, 0, 1, 3, -1, 2};
  const int64_t shape_x[2] = {T, H}, shape_picks[2] = {T, K}, shape_buckets[3] = {E, T, H};
  int64_t shape_rows[2] = {0, H};
  sy_tensor tx = tensor(x, 2, shape_x, SY_CODE_FLOAT), ty = tensor(y, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor texpert = tensor(expert, 2, shape_picks, SY_CODE_INT);
  sy_tensor tweight = tensor(weight, 2, shape_picks, SY_CODE_FLOAT), trows;
  sy_communicator alone = NULL;
  sy_unique_id id, other;
  sy_ep_config config;
  sy_ep ep = NULL;
  sy_flat flat;
  sy_bucketed bucketed;
  int i;
  flat.struct_size = sizeof flat;
  bucketed.struct_size = sizeof bucketed;
  for (i = 0; i < T * H; ++i) x[i] = (float)(i + 1);
  for (i = 0; i < T * K; ++i) weight[i] = 0.5F;
  EXPECT(sy_unique_id_make(&id) == SY_OK && sy_unique_id_make(&other) == SY_OK);
  EXPECT(memcmp(&id, &other, sizeof(id)) != 0);
  EXPECT(sy_unique_id_by_file("/nowhere/id", 0, &other) == SY_INVALID_ARGUMENT);
  EXPECT(sy_communicator_create(1, 1, &id, &alone) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "rank 1 is not in 0..0") != NULL);
  memset(&other, '/', sizeof(other));
  EXPECT(sy_communicator_create(0, 1, &other, &alone) == SY_INVALID_ARGUMENT);
  EXPECT(sy_communicator_create(0, 1, &id, &alone) == SY_OK);
  EXPECT(sy_communicator_size(alone) == 1);
  sy_ep_config_init(&config, sizeof config);
  config.num_experts = E;
  config.top_k = K;
  config.hidden = H;
  config.max_tokens = T;
  EXPECT(sy_ep_create(alone, &config, &ep) == SY_OK);
  EXPECT(sy_ep_combine_flat(ep, &tx, NULL, &ty, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(sy_ep_dispatch_flat(ep, &tx, &texpert, &tweight, &flat, NULL) == SY_OK);
  EXPECT(flat.num_rows == 5 && flat.meta[0] == 0 && flat.meta[1] == 3 && flat.meta[8] == 5);
  shape_rows[0] = flat.num_rows;
  trows = tensor((void*)flat.x, 2, shape_rows, SY_CODE_FLOAT);
  EXPECT(sy_ep_combine_flat(ep, &trows, NULL, &ty, NULL) == SY_OK);
  for (i = 0; i < T * H; ++i) EXPECT(y[i] == x[i] * (i < 2 * H ? 1.0F : 0.5F));
  EXPECT(sy_ep_dispatch_bucketed(ep, &tx, &texpert, &tweight, 1, &bucketed, NULL) != SY_OK);
  EXPECT(strstr(sy_last_error(), "expert 3 gets 2 rows, its bucket has 1") != NULL);
  EXPECT(sy_communicator_recover(alone) == SY_OK);
  EXPECT(sy_ep_dispatch_bucketed(ep, &tx, &texpert, &tweight, 0, &bucketed, NULL) == SY_OK);
  EXPECT(bucketed.num_local_experts == E && bucketed.capacity == T);
  EXPECT(bucketed.expert_num_tokens[3] == 2 && bucketed.expert_meta[3 * T * 5] == 3);
  memcpy(buckets, bucketed.expert_x, sizeof(buckets));
  trows = tensor(buckets, 3, shape_buckets, SY_CODE_FLOAT);
  for (i = 0; i < T * K; ++i) weight[i] = 0.25F;
  EXPECT(sy_ep_combine_bucketed(ep, &trows, &tweight, &ty, NULL) == SY_OK);
  for (i = 0; i < T * H; ++i) EXPECT(y[i] == x[i] * (i < 2 * H ? 0.5F : 0.25F));
  EXPECT(sy_ep_check(ep) == SY_OK); /* a CPU's findings are the calls' own */
  sy_ep_free(ep);
  config.device_type = 7;
  EXPECT(sy_ep_create(alone, &config, &ep) == SY_INVALID_ARGUMENT);
  config.device_type = 0; /* by the tensors of the first dispatch */
  EXPECT(sy_ep_create(alone, &config, &ep) == SY_OK);
  EXPECT(sy_ep_combine(ep, &trows, &ty, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(sy_ep_dispatch_flat(ep, &tx, &texpert, &tweight, &flat, NULL) == SY_OK);
  EXPECT(flat.rows_received == NULL);
  sy_ep_free(ep);
  sy_communicator_free(alone);
}

/* The words of a type stand in the order of their numbers, and nothing behind them. */
static void check_names(void) {
  static const struct {
    const char* type;
    const char* words[9];
  } want[] = {
      {"sy_dtype", {"f32", "bf16", "f16", "fp8"}},
      {"sy_score", {"softmax", "topk-softmax", "sigmoid", "sparse-mixer"}},
      {"sy_group_score", {"max", "top2sum"}},
      {"sy_activation",
       {"silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu", "identity"}},
      {"sy_layout", {"compact", "aligned", "padded"}},
      {"sy_drop_policy", {"token", "choice", "probs", "bpr", "reroute"}},
      {"sy_exchange_mode", {"auto", "throughput", "low-latency"}},
      {"sy_device_engine", {"auto", "peer", "nccl", "nccl-pairs"}},
      {"sy_weight_format", {"exact", "q8", "e4m3", "mxfp4", "int4", "nvfp4", "stored"}},
      {"sy_words", {NULL}},
  };
  size_t i;
  int32_t value;
  for (i = 0; i < sizeof want / sizeof want[0]; ++i) {
    for (value = 0; want[i].words[value] != NULL; ++value) {
      const char* word = sy_enumerator_name(want[i].type, value);
      EXPECT(word != NULL && strcmp(word, want[i].words[value]) == 0);
    }
    EXPECT(sy_enumerator_name(want[i].type, value) == NULL);
    EXPECT(sy_enumerator_name(want[i].type, -1) == NULL);
  }
  EXPECT(strcmp(sy_enumerator_name("sy_score", SY_SIGMOID), "sigmoid") == 0);
  EXPECT(strcmp(sy_enumerator_name("sy_dtype", SY_FP8_E4M3), "fp8") == 0);
  EXPECT(sy_enumerator_name(NULL, 0) == NULL);
}

/* Each name is used, or refused with the reason; another word is no name. */
static void check_forced_isas(const sy_expert_config* config, const sy_tensor* w13,
                              const sy_tensor* w2) {
  static const char* const names[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
  const char* before = getenv("SWITCHYARD_ISA");
  char kept[32] = "";
  size_t i;
  if (before != NULL) strncpy(kept, before, sizeof kept - 1);
  for (i = 0; i < sizeof names / sizeof names[0]; ++i) {
    sy_experts forced = NULL;
    sy_status status;
    EXPECT(setenv("SWITCHYARD_ISA", names[i], 1) == 0);
    status = sy_experts_create(config, w13, w2, NULL, NULL, 1, &forced);
    if (status != SY_OK) {
      EXPECT(status == SY_UNSUPPORTED && i > 0);
      EXPECT(strstr(sy_last_error(), names[i]) != NULL);
      EXPECT(strstr(sy_last_error(), "lacks") != NULL || strstr(sy_last_error(), "x86") != NULL);
    }
    sy_experts_free(forced);
  }
  {
    sy_experts none = NULL;
    EXPECT(setenv("SWITCHYARD_ISA", "mmx", 1) == 0);
    EXPECT(sy_experts_create(config, w13, w2, NULL, NULL, 1, &none) == SY_INVALID_ARGUMENT);
    EXPECT(strstr(sy_last_error(), "SWITCHYARD_ISA=mmx") != NULL);
  }
  if (kept[0] != '\0') {
    setenv("SWITCHYARD_ISA", kept, 1);
  } else {
    unsetenv("SWITCHYARD_ISA");
  }
}

int main(void) {
  static float x[T * H], gate[E * H], w13[E * 2 * I * H], w2[E * H * I], logits[T * E];
  static float weight[T * K], out[T * H], layer_out[T * H];
  static int32_t expert[T * K];
  const int64_t shape_x[] = {T, H}, shape_gate[] = {E, H}, shape_w13[] = {E, 2 * I, H};
  const int64_t shape_w2[] = {E, H, I}, shape_logits[] = {T, E}, shape_picks[] = {T, K};
  sy_tensor tx = tensor(x, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tgate = tensor(gate, 2, shape_gate, SY_CODE_FLOAT);
  sy_tensor tw13 = tensor(w13, 3, shape_w13, SY_CODE_FLOAT);
  sy_tensor tw2 = tensor(w2, 3, shape_w2, SY_CODE_FLOAT);
  sy_tensor tlogits = tensor(logits, 2, shape_logits, SY_CODE_FLOAT);
  sy_tensor texpert = tensor(expert, 2, shape_picks, SY_CODE_INT);
  sy_tensor tweight = tensor(weight, 2, shape_picks, SY_CODE_FLOAT);
  sy_tensor tout = tensor(out, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tlayer_out = tensor(layer_out, 2, shape_x, SY_CODE_FLOAT);
  sy_router_config router;
  sy_expert_config config;
  sy_layer_options options;
  sy_layer_arrays arrays;
  sy_experts experts = NULL;
  sy_layer layer = NULL;
  char version[32];
  int t, e, h;

  snprintf(version, sizeof version, "%d.%d.%d", SY_VERSION_MAJOR, SY_VERSION_MINOR,
           SY_VERSION_PATCH);
  EXPECT(strcmp(sy_version(), version) == 0);
  fill(x, T * H, 1);
  fill(gate, E * H, 2);
  fill(w13, E * 2 * I * H, 3);
  fill(w2, E * H * I, 4);
  for (t = 0; t < T; ++t) {
    for (e = 0; e < E; ++e) {
      logits[t * E + e] = 0;
      for (h = 0; h < H; ++h) {
        logits[t * E + e] = fmaf(x[t * H + h], gate[e * H + h], logits[t * E + e]);
      }
    }
  }

  sy_router_config_init(&router, sizeof router);
  router.num_experts = E;
  router.top_k = K;
  EXPECT(sy_route(&router, &tlogits, NULL, &texpert, &tweight, NULL) == SY_OK);
  for (t = 0; t < T; ++t) {
    EXPECT(logits[t * E + expert[t * K]] >= logits[t * E + expert[t * K + 1]]);
    EXPECT(fabs(weight[t * K] + weight[t * K + 1] - 1.0) < 1e-6);
  }

  sy_expert_config_init(&config, sizeof config);
  config.num_experts = E;
  config.hidden = H;
  config.inner = I;
  EXPECT(sy_experts_create(&config, &tw13, &tw2, NULL, NULL, 2, &experts) == SY_OK);
  EXPECT(sy_experts_run(experts, &tx, &texpert, &tweight, &tout, NULL) == SY_OK);
  EXPECT(worst(x, w13, w2, expert, weight, out) < 1e-5);

  memset(&arrays, 0, sizeof arrays);
  arrays.struct_size = sizeof arrays;
  arrays.router = &router;
  arrays.experts = &config;
  arrays.gate = &tgate;
  arrays.w13 = &tw13;
  arrays.w2 = &tw2;
  sy_layer_options_init(&options, sizeof options);
  EXPECT(sy_layer_from_arrays(&arrays, &options, NULL, &layer) == SY_OK);
  EXPECT(sy_layer_hidden(layer) == H && sy_layer_top_k(layer) == K);
  EXPECT(sy_layer_forward(layer, &tx, NULL, NULL, &tlayer_out, NULL) == SY_OK);
  EXPECT(worst(x, w13, w2, expert, weight, layer_out) < 1e-5);
  EXPECT(sy_layer_check(layer) == SY_OK);
  /* The routing that is given is the one that is used. */
  expert[0] = -1;
  EXPECT(sy_layer_forward(layer, &tx, &texpert, &tweight, &tlayer_out, NULL) == SY_OK);
  EXPECT(worst(x, w13, w2, expert, weight, layer_out) < 1e-5);

  /* Errors name the parameter and the value, and leave no exception behind. */
  router.top_k = E + 1;
  EXPECT(sy_route(&router, &tlogits, NULL, &texpert, &tweight, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "5") != NULL);
  EXPECT(sy_experts_run(experts, NULL, &texpert, &tweight, &tout, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "x is NULL") != NULL);
  expert[0] = E;
  EXPECT(sy_experts_run(experts, &tx, &texpert, &tweight, &tout, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "expert[0, 0] is 4") != NULL);
  EXPECT(sy_layer_from_checkpoint("no/such/place", 0, &options, NULL, &layer) != SY_OK);
  EXPECT(strstr(sy_last_error(), "no/such/place") != NULL);
  EXPECT(strcmp(sy_status_name(SY_TIMEOUT), "timeout") == 0);
  check_names();

  /* Weights that are loaded from now on are for the instruction set that the environment names. */
  check_forced_isas(&config, &tw13, &tw2);

  check_exchanges();
  sy_layer_free(layer);
  sy_experts_free(experts);
  sy_experts_free(NULL);
  if (failures == 0) printf("all of the C interface holds\n");
  return failures == 0 ? 0 : 1;
}
