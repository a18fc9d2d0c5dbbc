#!/usr/bin/env python3
"""Make files of results ready to be kept: machine, versions and commit once, in a header, and of
what was measured again the newest line only.

    tools/compact_results.py results/h200.jsonl [--without "all2all flat"]... [--stage layer]...

Each file is replaced whole or not at all. read_bars.py and `switchyard report` read both forms;
lines appended later stay whole until the next time.
"""

import argparse
import sys

import result_lines


def kept(lines, without, stages):
    def stays(line):
        name = str(line["case"].get("name", ""))
        if line.get("program", "bench") in without or name in without:
            return False
        return not stages or "bar" in line or line["stage"] in stages
    return [line for line in result_lines.newest(lines) if stays(line)]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--without", action="append", default=[], metavar="NAME",
                        help="leave out lines of this case or program")
    parser.add_argument("--stage", action="append", default=[], dest="stages",
                        help="of lines that answer no bar keep these stages only")
    options = parser.parse_args()
    for path in options.files:
        try:
            lines = result_lines.read(path)
        except (OSError, result_lines.NoResultLine) as error:
            sys.exit(f"compact_results: {error}")
        left = kept(lines, options.without, options.stages)
        if not left:
            sys.exit(f"compact_results: {path}: no line would be left")
        result_lines.replace(path, result_lines.compact(left))
        print(f"{path}: {len(left)} of {len(lines)} lines kept")


if __name__ == "__main__":
    main()
