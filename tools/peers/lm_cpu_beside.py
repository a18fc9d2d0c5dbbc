#!/usr/bin/env python3
"""Times steps of training a small language model on a CPU in PyTorch and in this library, in turns.

The model is the preset cpu-10min (docs/models.md): the one of lm_beside.py, with the experts as
models of torch on a CPU have them, a loop with a gather, two products with SwiGLU between, and
index_add for each expert that is hit; forward, backward, clipping and fused AdamW. Of --compute
bf16 products are autocast. "ours" is `switchyard train`, a process of its own a turn, which draws
its batches, logs and measures its peak itself. Both learn the same text, bytes for tokens.

Two lines of JSON on stdout (or added to --results): M7 is how many times as fast ours is by the
medians of all steps, asked 3; "M7 roof" the useful operations of ours by the arithmetic peak,
asked 0.5. On a machine that does other things too they mean nothing.

    tools/peers/lm_cpu_beside.py --ours build/release/switchyard --threads 2
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from beside import commit, cpu_name
from lm_beside import BALANCE, CLIP, Layer, Model, Sizes, Z, swiglu

NAME, SIZES = "cpu-10min", Sizes(4, 192, 6, 256, 8, 2, 384, 256, 16)
RATE = 2e-3
RATIO, ROOF = 3.0, 0.5


class LoopLayer(Layer):
    def moe(self, x):
        experts, top_k = self.sizes.experts, self.sizes.top_k
        with torch.autocast("cpu", enabled=False):  # the router in f32
            logits = F.linear(x.float(), self.gate)
            scores = logits.softmax(-1)
            weight, expert = scores.topk(top_k, dim=-1)
            weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
            share = expert.flatten().bincount(minlength=experts).float() / x.shape[0]
            loss = (BALANCE * experts / top_k * (share * scores.mean(0)).sum()
                    + Z * logits.logsumexp(-1).square().mean())
        out = torch.zeros_like(x)
        # Not w13[e]: the gradient of each would be a tensor of all experts, added to the others.
        for e, (w13, w2) in enumerate(zip(self.w13.unbind(), self.w2.unbind())):
            token, choice = torch.where(expert == e)
            if token.numel() == 0:
                continue
            y = F.linear(swiglu(F.linear(x[token], w13)), w2)
            out.index_add_(0, token, (y * weight[token, choice, None]).to(out.dtype))
        return out, loss


class Theirs:
    def __init__(self, text, compute):
        torch.manual_seed(1)
        self.bf16 = compute == "bf16"
        self.model = Model(SIZES, LoopLayer, torch.bfloat16 if self.bf16 else torch.float32)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE, betas=(0.9, 0.95),
                                           weight_decay=0.1, fused=True)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.losses = []

    def step(self):
        first = torch.randint(len(self.text) - SIZES.sequence, (SIZES.sequences, 1))
        window = self.text[first + torch.arange(SIZES.sequence + 1)]
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            loss = self.model(window[:, :-1], window[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self.optimizer.step()
        self.losses.append(loss.item())

    def times_us(self, count):
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.step()
            times.append(1e6 * (time.perf_counter() - begin))
        return times


def ours(args, text, steps):
    """The line that a run of so many steps writes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text").write_bytes(text)
        words = [args.ours, "train", "--preset", NAME, "--text", f"{folder}/text", "--steps", steps,
                 "--warmup", 0, "--schedule", "constant", "--compute", args.compute, "--threads",
                 args.threads, "--output", f"{folder}/run", "--results", f"{folder}/line"]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                              check=False)
        if done.returncode != 0:
            sys.exit(f"lm_cpu_beside: {' '.join(map(str, words))} ended with {done.returncode}: "
                     f"{done.stderr.strip()}")
        log = Path(folder, "run", "log.jsonl").read_text(encoding="utf-8").splitlines()
        line = json.loads(Path(folder, "line").read_text(encoding="utf-8"))
        return {**line, "first_loss": json.loads(log[0])["loss"],
                "steps_us": [1e6 * line["case"]["T"] / json.loads(step)["tokens_per_s"]
                             for step in log]}


def compare(args, text):
    """The two lines, and that both models learn."""
    theirs = Theirs(text, args.compute)
    theirs.times_us(1)
    times = {"ours": [], "theirs": []}
    runs = []
    for _ in range(args.turns):
        runs.append(ours(args, text, args.steps))
        times["ours"] += runs[-1]["steps_us"]
        times["theirs"] += theirs.times_us(args.steps)
    for way, first, last in (("ours", runs[0]["first_loss"], runs[0]["loss"]),
                             ("torch", theirs.losses[0], theirs.losses[-1])):
        begins = abs(first - math.log(SIZES.vocabulary)) < 0.2  # torch's with losses of its routers
        if not (begins and last < first):
            sys.exit(f"lm_cpu_beside: the loss of {way} went from {first} to {last}")
    medians = {way: statistics.median(all_) for way, all_ in times.items()}
    flops = runs[0]["flops"]
    peak = statistics.median(run["machine"][f"flops_{args.compute}"] for run in runs)
    line = {"schema": 1, "program": "lm_cpu_beside", "backend": "cpu",
            "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": commit(),
            "machine": {"cpu": cpu_name(), "isa": runs[0]["machine"]["isa"],
                        "cores": args.threads, "peak_flops": peak},
            "versions": {"torch": torch.__version__}, "stage": "training_step",
            "case": {"name": NAME, "T": runs[0]["case"]["T"], "compute": args.compute,
                     "threads": args.threads},
            "median_us": {way: round(us, 1) for way, us in medians.items()},
            "min_us": {way: round(min(all_), 1) for way, all_ in times.items()},
            "samples": len(times["ours"]), "turns": args.turns, "flops": flops,
            "parameters": sum(p.numel() for p in theirs.parameters)}
    values = (("M7", medians["theirs"] / medians["ours"], RATIO),
              ("M7 roof", flops / (1e-6 * medians["ours"]) / peak, ROOF))
    return [{**line, "bar": bar, "value": round(value, 3), "target": target,
             "holds": value >= target} for bar, value, target in values]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ours", required=True, help="the program switchyard")
    parser.add_argument("--text", type=Path, nargs="+",
                        help="files to learn from; without it docs/*.md")
    parser.add_argument("--compute", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--results", help="file that lines are added to")
    args = parser.parse_args()
    if not hasattr(F, "rms_norm"):
        parser.error(f"torch {torch.__version__} has no rms_norm, want 2.4 or later")
    files = args.text or sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    # A NUL byte would end a document of ours.
    text = b"".join(file.read_bytes() for file in files).replace(b"\0", b"")
    if len(text) <= SIZES.sequence + 1:
        parser.error(f"--text: {len(text)} bytes, want more than {SIZES.sequence + 1}")
    torch.set_num_threads(args.threads)
    for line in compare(args, text):
        words = json.dumps(line)
        print(words, flush=True)
        if args.results:
            with open(args.results, "a", encoding="utf-8") as file:
                file.write(words + "\n")


if __name__ == "__main__":
    main()
