#!/usr/bin/env python3
"""Append the result lines of a benchmark's log to a file, with commit, machine and versions.

A line of the log that is a JSON object is a result: at least `stage`, `case` and `median_us`. The
file is replaced whole or not at all.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
from pathlib import Path

import result_lines


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine():
    fields = "name,driver_version,clocks.max.sm,clocks.current.sm,power.limit"
    gpu = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader").splitlines()
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", maxsplit=1)[1].strip()
            break
    first = [part.strip() for part in gpu[0].split(",")] if gpu else ["", "", "", "", ""]
    return {"cpu": cpu, "isa": "", "gpu": first[0], "driver": first[1],
            "clocks": {"max_sm": first[2], "sm": first[3]}, "power_limit": first[4],
            "num_gpus": len(gpu)}


def versions():
    nvcc = re.search(r"V([0-9.]+)", output_of("nvcc", "--version"))
    try:
        import torch
        torch_version = torch.__version__
    except ImportError:
        torch_version = ""
    header = Path(__file__).resolve().parents[1] / "include" / "switchyard" / "switchyard.h"
    ours = ".".join(re.findall(r"#define SY_VERSION_[A-Z]+ (\d+)", header.read_text()))
    return {"switchyard": ours, "cuda": nvcc.group(1) if nvcc else "", "torch": torch_version}


def append(path, program, found, more_versions=None):
    """Result lines of one program to the file, whole or not at all."""
    commit = os.environ.get("SWITCHYARD_COMMIT") or output_of("git", "describe", "--always",
                                                              "--dirty", "--exclude=*")
    common = {"schema": 1,
              "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
              "commit": commit, "machine": machine(),
              "versions": {**versions(), **(more_versions or {})},
              "program": program, "backend": "cuda"}
    path = Path(path)
    old = path.read_text() if path.exists() else ""
    new = "".join(json.dumps({**common, **result}) + "\n" for result in found)
    result_lines.replace(path, old + new)
    print(f"{program}: {len(found)} result lines appended to {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", required=True)
    parser.add_argument("--results", required=True)
    parser.add_argument("--program", required=True)
    arguments = parser.parse_args()

    found = []
    for line in Path(arguments.log).read_text().splitlines():
        if not line.startswith("{"):
            continue
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # the last one of a program that was stopped
            print(f"{arguments.program}: left out, not JSON: {line[:60]}")
    append(arguments.results, arguments.program, found)


if __name__ == "__main__":
    main()
