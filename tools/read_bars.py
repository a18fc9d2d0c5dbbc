#!/usr/bin/env python3
"""Say which bars hold in files of results: for each bar how many of its cases, and those it misses.

A line that answers a bar has `bar`, `value`, `target` and `holds`; the stages of one case share
them. Of a case that was measured again on the same machine, and with the same instruction set, the
newest line counts, wherever it stands.

    tools/read_bars.py [--all] results/h200.jsonl
    tools/read_bars.py --write docs/performance.md results/*.jsonl
"""

import argparse
import re
import sys
from pathlib import Path

import result_lines

BEGIN = "<!-- begin: tools/read_bars.py -->"
END = "<!-- end: tools/read_bars.py -->"

# What a bar asks, and whether its value is to be at least ("+") or at most ("-") the target.
BARS = {
    "C1": ("+", "AVX-512 BF16, few rows: x oneDNN's loop, and a share of the roof"),
    "C2": ("+", "AVX-512 BF16, many rows: the same"),
    "C3": ("+", "AMX, few rows: the same"),
    "C4": ("+", "AMX, many rows: the same"),
    "C5": ("+", "AVX2 in f32: the same"),
    "C6": ("+", "AVX-512 in f32: the same"),
    "C7": ("-", "q8: its time over that of exact weights"),
    "A5": ("+", "AVX-512 in bf16, where its dot products are slower: x oneDNN's loop"),
    "A1": ("+", "a block beside transformers' on a CPU, in turns: x its speed"),
    "A2": ("+", "a whole model beside transformers' on a CPU, in turns: x its speed"),
    "A3": ("+", "a block and a whole model beside the best of transformers' ways on a GPU, in turns"),
    "A4": ("-", "a model loaded beside transformers' own way on a CPU: its time over theirs, memory over the weights"),
    "B1": ("+", "forward and backward of many tokens: x SonicMoE, in turns in one process"),
    "B2": ("-", "the forward of training beside that of inference, in turns: its time over the other's"),
    "B3": ("+", "weight gradients of the experts: the mean of their shares of dense cuBLAS 8192^3 in turns"),
    "B3 torch": ("+", "no claim, two processes: the same over torch._grouped_mm, shares of dense"),
    "B4": ("-", "small layers (presets s and m) there and back: time over the sum of their stages' limits"),
    "B5": ("-", "memory of a layer there and back beside parameters, gradients and what is saved: share of these"),
    "B6": ("+", "forward and backward beside torch's on a CPU, in turns, 512 tokens: x its speed"),
    "B7": ("-", "forward and backward over ranks on GPUs: what shows of the exchange over its wire's time"),
    "M1": ("+", "a step of training preset s beside PyTorch compiled in a graph, in turns: x its speed"),
    "M2": ("+", "the same with 32 experts, beside PyTorch in a graph"),
    "M3": ("+", "a step of preset m beside PyTorch compiled in a graph, in turns: x its speed"),
    "M7": ("+", "a step of training preset cpu-10min beside PyTorch's loop on two cores, in turns: x its speed"),
    "M7 roof": ("+", "the same: useful operations by the arithmetic peak"),
    "M8": ("-", "memory of training over 16 bytes a parameter and what is saved for the way back"),
    "M9": ("+", "preset m on several GPUs, as many tokens each: a step's speed over that of one alone"),
    "M10": ("-", "a step's time over that of a dense model of the same active width"),
    "M11": ("-", "preset s: s from nothing to the end of the first step"),
    "load": ("-", "loading: its time over reading and one copy"),
    "L1": ("-", "routers and their sums against plain top-k's time (ratio); noise: us more"),
    "L2": ("-", "expert choice, 16384 tokens, 64 experts, 512 each: us"),
    "L3": ("-", "Soft-MoE, 4096 tokens a group, 32 experts of 128 slots: x the limit of its products and bytes"),
    "L4": ("-", "route's way back with load balancing and z: us"),
    "L5": ("-", "a chain of two iterations of K / 2, less a plan: x one pass of K"),
    "L6": ("-", "sums of a routing for losses and statistics, logits in L2: us"),
    "L7": ("-", "a sweep's estimate of its time: share that it was off"),
    "L7 memory": ("-", "the same of its memory"),
    "G1": ("+", "grouped GEMM: share of dense cuBLAS 8192^3 in turns"),
    "G1 Zipf": ("+", "the same under Zipf(1.0) over the uniform load"),
    "G1 torch": ("+", "no claim, two processes: the same over torch._grouped_mm, shares of dense"),
    "G2": ("+", "gather and SwiGLU over the plain product"),
    "G3": ("+", "whole layers of many tokens: x SonicMoE, in turns in one process"),
    "G4": ("-", "few tokens, I 256: x the memory's floor; router and plan in us"),
    "G5": ("-", "few tokens, I 2048: x the memory's floor"),
    "G6": ("-", "few tokens, Qwen3-30B: x the memory's floor"),
    "G6 torch": ("+", "no claim, two processes: x torch, experts and combine"),
    "G7": ("-", "f32 layers, and their kernels alone: x the memory's floor"),
    "G8": ("-", "route, us"),
    "G9": ("-", "plan, us"),
    "G10": ("-", "pack and combine, us"),
    "G11": ("+", "layouts: share of points where the sentence holds"),
    "Q9": ("-", "experts as stored on a CPU: bytes of their weights in memory over those of codes and scales in the files"),
    "Q8 ggml": ("+", "experts as stored in MXFP4 on a CPU, gpt-oss' sizes: x ggml, in turns in one process"),
    "Q4": ("-", "experts as stored in e4m3, rows of bf16 (1 and 8 an expert) or e4m3 (32 and 64): x the memory's floor of their codes"),
    "Q5": ("-", "experts as stored in MXFP4, gpt-oss' sizes: x the memory's floor of their codes"),
    "Q6": ("-", "the same, 512 tokens of 128 experts"),
    "Q6 rate": ("+", "both products of 512 tokens of 32 experts, MXFP4: TFLOP/s"),
    "Q7": ("+", "the same of 4096 tokens, 32 and 128 experts: share of dense cuBLAS in turns"),
    "Q1": ("+", "e4m3, the plain product on six shapes beside DeepGEMM's, in turns in one process: x its speed"),
    "Q2": ("-", "e4m3, the first product with gather, SwiGLU and new codes: time over the plain product's"),
    "Q3": ("+", "e4m3, both products and the rows' codes: x the bf16 kernels, in turns"),
    "M4": ("-", "a token step of generation, preset s behind 512 positions, batch 1, 8, 64: ms"),
    "M5": ("-", "the same of preset m"),
    "M6": ("+", "prompts of 512 at a batch of 8, presets s and m: tokens a second"),
    "sm_80": ("+", "portable grouped GEMM: speed over that of the Hopper kernel"),
    "R1": ("-", "dispatch of 4096 tokens on 16 blocks: x the wire (asked of 8 GPUs)"),
    "R2": ("-", "combine of 4096 tokens on 16 blocks: x the wire (asked of 8 GPUs)"),
    "R3": ("-", "pair of 128 tokens, fp8 out, bf16 home: us (asked of 8 GPUs)"),
    "R4": ("-", "pair of 8 tokens: us (asked of 8 GPUs)"),
    "R5": ("+", "the published all-to-all: share of its rows in time"),
    "R5 mean": ("-", "the same: geometric mean, us"),
    "R6": ("+", "messages of fixed size: share of points in time, and beside NCCL"),
    "R7": ("-", "skewed routing: us"),
    "R8": ("-", "four MPI processes: x MPI_Alltoallv"),
}


