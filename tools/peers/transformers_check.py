#!/usr/bin/env python3
"""Compare Switchyard's layer with transformers' own Mixture-of-Experts block, family by family.

Small random models are made from their configuration classes and saved by save_pretrained; then, of
every MoE block, through switchyard.Layer.from_checkpoint:

  block     f32: largest difference to transformers' block, relative to its largest output, <= 1e-5
  bf16      the same of ours, and of transformers' own bf16 block, to the block in f32 on the same
            bf16 weights: root mean squares, ours no larger than theirs
  logits    of the whole model in f32 with every block replaced, relative, <= 1e-4
  tokens    24 greedy ones, the same
  taken     blocks of the model, in f32 and in bf16, that ours replaced: all of them by --through
            patch; the adapter leaves those that it does not know as they are

  transformers_check.py [--only NAME ...] [--through patch|adapter] [--device cuda] [--golden DIR]
                        [--json FILE]

--golden writes what the tests of CI compare with where there is no transformers: a model's
configuration, its last MoE block, tokens and the block's output. Needs transformers >= 5 and torch
>= 2.4, and SWITCHYARD_LIBRARY and PYTHONPATH as the Python package. Exit code 0: all hold.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import transformers

import switchyard
import transformers_models as models

TOKENS = 33
BLOCK_BOUND = 1e-5
LOGITS_BOUND = 1e-4
# Another order of sums may cost ours this much of transformers' own error.
BF16_SLACK = 1.02


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def rms(x):
    return float(x.double().square().mean().sqrt())


def same_path(directory, model, dtype):
    """The saved model in another type, on the same device."""
    return type(model).from_pretrained(directory, dtype=dtype).eval().to(model.device)


def our_layer(directory, index, model):
    return switchyard.Layer.from_checkpoint(directory, layer=index, device=str(model.device))


def moe_layers(model):
    return [i for i, layer in enumerate(models.decoder_layers(model))
            if models.is_moe(models.block_of(layer)[1])]


def check_dense_layers(model, directory):
    """A layer that is dense in transformers is refused by that name."""
    moe = moe_layers(model)
    for index in range(len(models.decoder_layers(model))):
        if index in moe:
            continue
        try:
            switchyard.Layer.from_checkpoint(directory, layer=index)
        except switchyard.SwitchyardError as error:
            if "is dense" in str(error):
                continue
            raise
        raise AssertionError(f"layer {index} is dense in transformers, but was loaded")
    return moe


def tokens_for(model, dtype, seed):
    size = model.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, size, generator=generator).to(model.device, dtype)


@torch.no_grad()
def compare_blocks(model, directory, worst):
    for index in check_dense_layers(model, directory):
        x = tokens_for(model, torch.float32, index)
        theirs = models.run_block(models.decoder_layers(model)[index], x)
        ours = our_layer(directory, index, model)(x)
        worst["block"] = max(worst["block"], relative(ours, theirs))


@torch.no_grad()
def compare_module_names(model, worst):
    """As compare_blocks, of a checkpoint with the names and stacks of transformers' own modules."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, save_original_format=False)
        compare_blocks(model, directory, worst)


@torch.no_grad()
def compare_bf16(model, replace, worst):
    """Through the checkpoint, and the adapter's blocks where it is what replaces them."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        half = same_path(directory, model, torch.bfloat16)
        half.save_pretrained(directory)
        exact = same_path(directory, model, torch.float32)
        adapted = same_path(directory, model, torch.bfloat16)
        if replace is adapt:
            worst["taken bf16"] = f"{adapt(adapted, directory)}/{len(moe_layers(model))}"
        for index in moe_layers(model):
            x = tokens_for(model, torch.bfloat16, index)
            truth = models.run_block(models.decoder_layers(exact)[index], x.float())
            theirs = models.run_block(models.decoder_layers(half)[index], x).float()
            ours = [our_layer(directory, index, model)(x)]
            if replace is adapt:
                ours.append(models.run_block(models.decoder_layers(adapted)[index], x))
            for out in ours:
                worst["bf16"] = max(worst["bf16"], rms(out.float() - truth) / rms(truth))
            worst["bf16 theirs"] = max(worst["bf16 theirs"], rms(theirs - truth) / rms(truth))


class Replaced(torch.nn.Module):
    """A block's place in the model, taken by our layer."""

    def __init__(self, layer, returns_tuple):
        super().__init__()
        self.layer = layer
        self.returns_tuple = returns_tuple

    def forward(self, x, *_, **__):
        y = self.layer(x.reshape(-1, x.shape[-1]).contiguous()).reshape(x.shape)
        return (y, None) if self.returns_tuple else y


class Nothing(torch.nn.Module):
    """In place of what our layer has within."""

    def forward(self, x):
        return torch.zeros_like(x)


