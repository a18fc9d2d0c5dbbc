#ifndef SWITCHYARD_SWITCHYARD_H
#define SWITCHYARD_SWITCHYARD_H

/* The C interface of Switchyard: C99, opaque handles, status codes, no exception crosses it.
 *
 * Conventions
 * - A call returns SY_OK or a code below; sy_last_error() then has one line about it, of this
 * thread.
 * - Tensors are described by sy_tensor, whose fields lie as in DLPack's DLTensor: a DLTensor* may
 * be cast to sy_tensor*. Tensors are row-major and without gaps; others are refused by name.
 * - `stream` is a cudaStream_t, or NULL; ignored for tensors on the CPU.
 * - A handle may be used by any thread: a call waits for another one on the same handle, or on one
 *   of the same communicator. Views last as long as is said of them, whoever makes the next call. A
 *   handle is freed by its own function, which takes NULL, when no call on it is under way.
 * - After fork() a handle on a CPU works in the child too, with threads of its own. Calls on one of
 *   ranks or on a GPU are SY_UNSUPPORTED there, and freeing it does nothing.
 * - Structs begin with struct_size, the size that the program was compiled with. Those that a
 *   program fills are initialised by sy_..._init(&s, sizeof s); of those that the library fills the
 *   program sets it before the call. A library takes the struct of an older program, whose missing
 *   fields have their defaults; a larger one, of a newer header, is SY_INVALID_ARGUMENT.
 * - Fields that hold an enumerator are int32_t, and the comment names its type; other numbers are
 *   SY_INVALID_ARGUMENT.
 * Letters: T tokens, E experts, K experts per token, H hidden, I inner, R ranks, N rows received.
 */

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SY_API __attribute__((visibility("default")))
#else
#define SY_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version's one place: the build and the Python package read it here. */
#define SY_VERSION_MAJOR 0
#define SY_VERSION_MINOR 2
#define SY_VERSION_PATCH 0

/* The same values as switchyard::ErrorCode, plus one; 0 is success. */
typedef enum sy_status {
  SY_OK = 0,
  SY_INVALID_ARGUMENT = 1,
  SY_UNSUPPORTED = 2,
  SY_BAD_FILE = 3,
  SY_IO = 4,
  SY_OUT_OF_MEMORY = 5,
  SY_DEVICE = 6,
  SY_TIMEOUT = 7,
  SY_COMMUNICATION = 8,
  SY_INTERNAL = 9 /* An error that is not one of ours: a bug. */
} sy_status;

/* DLPack's device types that are understood. */
enum { SY_DEVICE_CPU = 1, SY_DEVICE_CUDA = 2 };
/* DLPack's type codes that are understood: {kInt, 32}, {kInt, 64}, {kUInt, 8}, {kFloat, 16},
 * {kFloat, 32}, {kBfloat, 16}. */
enum { SY_CODE_INT = 0, SY_CODE_UINT = 1, SY_CODE_FLOAT = 2, SY_CODE_BFLOAT = 4 };

typedef struct sy_tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  const int64_t* shape;
  const int64_t* strides; /* In elements; NULL: row-major without gaps. */
  uint64_t byte_offset;
} sy_tensor;

/* "0.2.0"; SY_VERSION_* say what a program was compiled against. */
SY_API const char* sy_version(void);
/* The message of this thread's last failed call; never NULL. Valid until its next call. */
SY_API const char* sy_last_error(void);
/* "invalid argument", ... */
SY_API const char* sy_status_name(sy_status status);
/* The word for an enumerator, as Python and the command line spell it: of "sy_score", 1 is
 * "topk-softmax". `type` is sy_dtype, sy_score, sy_group_score, sy_activation, sy_layout,
 * sy_drop_policy, sy_exchange_mode, sy_device_engine, sy_weight_format, sy_recompute,
 * sy_loss_scope, sy_balance_share or sy_perft_kind. NULL: no such type, or value. */
SY_API const char* sy_enumerator_name(const char* type, int32_t value);

/* ---- Routing ------------------------------------------------------------------------------- */

typedef enum sy_score {
  SY_SOFTMAX = 0,
  SY_TOPK_SOFTMAX = 1,
  SY_SIGMOID = 2,
  SY_SPARSE_MIXER = 3 /* On the CPU; without groups and selection bias. */
} sy_score;

/* What a group of experts is worth where only some may be chosen from: its best selection score, or
 * the sum of its two best. */
typedef enum sy_group_score { SY_GROUP_MAX = 0, SY_GROUP_TOP2_SUM = 1 } sy_group_score;

/* switchyard::RouterConfig. Initialise with sy_router_config_init(). */
typedef struct sy_router_config {
  size_t struct_size;
  int32_t num_experts;
  int32_t top_k;
  int32_t score; /* sy_score */
  int32_t renormalize;
  float scale;
  int32_t groups;
  int32_t top_groups;
  int32_t group_score; /* sy_group_score */
  /* Another router as the command line spells it, "expert-choice:capacity-factor=2"
   * (docs/routers.md), in the place of top-k by what is above, which then says only what the
   * spelling leaves open: its K. NULL or "": top-k. Read in the call it is given to. */
  const char* router;
  /* Of the router hash: [V,K] i32 in host memory, the different experts of every token id; copied.
   * NULL: ids are hashed. */
  const sy_tensor* hash_table;
} sy_router_config;

SY_API void sy_router_config_init(sy_router_config* config, size_t struct_size);
/* logits [T,E] f32, selection_bias [E] f32 or NULL -> expert [T,K] i32, weight [T,K] f32. On a GPU
 * it only enqueues; a token with a NaN logit then gets no expert (-1), which is the error of a
 * later call on that GPU, or of sy_route_check(). */
SY_API sy_status sy_route(const sy_router_config* config, const sy_tensor* logits,
                          const sy_tensor* selection_bias, const sy_tensor* expert,
                          const sy_tensor* weight, void* stream);
/* How many columns the routing of a router has: K, or E where a token may have any number of
 * experts
 * (-1 behind its last). *has_logits: 0 where experts follow from token ids or places. Either may be
 * NULL. */
SY_API sy_status sy_router_columns(const sy_router_config* config, int32_t* columns,
                                   int32_t* has_logits);

/* How many experts its routing names: num_experts, and behind them the zero-computation experts of
 * the router moe++ (switchyard::ZeroComputationExperts). */
SY_API sy_status sy_router_num_experts(const sy_router_config* config, int32_t* num_experts);

/* How many columns its logits have, and rows its gate and router_bias: E, and behind these one for
 * every null or zero-computation expert. Where a tensor of logits or of a gate is [T,E] or [E,H]
 * here, E is that. Of the router chain it is that of one iteration: the gate, router_bias and
 * selection_bias of a layer, and their gradients, have it for each of them, iteration after
 * iteration. */
