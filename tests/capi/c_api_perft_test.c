/* PERFT in C: adapters of every kind against plain loops, gradients against differences. */
#include <math.h>
#include <stdlib.h>

#include "c_api_support.h"

enum { T = 6, M = 3, R = 4, H = 8, K = 2 };

static float x[T * H], base[T * H], a[M * R * H], b[M * H * R], gate[M * H], y[T * H], dy[T * H];
static float weight[T * K], dx[T * H], da[M * R * H], db[M * H * R], dgate[M * H], dweight[T * K];
static int32_t expert[T * K];
static const int64_t shape_x[] = {T, H}, shape_a[] = {M, R, H}, shape_b[] = {M, H, R};
static const int64_t shape_gate[] = {M, H}, shape_k[] = {T, K};
static sy_tensor tx, tbase, ta, tb, tgate, ty, tdy, texpert, tweight;
static sy_router_config router;
static sy_perft perft = NULL;

/* What adapter j makes of token t, without its weight. */
static void add_adapter(double* sum, int t, int j, double times) {
  int i, h;
  for (i = 0; i < R; ++i) {
    double inner = 0;
    for (h = 0; h < H; ++h) inner += (double)a[(j * R + i) * H + h] * x[t * H + h];
    for (h = 0; h < H; ++h) sum[h] += times * b[(j * H + h) * R + i] * inner;
  }
}

/* The two largest of softmax(gate x), ties to the lower. */
static void add_routed(double* sum, int t, double scale) {
  double logit[M], total = 0;
  int j, h, low = 0;
  for (j = 0; j < M; ++j) {
    logit[j] = 0;
    for (h = 0; h < H; ++h) logit[j] += (double)gate[j * H + h] * x[t * H + h];
    total += exp(logit[j]);
    if (logit[j] <= logit[low]) low = j;
  }
  for (j = 0; j < M; ++j) {
    if (j != low) add_adapter(sum, t, j, scale * exp(logit[j]) / total);
  }
}

static void expect_output(int kind, double scale) {
  int t, k, h;
  for (t = 0; t < T; ++t) {
    double want[H];
    for (h = 0; h < H; ++h) want[h] = base[t * H + h];
    if (kind == SY_PERFT_ROUTED) add_routed(want, t, scale);
    for (k = 0; k < K && kind == SY_PERFT_EMBEDDED; ++k) {
      const int j = expert[t * K + k];
      if (j >= 0) add_adapter(want, t, j, scale * weight[t * K + k]);
    }
    for (k = 0; k < M && kind == SY_PERFT_DENSE; ++k) add_adapter(want, t, k, scale);
    for (h = 0; h < H; ++h) EXPECT(fabs(y[t * H + h] - want[h]) < 2e-5);
  }
}

static void create(int kind, sy_perft_config* config) {
  const int by_rule = kind == SY_PERFT_ROUTED || kind == SY_PERFT_EMBEDDED;
  sy_perft_config_init(config, sizeof *config);
  config->kind = kind;
  config->alpha = 6;
  config->router = by_rule ? &router : NULL;
  sy_perft_free(perft);
  perft = NULL;
  EXPECT(sy_perft_create(config, &ta, &tb, kind == SY_PERFT_ROUTED ? &tgate : NULL, NULL, &perft) ==
         SY_OK);
}

static sy_status forward(int kind, sy_saved saved) {
  const int given = kind == SY_PERFT_EMBEDDED;
  return sy_perft_forward(perft, &tx, &tbase, given ? &texpert : NULL, given ? &tweight : NULL,
                          NULL, &ty, saved, NULL);
}

static double loss(int kind) {
  double sum = 0;
  int i;
  EXPECT(sy_perft_reload(perft) == SY_OK);
  EXPECT(forward(kind, NULL) == SY_OK);
  for (i = 0; i < T * H; ++i) sum += (double)y[i] * dy[i];
  return sum;
}

static void expect_slope(int kind, float* value, float gradient) {
  const float kept = *value, step = 1.0f / 256;
  double above, below;
  *value = kept + step;
  above = loss(kind);
  *value = kept - step;
  below = loss(kind);
  *value = kept;
  EXPECT(fabs((above - below) / (2 * step) - gradient) < 0.003 + 0.01 * fabs(gradient));
}

