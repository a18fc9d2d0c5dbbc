#!/usr/bin/env python3
"""Compare whole models with transformers: logits of every position, and greedy tokens.

Small random models of each family whose whole models are run are made from their configuration
classes, with what differs between families turned on, and saved by save_pretrained in f32, bf16 or
f16. transformers computes in f32 on the numbers as they were saved. Bounds: 1e-4 of the largest
logit, 16 greedy tokens the same.

  transformers_whole.py [--only NAME ...] [--tool SWITCHYARD] [--golden DIR] [--trained DIR ...]

--tool runs `switchyard generate` on each model. --golden writes what the tests of CI compare with
where there is no transformers. --trained goes the other way: transformers loads what `switchyard
train` wrote (a step-NNNNNN directory), which --tool then runs too. Needs transformers >= 5,
torch >= 2.4, and accelerate for MXFP4. Exit code 0: all hold.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import safetensors
import safetensors.torch
import torch
import transformers

import transformers_models as models

LOGITS_BOUND = 1e-4
NEW_TOKENS = 16
SIZES = {"num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7,
        "mscale_all_dim": 0.9, "original_max_position_embeddings": 16, "beta_fast": 4,
        "beta_slow": 1}
GPT_OSS_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False,
                "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}

# Name: (the model of transformers_models that it is one of, what differs, type it is saved in).
WHOLE = {
    "olmoe": ("olmoe", {"clip_qkv": 1.5, "attention_bias": True, "num_experts": 4,
                        "num_experts_per_tok": 2}, torch.float32),
    "qwen3_moe": ("qwen3_moe", {"num_local_experts": 4, "head_dim": 12,
                                "tie_word_embeddings": True}, torch.bfloat16),
    "qwen3_moe_windows": ("qwen3_moe", {"num_local_experts": 4, "use_sliding_window": True,
                                        "sliding_window": 5, "norm_topk_prob": False,
                                        "attention_bias": True,
                                        "rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                                            "rope_theta": 5000.0}},
                          torch.bfloat16),
    "mixtral": ("mixtral", FEW, torch.float16),
    "mixtral_windows": ("mixtral", FEW | {"sliding_window": 7, "head_dim": 6}, torch.bfloat16),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2,
                                "decoder_sparse_step": 2, "intermediate_size": 40,
                                "use_sliding_window": True, "sliding_window": 6,
                                "layer_types": ["full_attention", "sliding_attention"]},
                  torch.bfloat16),
    "gpt_oss": ("gpt_oss", FEW | {"sliding_window": 6, "rope_parameters": GPT_OSS_YARN},
                torch.bfloat16),
    "gpt_oss_mxfp4": ("gpt_oss", FEW | {"intermediate_size": 32, "sliding_window": 6,
                                        "rope_parameters": GPT_OSS_YARN}, torch.bfloat16),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK | {"rope_parameters": YARN, "attention_bias": True},
                    torch.bfloat16),
    "deepseek_v2_lite": ("deepseek_v2", DEEPSEEK | {"q_lora_rank": None, "v_head_dim": 24,
                                                    "topk_method": "greedy"}, torch.bfloat16),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK | {"rope_parameters": YARN}, torch.bfloat16),
}


def quantise(directory):
    """Experts of gpt-oss as they are released: MXFP4, of random codes, two a byte."""
    file = Path(directory) / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    generator = torch.Generator().manual_seed(9)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, cols, rows = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (experts, rows, cols // 32, 16),
                                                 generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(121, 126, (experts, rows, cols // 32),
                                                 generator=generator, dtype=torch.uint8)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((Path(directory) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (Path(directory) / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_whole(name, directory):
    """Makes the model, saves it in its type, and gives what transformers reads from there in f32."""
    base, differs, dtype = WHOLE[name]
    package, config_class, model_class, more = models.MODELS[base]
    models.MODELS["whole"] = (package, config_class, model_class, more | SIZES | differs)
    model = models.make_model("whole", seed=1)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "norm" in key and tensor.dim() == 1:
                tensor.normal_(1.0, 0.3)
            elif key.endswith("sinks"):
                tensor.normal_(0.0, 1.5)
    # In small shards, for the index. Read again: buffers stay as they are in the class.
    quantised = name.endswith("_mxfp4")
    model.to(dtype).save_pretrained(directory, max_shard_size="5GB" if quantised else "40KB")
    if quantised:
        quantise(directory)
    return type(model).from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def run_theirs(model, ids):
    """Logits [T, V] in f32, and tokens behind them, by whole forwards without a cache."""
    logits = model(input_ids=ids[None]).logits[0].float()
    tokens = ids.tolist()
    for _ in range(NEW_TOKENS):
        row = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(row.argmax()))
    return logits, tokens[len(ids):]


def run_ours(tool, directory, ids):
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/logits.npy"
        done = subprocess.run(
            [tool, "generate", "--model", str(directory), "--prompt-ids",
             ",".join(map(str, ids.tolist())), "--max-new-tokens", str(NEW_TOKENS),
             "--temperature", "0", "--ids", "--logits", file],
            capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
        return torch.from_numpy(numpy.load(file)), [int(t) for t in done.stdout.split()]


def compare(name, directory, model, ids, tool):
    theirs, tokens = run_theirs(model, ids)
    if tool is None:
        print(f"{name:24} {'':>9} logits up to {float(theirs.abs().max()):.3g}")
        return True
    try:
        logits, ours = run_ours(tool, directory, ids)
    except RuntimeError as error:
        print(f"{name:24} {error}")
        return False
    worst = float((logits - theirs).abs().max())
    largest = float(theirs.abs().max())
    same = sum(a == b for a, b in zip(ours, tokens))
    holds = worst <= LOGITS_BOUND * largest and same == NEW_TOKENS == len(ours)
    print(f"{name:24} {worst:9.1e} of {largest:7.3g} {same:3}/{NEW_TOKENS} tokens"
          f"{'' if holds else '  DOES NOT HOLD'}")
    return holds


def write_golden(name, model, ids, directory, golden):
    logits, tokens = run_theirs(model, ids)
    keep = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        keep |= safetensors.torch.load_file(file)
    into = Path(golden) / name
    into.mkdir(parents=True, exist_ok=True)
    (into / "config.json").write_text((Path(directory) / "config.json").read_text())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    more = {"golden.ids": ids.to(torch.int32), "golden.logits": logits.contiguous(),
            "golden.tokens": torch.tensor(tokens, dtype=torch.int32)}
    safetensors.torch.save_file(keep | more, into / "model.safetensors",
                                metadata={"format": "pt"} | versions)


def check_whole(name, tool, golden):
    ids = torch.randint(0, SIZES["vocab_size"], (24,), generator=torch.Generator().manual_seed(5))
    with tempfile.TemporaryDirectory() as directory:
        model = save_whole(name, directory)
        if golden is not None:
            write_golden(name, model, ids, directory, golden)
        return compare(name, directory, model, ids, tool)


def check_trained(directory, tool):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True)
    left = {key: sorted(value) for key, value in info.items() if value}
    if left:
        print(f"{directory}: not loaded as it is: {json.dumps(left, default=str)}")
        return False
    ids = torch.randint(0, model.config.vocab_size, (24,),
                        generator=torch.Generator().manual_seed(5))
    return compare("/".join(Path(directory).resolve().parts[-2:]), directory, model.eval(), ids, tool)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(WHOLE), default=list(WHOLE))
    parser.add_argument("--tool", metavar="SWITCHYARD")
    parser.add_argument("--golden", metavar="DIR")
    parser.add_argument("--trained", nargs="+", metavar="DIR", default=[])
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = [check_whole(name, args.tool, args.golden) for name in args.only]
    results += [check_trained(directory, args.tool) for directory in args.trained]
    print(f"{sum(results)} of {len(results)} hold; transformers {transformers.__version__}, torch "
          f"{torch.__version__}")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