SY_API sy_status sy_router_num_logits(const sy_router_config* config, int32_t* num_logits);

/* A hash_table that balances: token ids in descending frequency take the top_k experts with the
 * least load so far. frequency [vocabulary] of each id; table [vocabulary,top_k] i32 in host
 * memory. */
SY_API sy_status sy_balanced_hash_table(const int64_t* frequency, int64_t vocabulary,
                                        int32_t num_experts, int32_t top_k, const sy_tensor* table);

/* What a call's choice draws upon: switchyard::RouteRequest. Initialise with
 * sy_route_request_init(). */
typedef struct sy_route_request {
  size_t struct_size;
  uint64_t seed; /* of the noise, as the next two and the token's number */
  uint64_t step;
  int32_t layer;
  int32_t training;    /* 1: noise and samples are drawn */
  int64_t first_token; /* tokens on the ranks before this one */
  /* [T] i32 of the text, or NULL; what the router hash goes by. Where the other tensors are; a
   * layer on a GPU takes them from either memory, but only from its own while a stream is captured.
   */
  const sy_tensor* token_ids;
  /* [T,E] f32 of the router noisy-top-k, whose noise has the size softplus(noise_logits) + floor:
   * of sy_route_with() and sy_noise_backward() in training; else NULL. A layer makes its own. */
  const sy_tensor* noise_logits;
  /* [E] f32 of the router expert-threshold: thresholds with a minus; of sy_route_with(). NULL: 1/E
   * each. A layer has its own. */
  const sy_tensor* selection_bias;
  void*
      stream; /* of sy_route_with() and the ways back, where their tensors lie on a GPU; or NULL */
  /* Of a layer, [T,E] f32 where it is, or NULL: out, the logits that it routes by; and, of the
   * router moe++:residual=yes and only of it, in, those of the layer before. */
  const sy_tensor* logits;
  const sy_tensor* previous_logits;
} sy_route_request;
SY_API void sy_route_request_init(sy_route_request* request, size_t struct_size);

/* Any router: logits [T,E] f32, or NULL where the rule has none -> expert [T,C] i32 and weight
 * [T,C] f32, C of sy_router_columns(). Noise on logits, in training, is added to `logits` before,
 * in place: what is there afterwards is what sy_route_backward() takes. Jitter, which is on what
 * the gate is multiplied with, is a layer's. On a GPU all tensors lie there, and a call only
 * enqueues on request.stream: a token with a NaN logit gets no expert (-1), which sy_route_check()
 * says; a hash_table is a layer's there (SY_UNSUPPORTED). */
SY_API sy_status sy_route_with(const sy_router_config* config, const sy_route_request* request,
                               const sy_tensor* logits, const sy_tensor* expert,
                               const sy_tensor* weight);
/* From dweight [T,C] to dlogits [T,E] of the choice that sy_route_with() has made of `logits`. */
SY_API sy_status sy_route_backward(const sy_router_config* config, const sy_route_request* request,
                                   const sy_tensor* logits, const sy_tensor* expert,
                                   const sy_tensor* dweight, const sy_tensor* dlogits);
/* Of the router noisy-top-k: from dlogits [T,E], the gradient of what sy_route_with() has left in
 * `logits`, to dnoise_logits [T,E]; that of logits without noise is dlogits itself. */
SY_API sy_status sy_noise_backward(const sy_router_config* config, const sy_route_request* request,
                                   const sy_tensor* dlogits, const sy_tensor* dnoise_logits);
/* Waits for `stream` of GPU `device_id` and says what sy_route() has found wrong there, in this
 * process, since that was last said: SY_INVALID_ARGUMENT names the lowest token with a NaN logit.
 */
SY_API sy_status sy_route_check(int32_t device_id, void* stream);

/* ---- The plan of a rank --------------------------------------------------------------------- */

/* How the experts' rows lie: without gaps; each expert from a multiple of `alignment` on; or each
 * with C rows of its own. */
typedef enum sy_layout {
  SY_LAYOUT_COMPACT = 0,
  SY_LAYOUT_ALIGNED = 1,
  SY_LAYOUT_PADDED = 2
} sy_layout;

/* Which rows each expert works on: switchyard::PlanArgs. Initialise with sy_plan_config_init(). */
typedef struct sy_plan_config {
  size_t struct_size;
  int32_t num_experts;   /* El that this rank holds, */
  int32_t first_expert;  /* from this one on; ids of others are skipped */
  int32_t total_experts; /* E: an id outside -1..E-1 is an error; 0: none is */
  int32_t layout;        /* sy_layout */
  int32_t alignment;     /* rows, for SY_LAYOUT_ALIGNED */
  int64_t padded_rows;   /* C, for SY_LAYOUT_PADDED */
} sy_plan_config;

SY_API void sy_plan_config_init(sy_plan_config* config, size_t struct_size);
typedef struct sy_plan_t* sy_plan;
SY_API sy_status sy_plan_create(const sy_plan_config* config, sy_plan* plan);
SY_API void sy_plan_free(sy_plan plan);
/* Rows sorted by (expert, token, k), as CSR both ways. Views that stay valid until the next call:
 * host memory, or that of the GPU on which the tensors lie. */
typedef struct sy_plan_rows {
  size_t struct_size;          /* set by the caller */
  int32_t num_experts;         /* El */
  int64_t num_rows;            /* S: the most that the layout may need */
  int64_t num_tokens;          /* T */
  const int32_t* expert_begin; /* [El+1] first row of each expert; the last: rows of the layout */
  const int32_t* expert_rows;  /* [El] rows used of it; the others are padding */
  const int32_t* row_token;    /* [S] row of x it comes from; -1: padding */
  const float* row_weight;     /* [S] */
  const int32_t* token_begin;  /* [T+1] into token_row */
  const int32_t* token_row;    /* [T*K] the rows of each token */
} sy_plan_rows;
/* expert [T,K] i32 (-1 unused), weight [T,K] f32. On a GPU it only enqueues; memory is taken where
 * a call is larger than any before, which is an error while a stream is captured. What kernels find
 * wrong is the error of a later call, or of sy_plan_check(), which waits for the last one. */
SY_API sy_status sy_plan_run(sy_plan plan, const sy_tensor* expert, const sy_tensor* weight,
                             sy_plan_rows* rows, void* stream);
/* By the last plan: rows [S,H] of the experts' outputs, unweighted, f32, bf16 or f16; y [T,H] =
 * each token's weighted sum in the fixed order of switchyard::ReductionOrder. */
SY_API sy_status sy_plan_combine(sy_plan plan, const sy_tensor* rows, const sy_tensor* y,
                                 void* stream);
SY_API sy_status sy_plan_check(sy_plan plan);

/* ---- Experts ------------------------------------------------------------------------------- */

