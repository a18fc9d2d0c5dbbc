"""How a file of golden values is written, and how it is held against the definition it comes from."""

import json
import sys

import numpy as np


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def numbers(values):
    if isinstance(values, dict):
        return np.concatenate([np.ravel(inner) for inner in values.values()])
    return np.array(values)


def write_or_check(path, cases):
    """Writes the cases, or with --check exits with 1 and a message if results in the file, `y` or
    `gradients` of a case, are not within 1e-9 (and 1e-5 of their size) of these."""
    text = json.dumps(rounded(cases), separators=(",", ":")).replace('},"', '},\n"') + "\n"
    if "--check" not in sys.argv[1:]:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    with open(path, encoding="utf-8") as file:
        have, want = json.load(file), json.loads(text)
    if have.keys() != want.keys():
        sys.exit(f"{path} has other cases than its definition")
    for name, case in want.items():
        for key in ("y", "gradients"):
            mine, its = numbers(have[name][key]), numbers(case[key])
            if mine.shape != its.shape or not np.allclose(mine, its, atol=1e-9):
                sys.exit(f"{path}: {name}: {key} is not what its definition gives")
