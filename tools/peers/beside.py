"""What the programs share that time ours beside another's, torch's mostly, in turns in one
process."""

import datetime
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

try:
    import torch
except ImportError:  # whose peer is another
    torch = None

DTYPES = {name: getattr(torch, kind) for name, kind in
          (("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16")) if torch}


def in_turns(works, seconds, counted="theirs"):
    """{way: [seconds of a call]}: bursts of each way after the other, until the time is up and
    there are five of `counted`."""
    burst = {}
    for way, work in works.items():
        work()
        begin = time.perf_counter()
        work()
        burst[way] = max(1, min(50, int(0.02 / (time.perf_counter() - begin))))
    samples = {way: [] for way in works}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[counted]) < 5:
        for way, work in works.items():
            begin = time.perf_counter()
            for _ in range(burst[way]):
                work()
            samples[way].append((time.perf_counter() - begin) / burst[way])
    return samples


def commit():
    if os.environ.get("SWITCHYARD_COMMIT"):
        return os.environ["SWITCHYARD_COMMIT"]
    done = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12",
                           "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def cpu_name():
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def isa_name():
    """The widest of the instruction sets, by the names that the tool gives them, that this CPU has."""
    flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    names = {"amx_bf16": "amx_bf16", "avx512_bf16": "avx512_bf16", "avx512": "avx512f",
             "avx2": "avx2"}
    return next((name for name, flag in names.items() if flag in flags), "portable")


def line_of(args, program, bar, target, samples, case, **more):
    """A line of results: how many times as fast as "theirs" each way is.
    @param bar  (name, stage, the way that the bar asks of)."""
    pick = statistics.median if args.by == "median" else min
    ratios = {way: round(pick(samples["theirs"]) / pick(all_), 3)
              for way, all_ in samples.items() if way != "theirs"}
    name, stage, way = bar
    return {"schema": 1, "program": program, "backend": "cpu",
            "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": commit(), "machine": {"cpu": cpu_name(), "isa": isa_name(),
                                            "cores": torch.get_num_threads() if torch else
                                            args.threads},
            "versions": ({"torch": torch.__version__} if torch else {}) | more.pop("versions", {}),
            "stage": stage, "bar": name, "case": case, "by": args.by,
            "median_us": {way: round(1e6 * statistics.median(all_), 1)
                          for way, all_ in samples.items()},
            "min_us": {way: round(1e6 * min(all_), 1) for way, all_ in samples.items()},
            "samples": len(samples["theirs"]), "ratios": ratios, "value": ratios[way],
            "target": target, "holds": ratios[way] >= target} | more


def tell(args, line):
    """To stdout, or to the file of --results and a summary to stdout."""
    text = json.dumps(line)
    if args.results:
        with open(args.results, "a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(f"{line['bar']} {line['stage']} {json.dumps(line['case'])}: {line['ratios']} by "
              f"{line['by']} {line['min_us']}", flush=True)
    else:
        print(text, flush=True)