/* switchyard::Activation, with its formulas. */
typedef enum sy_activation {
  SY_SILU = 0,
  SY_GELU = 1,
  SY_GELU_TANH = 2,
  SY_RELU = 3,
  SY_RELU2 = 4,
  SY_CLAMPED_SWIGLU = 5,
  SY_IDENTITY = 6
} sy_activation;

/* switchyard::ExpertConfig. Initialise with sy_expert_config_init(). */
typedef struct sy_expert_config {
  size_t struct_size;
  int32_t num_experts;
  int64_t hidden;
  int64_t inner;
  int32_t gated;
  int32_t activation; /* sy_activation */
  float alpha;
  float limit;
} sy_expert_config;

SY_API void sy_expert_config_init(sy_expert_config* config, size_t struct_size);

/* Expert weights in the form that a device computes with. */
typedef struct sy_experts_t* sy_experts;
/* w13 [E,2I,H] (gate rows, then up rows; [E,I,H] when not gated) and w2 [E,H,I], both f32, bf16 or
 * f16; b13 [E,2I] (or [E,I]) and b2 [E,H] f32, or both NULL. Arrays of host memory may be freed
 * afterwards; those of a GPU are used where they lie and have to outlive the handle. num_threads as
 * in sy_layer_options. */
SY_API sy_status sy_experts_create(const sy_expert_config* config, const sy_tensor* w13,
                                   const sy_tensor* w2, const sy_tensor* b13, const sy_tensor* b2,
                                   int32_t num_threads, sy_experts* experts);
/* Experts that are stored as codes with scales in host memory, as e4m3 or MXFP4: w13, w2 and their
 * scales as sy_layer_arrays has them, b13 and b2 f32 or both NULL. All are copied. */
typedef struct sy_stored_experts {
  size_t struct_size; /* sizeof the struct; there is no init: zero the rest */
  const sy_tensor* w13;
  const sy_tensor* w13_scales;
  const sy_tensor* w2;
  const sy_tensor* w2_scales;
  const sy_tensor* b13;
  const sy_tensor* b2;
  int32_t weights;     /* sy_weight_format: SY_WEIGHTS_STORED, or the format by name, keeps them as
                        * codes, SY_WEIGHTS_EXACT makes numbers of them, SY_WEIGHTS_Q8 int8 */
  int32_t compute;     /* sy_dtype that is computed in: SY_F32, SY_BF16 or SY_F16; of codes on a GPU
                        * SY_BF16 */
  int32_t device_type; /* SY_DEVICE_CPU or SY_DEVICE_CUDA */
  int32_t device_id;   /* of a GPU */
  int32_t num_threads; /* of a CPU */
} sy_stored_experts;
/* The same of these. On a CPU x of sy_experts_run is f32, bf16 or f16, rounded to `compute`; on a
 * GPU of that type. sy_experts_run_saved wants weights that are kept as numbers, on a CPU. */
SY_API sy_status sy_experts_create_stored(const sy_expert_config* config,
                                          const sy_stored_experts* stored, sy_experts* experts);
SY_API void sy_experts_free(sy_experts experts);
/* y = sum over k of weight[t,k] * expert[t,k](x[t]): x [T,H] of the weights' type, expert [T,K] i32
 * (-1 unused), weight [T,K] f32, y [T,H] f32, bf16 or f16, without overlap with x. */
SY_API sy_status sy_experts_run(sy_experts experts, const sy_tensor* x, const sy_tensor* expert,
                                const sy_tensor* weight, const sy_tensor* y, void* stream);
/* On a GPU calls behave as sy_plan_run: this waits for the last one and says what it found wrong.
 */
SY_API sy_status sy_experts_check(sy_experts experts);
/* The weights of one expert back out of the form that they are computed with: w13 [2I,H] (or [I,H])
 * and w2 [H,I] f32, bf16 or f16, b13 [2I] (or [I]) and b2 [H] f32, in host memory; each may be
 * NULL. In the weights' own type they are the bits that were given. SY_UNSUPPORTED: weights of a
 * GPU lie where the caller has them. */
SY_API sy_status sy_experts_read_expert(sy_experts experts, int32_t expert, const sy_tensor* w13,
                                        const sy_tensor* w2, const sy_tensor* b13,
                                        const sy_tensor* b2);

/* ---- The way back --------------------------------------------------------------------------- */

/* What a forward leaves in memory for its backward: switchyard::Recompute. */
typedef enum sy_recompute {
  SY_RECOMPUTE_NONE = 0,            /* pre-activations are kept */
  SY_RECOMPUTE_ACTIVATION_INPUT = 1 /* they are made again from the tokens */
} sy_recompute;

/* What one forward leaves for its backward: made once and used step after step, one for each
 * forward that is not yet gone back through. It grows to the largest call and keeps its memory. */
typedef struct sy_saved_t* sy_saved;
/* recompute: sy_recompute. */
SY_API sy_status sy_saved_create(int32_t recompute, sy_saved* saved);
SY_API void sy_saved_free(sy_saved saved);
/* 1: a forward has filled it that no backward has used. */
SY_API int32_t sy_saved_ready(sy_saved saved);
/* Bytes that the last forward has kept: switchyard::SavedForward has the formula. */
SY_API int64_t sy_saved_bytes(sy_saved saved);

/* The router's logits [T,E] f32 of the layer's forward that has filled `saved`, where the layer is
 * and once its stream is so far: valid until the next forward with it. NULL where there are none.
 */
SY_API const float* sy_saved_logits(sy_saved saved);
/* Of the layer's forward that has filled `saved`, likewise, NULL where the layer has no losses: [7]
 * values without coefficients, in the order of sy_loss_config, and what they come to with them; */
SY_API const double* sy_saved_losses(sy_saved saved);
/* and assignments of each expert [G,E] before any was dropped, of *groups G: the sequences, or 1.
 */
SY_API const int64_t* sy_saved_counts(sy_saved saved, int64_t* groups);

/* Where a backward writes gradients: each a tensor of the shape that its parameter has, or NULL
 * where it is not wanted. Initialise with sy_gradients_init(). */
