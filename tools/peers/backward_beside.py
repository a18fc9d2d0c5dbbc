#!/usr/bin/env python3
"""Times forward and backward of a MoE layer on a CPU beside torch's, in turns in one process.

"theirs" is the loop over the experts as models of torch have it: router, softmax, top-k, and for
each expert that is hit a gather, two products with SwiGLU between, and index_add. It takes the
experts apart once: with w13[e] in the loop a call of layer B takes 35 s on a Xeon (no line).
"ours" is a switchyard.Layer(trainable=True) on the same tensors; "step" the same with weights that
have changed since the last call, as behind an optimiser: it packs them again. Each call ends with
all gradients: of tokens, gate and weights. Lines of JSON on stdout (or added to --results) have the
median and the fastest sample of each, in microseconds a call, and what the bar B6 asks of "step".
The gradients of both are compared first.

    PYTHONPATH=python tools/peers/backward_beside.py --dtype f32,bf16 --threads 2
"""

import argparse
import sys

import torch
from beside import DTYPES, in_turns, line_of, tell

import switchyard as sw

LAYERS = {"A": (1024, 4096, 8, 2), "B": (2048, 1024, 64, 6), "C": (2048, 768, 128, 8)}  # H I E K
BAR = 1.5


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", default="A,B,C")
    parser.add_argument("--dtype", default="f32,bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=10, help="of each comparison")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--by", choices=["median", "min"], default="median")
    parser.add_argument("--results", help="file that lines are added to")
    return parser.parse_args()


class Loop(torch.nn.Module):
    """[T, H] by a loop over the experts that are hit."""

    def __init__(self, gate, w13, w2, top_k):
        super().__init__()
        self.gate, self.w13, self.w2, self.top_k = gate, w13, w2, top_k

    def forward(self, x):
        probability = torch.softmax(torch.nn.functional.linear(x, self.gate).float(), dim=-1)
        weight, expert = torch.topk(probability, self.top_k, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        # Not w13[e]: the gradient of each would be a tensor of all experts, added to the others.
        for e, (w13, w2) in enumerate(zip(self.w13.unbind(), self.w2.unbind())):
            token, k = torch.where(expert == e)
            if token.numel() == 0:
                continue
            gate, up = torch.nn.functional.linear(x[token], w13).chunk(2, dim=-1)
            y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2)
            out.index_add_(0, token, y * weight[token, k, None])
        return out


def make(layer, dtype, num_tokens):
    hidden, inner, experts, _ = LAYERS[layer]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    parameters = [draw(experts, hidden, scale=hidden ** -0.5),
                  draw(experts, 2 * inner, hidden, scale=hidden ** -0.5),
                  draw(experts, hidden, inner, scale=inner ** -0.5)]
    x, dout = draw(num_tokens, hidden), draw(num_tokens, hidden)
    return [p.requires_grad_() for p in parameters], x, dout


def compare(works, parameters, x):
    """Largest |ours - theirs| of a gradient, relative to its norm."""
    gradients = {}
    for way in ("theirs", "ours"):
        works[way]()
        gradients[way] = [p.grad.float().clone() for p in (*parameters, x)]
    return max(((a - b).norm() / b.norm()).item()
               for a, b in zip(gradients["ours"], gradients["theirs"]))


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    for name in args.dtype.split(","):
        for layer in args.layers.split(","):
            hidden, inner, experts, top_k = LAYERS[layer]
            parameters, x, dout = make(layer, DTYPES[name], args.tokens)
            x.requires_grad_()
            theirs = Loop(*parameters, top_k)
            ours = sw.Layer(*parameters, top_k, trainable=True, recompute=args.recompute,
                            num_threads=args.threads)

            def step(forward, changed=False):
                for p in (*parameters, x):
                    p.grad = None
                if changed:
                    with torch.no_grad():
                        for p in parameters:
                            p[:1, :1].mul_(1)
                forward(x).backward(dout)

            works = {"theirs": lambda: step(theirs), "ours": lambda: step(ours),
                     "step": lambda: step(ours, changed=True)}
            difference = compare(works, parameters, x)
            case = {"name": layer, "E": experts, "K": top_k, "H": hidden, "I": inner,
                    "T": args.tokens, "compute": name, "threads": args.threads,
                    "recompute": args.recompute}
            tell(args, line_of(args, "backward_beside", ("B6", "forward+backward", "step"), BAR,
                               in_turns(works, args.seconds), case,
                               relative_difference=difference))
    return 0


if __name__ == "__main__":
    sys.exit(main())
