#!/usr/bin/env python3
"""Times loading a model of transformers with its experts in Switchyard's place, beside transformers' own.

A checkpoint of OLMoE's shape with random weights is saved once by save_pretrained. Then it is loaded
in turns, each time by a process of its own: by AutoModelForCausalLM.from_pretrained ("theirs"), by
switchyard.transformers.from_pretrained ("layer"), and by theirs with accelerate() behind it
("accelerate"). The clock runs from the call to the end of the first forward pass of one token, so that
nothing is left to it that was put off. Memory is the process's largest resident set (VmHWM) less what
it had before the call, over the bytes of the weights; pages of the file, which the system may take back
at any time, count as they lie there.

Lines of JSON as those of transformers_beside.py: the bar A4 asks of "layer" at most 1.1 times the time
of theirs (stage load, value: ours over theirs) and at most 1.1 times the weights (stage memory). Files
are in the page cache, after one load that is not counted. Before each load twice the weights' bytes are
written to in huge pages and given back: on a virtual machine memory that nobody has touched yet comes
from its host, at 1 GB/s on ours, and the ways differ in how much of what they get is such.

    PYTHONPATH=python tools/peers/transformers_load.py --dtype bf16 --threads 2
"""

import argparse
import json
import mmap
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = "transformers_load"
BAR = 1.1  # A4
WAYS = ("theirs", "layer", "accelerate")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    numbers = lambda text: [int(word) for word in text.split(",")]
    parser.add_argument("--dtype", default="f32,bf16")
    parser.add_argument("--threads", type=numbers, default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the checkpoint is written; kept if given")
    parser.add_argument("--by", choices=["median", "min"], default="median")
    parser.add_argument("--results", help="file that lines are added to")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    for name, size in (("layers", 4), ("hidden", 1024), ("inner", 512), ("experts", 64), ("k", 8),
                       ("heads", 16)):
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args()


def memory(key):
    """Bytes by /proc."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE).group(1))


def child(args):
    """Loads once and says in JSON what it took."""
    import torch
    import transformers

    from beside import DTYPES

    torch.set_num_threads(args.threads[0])
    if args.child != "theirs":
        import switchyard.transformers as ours
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = DTYPES[args.dtype]
    ids = torch.tensor([[1]])
    # What is made at a first use, of torch and of transformers, is made before.
    small = transformers.OlmoeConfig(hidden_size=64, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, num_experts=4, num_experts_per_tok=2,
                                     vocab_size=64)
    with torch.inference_mode():
        transformers.OlmoeForCausalLM(small).to(dtype).eval()(ids)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
        before = memory("VmRSS")
        begin = time.perf_counter()
        if args.child == "layer":
            model = ours.from_pretrained(args.folder, dtype=dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype)
        if args.child == "accelerate":
            ours.accelerate(model)
        token = model.eval()(ids).logits.argmax().item()
        seconds = time.perf_counter() - begin
    replaced = 0 if args.child == "theirs" else len(ours.report(model).replaced)
    print(json.dumps({"seconds": seconds, "bytes": memory("VmHWM") - before, "token": token,
                      "replaced": replaced}))


def save(args, folder):
    """Returns the bytes of the weights."""
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    from beside import DTYPES

    torch.manual_seed(0)
    config = OlmoeConfig(hidden_size=args.hidden, intermediate_size=args.inner,
                         num_hidden_layers=args.layers, num_attention_heads=args.heads,
                         num_experts=args.experts, num_experts_per_tok=args.k)
    torch.set_default_dtype(DTYPES[args.dtype])
    model = OlmoeForCausalLM(config)
    model.save_pretrained(folder)
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def touch(num_bytes):
    """Takes memory from the system and gives it back."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for place in range(0, num_bytes, mmap.PAGESIZE):
        memory[place] = 1
    memory.close()


def load(args, way, num_bytes):
    touch(2 * num_bytes)
    command = [sys.executable, __file__, "--child", way, "--dtype", args.dtype, "--threads",
               str(args.threads[0]), "--folder", args.folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(args, num_bytes):
    from beside import line_of, tell

    import transformers

    results = {way: [] for way in WAYS}
    load(args, "theirs", num_bytes)
    for _ in range(args.rounds):
        for way in WAYS:
            results[way].append(load(args, way, num_bytes))
    tokens = {one["token"] for all_ in results.values() for one in all_}
    for way in WAYS[1:]:
        if any(one["replaced"] != args.layers for one in results[way]):
            raise SystemExit(f"{way}: not all blocks are Switchyard's")
    if args.dtype == "f32" and len(tokens) != 1:
        raise SystemExit(f"the ways do not give one token: {tokens}")
    case = {"name": "olmoe", "E": args.experts, "K": args.k, "H": args.hidden, "I": args.inner,
            "layers": args.layers, "compute": args.dtype, "threads": args.threads[0], "T": 1}
    samples = {way: [one["seconds"] for one in all_] for way, all_ in results.items()}
    line = line_of(args, PROGRAM, ("A4", "load", "layer"), BAR, samples, case,
                   versions={"transformers": transformers.__version__}, weight_bytes=num_bytes)
    value = round(1 / line["ratios"]["layer"], 3)
    line["machine"]["cores"] = args.threads[0]
    tell(args, line | {"value": value, "holds": value <= BAR})
    share = {way: round(max(one["bytes"] for one in all_) / num_bytes, 3)
             for way, all_ in results.items()}
    # The times of a line of memory are the first line's: read_bars.py tells lines apart by stage.
    tell(args, line | {"stage": "memory", "over_weights": share, "value": share["layer"],
                       "holds": share["layer"] <= BAR})


def main():
    args = parse()
    if args.child:
        return child(args)
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2] / "python"))
    for dtype in args.dtype.split(","):
        args.dtype = dtype
        with tempfile.TemporaryDirectory() as folder:
            root = args.folder
            args.folder = os.path.join(root or folder, dtype)
            num_bytes = save(args, args.folder)
            numbers = args.threads
            for threads in numbers:
                args.threads = [threads]
                measure(args, num_bytes)
            args.threads, args.folder = numbers, root
    return 0


if __name__ == "__main__":
    sys.exit(main())