typedef struct sy_gradients {
  size_t struct_size;
  const sy_tensor* tokens; /* [T,H] f32, bf16 or f16 */
  const sy_tensor* weight; /* [T,K] f32 of the experts' weights; 0 where unused or dropped */
  const sy_tensor* w13;    /* f32 or the compute type, as w2, shared_w13 and shared_w2 */
  const sy_tensor* w2;
  const sy_tensor* b13; /* f32, as b2 */
  const sy_tensor* b2;
  /* Of a layer: */
  const sy_tensor* gate;        /* [E,H] f32, bf16 or f16; of a network [E,D] */
  const sy_tensor* router_bias; /* [E] f32 */
  const sy_tensor* shared_w13;
  const sy_tensor* shared_w2;
  const sy_tensor* shared_gate; /* [H] f32 */
  /* In: [T,E] f32 dL/dlogits of auxiliary losses, added to that of the choice; or NULL. */
  const sy_tensor* dlogits;
  int32_t accumulate; /* 1: those of parameters are added to what is there */
  /* Of a layer with losses: the scale of their gradient, as dout is scaled; 1. */
  double loss_scale;
  /* In: with SY_LOSS_GLOBAL [E] i64, the sums of sy_saved_counts() over all ranks and accumulation
   * steps. NULL: over ranks, of all ranks; without SY_LOSS_GLOBAL there are none. */
  const sy_tensor* loss_counts;
  const sy_tensor* noise_gate;     /* [E,H] as gate; of the router noisy-top-k */
  const sy_tensor* router_network; /* [N] f32, of a router with a network */
  /* f32 of the router moe++: [C,3,H] of its constant experts; with residual=yes [E,E] of the
   * matrix, and [T,E] what the layer before takes as dlogits, which is written. */
  const sy_tensor* constant_experts;
  const sy_tensor* gating_residual;
  const sy_tensor* previous_logits;
} sy_gradients;
SY_API void sy_gradients_init(sy_gradients* gradients, size_t struct_size);

/* As sy_experts_run, and fills `saved` for sy_experts_backward. */
SY_API sy_status sy_experts_run_saved(sy_experts experts, const sy_tensor* x,
                                      const sy_tensor* expert, const sy_tensor* weight,
                                      const sy_tensor* y, sy_saved saved, void* stream);
/* From dy [T,H] f32, bf16 or f16 of the run that has filled `saved`, which is used up, to the
 * gradients. SY_INVALID_ARGUMENT: nothing was saved, it was used already, it is another object's.
 */
SY_API sy_status sy_experts_backward(sy_experts experts, sy_saved saved, const sy_tensor* dy,
                                     const sy_gradients* gradients, void* stream);

/* ---- Soft-MoE ------------------------------------------------------------------------------- */

/* switchyard::SoftMoeConfig. Initialise with sy_soft_moe_config_init(). */
typedef struct sy_soft_moe_config {
  size_t struct_size;
  int64_t slots;     /* of each expert and group; 1 */
  int64_t group;     /* neighbouring tokens that are mixed; 0: all of a sequence */
  int64_t sequence;  /* tokens of a sequence; 0: all of the call */
  int32_t normalize; /* 1: lengths of tokens and of phi's rows are divided out */
  int32_t causal;    /* 1: tokens read the slots of the group before theirs */
  float scale;       /* of the logits; 1 */
} sy_soft_moe_config;
SY_API void sy_soft_moe_config_init(sy_soft_moe_config* config, size_t struct_size);

/* What one sy_soft_moe_run leaves for its backward: switchyard::SavedSoftMoe. recompute:
 * sy_recompute. */
typedef struct sy_soft_moe_saved_t* sy_soft_moe_saved;
SY_API sy_status sy_soft_moe_saved_create(int32_t recompute, sy_soft_moe_saved* saved);
SY_API void sy_soft_moe_saved_free(sy_soft_moe_saved saved);
/* Bytes that the last run has kept. */
SY_API int64_t sy_soft_moe_saved_bytes(sy_soft_moe_saved saved);

/* x [T,H] of the weights' type, phi [E*slots,H] f32, bf16 or f16 -> y [T,H] f32, bf16 or f16,
 * without overlap with x. dispatch and combine [T,E*slots] f32 get the weights of both ways, or are
 * NULL; so is `saved` where no backward follows. All lie where the experts are. On a GPU a call
 * only enqueues on `stream` and may be captured once a call with as many tokens has come before;
 * scratch is kept by the experts object, and a logit that is not finite is the error of a later
 * call, or of sy_experts_check(). `stream` is a cudaStream_t, ignored on a CPU. */
SY_API sy_status sy_soft_moe_run(sy_experts experts, const sy_soft_moe_config* config,
                                 const sy_tensor* x, const sy_tensor* phi, const sy_tensor* y,
                                 const sy_tensor* dispatch, const sy_tensor* combine,
                                 sy_soft_moe_saved saved, void* stream);
/* From dy [T,H] of the run that has filled `saved`, which is used up, and its phi, to the
 * gradients: of `gradients` tokens, w13, w2, b13, b2 and accumulate (of all but tokens); dphi
 * [E*slots,H] f32, bf16 or f16, and *dscale, which is memory of the GPU for experts there. Any may
 * be NULL. */
SY_API sy_status sy_soft_moe_backward(sy_experts experts, sy_soft_moe_saved saved,
                                      const sy_tensor* phi, const sy_tensor* dy,
                                      const sy_gradients* gradients, const sy_tensor* dphi,
                                      float* dscale, void* stream);

/* ---- Ranks --------------------------------------------------------------------------------- */

typedef struct sy_communicator_t* sy_communicator;
/* Rank and world from the launcher's environment (mpirun, srun, torchrun; by hand: RANK,
 * WORLD_SIZE, MASTER_ADDR and MASTER_PORT, where processes of one host meet); a world of 1 without.
 */
SY_API sy_status sy_communicator_from_environment(sy_communicator* communicator);
/* Ranks as threads of this process: fills communicators[0..num_ranks). */
SY_API sy_status sy_communicator_threads(int32_t num_ranks, sy_communicator* communicators);
/* Names processes of one host that are about to meet: one makes it and gives it to the others. */
#define SY_UNIQUE_ID_BYTES 64
typedef struct sy_unique_id {
  char bytes[SY_UNIQUE_ID_BYTES];
} sy_unique_id;
SY_API sy_status sy_unique_id_make(sy_unique_id* id);
/* The same id for all ranks that name the same file: rank 0 makes it and writes the file, which may
 * not be that of a process that still runs; the others wait for it. SY_TIMEOUT after 60 s. */
SY_API sy_status sy_unique_id_by_file(const char* path, int32_t rank, sy_unique_id* id);
/* Collective over num_ranks processes of one host and one user, each with a rank of its own, over
 * shared memory; an id serves one meeting. SY_TIMEOUT where one does not come within 60 s. */
SY_API sy_status sy_communicator_create(int32_t rank, int32_t num_ranks, const sy_unique_id* id,
                                        sy_communicator* communicator);
SY_API void sy_communicator_free(sy_communicator communicator);
SY_API int32_t sy_communicator_rank(sy_communicator communicator);
SY_API int32_t sy_communicator_size(sy_communicator communicator);
SY_API sy_status sy_communicator_set_timeout(sy_communicator communicator, int64_t milliseconds);
/* Collective, after SY_TIMEOUT or SY_COMMUNICATION: afterwards the same objects work again. */
SY_API sy_status sy_communicator_recover(sy_communicator communicator);

/* ---- Dispatch and combine across ranks ----------------------------------------------------- */

