/* Experts given as codes with scales by the C interface: results that plain arithmetic has, kept as
 * codes or not, and calls that are refused. */
#include <stddef.h>

#include "tests/capi/c_api_support.h"

enum { T = 3, E = 2, H = 32, I = 64, K = 2 };

static uint8_t w13[E * I * H / 2], w13_scales[E * I * H / 32];
static uint8_t w2[E * H * I / 2], w2_scales[E * H * I / 32];
static float x[T * H], y[T * H], weight[T * K];
static int32_t expert[T * K];
static const int64_t shape_w13[] = {E, I, H / 2}, shape_scales13[] = {E, I, H / 32};
static const int64_t shape_w2[] = {E, H, I / 2}, shape_scales2[] = {E, H, I / 32};
static const int64_t shape_x[] = {T, H}, shape_choices[] = {T, K};
static sy_tensor tx, ty, texpert, tweight, tensors[4];
static sy_expert_config config;

static sy_tensor bytes(void* data, const int64_t* shape) {
  sy_tensor t = tensor(data, 3, shape, SY_CODE_UINT);
  t.type_bits = 8;
  return t;
}

static sy_stored_experts stored(int32_t weights, int32_t compute) {
  sy_stored_experts arrays;
  memset(&arrays, 0, sizeof arrays);
  arrays.struct_size = sizeof arrays;
  arrays.w13 = &tensors[0];
  arrays.w13_scales = &tensors[1];
  arrays.w2 = &tensors[2];
  arrays.w2_scales = &tensors[3];
  arrays.weights = weights;
  arrays.compute = compute;
  arrays.device_type = SY_DEVICE_CPU;
  arrays.num_threads = 1;
  return arrays;
}

/* All weights of the first product are 1, those of the second 1 of expert 0 and 2 of expert 1. */
static void make(void) {
  int i;
  memset(w13, 0x22, sizeof w13);
  memset(w13_scales, 127, sizeof w13_scales);
  memset(w2, 0x44, sizeof w2); /* 2, times half */
  memset(w2_scales, 126, sizeof w2_scales / 2);
  memset(w2_scales + sizeof w2_scales / 2, 127, sizeof w2_scales / 2);
  for (i = 0; i < T * H; ++i) x[i] = (float)(i % H % 3);
  for (i = 0; i < T * K; ++i) {
    expert[i] = (i + i / K) % K; /* 0 1, 1 0, 0 1 */
    weight[i] = i % K == 0 ? 0.5f : 0.25f;
  }
  tensors[0] = bytes(w13, shape_w13);
  tensors[1] = bytes(w13_scales, shape_scales13);
  tensors[2] = bytes(w2, shape_w2);
  tensors[3] = bytes(w2_scales, shape_scales2);
  tx = tensor(x, 2, shape_x, SY_CODE_FLOAT);
  ty = tensor(y, 2, shape_x, SY_CODE_FLOAT);
  tweight = tensor(weight, 2, shape_choices, SY_CODE_FLOAT);
  texpert = tensor(expert, 2, shape_choices, SY_CODE_INT);
  sy_expert_config_init(&config, sizeof config);
  config.num_experts = E;
  config.hidden = H;
  config.inner = I;
  config.gated = 0;
  config.activation = SY_RELU;
}

/* Tokens sum to 31; all numbers are whole, or halves, and exact in bf16 too. */
static void check_results(int32_t weights, int32_t compute) {
  const sy_stored_experts arrays = stored(weights, compute);
  sy_experts experts = NULL;
  int t, h;
  EXPECT(sy_experts_create_stored(&config, &arrays, &experts) == SY_OK);
  memset(y, 0xff, sizeof y);
  EXPECT(sy_experts_run(experts, &tx, &texpert, &tweight, &ty, NULL) == SY_OK);
  for (t = 0; t < T; ++t) {
    const float want = 31 * I * (t % 2 == 0 ? 0.5f * 1 + 0.25f * 2 : 0.5f * 2 + 0.25f * 1);
    for (h = 0; h < H; ++h) EXPECT(y[t * H + h] == want);
  }
  sy_experts_free(experts);
}

static void check_saved(void) {
  sy_stored_experts arrays = stored(SY_WEIGHTS_STORED, SY_F32);
  sy_experts experts = NULL;
  sy_saved saved = NULL;
  EXPECT(sy_saved_create(SY_RECOMPUTE_NONE, &saved) == SY_OK);
  EXPECT(sy_experts_create_stored(&config, &arrays, &experts) == SY_OK);
  EXPECT(sy_experts_run_saved(experts, &tx, &texpert, &tweight, &ty, saved, NULL) ==
         SY_UNSUPPORTED);
  EXPECT(strstr(sy_last_error(), "kept as mxfp4 have no backward") != NULL);
  EXPECT(sy_saved_ready(saved) == 0);
  sy_experts_free(experts);
  arrays.weights = SY_WEIGHTS_EXACT;
  EXPECT(sy_experts_create_stored(&config, &arrays, &experts) == SY_OK);
  EXPECT(sy_experts_run_saved(experts, &tx, &texpert, &tweight, &ty, saved, NULL) == SY_OK);
  EXPECT(sy_saved_ready(saved) == 1);
  sy_experts_free(experts);
  sy_saved_free(saved);
}

static void refused(const sy_stored_experts* arrays, const char* words) {
  sy_experts experts = NULL;
  EXPECT(sy_experts_create_stored(&config, arrays, &experts) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), words) != NULL);
  EXPECT(experts == NULL);
}

static void check_refusals(void) {
  sy_stored_experts arrays = stored(SY_WEIGHTS_STORED, SY_F32);
  refused(NULL, "stored is NULL");
  arrays.w2_scales = NULL;
  refused(&arrays, "w13_scales and w2_scales must both be given");
  arrays = stored(SY_WEIGHTS_STORED, SY_F32);
  arrays.device_type = 0;
  refused(&arrays, "device_type=0 is neither 1 (CPU) nor 2 (CUDA)");
  arrays.device_type = SY_DEVICE_CUDA;
  arrays.device_id = -1;
  refused(&arrays, "device_id=-1 is no GPU");
  arrays = stored(99, SY_F32);
  refused(&arrays, "weights");
  arrays = stored(SY_WEIGHTS_STORED, 17);
  refused(&arrays, "compute");
  arrays = stored(SY_WEIGHTS_STORED, SY_F32);
  arrays.b2 = &tx;
  refused(&arrays, "b13 and b2 must both be given, or neither");
  arrays = stored(SY_WEIGHTS_STORED, SY_F32);
  w2_scales[5] = 255;
  refused(&arrays, "w2's scales of expert 0: row 2 of down, column 1 is 255");
  w2_scales[5] = 126;
}

int main(void) {
  make();
  check_results(SY_WEIGHTS_STORED, SY_F32);
  check_results(SY_WEIGHTS_STORED, SY_BF16);
  check_results(SY_WEIGHTS_MXFP4, SY_F32);
  check_results(SY_WEIGHTS_EXACT, SY_F32);
  check_results(SY_WEIGHTS_EXACT, SY_BF16);
  check_saved();
  check_refusals();
  if (failures == 0) printf("ok\n");
  return failures != 0;
}
