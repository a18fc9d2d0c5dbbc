/* The layer from arrays by the C interface: gates, shared experts, and how structs are read. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tests/capi/c_api_support.h"

enum { T = 5, E = 4, K = 2, H = 12, I = 7 };

/* A gate in bf16 is taken as in f32; one that is used where it lies may change between calls. */
static void check_gates(const sy_layer_arrays* like, const sy_layer_options* options,
                        const sy_tensor* x) {
  static float wide[E * H], other[E * H], got[T * H], want[T * H];
  static uint16_t narrow[E * H];
  const int64_t shape_gate[] = {E, H}, shape_x[] = {T, H};
  sy_tensor tgate = tensor(wide, 2, shape_gate, SY_CODE_FLOAT);
  sy_tensor tnarrow = tensor(narrow, 2, shape_gate, SY_CODE_BFLOAT);
  sy_tensor tgot = tensor(got, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor twant = tensor(want, 2, shape_x, SY_CODE_FLOAT);
  sy_layer_arrays arrays = *like;
  sy_layer layer = NULL, copied = NULL;
  int i;
  tnarrow.type_bits = 16;
  fill(wide, E * H, 5);
  fill(other, E * H, 6);
  for (i = 0; i < E * H; ++i) {
    uint32_t bits;
    memcpy(&bits, &wide[i], sizeof bits);
    narrow[i] = (uint16_t)(bits >> 16);
    bits &= 0xffff0000U;
    memcpy(&wide[i], &bits, sizeof bits);
  }
  arrays.gate = &tnarrow;
  EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &layer) == SY_OK);
  arrays.gate = &tgate;
  EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &copied) == SY_OK);
  EXPECT(sy_layer_forward(layer, x, NULL, NULL, &tgot, NULL) == SY_OK);
  EXPECT(sy_layer_forward(copied, x, NULL, NULL, &twant, NULL) == SY_OK);
  EXPECT(memcmp(got, want, sizeof got) == 0);
  sy_layer_free(layer);

  arrays.router_in_place = 1;
  EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &layer) == SY_OK);
  memcpy(wide, other, sizeof wide);
  EXPECT(sy_layer_forward(copied, x, NULL, NULL, &tgot, NULL) == SY_OK);
  EXPECT(memcmp(got, want, sizeof got) == 0); /* a copy stays as it was */
  sy_layer_free(copied);
  EXPECT(sy_layer_forward(layer, x, NULL, NULL, &tgot, NULL) == SY_OK);
  EXPECT(memcmp(got, want, sizeof got) != 0);
  arrays.router_in_place = 0;
  EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &copied) == SY_OK);
  EXPECT(sy_layer_forward(copied, x, NULL, NULL, &twant, NULL) == SY_OK);
  EXPECT(memcmp(got, want, sizeof got) == 0);
  sy_layer_free(copied);
  sy_layer_free(layer);

  tgate.type_code = SY_CODE_INT;
  EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "gate is i32, want f32, bf16 or f16") != NULL);
}

/* Shared experts are added to what the others give; times sigmoid(x . gate) where there is one. */
static void check_shared_experts(const sy_layer_arrays* without, const sy_layer_options* options,
                                 const sy_tensor* tx, const float* alone) {
  static float w13[2 * I * H], w2[H * I], gate[H], with[T * H];
  const int64_t shape13[] = {2 * I, H}, shape2[] = {H, I}, shape_gate[] = {H}, shape[] = {T, H};
  sy_tensor t13 = tensor(w13, 2, shape13, SY_CODE_FLOAT), t2 = tensor(w2, 2, shape2, SY_CODE_FLOAT);
  sy_tensor tgate = tensor(gate, 1, shape_gate, SY_CODE_FLOAT);
  sy_tensor tout = tensor(with, 2, shape, SY_CODE_FLOAT);
  const float* x = tx->data;
  sy_layer_arrays arrays = *without;
  sy_layer layer = NULL;
  int gated, t, h, i;
  for (i = 0; i < 2 * I * H; ++i) w13[i] = (float)(i % 7 - 3) / 16;
  for (i = 0; i < H * I; ++i) w2[i] = (float)(i % 5 - 2) / 16;
  for (i = 0; i < H; ++i) gate[i] = (float)(i % 3 - 1) / 4;
  arrays.shared_w13 = &t13;
  EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "shared_w13 and shared_w2") != NULL);
  arrays.shared_w2 = &t2;
  for (gated = 0; gated < 2; ++gated) {
    arrays.shared_gate = gated ? &tgate : NULL;
    EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &layer) == SY_OK);
    EXPECT(sy_layer_forward(layer, tx, NULL, NULL, &tout, NULL) == SY_OK);
    for (t = 0; t < T; ++t) {
      double inner[I], share = 0;
      for (h = 0; h < H; ++h) share += (double)x[t * H + h] * gate[h];
      share = gated ? 1 / (1 + exp(-share)) : 1;
      for (i = 0; i < I; ++i) {
        double g = 0, u = 0;
        for (h = 0; h < H; ++h) {
          g += (double)x[t * H + h] * w13[i * H + h];
          u += (double)x[t * H + h] * w13[(I + i) * H + h];
        }
        inner[i] = g / (1 + exp(-g)) * u;
      }
      for (h = 0; h < H; ++h) {
        double sum = 0;
        for (i = 0; i < I; ++i) sum += inner[i] * w2[h * I + i];
        EXPECT(fabs(alone[t * H + h] + share * sum - with[t * H + h]) < 1e-5);
      }
    }
    sy_layer_free(layer);
  }
  t2.shape = shape13; /* [2I, H], want [H, 2I] */
  EXPECT(sy_layer_from_arrays(&arrays, options, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "shared_w") != NULL);
}