/* switchyard::ExpertParallelConfig. Types are sy_dtype. Initialise with sy_ep_config_init(). */
typedef enum sy_dtype { SY_F32 = 0, SY_BF16 = 1, SY_F16 = 2, SY_FP8_E4M3 = 3 } sy_dtype;
/* Which assignments an expert keeps when more want it than it has capacity for:
 * switchyard::DropPolicy. */
typedef enum sy_drop_policy {
  SY_DROP_TOKEN = 0,
  SY_DROP_CHOICE = 1,
  SY_DROP_PROBS = 2,
  SY_DROP_BPR = 3,
  /* A token takes the best experts that have room left from the tokens before it, with their
   * weights: of layers on a CPU that route by top-k. */
  SY_DROP_REROUTE = 4
} sy_drop_policy;
/* How ranks on GPUs exchange: switchyard::ExchangeMode. */
typedef enum sy_exchange_mode {
  SY_MODE_AUTO = 0,
  SY_MODE_THROUGHPUT = 1,
  SY_MODE_LOW_LATENCY = 2
} sy_exchange_mode;
/* How GPUs of ranks reach each other's memory: switchyard::DeviceEngine. */
typedef enum sy_device_engine {
  SY_ENGINE_AUTO = 0,
  SY_ENGINE_PEER = 1,
  SY_ENGINE_NCCL = 2,
  SY_ENGINE_NCCL_PAIRS = 3
} sy_device_engine;
typedef struct sy_ep_config {
  size_t struct_size;
  int32_t num_experts;
  int32_t top_k;
  int64_t hidden;
  int64_t max_tokens;
  int32_t dtype;
  int32_t dispatch_wire; /* -1: as dtype */
  int32_t combine_wire;
  int32_t rank_invariant;
  int64_t max_recv_rows;  /* 0: R * max_tokens */
  double capacity_factor; /* 0: dropless; else slots per (source rank, expert) are factor*T*K/E */
  int32_t drop_policy;    /* sy_drop_policy */
  /* SY_DEVICE_CPU, SY_DEVICE_CUDA, or 0: where the tensors of the first dispatch lie, which then
   * makes what it needs (not while a stream is captured). */
  int32_t device_type;
  int32_t device_id;     /* CUDA: this rank's device; ranks may share one, for tests. */
  int32_t mode;          /* CUDA: sy_exchange_mode */
  int32_t ctas;          /* CUDA: thread blocks a direction; 0: the default */
  int32_t device_engine; /* CUDA: sy_device_engine; SY_ENGINE_NCCL_PAIRS: native calls only */
} sy_ep_config;

SY_API void sy_ep_config_init(sy_ep_config* config, size_t struct_size);
typedef struct sy_ep_t* sy_ep;
SY_API sy_status sy_ep_create(sy_communicator communicator, const sy_ep_config* config, sy_ep* ep);
SY_API void sy_ep_free(sy_ep ep);

/* What a rank received, and its plan: views that stay valid until the second following dispatch on
 * the CPU, until the next one on a GPU.
 *
 * On a GPU all pointers are device memory, the call only enqueues on its stream (and may be
 * captured in a graph), and counts stay on the device: num_rows and num_assignments are the most
 * there can be, *rows_received and expert_begin[El] what there is; entries of row_x behind them
 * name some row of x. Every dispatch is followed by its combine. What kernels find wrong is the
 * error of a later call, or of sy_ep_check(). Memory is aligned to 16 bytes, H a multiple of 8. */
typedef struct sy_received {
  size_t struct_size;           /* set by the caller */
  const void* x;                /* [N, H] */
  int64_t num_rows;             /* N */
  int64_t num_assignments;      /* S */
  int32_t num_local_experts;    /* El */
  const int32_t* expert_begin;  /* [El+1] */
  const int32_t* row_x;         /* [S] row of x of each assignment, sorted by expert */
  const float* row_weight;      /* [S] */
  int64_t dropped_rows;         /* CPU; on a GPU see rows_dropped */
  int32_t x_dtype;              /* sy_dtype of x: the wire's on a GPU */
  int64_t num_scales;           /* ceil(H/128) where x is SY_FP8_E4M3, else 0 */
  const float* scale;           /* [N, num_scales] */
  const int64_t* rows_received; /* GPU only: [1] */
  const int64_t* rows_dropped;  /* GPU only: [1] */
  uint64_t number;              /* of the dispatch on its ep, from 1 on */
} sy_received;
/* Collective. x [T,H], expert [T,K] i32 (-1 unused), weight [T,K] f32. */
SY_API sy_status sy_ep_dispatch(sy_ep ep, const sy_tensor* x, const sy_tensor* expert,
                                const sy_tensor* weight, sy_received* received, void* stream);
/* SY_INVALID_ARGUMENT where a later dispatch has, or may have, written over what it gave. */
SY_API sy_status sy_ep_check_received(sy_ep ep, const sy_received* received);
/* Collective. rows [S,H], the experts' outputs of the last dispatch, unweighted, in its order (f32,
 * bf16 or f16), on a GPU from expert_begin[El] to num_assignments of them; y [T,H]. */
SY_API sy_status sy_ep_combine(sy_ep ep, const sy_tensor* rows, const sy_tensor* y, void* stream);
/* After the stream has been waited for: what kernels on a GPU have found wrong. SY_TIMEOUT: a rank
 * did not come, sy_communicator_recover() helps; SY_INVALID_ARGUMENT: an expert id out of range, a
 * bucket too small. */
SY_API sy_status sy_ep_check(sy_ep ep);

/* The same exchange by the interfaces of the published all-to-all benchmark: a row per (token, k).
 * x and the rows of combine are of the configured dtype; what dispatch gives stays valid until the
 * next dispatch of its kind. In combine, weight [T,K] f32 takes the place of dispatch's, NULL keeps
 * it; y [T,H] = sum over k of weight * row, in fp32, rounded once. All are collective. */
typedef struct sy_flat {
  size_t struct_size;  /* set by the caller */
  const void* x;       /* [S, H] in the order source rank, token, k */
  int64_t num_rows;    /* S; on a GPU the most there can be */
  const int32_t* meta; /* [S, 2]: token * K + k at its source; global expert; -1, -1: no row */
  const int64_t* rows_received; /* GPU only: [1] rows that there are, the first ones */
} sy_flat;
SY_API sy_status sy_ep_dispatch_flat(sy_ep ep, const sy_tensor* x, const sy_tensor* expert,
                                     const sy_tensor* weight, sy_flat* flat, void* stream);
/* rows [S,H]; on a GPU as many as there are, or more. */
SY_API sy_status sy_ep_combine_flat(sy_ep ep, const sy_tensor* rows, const sy_tensor* weight,
                                    const sy_tensor* y, void* stream);