static void check_kind(int kind) {
  sy_perft_config config;
  sy_gradients gradients;
  sy_saved saved = NULL;
  sy_tensor tdx = tensor(dx, 2, shape_x, SY_CODE_FLOAT),
            tda = tensor(da, 3, shape_a, SY_CODE_FLOAT);
  sy_tensor tdb = tensor(db, 3, shape_b, SY_CODE_FLOAT);
  sy_tensor tdgate = tensor(dgate, 2, shape_gate, SY_CODE_FLOAT);
  sy_tensor tdweight = tensor(dweight, 2, shape_k, SY_CODE_FLOAT);
  int i;
  create(kind, &config);
  sy_gradients_init(&gradients, sizeof gradients);
  gradients.tokens = &tdx;
  gradients.w13 = &tda;
  gradients.w2 = &tdb;
  if (kind == SY_PERFT_ROUTED) gradients.gate = &tdgate;
  if (kind == SY_PERFT_EMBEDDED) gradients.weight = &tdweight;
  EXPECT(sy_saved_create(SY_RECOMPUTE_NONE, &saved) == SY_OK);
  EXPECT(sy_perft_backward(perft, saved, &tdy, NULL, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(forward(kind, saved) == SY_OK);
  EXPECT(sy_saved_ready(saved) == 1);
  expect_output(kind, 6.0 / R);
  gradients.router_bias = &tdgate;
  EXPECT(sy_perft_backward(perft, saved, &tdy, NULL, &gradients, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "adapters have not") != NULL);
  gradients.router_bias = NULL;
  /* The gradient through the layer, which is here dy itself. */
  EXPECT(sy_perft_backward(perft, saved, &tdy, &tdy, &gradients, NULL) == SY_OK);
  EXPECT(sy_saved_ready(saved) == 0);
  for (i = 5; i < T * H; i += 14) expect_slope(kind, &x[i], dx[i] - dy[i]);
  for (i = 3; i < M * R * H; i += 29) expect_slope(kind, &a[i], da[i]);
  for (i = 1; i < M * H * R; i += 31) expect_slope(kind, &b[i], db[i]);
  if (kind == SY_PERFT_ROUTED) expect_slope(kind, &gate[9], dgate[9]);
  if (kind == SY_PERFT_EMBEDDED) expect_slope(kind, &weight[2], dweight[2]);
  /* Once more, added to what is there, from the same numbers as before. */
  EXPECT(sy_perft_reload(perft) == SY_OK);
  EXPECT(forward(kind, saved) == SY_OK);
  memcpy(y, da, sizeof(float) * T * H);
  gradients.accumulate = 1;
  EXPECT(sy_perft_backward(perft, saved, &tdy, &tdy, &gradients, NULL) == SY_OK);
  for (i = 0; i < T * H; ++i) EXPECT(fabsf(da[i] - 2 * y[i]) <= 1e-5f * (1 + fabsf(y[i])));
  sy_saved_free(saved);
}

static void check_stats(void) {
  sy_perft_config config;
  sy_routing_stats stats;
  int64_t counts[M];
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  stats.counts = counts;
  create(SY_PERFT_ROUTED, &config);
  EXPECT(forward(SY_PERFT_ROUTED, NULL) == SY_OK);
  EXPECT(sy_perft_stats(perft, &stats) == SY_OK);
  EXPECT(counts[0] + counts[1] + counts[2] == T * K);
  create(SY_PERFT_DENSE, &config);
  EXPECT(sy_perft_stats(perft, &stats) == SY_INVALID_ARGUMENT);
}

static void refuse(const sy_perft_config* config, const sy_tensor* of_b, const sy_tensor* of_gate,
                   const char* words) {
  sy_perft other = NULL;
  EXPECT(sy_perft_create(config, &ta, of_b, of_gate, NULL, &other) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), words) != NULL);
  EXPECT(other == NULL);
}

static void check_refusals(void) {
  sy_perft_config config;
  sy_tensor wrong = tb;
  create(SY_PERFT_DENSE, &config);
  wrong.shape = shape_a;
  refuse(&config, &wrong, NULL, "b: dimension 2 is 8, want 4");
  wrong = tb;
  wrong.type_bits = 16;
  refuse(&config, &wrong, NULL, "b is f16, but a is f32");
  refuse(&config, &tb, &tgate, "dense adapters take no gate");
  EXPECT(sy_perft_forward(perft, &tx, NULL, &texpert, &tweight, NULL, &ty, NULL, NULL) ==
         SY_INVALID_ARGUMENT);
  config.router = &router;
  refuse(&config, &tb, NULL, "a router is given to adapters of kind dense");
  config.kind = SY_PERFT_SHARED;
  config.router = NULL;
  refuse(&config, &tb, NULL, "num_adapters=3 of kind shared");
  config.kind = SY_PERFT_EMBEDDED;
  refuse(&config, &tb, NULL, "adapters of kind embedded want a router");
  config.kind = 4;
  refuse(&config, &tb, NULL, "kind=4 is no sy_perft_kind");
  config.struct_size = sizeof config + 8;
  refuse(&config, &tb, NULL, "struct_size");
  EXPECT(sy_perft_forward(NULL, &tx, NULL, NULL, NULL, NULL, &ty, NULL, NULL) ==
         SY_INVALID_ARGUMENT);
  EXPECT(strcmp(sy_enumerator_name("sy_perft_kind", SY_PERFT_EMBEDDED), "embedded") == 0);
}

int main(void) {
  int i;
  fill(x, T * H, 1);
  fill(base, T * H, 2);
  fill(a, M * R * H, 3);
  fill(b, M * H * R, 4);
  fill(gate, M * H, 5);
  fill(dy, T * H, 6);
  fill(weight, T * K, 7);
  for (i = 0; i < T * K; ++i) expert[i] = i * 5 % 4 - 1;
  tx = tensor(x, 2, shape_x, SY_CODE_FLOAT);
  tbase = tensor(base, 2, shape_x, SY_CODE_FLOAT);
  ta = tensor(a, 3, shape_a, SY_CODE_FLOAT);
  tb = tensor(b, 3, shape_b, SY_CODE_FLOAT);
  tgate = tensor(gate, 2, shape_gate, SY_CODE_FLOAT);
  ty = tensor(y, 2, shape_x, SY_CODE_FLOAT);
  tdy = tensor(dy, 2, shape_x, SY_CODE_FLOAT);
  texpert = tensor(expert, 2, shape_k, SY_CODE_INT);
  tweight = tensor(weight, 2, shape_k, SY_CODE_FLOAT);
  sy_router_config_init(&router, sizeof router);
  router.num_experts = M;
  router.top_k = K;
  router.renormalize = 0;
  check_kind(SY_PERFT_ROUTED);
  check_kind(SY_PERFT_EMBEDDED);
  check_kind(SY_PERFT_DENSE);
  check_stats();
  check_refusals();
  sy_perft_free(perft);
  sy_perft_free(NULL);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
