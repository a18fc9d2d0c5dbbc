/* The C interface from a C99 program: the plan and the sums by it, dispatch and combine of one
 * rank, a layer of a checkpoint. Exits 1 and says which line failed. */
#include <stdlib.h>

#include "tests/capi/c_api_support.h"

enum { T = 3, E = 4, K = 2, H = 4 };

/* Tokens 1, 2, ...; two experts each, with one unused. */
typedef struct problem {
  float x[T * H], weight[T * K], y[T * H];
  int32_t expert[T * K];
} problem;

static const int64_t kShapeX[2] = {T, H}, kShapePicks[2] = {T, K};

static problem make_problem(void) {
  static const int32_t expert[T * K] = {3, 0, 1, 3, -1, 2};
  problem p;
  int i;
  for (i = 0; i < T * H; ++i) p.x[i] = (float)(i + 1);
  for (i = 0; i < T * K; ++i) p.weight[i] = 0.5F + (float)i;
  memcpy(p.expert, expert, sizeof expert);
  memset(p.y, 0, sizeof p.y);
  return p;
}

/* The expert e gives x * (e + 1). */
static void expect_sums(const problem* p) {
  int t, k, h;
  for (t = 0; t < T; ++t) {
    float factor = 0;
    for (k = 0; k < K; ++k) {
      if (p->expert[t * K + k] >= 0) {
        factor += p->weight[t * K + k] * (float)(p->expert[t * K + k] + 1);
      }
    }
    for (h = 0; h < H; ++h) EXPECT(p->y[t * H + h] == p->x[t * H + h] * factor);
  }
}

static void check_plan(void) {
  problem p = make_problem();
  sy_tensor expert = tensor(p.expert, 2, kShapePicks, SY_CODE_INT);
  sy_tensor weight = tensor(p.weight, 2, kShapePicks, SY_CODE_FLOAT);
  sy_tensor y = tensor(p.y, 2, kShapeX, SY_CODE_FLOAT), trows;
  float outputs[T * K * H];
  int64_t shape_rows[2] = {0, H};
  sy_plan_config config;
  sy_plan plan = NULL;
  sy_plan_rows rows;
  int e, r, h;
  rows.struct_size = sizeof rows;
  sy_plan_config_init(&config, sizeof config);
  EXPECT(sy_plan_create(&config, &plan) == SY_INVALID_ARGUMENT);
  config.num_experts = E;
  config.total_experts = E;
  EXPECT(sy_plan_create(&config, &plan) == SY_OK);
  EXPECT(sy_plan_combine(plan, &y, &y, NULL) == SY_INVALID_ARGUMENT);
  EXPECT(sy_plan_run(plan, &expert, &weight, &rows, NULL) == SY_OK);
  EXPECT(rows.num_experts == E && rows.num_tokens == T && rows.num_rows == T * K);
  EXPECT(rows.expert_begin[0] == 0 && rows.expert_begin[1] == 1 && rows.expert_begin[E] == 5);
  EXPECT(rows.expert_rows[3] == 2 && rows.row_token[3] == 0 && rows.row_token[4] == 1);
  EXPECT(rows.row_weight[4] == p.weight[3]);
  EXPECT(rows.token_begin[T] == 5 && rows.token_row[rows.token_begin[2]] == 2);
  for (e = 0; e < E; ++e) {
    for (r = rows.expert_begin[e]; r < rows.expert_begin[e + 1]; ++r) {
      for (h = 0; h < H; ++h) {
        outputs[r * H + h] = p.x[rows.row_token[r] * H + h] * (float)(e + 1);
      }
    }
  }
  shape_rows[0] = rows.expert_begin[E];
  trows = tensor(outputs, 2, shape_rows, SY_CODE_FLOAT);
  EXPECT(sy_plan_combine(plan, &trows, &y, NULL) == SY_OK);
  expect_sums(&p);
  EXPECT(sy_plan_check(plan) == SY_OK);
  shape_rows[0] = 1;
  EXPECT(sy_plan_combine(plan, &trows, &y, NULL) == SY_INVALID_ARGUMENT);
  p.expert[0] = E;
  EXPECT(sy_plan_run(plan, &expert, &weight, &rows, NULL) == SY_INVALID_ARGUMENT);
  sy_plan_free(plan);
  sy_plan_free(NULL);
  config.layout = 3;
  EXPECT(sy_plan_create(&config, &plan) == SY_INVALID_ARGUMENT);
}