/* A struct says how large it is, and numbers that are no enumerators are named. */
static void check_structs(const sy_layer_arrays* arrays, const sy_layer_options* options) {
  sy_layer_options other = *options;
  sy_layer layer = NULL;
  struct {
    sy_router_config config;
    char behind[8];
  } older;
  other.struct_size = 0;
  EXPECT(sy_layer_from_arrays(arrays, &other, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "options.struct_size is 0") != NULL);
  other.struct_size = sizeof other + 8; /* of a newer header */
  EXPECT(sy_layer_from_arrays(arrays, &other, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "struct_size") != NULL);
  other = *options;
  other.layout = 3;
  EXPECT(sy_layer_from_arrays(arrays, &other, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "layout=3 is no sy_layout") != NULL);
  other = *options;
  other.device_engine = -1;
  EXPECT(sy_layer_from_arrays(arrays, &other, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "device_engine=-1 is no sy_device_engine") != NULL);
  other = *options;
  other.device_type = 0;
  EXPECT(sy_layer_from_arrays(arrays, &other, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "device_type=0") != NULL);
  EXPECT(sy_route_check(-1, NULL) == SY_INVALID_ARGUMENT);
  /* Initialising writes no further than the program's struct reaches. */
  memset(&older, 7, sizeof older);
  sy_router_config_init(&older.config, sizeof older.config);
  EXPECT(older.config.struct_size == sizeof older.config && older.config.renormalize == 1);
  EXPECT(older.behind[0] == 7 && older.behind[7] == 7);
}

/* Memory that layers on a GPU share; where there is a GPU one on a CPU is refused with it. */
static void check_scratch(const sy_layer_arrays* arrays, const sy_layer_options* like) {
  sy_layer_options options = *like;
  sy_layer layer = NULL;
  sy_status status;
  EXPECT(options.scratch == NULL);
  EXPECT(sy_scratch_create(-1, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(sy_scratch_create(-2, &options.scratch) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "device_id=-2 is no device") != NULL);
  sy_scratch_free(NULL);
  status = sy_scratch_create(-1, &options.scratch);
  EXPECT(status == SY_OK || status == SY_UNSUPPORTED || status == SY_DEVICE);
  if (status != SY_OK) return;
  EXPECT(sy_layer_from_arrays(arrays, &options, NULL, &layer) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "scratch is given to a layer on a CPU") != NULL);
  sy_scratch_free(options.scratch);
}

int main(void) {
  static float x[T * H], gate[E * H], w13[E * 2 * I * H], w2[E * H * I], out[T * H];
  const int64_t shape_x[] = {T, H}, shape_gate[] = {E, H}, shape_w13[] = {E, 2 * I, H};
  const int64_t shape_w2[] = {E, H, I};
  sy_tensor tx = tensor(x, 2, shape_x, SY_CODE_FLOAT),
            tout = tensor(out, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tgate = tensor(gate, 2, shape_gate, SY_CODE_FLOAT);
  sy_tensor tw13 = tensor(w13, 3, shape_w13, SY_CODE_FLOAT);
  sy_tensor tw2 = tensor(w2, 3, shape_w2, SY_CODE_FLOAT);
  sy_router_config router;
  sy_expert_config experts;
  sy_layer_options options;
  sy_layer_arrays arrays;
  sy_layer layer = NULL;

  fill(x, T * H, 1);
  fill(gate, E * H, 2);
  fill(w13, E * 2 * I * H, 3);
  fill(w2, E * H * I, 4);
  sy_router_config_init(&router, sizeof router);
  router.num_experts = E;
  router.top_k = K;
  sy_expert_config_init(&experts, sizeof experts);
  experts.num_experts = E;
  experts.hidden = H;
  experts.inner = I;
  sy_layer_options_init(&options, sizeof options);
  memset(&arrays, 0, sizeof arrays);
  arrays.struct_size = sizeof arrays;
  arrays.router = &router;
  arrays.experts = &experts;
  arrays.gate = &tgate;
  arrays.w13 = &tw13;
  arrays.w2 = &tw2;

  EXPECT(sy_layer_from_arrays(&arrays, &options, NULL, &layer) == SY_OK);
  EXPECT(sy_layer_forward(layer, &tx, NULL, NULL, &tout, NULL) == SY_OK);
  EXPECT(sy_layer_check(layer) == SY_OK); /* a CPU's errors are the calls' own */
  sy_layer_free(layer);
  check_gates(&arrays, &options, &tx);
  check_shared_experts(&arrays, &options, &tx, out);
  check_structs(&arrays, &options);
  check_scratch(&arrays, &options);
  if (failures == 0) printf("layers from arrays hold\n");
  return failures == 0 ? 0 : 1;
}
