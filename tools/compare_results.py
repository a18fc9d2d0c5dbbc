#!/usr/bin/env python3
"""Compare the times of two sets of result lines, say before and after a change on one machine.

Give each side as many files as there were runs, taken in turns: a time is the median of its runs,
and its spread over the runs of one side is shown beside the ratio, so that noise is not taken for a
change. A time is slower where the ratio of the medians is above the limit and every run after is
slower than every run before. Exits with 1 if one is slower, with 2 if nothing could be compared.
"""

import argparse
import json
import math
import statistics
import sys

import result_lines

# Numbers of a case that describe the machine, not the work.
NOT_THE_CASE = ("threads",)


def times_of(line):
    """Every time that a result line has, in microseconds, by a key that says what was timed."""
    case = {k: v for k, v in (line.get("case") or {}).items() if k not in NOT_THE_CASE}
    key = (line.get("program") or "", line.get("suite") or "", line.get("stage") or "",
           json.dumps(case, sort_keys=True), line.get("peer") or "")
    for name in ("median_us", "grouped_us", "streaming_us", "chain_us"):
        if isinstance(line.get(name), (int, float)):
            yield (*key, name), line[name]
    for name, value in (line.get("chain") or {}).items():
        if name in ("graph_us", "eager_us"):
            yield (*key, "chain " + name), value


def read(path):
    """{key: median of its times in the file}; lines of the same key are turns of one run."""
    found = {}
    try:
        lines = result_lines.read(path)
    except (OSError, ValueError) as error:
        sys.exit(f"compare_results: {error}")
    for line in lines:
        for key, value in times_of(line):
            if math.isfinite(value) and value > 0:
                found.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in found.items()}


def compare(before, after, limit):
    """[(ratio, slower, key, median before, median after, spread before)], slowest first."""
    rows = []
    for key in sorted(set().union(*before) & set().union(*after)):
        old = [run[key] for run in before if key in run]
        new = [run[key] for run in after if key in run]
        ratio = statistics.median(new) / statistics.median(old)
        slower = ratio > 1 + limit and min(new) > max(old)
        rows.append((ratio, slower, key, statistics.median(old), statistics.median(new),
                     max(old) / min(old)))
    return sorted(rows, key=lambda row: -row[0])


def said(key):
    program, suite, stage, case, peer, what = key
    shape = json.loads(case)
    sizes = " ".join(f"{k}={shape[k]}" for k in ("R", "T", "E", "K", "H", "I", "compute", "dtype",
                                                 "layout", "zipf", "batch_invariant")
                     if shape.get(k) not in (None, "", 0, 0.0, False, "compact"))
    name = shape.get("name") or shape.get("shape") or ""
    where = " ".join(part for part in (program, suite, peer) if part)
    return f"{where or 'bench'}: {stage} {name} {sizes} {'' if what == 'median_us' else what}"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--after", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--limit", type=float, default=0.02, help="slower by this share (0.02)")
    parser.add_argument("--stage", help="only times whose description contains this")
    parser.add_argument("--show", type=int, default=20, help="rows of the table (20; slowest first)")
    arguments = parser.parse_args()

    rows = compare([read(f) for f in arguments.before], [read(f) for f in arguments.after],
                   arguments.limit)
    rows = [row for row in rows if not arguments.stage or arguments.stage in said(row[2])]
    if not rows:
        print("compare_results: the two sides have no time in common", file=sys.stderr)
        return 2
    print(f"{'ratio':>6} {'before':>10} {'after':>10} {'spread':>7}   what (microseconds)")
    for ratio, slower, key, old, new, spread in rows[: arguments.show]:
        print(f"{ratio:6.3f} {old:10.2f} {new:10.2f} {spread:7.3f} {'!' if slower else ' '} {said(key)}")
    slow = [row for row in rows if row[1]]
    mean = math.exp(statistics.fmean(math.log(row[0]) for row in rows))
    within = sum(row[0] <= 1 + arguments.limit for row in rows)
    print(f"{len(rows)} times: {within} within {arguments.limit:.0%}, geometric mean {mean:.4f}, "
          f"{len(slow)} slower in every run")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