typedef struct sy_bucketed {
  size_t struct_size;               /* set by the caller */
  const int32_t* expert_num_tokens; /* [El] rows of each local expert */
  const void* expert_x;             /* [El, C, H]; rows from expert_num_tokens on are undefined */
  const int32_t* expert_meta;       /* [El, C, 5]: expert, source rank, token, k, 0; -1: no row */
  int32_t num_local_experts;        /* El */
  int64_t capacity;                 /* C */
} sy_bucketed;
/* capacity is the same on all ranks; 0: max_tokens * R. SY_INVALID_ARGUMENT where an expert gets
 * more, on a GPU by a later call. On a GPU max_tokens * K is at most 16384 for these, and the first
 * call, and one with another capacity, take memory. */
SY_API sy_status sy_ep_dispatch_bucketed(sy_ep ep, const sy_tensor* x, const sy_tensor* expert,
                                         const sy_tensor* weight, int64_t capacity,
                                         sy_bucketed* bucketed, void* stream);
/* rows [El,C,H]. */
SY_API sy_status sy_ep_combine_bucketed(sy_ep ep, const sy_tensor* rows, const sy_tensor* weight,
                                        const sy_tensor* y, void* stream);

/* ---- The layer ----------------------------------------------------------------------------- */

/* How experts compute with their weights: switchyard::WeightFormat. SY_WEIGHTS_EXACT dequantises
 * those of quantised checkpoints as they are read. On a CPU also SY_WEIGHTS_Q8, and there and on a
 * GPU of compute capability 8.0 or later SY_WEIGHTS_STORED (or the checkpoint's own format by
 * name): codes and scales are kept as they are stored; on a CPU the results have the bits of the
 * dequantised weights. */
typedef enum sy_weight_format {
  SY_WEIGHTS_EXACT = 0,
  SY_WEIGHTS_Q8 = 1,
  SY_WEIGHTS_E4M3 = 2,
  SY_WEIGHTS_MXFP4 = 3,
  SY_WEIGHTS_INT4 = 4,
  SY_WEIGHTS_NVFP4 = 5,
  SY_WEIGHTS_STORED = 6
} sy_weight_format;

/* Over which tokens balance losses take their shares, and of what: switchyard::LossScope and
 * BalanceShare. */
typedef enum sy_loss_scope {
  SY_LOSS_BATCH = 0,
  SY_LOSS_SEQUENCE = 1,
  SY_LOSS_GLOBAL = 2
} sy_loss_scope;
typedef enum sy_balance_share {
  SY_SHARE_ASSIGNMENTS = 0,
  SY_SHARE_TOKENS = 1,
  SY_SHARE_FIRST_CHOICE = 2
} sy_balance_share;

/* Auxiliary losses of a layer's router: coefficients, 0 for those that it has not (docs/metrics.md,
 * switchyard::LossConfig). Initialise with sy_loss_config_init(): none. */
typedef struct sy_loss_config {
  size_t struct_size;
  double balance;
  double z;
  double importance;
  double device;
  double communication;
  double entropy;
  int32_t scope;           /* sy_loss_scope of balance, device and communication */
  int32_t share;           /* sy_balance_share, likewise */
  int64_t sequence_length; /* tokens, for SY_LOSS_SEQUENCE; else 0 */
  int32_t devices;         /* groups of neighbouring experts; divide E */
  int32_t devices_per_token;
} sy_loss_config;

SY_API void sy_loss_config_init(sy_loss_config* config, size_t struct_size);

/* Memory of GPU `device_id` (-1: the thread's current one) in which a call of a layer leaves
 * nothing: rows on their way through experts, there and back. Layers that are given one share it,
 * whatever their shapes, so that a model's layers take the largest's once. Their calls take turns,
 * as those of one handle, and run on one stream or on streams that wait for each other. It grows
 * with the calls, which moves it: before graphs are captured give max_tokens, or make the largest
 * call of every layer. SY_UNSUPPORTED: a build without CUDA; SY_DEVICE: no such GPU. Layers keep
 * the memory of one that is freed. */
typedef struct sy_scratch_t* sy_scratch;
SY_API sy_status sy_scratch_create(int32_t device_id, sy_scratch* scratch);
SY_API void sy_scratch_free(sy_scratch scratch);

/* switchyard::LayerOptions. Initialise with sy_layer_options_init(). */
typedef struct sy_layer_options {
  size_t struct_size;
  int32_t device_type; /* SY_DEVICE_CPU or SY_DEVICE_CUDA */
  int32_t compute; /* sy_dtype; -1: as the weights are stored; SY_FP8_E4M3: LayerOptions::compute */
  int32_t layout;  /* sy_layout */
  int32_t alignment;      /* rows, for aligned */
  double capacity_factor; /* 0: dropless */
  int32_t drop_policy;    /* sy_drop_policy */
  int32_t combine_wire;   /* sy_dtype of partial sums between ranks */
  int32_t batch_invariant;
  int32_t rank_invariant;
  int64_t max_tokens;       /* needed when several ranks share the layer */
  int32_t num_threads;      /* of a CPU; 0: as many as the process's OpenMP runtime has, or 1 */
  int32_t device_id;        /* SY_DEVICE_CUDA: the layer's device; -1: the thread's current one */
  int32_t dispatch_wire;    /* sy_dtype of tokens on the way to the experts; -1: as compute */
  int32_t device_engine;    /* SY_DEVICE_CUDA: sy_device_engine between the ranks */
  int32_t weights;          /* sy_weight_format of the experts, shared ones included */
  int32_t leave_out_shared; /* of a checkpoint: 1: the layer has no shared experts */
  /* The router in the place of the checkpoint's, as sy_router_config.router; of arrays that is
   * where it is given. NULL or "": its own. */
  const char* router;
  /* Auxiliary losses: a forward that saves has their values, sy_saved_losses(), and
   * sy_layer_backward adds their gradient at the logits. NULL: none. */
  const sy_loss_config* losses;
  /* SY_DEVICE_CUDA: memory that other layers use too. NULL: the layer has its own.
   * SY_INVALID_ARGUMENT: it is of another GPU, or shared by layers of another communicator. */
  sy_scratch scratch;
} sy_layer_options;

SY_API void sy_layer_options_init(sy_layer_options* options, size_t struct_size);

typedef struct sy_layer_t* sy_layer;
/* communicator may be NULL: one rank; else it must outlive the layer. */
SY_API sy_status sy_layer_from_checkpoint(const char* path, int32_t layer_index,
                                          const sy_layer_options* options,
                                          sy_communicator communicator, sy_layer* layer);
/* gate [E,H] f32, bf16 or f16; router_bias and selection_bias [E] f32 or NULL; weights as
 * sy_experts_create, in host memory. The arrays may be freed afterwards. With router_in_place gate
 * and biases lie on the layer's device, are used there, outlive the layer, and what is written to
 * them counts from the next call on; on a GPU such a gate is f32 or of the layer's compute type.
 *
 * The S shared experts are given as one of width S*I, whose output is added to every token's:
 * shared_w13 [2*S*I,H] (gate rows, then up rows; [S*I,H] where the experts are not gated) and
 * shared_w2 [H,S*I] of the experts' type, or both NULL; shared_gate [H] f32: times
 * sigmoid(x . shared_gate), or NULL. */
