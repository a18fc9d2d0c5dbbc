/* Soft-MoE by the C interface: weights that sum to 1, gradients that are finite differences, what
 * is saved serves one backward, and calls that are refused. */
#include <math.h>
#include <stdlib.h>

#include "tests/capi/c_api_support.h"

enum { T = 6, E = 3, P = 2, S = E * P, H = 8, I = 5 };

static float x[T * H], phi[S * H], w13[E * 2 * I * H], w2[E * H * I], y[T * H], dy[T * H];
static float dispatch[T * S], combine[T * S], dx[T * H], dphi[S * H], dw2[E * H * I], dscale;
static const int64_t shape_x[] = {T, H}, shape_phi[] = {S, H}, shape_w13[] = {E, 2 * I, H};
static const int64_t shape_w2[] = {E, H, I}, shape_pairs[] = {T, S};
static sy_experts experts = NULL;
static sy_soft_moe_config config;
static sy_tensor tx, tphi, ty;

static void make_experts(void) {
  sy_tensor tw13 = tensor(w13, 3, shape_w13, SY_CODE_FLOAT);
  sy_tensor tw2 = tensor(w2, 3, shape_w2, SY_CODE_FLOAT);
  sy_expert_config of_experts;
  sy_expert_config_init(&of_experts, sizeof of_experts);
  of_experts.num_experts = E;
  of_experts.hidden = H;
  of_experts.inner = I;
  of_experts.gated = 1;
  EXPECT(sy_experts_create(&of_experts, &tw13, &tw2, NULL, NULL, 1, &experts) == SY_OK);
}

static double loss(void) {
  double sum = 0;
  int i;
  EXPECT(sy_soft_moe_run(experts, &config, &tx, &tphi, &ty, NULL, NULL, NULL, NULL) == SY_OK);
  for (i = 0; i < T * H; ++i) sum += (double)y[i] * dy[i];
  return sum;
}

static void expect_slope(float* value, float gradient) {
  const float kept = *value, step = 1.0f / 256;
  double above, below;
  *value = kept + step;
  above = loss();
  *value = kept - step;
  below = loss();
  *value = kept;
  EXPECT(fabs((above - below) / (2 * step) - gradient) < 0.003 + 0.01 * fabs(gradient));
}

static void check_both_ways(void) {
  sy_tensor tdispatch = tensor(dispatch, 2, shape_pairs, SY_CODE_FLOAT);
  sy_tensor tcombine = tensor(combine, 2, shape_pairs, SY_CODE_FLOAT);
  sy_tensor tdy = tensor(dy, 2, shape_x, SY_CODE_FLOAT),
            tdx = tensor(dx, 2, shape_x, SY_CODE_FLOAT);
  sy_tensor tdphi = tensor(dphi, 2, shape_phi, SY_CODE_FLOAT);
  sy_tensor tdw2 = tensor(dw2, 3, shape_w2, SY_CODE_FLOAT);
  sy_gradients gradients;
  sy_soft_moe_saved saved = NULL;
  int t, s;
  sy_gradients_init(&gradients, sizeof gradients);
  gradients.tokens = &tdx;
  gradients.w2 = &tdw2;
  EXPECT(sy_soft_moe_saved_create(SY_RECOMPUTE_NONE, &saved) == SY_OK);
  EXPECT(sy_soft_moe_backward(experts, saved, &tphi, &tdy, &gradients, &tdphi, &dscale, NULL) ==
         SY_INVALID_ARGUMENT);
  EXPECT(sy_soft_moe_run(experts, &config, &tx, &tphi, &ty, &tdispatch, &tcombine, saved, NULL) ==
         SY_OK);
  EXPECT(sy_soft_moe_saved_bytes(saved) == 4 * (T * H + T * S + 2 * S * H + S * 2 * I));
  for (t = 0; t < T; ++t) {
    float sum = 0;
    for (s = 0; s < S; ++s) sum += combine[t * S + s];
    EXPECT(fabsf(sum - 1) < 1e-6f);
  }
  for (s = 0; s < S; ++s) {
    float sum = 0;
    for (t = 0; t < T; ++t) sum += dispatch[t * S + s];
    EXPECT(fabsf(sum - 1) < 1e-6f);
  }
  gradients.gate = &tdphi;
  EXPECT(sy_soft_moe_backward(experts, saved, &tphi, &tdy, &gradients, &tdphi, &dscale, NULL) ==
         SY_INVALID_ARGUMENT);
  gradients.gate = NULL;
  EXPECT(sy_soft_moe_backward(experts, saved, &tphi, &tdy, &gradients, &tdphi, &dscale, NULL) ==
         SY_OK);
  expect_slope(&x[11], dx[11]);
  expect_slope(&phi[20], dphi[20]);
  expect_slope(&config.scale, dscale);
  EXPECT(sy_soft_moe_backward(experts, saved, &tphi, &tdy, &gradients, &tdphi, &dscale, NULL) ==
         SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "used") != NULL);
  sy_soft_moe_saved_free(saved);
}

static void check_refusals(void) {
  sy_soft_moe_config other = config;
  other.group = 4;
  EXPECT(sy_soft_moe_run(experts, &other, &tx, &tphi, &ty, NULL, NULL, NULL, NULL) ==
         SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "group=4 does not divide the 6 tokens") != NULL);
  other.struct_size = sizeof other + 8;
  EXPECT(sy_soft_moe_run(experts, &other, &tx, &tphi, &ty, NULL, NULL, NULL, NULL) ==
         SY_INVALID_ARGUMENT);
  EXPECT(sy_soft_moe_run(NULL, &config, &tx, &tphi, &ty, NULL, NULL, NULL, NULL) ==
         SY_INVALID_ARGUMENT);
  EXPECT(sy_soft_moe_run(experts, &config, &tx, &tphi, &tx, NULL, NULL, NULL, NULL) ==
         SY_INVALID_ARGUMENT);
}

int main(void) {
  fill(x, T * H, 1);
  fill(phi, S * H, 2);
  fill(w13, E * 2 * I * H, 3);
  fill(w2, E * H * I, 4);
  fill(dy, T * H, 5);
  tx = tensor(x, 2, shape_x, SY_CODE_FLOAT);
  tphi = tensor(phi, 2, shape_phi, SY_CODE_FLOAT);
  ty = tensor(y, 2, shape_x, SY_CODE_FLOAT);
  sy_soft_moe_config_init(&config, sizeof config);
  config.slots = P;
  make_experts();
  check_both_ways();
  check_refusals();
  sy_experts_free(experts);
  sy_soft_moe_saved_free(NULL);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