static void check_dispatch(void) {
  problem p = make_problem();
  sy_tensor x = tensor(p.x, 2, kShapeX, SY_CODE_FLOAT), y = tensor(p.y, 2, kShapeX, SY_CODE_FLOAT);
  sy_tensor expert = tensor(p.expert, 2, kShapePicks, SY_CODE_INT), trows;
  sy_tensor weight = tensor(p.weight, 2, kShapePicks, SY_CODE_FLOAT);
  float outputs[T * K * H];
  int64_t shape_rows[2] = {0, H};
  sy_communicator ranks[1] = {NULL};
  sy_ep_config config;
  sy_ep ep = NULL;
  sy_received got, first;
  int e, s, h;
  EXPECT(sy_communicator_from_environment(ranks) == SY_OK);
  EXPECT(sy_communicator_size(ranks[0]) == 1);
  sy_communicator_free(ranks[0]);
  EXPECT(sy_communicator_threads(0, ranks) == SY_INVALID_ARGUMENT);
  EXPECT(sy_communicator_threads(1, ranks) == SY_OK);
  EXPECT(sy_communicator_rank(ranks[0]) == 0);
  EXPECT(sy_communicator_set_timeout(ranks[0], 5000) == SY_OK);
  got.struct_size = sizeof got;
  sy_ep_config_init(&config, sizeof config);
  config.num_experts = E;
  config.top_k = K;
  config.hidden = H;
  config.max_tokens = T;
  EXPECT(sy_ep_create(ranks[0], &config, &ep) == SY_OK);
  EXPECT(sy_ep_dispatch(ep, &x, &expert, &weight, &got, NULL) == SY_OK);
  EXPECT(got.num_rows == T && got.num_assignments == 5 && got.num_local_experts == E);
  EXPECT(got.dropped_rows == 0 && got.x_dtype == SY_F32 && got.rows_received == NULL);
  for (e = 0; e < E; ++e) {
    for (s = got.expert_begin[e]; s < got.expert_begin[e + 1]; ++s) {
      for (h = 0; h < H; ++h) {
        outputs[s * H + h] = ((const float*)got.x)[got.row_x[s] * H + h] * (float)(e + 1);
      }
    }
  }
  shape_rows[0] = got.num_assignments;
  trows = tensor(outputs, 2, shape_rows, SY_CODE_FLOAT);
  EXPECT(sy_ep_combine(ep, &trows, &y, NULL) == SY_OK);
  expect_sums(&p);
  first = got;
  EXPECT(first.number == 1 && sy_ep_check_received(ep, &first) == SY_OK);
  EXPECT(sy_ep_dispatch(ep, &x, &expert, &weight, &got, NULL) == SY_OK);
  EXPECT(got.number == 2 && sy_ep_check_received(ep, &first) == SY_OK);
  EXPECT(first.row_x != got.row_x && first.x != got.x);
  EXPECT(sy_ep_dispatch(ep, &x, &expert, &weight, &got, NULL) == SY_OK);
  EXPECT(sy_ep_check_received(ep, &first) == SY_INVALID_ARGUMENT);
  EXPECT(strstr(sy_last_error(), "received is stale") != NULL);
  EXPECT(sy_ep_check_received(ep, &got) == SY_OK);
  got.number = 4;
  EXPECT(sy_ep_check_received(ep, &got) == SY_INVALID_ARGUMENT);
  sy_ep_free(ep);
  sy_communicator_free(ranks[0]);
}

static void check_checkpoint(const char* directory) {
  enum { H = 32, T = 2 };
  float x[T * H], y[T * H];
  const int64_t shape[2] = {T, H};
  sy_tensor tx = tensor(x, 2, shape, SY_CODE_FLOAT), ty = tensor(y, 2, shape, SY_CODE_FLOAT);
  sy_checkpoint_recipe recipe;
  sy_layer_options options;
  sy_layer layer = NULL;
  double sum = 0;
  int i;
  sy_checkpoint_recipe_init(&recipe, sizeof recipe);
  recipe.family = "qwen3-moe";
  recipe.hidden = H;
  recipe.inner = 16;
  recipe.num_experts = 8;
  recipe.top_k = 2;
  EXPECT(sy_make_checkpoint(&recipe, directory) == SY_OK);
  sy_layer_options_init(&options, sizeof options);
  EXPECT(sy_layer_from_checkpoint(directory, 0, &options, NULL, &layer) == SY_OK);
  EXPECT(sy_layer_hidden(layer) == H && sy_layer_num_experts(layer) == 8);
  for (i = 0; i < T * H; ++i) x[i] = (float)(i % 7) - 3;
  EXPECT(sy_layer_forward(layer, &tx, NULL, NULL, &ty, NULL) == SY_OK);
  for (i = 0; i < T * H; ++i) sum += y[i] < 0 ? -y[i] : y[i];
  EXPECT(sum > 0);
  sy_layer_free(layer);
}

int main(int argc, char** argv) {
  check_plan();
  check_dispatch();
  if (argc > 1) check_checkpoint(argv[1]);
  if (failures == 0) printf("all of the C interface holds\n");
  return failures == 0 ? 0 : 1;
}