@torch.no_grad()
def patch(model, directory):
    """Replace every MoE block by hand; their number."""
    layers = list(moe_layers(model))
    for index in layers:
        layer = models.decoder_layers(model)[index]
        name, block = models.block_of(layer)
        probe = block(torch.zeros(1, 1, model.config.get_text_config().hidden_size,
                                  device=model.device))
        ours = our_layer(directory, index, model)
        setattr(layer, name, Replaced(ours, isinstance(probe, tuple)))
        if getattr(layer, "shared_mlp", None) is not None:
            layer.shared_mlp = Nothing()
    return len(layers)


def adapt(model, directory):
    """Replace MoE blocks by the package's own adapter; the number of those that it took."""
    del directory
    from switchyard.transformers import accelerate
    return len(accelerate(model).replaced)


@torch.no_grad()
def compare_model(model, directory, replace, worst):
    ids = torch.randint(1, models.COMMON["vocab_size"], (1, 17),
                        generator=torch.Generator().manual_seed(3)).to(model.device)
    more = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    logits = model(input_ids=ids).logits
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
    replaced = same_path(directory, model, torch.float32)
    worst["taken"] = f"{replace(replaced, directory)}/{len(moe_layers(model))}"
    worst["logits"] = relative(replaced(input_ids=ids).logits, logits)
    ours = replaced.generate(ids, attention_mask=torch.ones_like(ids), **more)
    worst["tokens"] = int((ours == tokens).sum()) - ids.shape[1]


@torch.no_grad()
def write_golden(name, model, directory, golden):
    """The last MoE block alone, in f32, with tokens and what transformers makes of them."""
    index = moe_layers(model)[-1]
    x = tokens_for(model, torch.float32, 7)[:7]
    y = models.run_block(models.decoder_layers(model)[index], x)
    prefix = f".{index}."
    keep = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as tensors:
            for key in tensors.keys():
                if prefix in key and not any(w in key for w in ("attn", "attention.", "norm", "conv",
                                                                 "visual", "vision", ".mlps.")):
                    keep[key] = tensors.get_tensor(key)
    # Beside the experts' names: where a nested model's tensors are is told by the embedding.
    if "text" in models.MODELS[name][3]:
        keep |= {key: value for key, value in embeddings(directory).items()}
    into = Path(golden) / name
    into.mkdir(parents=True, exist_ok=True)
    (into / "config.json").write_text((Path(directory) / "config.json").read_text())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    safetensors.torch.save_file(
        keep | {"golden.tokens": x, f"golden.layer.{index}": y.contiguous()},
        into / "model.safetensors", metadata={"format": "pt"} | versions)


def embeddings(directory):
    found = {}
    for file in Path(directory).glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in tensors.keys()
                      if key.endswith("embed_tokens.weight")}
    return found


def check(name, replace, golden, device):
    worst = {"block": 0.0, "bf16": 0.0, "bf16 theirs": 0.0, "logits": 0.0, "tokens": 0,
             "taken": "", "taken bf16": ""}
    model = models.make_model(name).to(device)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        if golden is not None:
            write_golden(name, model, directory, golden)
        compare_blocks(model, directory, worst)
        compare_model(model, directory, replace, worst)
    compare_module_names(model, worst)
    compare_bf16(model, replace, worst)
    worst["holds"] = (worst["block"] <= BLOCK_BOUND and worst["logits"] <= LOGITS_BOUND and
                      worst["tokens"] == 24 and
                      worst["bf16"] <= BF16_SLACK * worst["bf16 theirs"])
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=models.MODELS, default=list(models.MODELS))
    parser.add_argument("--through", choices=("patch", "adapter"), default="patch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--golden", metavar="DIR")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    replace = {"patch": patch, "adapter": adapt}[args.through]
    results = {}
    print(f"{'model':18} {'block f32':>10} {'bf16':>8} {'theirs':>8} {'logits':>8} tokens taken")
    for name in args.only:
        try:
            result = check(name, replace, args.golden, args.device)
        except (switchyard.SwitchyardError, AssertionError) as error:
            result = {"holds": False, "error": str(error)}
            print(f"{name:18} {error}")
        else:
            print(f"{name:18} {result['block']:10.1e} {result['bf16']:8.1e} "
                  f"{result['bf16 theirs']:8.1e} {result['logits']:8.1e} {result['tokens']:4}"
                  f"/24 {result['taken']:>5} {result['taken bf16']:>5}"
                  f"{'' if result['holds'] else '  DOES NOT HOLD'}")
        results[name] = result
    versions = {"transformers": transformers.__version__, "torch": torch.__version__,
                "through": args.through, "device": args.device}
    failed = [name for name, result in results.items() if not result["holds"]]
    print(f"{len(results) - len(failed)} of {len(results)} hold; transformers "
          f"{transformers.__version__}, torch {torch.__version__}, through {args.through} on {args.device}")
    if args.json:
        Path(args.json).write_text(json.dumps(versions | {"models": results}, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
