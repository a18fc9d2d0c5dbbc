#!/usr/bin/env python3
"""Say which bars hold in files of results: for each bar how many of its cases, and those it misses.

A line that answers a bar has `bar`, `value`, `target` and `holds`; the stages of one case share
them, and the last line of a case counts.

    tools/read_bars.py results/h200.jsonl [--all]
"""

import argparse
import json
import re
import sys
from pathlib import Path


def name_of(line):
    """What tells the cases of a bar apart, in a few words."""
    case = line["case"]
    words = [case.get("name") or case.get("shape") or line["stage"]]
    words += [f"{key}={case[key]}" for key in ("T", "E", "I", "R") if case.get(key)]
    words += [str(case[key]) for key in ("mode", "routing", "dispatch_wire") if case.get(key)]
    if "ctas" in case:
        words.append(f"{case['ctas']} blocks")
    if case.get("zipf"):
        words.append(f"zipf:{case['zipf']}")
    elif case.get("skew") and case["skew"] != "uniform":
        words.append(case["skew"])
    return " ".join(words)


def answers(lines):
    """The answers to bars by (bar, program, case, stage or whole), in their order of appearance."""
    found = {}
    for line in lines:
        if "bar" not in line:
            continue
        # The lines of a case of `bench` repeat its answer, those of other programs have their own.
        stage = line["stage"] if "program" in line else ""
        case = json.dumps(line["case"], sort_keys=True)
        found[line["bar"], line.get("program", "bench"), case, stage] = line
    return list(found.values())


def natural(text):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def table(lines, everything):
    """One text line a bar, and one for each case that misses it."""
    by_bar = {}
    for line in answers(lines):
        by_bar.setdefault(line["bar"], []).append(line)
    text = []
    for bar in sorted(by_bar, key=natural):
        cases = by_bar[bar]
        held = sum(1 for line in cases if line["holds"])
        text.append(f"{bar}: {held} of {len(cases)} hold")
        for line in cases:
            if everything or not line["holds"]:
                verdict = "holds" if line["holds"] else "missed"
                text.append(f"    {verdict} {name_of(line)}: {line['value']:.4g}, "
                            f"wanted {line['target']:.4g} ({line.get('program', 'bench')})")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="cases that hold too")
    options = parser.parse_args()
    lines = []
    for path in options.files:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                sys.exit(f"{path} line {number} is no result line")
    print("\n".join(table(lines, options.all)) or "no line answers a bar")


if __name__ == "__main__":
    main()
