"""Small random models of transformers, one of every family that Switchyard reads.

A model is given by the name of its configuration's class and what differs from its defaults; the
weights are drawn so that routers decide, and activations leave their linear part.
"""

import importlib

import torch

COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
          "bos_token_id": None, "eos_token_id": None}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
          "qk_nope_head_dim": 8, "num_key_value_heads": 4}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "head_dim": 8,
          "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}
OWN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
            "intermediate_size": 40, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 1.5}
GATED_SHARED = {"shared_expert_intermediate_size": 24}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
          "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16}
NO = None  # takes a common value away

# Name: (package, configuration class, model class, what differs). "text": within text_config.
MODELS = {
    "mixtral": ("mixtral", "MixtralConfig", "MixtralForCausalLM", LOCAL),
    "minimax": ("minimax", "MiniMaxConfig", "MiniMaxForCausalLM", LOCAL | {"head_dim": 8}),
    "minimax_m2": ("minimax_m2", "MiniMaxM2Config", "MiniMaxM2ForCausalLM",
                   LOCAL | {"head_dim": 8}),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", OWN | GATED_SHARED),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                  OWN | {"norm_topk_prob": True, "head_dim": 8, "mlp_only_layers": [1],
                         "intermediate_size": 40}),
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM",
                   OWN | GATED_SHARED | LINEAR),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM",
                         OWN | GATED_SHARED | LINEAR),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration",
                    {"text": OWN | GATED_SHARED | LINEAR, "vision_config": VISION}),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration",
                     {"text": OWN | {"moe_intermediate_size": 24, "head_dim": 8,
                                     "rope_parameters": {"rope_type": "default",
                                                         "rope_theta": 10000.0,
                                                         "mrope_section": [2, 1, 1]}},
                      "vision_config": VISION | {"deepstack_visual_indexes": [0]}}),
    "olmoe": ("olmoe", "OlmoeConfig", "OlmoeForCausalLM",
              {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16}),
    "flex_olmo": ("flex_olmo", "FlexOlmoConfig", "FlexOlmoForCausalLM",
                  {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16}),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM",
                    DEEPSEEK | LATENT | {"topk_method": "group_limited_greedy",
                                         "first_k_dense_replace": 1}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM",
                    DEEPSEEK | LATENT | {"first_k_dense_replace": 1}),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM",
                     DEEPSEEK | LATENT | {"first_k_dense_replace": 1}),
    "glm4_moe": ("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM",
                 DEEPSEEK | {"head_dim": 8, "first_k_dense_replace": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM",
                      DEEPSEEK | LATENT),
    "dots1": ("dots1", "Dots1Config", "Dots1ForCausalLM",
              DEEPSEEK | {"head_dim": 8, "first_k_dense_replace": 1}),
    "solar_open": ("solar_open", "SolarOpenConfig", "SolarOpenForCausalLM",
                   DEEPSEEK | {"head_dim": 8}),
    "mimo_v2_flash": ("mimo_v2_flash", "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM",
                      DEEPSEEK | {"head_dim": 8, "v_head_dim": 8, "n_shared_experts": NO}),
    "gpt_oss": ("gpt_oss", "GptOssConfig", "GptOssForCausalLM",
                LOCAL | {"head_dim": 8, "swiglu_alpha": 1.3, "swiglu_limit": 1.5}),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM",
                     {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16,
                      "intermediate_size": 40}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM",
                       {"num_experts": 8, "moe_topk": 3, "intermediate_size": 16, "head_dim": 8}),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeForCausalLM",
                 OWN | {"num_dense_layers": 1, "intermediate_size": 40,
                        "layer_types": ["conv", "full_attention", "conv"]}),
    "afmoe": ("afmoe", "AfmoeConfig", "AfmoeForCausalLM",
              OWN | {"num_dense_layers": 1, "head_dim": 8, "route_scale": 1.5,
                     "intermediate_size": 40}),
    "granitemoe": ("granitemoe", "GraniteMoeConfig", "GraniteMoeForCausalLM", LOCAL),
    "granitemoeshared": ("granitemoeshared", "GraniteMoeSharedConfig",
                         "GraniteMoeSharedForCausalLM", LOCAL | {"shared_intermediate_size": 24}),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridConfig",
                         "GraniteMoeHybridForCausalLM",
                         LOCAL | {"shared_intermediate_size": 24, "mamba_n_heads": 4,
                                  "mamba_d_head": 16, "layer_types": ["attention"] * 3}),
    "phimoe": ("phimoe", "PhimoeConfig", "PhimoeForCausalLM", LOCAL),
    "llama4_text": ("llama4", "Llama4TextConfig", "Llama4ForCausalLM",
                    {"num_local_experts": 8, "intermediate_size": 16, "intermediate_size_mlp": 40,
                     "head_dim": 8, "moe_layers": [1, 2]}),
    "llama4": ("llama4", "Llama4Config", "Llama4ForConditionalGeneration",
               {"text": {"num_local_experts": 8, "intermediate_size": 16, "head_dim": 8,
                         "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2},
                "vision_config": {"hidden_size": 16, "num_hidden_layers": 1,
                                  "num_attention_heads": 2, "intermediate_size": 64,
                                  "vision_output_dim": 16, "image_size": 28, "patch_size": 14,
                                  "projector_input_dim": 16, "projector_output_dim": 16}}),
    "longcat_flash": ("longcat_flash", "LongcatFlashConfig", "LongcatFlashForCausalLM",
                      LATENT | {"num_layers": 3, "num_hidden_layers": 6, "moe_topk": 3,
                                "n_routed_experts": 8, "zero_expert_num": 4, "head_dim": 8,
                                "expert_ffn_hidden_size": 16, "ffn_hidden_size": 40,
                                "routed_scaling_factor": 1.5}),
    "jetmoe": ("jetmoe", "JetMoeConfig", "JetMoeForCausalLM",
               LOCAL | {"kv_channels": 8, "num_attention_heads": NO}),
    "dbrx": ("dbrx", "DbrxConfig", "DbrxForCausalLM",
             {"d_model": 32, "n_heads": 4, "n_layers": 3, "hidden_size": NO,
              "num_hidden_layers": NO, "num_attention_heads": NO, "num_key_value_heads": NO,
              "max_position_embeddings": NO, "max_seq_len": 128,
              "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 3},
              "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}}),
}


def make_config(name):
    """The configuration of a small model of that name."""
    package, config_class, _, differs = MODELS[name]
    config_class = getattr(importlib.import_module(f"transformers.models.{package}"), config_class)
    if "text" in differs:
        rest = {key: value for key, value in differs.items() if key != "text"}
        return config_class(text_config=COMMON | differs["text"], **rest)
    values = COMMON | differs
    if name == "gpt_oss" and not hasattr(config_class(), "swiglu_alpha"):
        # transformers 5.17 computes with 1.702 and 7 whatever the configuration says.
        values = {key: value for key, value in values.items() if not key.startswith("swiglu")}
    return config_class(**{key: value for key, value in values.items()
                           if value is not NO or key.endswith(("token_id", "q_lora_rank"))})


def model_class(name):
    return getattr(importlib.import_module(f"transformers.models.{MODELS[name][0]}"),
                   MODELS[name][2])


def make_model(name, seed=0):
    """A model of that name with random weights, f32."""
    torch.manual_seed(seed)
    model = model_class(name)(make_config(name)).eval()
    with torch.no_grad():
        for key, tensor in list(model.named_parameters()) + list(model.named_buffers()):
            if not tensor.is_floating_point() or "inv_freq" in key or "conv" in key:
                continue
            if key.endswith("bias") and "norm" not in key:
                tensor.normal_(0.0, 0.2)  # selection biases, biases of experts
            elif tensor.dim() == 2 and "embed" in key:
                tensor.normal_(0.0, 1.0)
            elif tensor.dim() >= 2:
                tensor.normal_(0.0, 1.5 / tensor.shape[-1] ** 0.5)
    return model


def decoder_layers(model):
    """The list of the text model's layers."""
    text = model.language_model if hasattr(model, "language_model") else model
    inner = getattr(text, "model", None) or text.transformer
    inner = getattr(inner, "language_model", inner)
    return getattr(inner, "layers", None) or inner.blocks


def block_of(layer):
    """(name, module) of a layer's feed-forward network."""
    for name in "block_sparse_moe", "mlp", "feed_forward", "ffn":
        if hasattr(layer, name):
            return name, getattr(layer, name)
    raise ValueError(f"{type(layer).__name__} has no feed-forward network of a known name")


def is_moe(block):
    return hasattr(block, "experts") or hasattr(block, "input_linear")


def run_block(layer, x):
    """What the layer's block makes of tokens [T, H], shared experts included."""
    _, block = block_of(layer)
    out = block(x[None])
    out = out[0] if isinstance(out, tuple) else out
    out = out.reshape(x.shape)
    shared = getattr(layer, "shared_mlp", None)
    return out if shared is None else out + shared(x)