typedef struct sy_layer_arrays {
  size_t struct_size; /* sizeof the struct; there is no init: zero the rest */
  const sy_router_config* router;
  const sy_expert_config* experts;
  const sy_tensor* gate;
  const sy_tensor* router_bias;
  const sy_tensor* selection_bias;
  const sy_tensor* w13;
  const sy_tensor* w2;
  const sy_tensor* b13;
  const sy_tensor* b2;
  int32_t router_in_place; /* 0: gate and biases lie in host memory and are copied */
  const sy_tensor* shared_w13;
  const sy_tensor* shared_w2;
  const sy_tensor* shared_gate;
  /* 1: the arrays of the experts, shared ones too, outlive the layer: sy_layer_reload_experts()
   * reads them again, and shared_gate is used where it lies on a CPU. A layer on a GPU, of one
   * rank, then takes such arrays there, all of them, of its compute type: they are used where they
   * lie, and what is written to them counts from the next call on. 0: all are copied. */
  int32_t experts_in_place;
  /* [E,H] as gate: what the size of the noise is made of, of the router noisy-top-k; else NULL. */
  const sy_tensor* noise_gate;
  /* [N] f32: the parameters of the router's network (network=cosine, mlp or hadamard of its
   * spelling), matrices behind each other as switchyard::RouterNetwork has them; else NULL. The
   * gate is then [E,D]: of cosine and mlp D is the network's width. */
  const sy_tensor* router_network;
  /* Z experts that return their input, the last ids of the router, whose num_experts is then that
   * of `experts` and Z: switchyard::ZeroComputationExperts::copy without a tau. */
  int32_t identity_experts;
  /* 1: a token's weight multiplies what its expert takes instead of what it gives:
   * switchyard::LayerConfig::weight_on_input. Of one expert a token. */
  int32_t weight_on_input;
  /* Experts that are stored as codes in host memory, with w13 and w2 of bytes: e4m3, w13 [E,2I,H],
   * with f32 scales w13_scales [E,2*ceil(I/128),ceil(H/128)] (gate's blocks of 128 x 128, then
   * up's) and w2_scales [E,ceil(H/128),ceil(I/128)]; MXFP4, w13 [E,2I,H/2] of two codes a byte, the
   * even column in the low half, w2 [E,H,I/2], with bytes of scales (e8m0) w13_scales [E,2I,H/32]
   * and w2_scales [E,H,I/32]. Both or neither. sy_layer_options.weights says whether they stay so.
   * Shared experts are then of any type of numbers. */
  const sy_tensor* w13_scales;
  const sy_tensor* w2_scales;
  /* f32 of the router moe++, as router_bias: [C,3,H] of its constant experts, the two rows of W and
   * v of each; with residual=yes [E,E], what logits of the layer before are multiplied by. Else
   * NULL. */
  const sy_tensor* constant_experts;
  const sy_tensor* gating_residual;
} sy_layer_arrays;
SY_API sy_status sy_layer_from_arrays(const sy_layer_arrays* arrays,
                                      const sy_layer_options* options, sy_communicator communicator,
                                      sy_layer* layer);
SY_API void sy_layer_free(sy_layer layer);
SY_API int64_t sy_layer_hidden(sy_layer layer);
SY_API int32_t sy_layer_top_k(sy_layer layer);
SY_API int32_t sy_layer_num_experts(sy_layer layer);
/* switchyard::update_selection_bias, after a step of the optimizer: bias [E] f32 in host memory, in
 * place, += rate * sign(mean - counts). counts [E] are assignments before any was dropped, and are
 * summed over the ranks of the communicator, collectively; NULL: one rank. centered: 1 keeps the
 * mean of the bias. */
SY_API sy_status sy_update_selection_bias(const int64_t* counts, const sy_tensor* bias, double rate,
                                          int32_t centered, sy_communicator communicator);
/* switchyard::update_thresholds, after a step of the optimizer: bias [E] f32 in host memory, in
 * place = momentum * bias - (1 - momentum) * the quantile that top_k of E tokens of logits [T,E]
 * are above. Ranks as above. */
SY_API sy_status sy_update_thresholds(const sy_tensor* logits, int32_t top_k, double momentum,
                                      const sy_tensor* bias, sy_communicator communicator);
/* tokens [T,H] -> out [T,H], each f32, bf16 or f16, without overlap. expert [T,K] i32 (-1 unused)
 * and weight [T,K] f32 skip the router, or are both NULL; an id that is no expert is
 * SY_INVALID_ARGUMENT, on a GPU by sy_layer_check(). Collective over the layer's ranks. */
SY_API sy_status sy_layer_forward(sy_layer layer, const sy_tensor* tokens, const sy_tensor* expert,
                                  const sy_tensor* weight, const sy_tensor* out, void* stream);
/* As sy_layer_forward, and fills `saved` for sy_layer_backward. Over ranks on GPUs the first call
 * with each `saved` makes memory, collectively. */
SY_API sy_status sy_layer_forward_saved(sy_layer layer, const sy_tensor* tokens,
                                        const sy_tensor* expert, const sy_tensor* weight,
                                        const sy_tensor* out, sy_saved saved, void* stream);
/* The layer's own routing with what it draws upon; `saved` is filled for sy_layer_backward, or
 * NULL. */
SY_API sy_status sy_layer_forward_with(sy_layer layer, const sy_tensor* tokens,
                                       const sy_route_request* request, const sy_tensor* out,
                                       sy_saved saved, void* stream);
/* From dout [T,H] f32, bf16 or f16 of the forward that has filled `saved`, which is used up, to the
 * gradients: switchyard::MoeLayer::backward. SY_INVALID_ARGUMENT: nothing was saved, it was used
 * already, it is another layer's, or the experts were reloaded or the ranks have recovered since.
 * Over ranks collective; w13, w2, b13 and b2 are of the experts that this rank holds. */
SY_API sy_status sy_layer_backward(sy_layer layer, sy_saved saved, const sy_tensor* dout,
                                   const sy_gradients* gradients, void* stream);
/* Reads the experts' weights again, of a checkpoint or from arrays with experts_in_place: after an
 * optimiser has changed them. Costs as much as making them. */
SY_API sy_status sy_layer_reload_experts(sy_layer layer);
/* Waits for the layer's last forward on a GPU and says what its kernels found wrong, once:
 * SY_INVALID_ARGUMENT (a NaN logit, an expert id out of range), SY_TIMEOUT. On a CPU a call's error
 * is its own, and this is SY_OK. */
