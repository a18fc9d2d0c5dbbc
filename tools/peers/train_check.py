#!/usr/bin/env python3
"""Trains models of transformers with Switchyard's layers in the place of blocks, against themselves.

OLMoE and Mixtral of small random configurations, in f32, on a CPU or by --device cuda: the gradient of every parameter
within 1e-5 of autograd's, relative to its norm, and the losses of 20 steps of AdamW within 1e-5. Prints
versions and figures as a line of JSON a model; exits with 1 where one misses. --golden writes what the
blocks by themselves give, which tests/python/test_training.py holds without transformers.

    PYTHONPATH=python tools/peers/train_check.py --golden tests/data/training_golden.npz
"""

import argparse
import copy
import json
import sys

import numpy
import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM

import switchyard as sw

TOLERANCE = 1e-5
STEPS = 20
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS = {
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False)),
    "olmoe-renormalised": lambda: OlmoeForCausalLM(OlmoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2)),
}

GOLDEN = ("olmoe", "mixtral")


class Block(torch.nn.Module):
    """A block's parameters under their names, and our layer on them."""

    def __init__(self, block):
        super().__init__()
        self.gate, self.experts = block.gate, block.experts
        self.layer = sw.Layer(block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj,
                              top_k=block.gate.top_k, trainable=True, device=block.gate.weight.device,
                              renormalize=getattr(block.gate, "norm_topk_prob", True))

    def forward(self, hidden_states):
        return self.layer(hidden_states)


def made_up(name, device="cpu"):
    """A model with random weights, those of its blocks large enough to matter."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for block in blocks(model):
            for parameter in block.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(device)


def blocks(model):
    return [layer.mlp for layer in model.model.layers]


def with_ours(model):
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.mlp = Block(layer.mlp)
    return model


def loss_of(model):
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(model.device)
    return model(input_ids=tokens, labels=tokens).loss


def gradients(model):
    model.zero_grad()
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def losses(make_loss, parameters):
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    found = []
    for _ in range(STEPS):
        loss = make_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def check(name, device):
    """Figures of one model."""
    theirs = made_up(name, device)
    ours = with_ours(theirs)
    want, got = gradients(theirs), gradients(ours)
    assert want.keys() == got.keys() and all(g is not None for g in got.values())
    worst, worst_name = max((float((got[key] - want[key]).norm() / want[key].norm()), key)
                            for key in want)
    runs = [losses(lambda m=model: loss_of(m), model.parameters()) for model in (theirs, ours)]
    apart = max(abs(a - b) / a for a, b in zip(*runs))
    return {"model": name, "parameters": len(want), "worst_gradient": worst, "of": worst_name,
            "steps": STEPS, "first_loss": runs[0][0], "last_loss": runs[0][-1],
            "losses_apart": apart, "holds": worst <= TOLERANCE and apart <= TOLERANCE}


def golden(name):
    """What a block of transformers by itself gives: its output, its gradients, and losses."""
    block = blocks(made_up(name))[0]
    named = {"gate": block.gate.weight, "w13": block.experts.gate_up_proj,
             "w2": block.experts.down_proj}
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 12, SIZES["hidden_size"], generator=g)
    target = torch.randn(x.shape, generator=g)
    arrays = {"x": x.numpy(), "target": target.numpy(), "top_k": numpy.int64(block.gate.top_k),
              "renormalize": numpy.int64(getattr(block.gate, "norm_topk_prob", True)),
              **{key: parameter.detach().numpy().copy() for key, parameter in named.items()}}
    leaf = x.clone().requires_grad_()
    y = block(leaf)
    (y - target).square().mean().backward()
    arrays.update(y=y.detach().numpy(), d_x=leaf.grad.numpy(),
                  **{"d_" + key: parameter.grad.numpy().copy() for key, parameter in named.items()})
    arrays["losses"] = numpy.array(losses(lambda: (block(x) - target).square().mean(),
                                          block.parameters()))
    return {f"{name}.{key}": value for key, value in arrays.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--golden", metavar="FILE", help="write the golden values of the blocks")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    options = parser.parse_args()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__,
                "threads": torch.get_num_threads(), "device": options.device}
    results = [check(name, options.device) for name in MODELS]
    for result in results:
        print(json.dumps({**versions, **result}))
    if options.golden:
        arrays = {key: value for name in GOLDEN for key, value in golden(name).items()}
        numpy.savez_compressed(options.golden, versions=json.dumps(versions), **arrays)
    return 0 if all(result["holds"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
