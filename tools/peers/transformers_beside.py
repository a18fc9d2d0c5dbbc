#!/usr/bin/env python3
"""Times a MoE block and a whole model of transformers on a CPU beside ours, in turns in one process.

The model is OLMoE's of a few layers with random weights. Its blocks run as transformers runs them
by default ("theirs"), with a switchyard.Layer in their place ("layer"), and with their router and
switchyard.Experts ("experts"). A sample is a burst of calls of one of the three, then of the next;
lines of JSON on stdout (or added to --results) have the median and the fastest sample of each, in
microseconds a call, and what the bars A1 and A2 ask. On a machine that others use too, --by min
compares the fastest samples.

    PYTHONPATH=python tools/peers/transformers_beside.py --dtype f32,bf16 --threads 1,2
"""

import argparse
import sys

import torch
import transformers
from beside import DTYPES, in_turns, line_of, tell
from transformers import DynamicCache, OlmoeConfig, OlmoeForCausalLM

import switchyard as sw

PROGRAM = "transformers_beside"
VERSIONS = {"transformers": transformers.__version__}
BLOCK_BAR = 1.3  # A1; other numbers of tokens: never slower
BLOCK_TOKENS = (1, 8, 512)
DECODE_BAR, PREFILL_BAR = 1.25, 1.3  # A2


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    numbers = lambda text: [int(word) for word in text.split(",")]
    parser.add_argument("--dtype", default="f32,bf16")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--tokens", type=numbers, default=[1, 2, 8, 32, 128, 512])
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=8, help="tokens of a sample")
    parser.add_argument("--stage", default="block,decode,prefill")
    parser.add_argument("--seconds", type=float, default=6, help="of each comparison")
    parser.add_argument("--by", choices=["median", "min"], default="median")
    parser.add_argument("--implementation", help="transformers' experts_implementation")
    parser.add_argument("--results", help="file that lines are added to")
    for name, size in (("layers", 4), ("hidden", 1024), ("inner", 512), ("experts", 64), ("k", 8),
                       ("heads", 16)):
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args()


def make_model(args, dtype):
    torch.manual_seed(0)
    config = OlmoeConfig(
        hidden_size=args.hidden, intermediate_size=args.inner, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_experts=args.experts, num_experts_per_tok=args.k,
        initializer_range=0.02)
    if args.implementation:
        config._experts_implementation = args.implementation
    return OlmoeForCausalLM(config).to(dtype).eval()


class Blocks:
    """The blocks of a model, each with its three ways to run."""

    def __init__(self, model, threads):
        self.ways = {}
        self.blocks = [layer.mlp for layer in model.model.layers]
        for block in self.blocks:
            self.ways[block] = {"theirs": type(block).forward.__get__(block),
                                "layer": self.with_layer(block, threads),
                                "experts": self.with_experts(block, threads)}

    @staticmethod
    def with_layer(block, threads):
        experts = block.experts
        layer = sw.Layer(block.gate.weight.detach(), experts.gate_up_proj.detach(),
                         experts.down_proj.detach(), block.gate.top_k,
                         renormalize=block.gate.norm_topk_prob, num_threads=threads)
        return lambda x: layer(x.view(-1, x.shape[-1])).view(x.shape)

    @staticmethod
    def with_experts(block, threads):
        ours = sw.Experts(block.experts.gate_up_proj.detach(), block.experts.down_proj.detach(),
                          num_threads=threads)

        def forward(x):
            tokens = x.view(-1, x.shape[-1])
            _, weight, expert = block.gate(tokens)
            return ours(tokens, expert.int(), weight.float()).view(x.shape)

        return forward

    def use(self, way):
        for block in self.blocks:
            block.forward = self.ways[block][way]


def time_block(blocks, args, num_tokens, dtype):
    block = blocks.blocks[0]
    x = torch.randn(1, num_tokens, args.hidden).to(dtype)
    works = {way: lambda forward=forward: forward(x)
             for way, forward in blocks.ways[block].items()}
    outs = {way: work().float() for way, work in works.items()}
    errors = {way: ((outs[way] - outs["theirs"]).norm() / outs["theirs"].norm()).item()
              for way in works if way != "theirs"}
    return in_turns(works, args.seconds), errors


def time_model(model, blocks, args, prompt, num_decoded):
    """A forward pass of `prompt` tokens, or as many steps of one token behind them."""
    ids = torch.randint(0, model.config.vocab_size, (1, prompt),
                        generator=torch.Generator().manual_seed(1))

    def prefill(way):
        blocks.use(way)
        return model(ids, use_cache=False, logits_to_keep=1)

    if num_decoded == 0:
        return in_turns({way: lambda way=way: prefill(way) for way in ("theirs", "layer",
                                                                       "experts")}, args.seconds)
    blocks.use("theirs")
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    token = ids[:, -1:]

    def decode(way):
        blocks.use(way)
        for _ in range(num_decoded):
            model(token, past_key_values=cache, use_cache=True)
        cache.crop(-num_decoded)

    samples = in_turns({way: lambda way=way: decode(way)
                        for way in ("theirs", "layer", "experts")}, args.seconds)
    return {way: [one / num_decoded for one in all_] for way, all_ in samples.items()}


def main():
    args = parse()
    stages = args.stage.split(",")
    for name in args.dtype.split(","):
        model = make_model(args, DTYPES[name])
        for threads in args.threads:
            torch.set_num_threads(threads)
            blocks = Blocks(model, threads)
            case = {"name": "olmoe", "E": args.experts, "K": args.k, "H": args.hidden,
                    "I": args.inner, "layers": args.layers, "compute": name, "threads": threads}
            if "block" in stages:
                for num_tokens in args.tokens:
                    samples, errors = time_block(blocks, args, num_tokens, DTYPES[name])
                    target = BLOCK_BAR if num_tokens in BLOCK_TOKENS else 1.0
                    tell(args, line_of(args, PROGRAM, ("A1", "block", "layer"), target, samples,
                                       case | {"T": num_tokens}, versions=VERSIONS,
                                       relative_difference=errors))
            if "decode" in stages:
                samples = time_model(model, blocks, args, 32, args.decode)
                tell(args, line_of(args, PROGRAM, ("A2", "decode", "layer"), DECODE_BAR, samples,
                                   case | {"T": 1}, versions=VERSIONS))
            if "prefill" in stages:
                samples = time_model(model, blocks, args, args.prefill, 0)
                tell(args, line_of(args, PROGRAM, ("A2", "prefill", "layer"), PREFILL_BAR,
                                   samples, case | {"T": args.prefill}, versions=VERSIONS))
            blocks.use("theirs")
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