def exchange_bar(line):
    """R1 to R4, which are asked of eight GPUs: device_exchange_bench has their figures with fewer,
    and does not judge them."""
    case = line["case"]
    if line.get("program") != "device_exchange_bench" or case.get("skew") != "uniform":
        return None
    many = (case["mode"], case["T"], case["ctas"]) == ("throughput", 4096, 16)
    if many and line["stage"] == "dispatch":
        return "R1", round(line["median_us"] / line["limit_us"], 3), \
            1.07 if case["dispatch_wire"] == "fp8" else 1.06
    if many and line["stage"] == "combine":
        return "R2", round(line["median_us"] / line["limit_us"], 3), 1.09
    few = case["mode"] == "low-latency" and case["ctas"] == 64
    if few and case["T"] == 128 and case["dispatch_wire"] == "fp8":
        return "R3", line["median_us"], 52
    if few and case["T"] == 8:
        return "R4", line["median_us"], 18
    return None


def sweep_answers(line):
    """L7, of the line that a sweep ends with: how far off its estimate was."""
    said_and_seen = line["estimate"]
    of = {"L7": ("seconds", 0.25), "L7 memory": ("bytes", 0.05)}
    for bar, (what, target) in of.items():
        seen = said_and_seen.get(f"measured_{what}", 0)  # lines of GPUs had none of memory
        if seen > 0:
            off = abs(said_and_seen[what] / seen - 1)
            yield {**line, "bar": bar, "value": round(off, 3), "target": target,
                   "holds": off <= target}


def memory_answer(line):
    """B5, of a layer there and back on a GPU."""
    beside = line["memory"]["beside"]
    return {**line, "bar": "B5", "value": round(beside, 3), "target": 0.12, "holds": beside <= 0.12}


def answers_of(line):
    if line["stage"] == "sweep" and "estimate" in line:
        return list(sweep_answers(line))
    answer = answer_of(line)
    found = [] if answer is None else [answer]
    if "beside" in line.get("memory", {}):
        found.append(memory_answer(line))
    return found


def answer_of(line):
    """The line with `bar`, `value`, `target` and `holds`, or None where it answers no bar."""
    judged = exchange_bar(line)
    if judged:
        bar, value, target = judged
        return {**line, "bar": bar, "value": value, "target": target, "holds": value <= target}
    if "bar" not in line:
        return None
    # Until 78351a7 the ratio of G3 was scaled from figures of another day: no answer.
    if line["bar"] == "G3" and "sonicmoe" not in line.get("peers", {}):
        return None
    if line["bar"] == "G6" and line.get("program", "bench") == "bench":
        return {**line, "bar": "G6 torch"}
    if line["bar"] == "R5" and line["case"].get("name", "").startswith("geometric mean"):
        return {**line, "bar": "R5 mean"}
    return line