SY_API sy_status sy_layer_check(sy_layer layer);
/* Statistics of a routing, before anything is dropped unless they say so: docs/metrics.md,
 * switchyard::metrics. NaN: there is none. */
typedef struct sy_routing_stats {
  size_t struct_size; /* set by the caller */
  double cv;
  double cv_floor; /* what uniform random routing has */
  double max_over_mean;
  double min_over_mean;
  double kl;
  double entropy; /* of the experts' shares, by ln E */
  double effective_experts;
  double gini;
  int64_t dead_experts;
  double rank_imbalance; /* of more than one rank */
  double entropy_router; /* of routers with logits */
  double entropy_weights;
  double entropy_marginal;
  double entropy_information;
  double dropped_assignments; /* with a capacity */
  double dropped_tokens;
  double dropped_mass;
  double padding_waste;      /* share of computed rows */
  int64_t* counts;           /* set by the caller: [E] of each expert, or NULL */
  double* dropped_by_choice; /* set by the caller: [K], or NULL */
} sy_routing_stats;
/* Of the layer's last forward, this rank's tokens; computed now, on a GPU after waiting as
 * sy_layer_check does. SY_INVALID_ARGUMENT: there was no forward, it failed, its routing was given,
 * or on a GPU it has saved. */
SY_API sy_status sy_layer_stats(sy_layer layer, sy_routing_stats* stats);
/* The weights of one expert of this rank, as sy_experts_read_expert gives them, on every device:
 * exact ones in the layer's compute type, others as they dequantise. */
SY_API sy_status sy_layer_read_expert(sy_layer layer, int32_t expert, const sy_tensor* w13,
                                      const sy_tensor* w2, const sy_tensor* b13,
                                      const sy_tensor* b2);

/* ---- PERFT: adapters beside a frozen layer -------------------------------------------------- */

/* switchyard::PerftKind, with its formulas. */
typedef enum sy_perft_kind {
  SY_PERFT_ROUTED = 0,
  SY_PERFT_EMBEDDED = 1,
  SY_PERFT_DENSE = 2,
  SY_PERFT_SHARED = 3
} sy_perft_kind;

/* switchyard::PerftConfig and PerftOptions; M, r and H are A's. Initialise with
 * sy_perft_config_init(). */
typedef struct sy_perft_config {
  size_t struct_size;
  int32_t kind;        /* sy_perft_kind */
  float alpha;         /* 32: an adapter counts alpha / r times */
  int32_t activation;  /* sy_activation without a gate; SY_IDENTITY */
  int32_t compute;     /* sy_dtype of the adapters' products; -1: that of A */
  int32_t num_threads; /* as in sy_layer_options; 1 */
  /* Routed: the rule over the M adapters, by logits of a gate alone. Embedded: the layer's, for the
   * columns of its routing. Else NULL. Read in the call it is given to, as losses. */
  const sy_router_config* router;
  const sy_loss_config* losses; /* of the router of routed ones, or NULL */
  int64_t max_tokens; /* most of a call; 0: memory grows. Given, calls on a GPU may be captured */
} sy_perft_config;
SY_API void sy_perft_config_init(sy_perft_config* config, size_t struct_size);

/* The adapters of one layer. A [M,r,H] and B [M,H,r] of one type, gate [E,H] of routed ones, else
 * NULL, all f32, bf16 or f16, in one place, where calls then run: they are used where they lie and
 * have to outlive the handle. A and B of host memory are read now and by sy_perft_reload(), those
 * of a GPU by every forward, the gate by every call. With a communicator every rank holds all
 * adapters: gradients of A, B and the gate are sums over the ranks, with the same bits on all.
 * SY_UNSUPPORTED on a GPU: rows of H numbers of the compute type that are no multiple of 16 bytes.
 */
typedef struct sy_perft_t* sy_perft;
SY_API sy_status sy_perft_create(const sy_perft_config* config, const sy_tensor* a,
                                 const sy_tensor* b, const sy_tensor* gate,
                                 sy_communicator communicator, sy_perft* perft);
SY_API void sy_perft_free(sy_perft perft);
/* tokens [T,H] as the layer gets them, base [T,H] the layer's output or NULL (zeros) -> out [T,H] =
 * base + what the adapters add, in fp32 and rounded once; f32, bf16 or f16 each. `out` may be
 * `base`, not tokens. Embedded: the layer's routing, expert [T,K] i32 with -1 where unused or
 * dropped and weight [T,K] f32; else NULL. request and saved may be NULL. On a GPU it only
 * enqueues, with all arrays there: what kernels find wrong is the error of a later call, or of
 * sy_perft_check(). */
SY_API sy_status sy_perft_forward(sy_perft perft, const sy_tensor* tokens, const sy_tensor* base,
                                  const sy_tensor* expert, const sy_tensor* weight,
                                  const sy_route_request* request, const sy_tensor* out,
                                  sy_saved saved, void* stream);
/* From dout [T,H] of the forward that has filled `saved`, which is used up, to the gradients: of
 * `gradients` tokens, weight (embedded), w13 of A, w2 of B (f32 or the compute type), gate
 * (routed), accumulate, loss_scale and loss_counts; the others are NULL. base [T,H]: the tokens'
 * gradient through the layer, added to that of tokens and perhaps the same memory, or NULL. Over
 * ranks collective; on a GPU it then waits, else it only enqueues. */
SY_API sy_status sy_perft_backward(sy_perft perft, sy_saved saved, const sy_tensor* dout,
                                   const sy_tensor* base, const sy_gradients* gradients,
                                   void* stream);
/* After a write to A or B in host memory. A forward that was saved before has no backward any more.
 */
SY_API sy_status sy_perft_reload(sy_perft perft);
/* As sy_layer_check(). */
SY_API sy_status sy_perft_check(sy_perft perft);
/* As sy_layer_stats(), of routed adapters. */
SY_API sy_status sy_perft_stats(sy_perft perft, sy_routing_stats* stats);

/* ---- Checkpoints --------------------------------------------------------------------------- */

/* A small checkpoint of a family with made-up weights (switchyard::make_checkpoint). */
typedef struct sy_checkpoint_recipe {
  size_t struct_size;
  const char* family; /* A name of docs/checkpoints.md, "mixtral". */
  int64_t hidden;
  int64_t inner;
  int32_t num_experts;
  int32_t top_k;
  int32_t shared_experts;
  int32_t groups;
  int32_t top_groups;
  int32_t num_layers;
  int32_t dtype; /* sy_dtype */
  uint64_t seed;
  int32_t shards;
} sy_checkpoint_recipe;

SY_API void sy_checkpoint_recipe_init(sy_checkpoint_recipe* recipe, size_t struct_size);
SY_API sy_status sy_make_checkpoint(const sy_checkpoint_recipe* recipe, const char* directory);

#ifdef __cplusplus
}
#endif

#endif /* SWITCHYARD_SWITCHYARD_H */
