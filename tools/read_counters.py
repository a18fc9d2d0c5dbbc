#!/usr/bin/env python3
"""Append what ncu has counted to a file of results: one line for each kernel and grid.

Reads what `ncu --csv --page raw` wrote, with or without base units. Where there is nothing to
read, one line says why. The file is replaced whole or not at all.
"""

import argparse
import csv
import re
import statistics
import sys
from pathlib import Path

import add_results

# Our key, and ncu's metric; device_check asks for these.
COUNTERS = {
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "ipc": "sm__inst_executed.avg.per_cycle_active",
    "dram_gbps": "dram__bytes.sum.per_second",
    "l1_hit_pct": "l1tex__t_sector_hit_rate.pct",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
}
DURATION = "gpu__time_duration.sum"
PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
MICROSECONDS = {"n": 1e-3, "u": 1.0, "m": 1e3, "": 1e6}


def short_name(kernel):
    """"void switchyard::<unnamed>::pack_kernel(Params)" is "pack_kernel"."""
    kernel = re.sub(r"(<?unnamed>?|\(anonymous namespace\)|_GLOBAL__N__\w+)::", "", kernel)
    found = re.match(r"(?:void )?(?:\w+::)*(\w+)", kernel)
    return found.group(1) if found else kernel


def number(text):
    """ncu writes thousands with commas; what it could not read is "" or "n/a"."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def scaled(key, value, unit):
    """In GB/s, microseconds, percent, or instructions a cycle."""
    if value is None:
        return None
    rate = re.fullmatch(r"([KMGT]?)byte/s(?:econd)?", unit)
    time = re.fullmatch(r"([num]?)s(?:econd)?", unit)
    if rate:
        return value * PREFIXES[rate.group(1)] * 1e-9
    if time:
        return value * MICROSECONDS[time.group(1)]
    if key == "dram_gbps" or key == DURATION:
        raise ValueError(f"{key} is in '{unit}', want byte/second or seconds")
    return value


def read_launches(lines):
    """One dictionary for each launch: kernel, grid, block, and values by our keys."""
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return []
    rows = list(csv.DictReader(line for line in lines[begin:] if line.startswith('"')))
    units = {}
    if rows and rows[0]["ID"] == "":
        units = rows.pop(0)
    launches = []
    for row in rows:
        launch = {"kernel": short_name(row["Kernel Name"]), "grid": row["Grid Size"],
                  "block": row["Block Size"]}
        for key, metric in {**COUNTERS, DURATION: DURATION}.items():
            launch[key] = scaled(key, number(row.get(metric) or ""), units.get(metric, ""))
        launches.append(launch)
    return launches


def median(values):
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def result_lines(launches):
    groups = {}
    for launch in launches:
        groups.setdefault((launch["kernel"], launch["grid"], launch["block"]), []).append(launch)
    lines = []
    for (kernel, grid, block), same in groups.items():
        lines.append({"stage": "counters",
                      "case": {"name": kernel, "grid": grid, "block": block},
                      "samples": len(same),
                      "median_us": median(launch[DURATION] for launch in same),
                      "counters": {key: median(launch[key] for launch in same)
                                   for key in COUNTERS}})
    return lines


def reason_of(lines):
    for line in lines:
        if line.startswith("==ERROR=="):
            return line.removeprefix("==ERROR==").strip()
    return "ncu has profiled no kernel"


def read(text, program):
    """The result lines that ncu's output gives: one at least."""
    lines = text.splitlines()
    try:
        found = result_lines(read_launches(lines))
    except (KeyError, ValueError) as error:
        return [no_counters(program, f"ncu's table cannot be read: {error}")]
    if any(value is not None for line in found for value in line["counters"].values()):
        return found
    return [no_counters(program, reason_of(lines))]


def no_counters(program, reason):
    return {"stage": "counters", "case": {"name": program}, "counters": None, "reason": reason}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", help="what ncu wrote; without it --reason")
    parser.add_argument("--reason", default="there is no ncu", help="why there is none")
    parser.add_argument("--results", required=True)
    parser.add_argument("--program", required=True, help="what was profiled, in a word")
    arguments = parser.parse_args()
    if arguments.csv:
        text = Path(arguments.csv).read_text(errors="replace") if Path(arguments.csv).exists() else ""
        found = read(text, arguments.program)
    else:
        found = [no_counters(arguments.program, arguments.reason)]
    for line in found:
        if line["counters"] is None:
            print(f"{arguments.program}: no counters: {line['reason']}", file=sys.stderr)
    said = add_results.output_of("ncu", "--version") or add_results.output_of(
        "/usr/local/cuda/bin/ncu", "--version")
    ncu = re.search(r"Version ([0-9.]+)", said)
    add_results.append(arguments.results, arguments.program, found,
                       {"ncu": ncu.group(1) if ncu else ""})


if __name__ == "__main__":
    main()