def name_of(line):
    """What tells the cases of a bar apart, in a few words."""
    case = line["case"]
    words = [case.get("name") or case.get("shape") or line["stage"]]
    if words[0] == line["bar"]:
        words.pop()
    if line["bar"] == "G7" and "program" in line:
        words.append("kernels")
    words += [f"{key} {case[key]}" for key in ("T", "E", "I") if case.get(key)]
    words += [str(case[key]) for key in ("mode", "routing", "dispatch_wire") if case.get(key)]
    if "ctas" in case:
        words.append(f"{case['ctas']} blocks")
    if case.get("zipf"):
        words.append(f"zipf:{case['zipf']}")
    elif case.get("skew") and case["skew"] != "uniform":
        words.append(case["skew"])
    return " ".join(words)


def answers(lines):
    """The answers by (bar, machine): the newest of each case."""
    found = {}
    for line in (answer for line in lines for answer in answers_of(line)):
        # The lines of a case of `bench` repeat its answer, those of other programs have their own.
        stage = line["stage"] if "program" in line else ""
        place = found.setdefault((line["bar"], result_lines.machine_of(line)), {})
        key = (line.get("program", "bench"), result_lines.case_key(line), stage)
        if key not in place or place[key].get("time", "") <= line.get("time", ""):
            place[key] = line
    order = sorted(found, key=lambda key: (natural(key[0]), natural(key[1])))
    return {key: list(found[key].values()) for key in order}


def natural(text):
    return [(0, int(part), "") if part.isdigit() else (1, 0, part)
            for part in re.split(r"(\d+)", text) if part]


def commits(cases):
    return ", ".join(dict.fromkeys(line.get("commit", "")[:7] for line in cases))


def said(line):
    """Value and target; where the value would do, what else was asked."""
    words = f"{line['value']:.4g}, wanted {line['target']:.4g}"
    if line.get("roof_share", 1) < line.get("roof_share_target", 0):
        words += f", at {line['roof_share']:.2f} of the roof, wanted {line['roof_share_target']:.2f}"
    return words


def table(lines, everything):
    """One text line a bar and machine, and one for each case that misses it."""
    text = []
    for (bar, machine), cases in answers(lines).items():
        held = sum(1 for line in cases if line["holds"])
        text.append(f"{bar}, {machine}, at {commits(cases)}: {held} of {len(cases)} hold")
        for line in cases:
            if everything or not line["holds"]:
                verdict = "holds" if line["holds"] else "missed"
                text.append(f"    {verdict} {name_of(line)}: {said(line)} "
                            f"({line.get('program', 'bench')})")
    return text


def worst(bar, cases):
    """Of the cases that miss, else of all, the one whose value is furthest from its target."""
    missed = [line for line in cases if not line["holds"]] or cases
    if BARS[bar][0] == "+":
        return min(missed, key=lambda line: line["value"] / line["target"])
    return max(missed, key=lambda line: line["value"] / line["target"])


def markdown(lines):
    """The table of all bars, as docs/performance.md has it."""
    found = answers(lines)
    unknown = sorted({bar for bar, _ in found} - set(BARS))
    if unknown:
        raise ValueError(f"BARS has no words for {', '.join(unknown)}")
    text = ["| bar | what is asked | machine | commit | hold | the worst case |",
            "|---|---|---|---|---|---|"]
    for bar in sorted(BARS, key=natural):
        places = [(machine, cases) for (name, machine), cases in found.items() if name == bar]
        if not places:
            text.append(f"| {bar} | {BARS[bar][1]} | | | no line kept | |")
        what = BARS[bar][1]
        for machine, cases in places:
            held = sum(1 for line in cases if line["holds"])
            count = f"{held} of {len(cases)}"
            line = worst(bar, cases)
            text.append(f"| {bar} | {what} | {machine} | {commits(cases)} | "
                        f"{count if held == len(cases) else f'**{count}**'} | "
                        f"{name_of(line)}: {said(line)} |")
            what = ""
    return "\n".join(text)


def with_table(document, lines):
    """The document with the table of these lines between its two marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no lines '{BEGIN}' and '{END}' after it")
    return f"{before}{BEGIN}\n{markdown(lines)}\n{END}{after}"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="cases that hold too")
    parser.add_argument("--markdown", action="store_true", help="print the table of all bars")
    parser.add_argument("--write", type=Path, metavar="FILE",
                        help="put that table between its two marks in this document")
    options = parser.parse_args()
    try:
        lines = [line for path in options.files for line in result_lines.read(path)]
        if options.write:
            document = options.write.read_text(encoding="utf-8")
            result_lines.replace(options.write, with_table(document, lines))
        elif options.markdown:
            print(markdown(lines))
        else:
            print("\n".join(table(lines, options.all)) or "no line answers a bar")
    except (OSError, ValueError) as error:
        sys.exit(f"read_bars: {error}")


if __name__ == "__main__":
    main()
