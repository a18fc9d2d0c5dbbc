#!/usr/bin/env python3
"""Times a MoE block and a whole model of transformers on a GPU beside ours, in turns in one process.

The model is OLMoE's of a few layers with random weights in bf16. Theirs runs with each of
transformers' ways to run experts that this machine has (eager, batched_mm, grouped_mm), ours as
switchyard.transformers.accelerate leaves it. A sample is a burst of calls and the wait for the GPU
behind it; the host's time of a call is that of a burst nobody waits for. A whole model is also
timed behind torch.compile(mode="reduce-overhead"), where the calls are one CUDA graph.

Lines of JSON on stdout (or added to --results) have what bar A3 asks: a block against the best of
theirs, the host's time of a call of ours, a compiled model against the best of theirs compiled.

    PYTHONPATH=python tools/peers/transformers_gpu_beside.py --results results/device.jsonl
"""

import argparse
import copy
import statistics
import sys
import time

import torch
import transformers
from beside import in_turns, line_of, tell
from transformers import OlmoeConfig, OlmoeForCausalLM

import switchyard.transformers

PROGRAM = "transformers_gpu_beside"
VERSIONS = {"transformers": transformers.__version__}
THEIRS = ("eager", "batched_mm", "grouped_mm")
BLOCK_BAR, HOST_BAR_US, COMPILED_BAR = 2.5, 12.0, 1.15
MOST_BATCHED = 64  # batched_mm copies the weights of every choice: beyond these it has no memory


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    numbers = lambda text: [int(word) for word in text.split(",")]
    parser.add_argument("--tokens", type=numbers, default=[1, 32, 512, 4096], help="of a block")
    parser.add_argument("--model-tokens", type=numbers, default=[1, 32, 4096],
                        help="of a whole model")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each comparison")
    parser.add_argument("--theirs", type=lambda text: text.split(","), default=THEIRS,
                        help="transformers' ways to run experts")
    parser.add_argument("--stage", default="block,model,compiled")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--by", choices=["median", "min"], default="median")
    parser.add_argument("--results", help="file that lines are added to")
    for name, size in (("layers", 4), ("hidden", 2048), ("inner", 1024), ("experts", 64), ("k", 8),
                       ("heads", 16)):
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args()


def make_models(args):
    """{way: a model of its own}, all with the same weights."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        hidden_size=args.hidden, intermediate_size=args.inner, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.heads, num_experts=args.experts,
        num_experts_per_tok=args.k, initializer_range=0.02)
    model = OlmoeForCausalLM(config).to(args.device, torch.bfloat16).eval()
    models = {way: copy.deepcopy(model) for way in args.theirs}
    for way, theirs in models.items():
        theirs.set_experts_implementation(way)
    report = switchyard.transformers.accelerate(model)
    if len(report.replaced) != args.layers or report.replaced[0].extent != "block":
        raise RuntimeError(f"not every block is taken whole: {report}")
    return models | {"ours": model}


class Timer:
    def __init__(self, args):
        self.seconds = args.seconds
        self.gpu = args.device != "cpu"

    def wait(self):
        if self.gpu:
            torch.cuda.synchronize()

    def turns(self, works):
        """{way: [seconds of a call]}: bursts in turns, the wait for the GPU in each."""
        runs, bursts = {}, {}
        for way, work in works.items():
            def run(work=work, burst=1):
                for _ in range(burst):
                    work()
                self.wait()

            for _ in range(3):  # the third call of a compiled model is the first to be replayed
                run()
            begin = time.perf_counter()
            run()
            bursts[way] = max(1, min(50, int(0.01 / (time.perf_counter() - begin))))
            runs[way] = lambda run=run, burst=bursts[way]: run(burst=burst)
        samples = in_turns(runs, self.seconds, "ours")
        return {way: [one / bursts[way] for one in all_] for way, all_ in samples.items()}

    def host_us(self, work):
        """Microseconds until a call returns, the fastest of 20 bursts of 20 that nobody waits for."""
        fastest = float("inf")
        for _ in range(20):
            self.wait()
            begin = time.perf_counter()
            for _ in range(20):
                work()
            fastest = min(fastest, (time.perf_counter() - begin) / 20)
        self.wait()
        return round(1e6 * fastest, 2)


def usable(models, num_tokens, without=()):
    return {way: model for way, model in models.items() if way not in without
            and (way != "batched_mm" or num_tokens <= MOST_BATCHED)}


def time_block(models, timer, args, num_tokens):
    x = torch.randn(1, num_tokens, args.hidden, device=args.device, dtype=torch.bfloat16)
    works = {way: lambda block=model.model.layers[0].mlp: block(x)
             for way, model in usable(models, num_tokens).items()}
    outs = {way: work().float() for way, work in works.items()}
    truth = outs[args.theirs[0]]
    error = ((outs["ours"] - truth).norm() / truth.norm()).item()
    return timer.turns(works), {"host_us": timer.host_us(works["ours"]),
                                "relative_difference": error}


def time_model(models, timer, args, num_tokens, compiled):
    ids = torch.randint(0, 50000, (1, num_tokens), device=args.device)
    # Compiled, the loop over experts would ask the host how many tokens there are.
    models = usable(models, num_tokens, without=("eager",) if compiled else ())
    works = {}
    if compiled:
        torch._dynamo.reset()
    for way, model in models.items():
        run = torch.compile(model, mode="reduce-overhead", dynamic=False) if compiled else model

        def work(run=run):
            if compiled:
                torch.compiler.cudagraph_mark_step_begin()
            return run(ids, use_cache=False, logits_to_keep=1)

        works[way] = work
    return timer.turns(works)


def best_first(samples):
    """With the best of theirs as "theirs", and the name of that way."""
    best = min((way for way in samples if way != "ours"),
               key=lambda way: statistics.median(samples[way]))
    return {"theirs": samples[best]} | samples, best


def main():
    args = parse()
    models, timer = make_models(args), Timer(args)
    case = {"name": "olmoe", "E": args.experts, "K": args.k, "H": args.hidden, "I": args.inner,
            "layers": args.layers, "compute": "bf16"}

    def report(stage, target, num_tokens, samples, **more):
        samples, best = best_first(samples)
        line = line_of(args, PROGRAM, ("A3", stage, "ours"), target, samples,
                       case | {"T": num_tokens}, versions=VERSIONS, best=best, **more)
        if args.device != "cpu":
            line |= {"backend": "cuda", "machine": {"gpu": torch.cuda.get_device_name()}}
        tell(args, line)

    stages = args.stage.split(",")
    for num_tokens in args.tokens if "block" in stages else ():
        samples, more = time_block(models, timer, args, num_tokens)
        report("block", BLOCK_BAR, num_tokens, samples, host_target_us=HOST_BAR_US, **more)
    for stage in "model", "compiled":
        for num_tokens in args.model_tokens if stage in stages else ():
            samples = time_model(models, timer, args, num_tokens, stage == "compiled")
            report(stage, COMPILED_BAR if stage == "compiled" else 1.0, num_tokens, samples)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
