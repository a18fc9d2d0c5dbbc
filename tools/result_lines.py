"""Files of result lines: one JSON object a line, whole, or short under a header.

`switchyard bench --results` and add_results.py append whole lines: each has `schema`, the machine,
the versions and the commit. A compacted file (compact_results.py) has a first line
{"header": {...}} with what its lines share of these, and short lines without `schema`, which hold
what is their own. Whole lines may follow short ones: files stay open for appending.
"""

import copy
import json
import os
import tempfile
from pathlib import Path

# What programs and stages were called in older lines.
RENAMED = {"decode_bench": "streaming_bench", "decode": "streaming", "decode up": "streaming up",
           "decode down": "streaming down", "decode whole": "streaming whole"}
SHARED = ("schema", "commit", "backend", "machine", "versions")


class NoResultLine(ValueError):
    """A file has something else than a result line; the words say where."""


def whole(line, header):
    """The short line with what its header says; a whole line as it is."""
    if "schema" in line:
        return line
    full = copy.deepcopy(header)
    for key, value in line.items():
        if key in ("machine", "versions"):
            full.setdefault(key, {}).update(value)
        else:
            full[key] = value
    return full


def named_as_today(line):
    names = {key: RENAMED.get(line[key]) for key in ("program", "stage") if key in line}
    return {**line, **{key: name for key, name in names.items() if name}}


def parse(text, name):
    """All lines of a file, whole, in their order, programs and stages by today's names."""
    lines, header = [], {}
    for number, words in enumerate(text.splitlines(), 1):
        if not words.strip():
            continue
        try:
            line = json.loads(words)
            if not isinstance(line, dict):
                raise TypeError
            if "header" in line:
                header = line["header"]
            else:
                lines.append(named_as_today(whole(line, header)))
        except (ValueError, TypeError):
            raise NoResultLine(f"{name} line {number} is no result line") from None
    return lines


def read(path):
    return parse(Path(path).read_text(encoding="utf-8"), path)


def _shared(values):
    """What all of them that say anything agree on; where all say something, what most say."""
    said = [value for value in values if value not in (None, "")]
    if said and (len(said) == len(values) or all(value == said[0] for value in said)):
        best = max(said, key=said.count)
        return best if said.count(best) > 1 or len(values) == 1 else None
    return None


def header_of(lines):
    """What the lines share."""
    header = {}
    for key in SHARED:
        values = [line.get(key) for line in lines]
        if key in ("machine", "versions"):
            names = dict.fromkeys(name for value in values for name in value or {})
            parts = {name: _shared([(value or {}).get(name) for value in values])
                     for name in names}
            header[key] = {name: part for name, part in parts.items() if part is not None}
        elif _shared(values) is not None:
            header[key] = _shared(values)
    return header


def short(line, header):
    """Without what the header says. `schema` goes in any case: it marks whole lines."""
    out = {}
    for key, value in line.items():
        if key in ("machine", "versions"):
            own = {name: part for name, part in value.items()
                   if name not in header.get(key, {}) or part not in ("", header[key][name])}
            if own:
                out[key] = own
        elif key != "schema" and (key not in header or header[key] != value):
            out[key] = value
    return out


def compact(lines):
    """The text of a compacted file."""
    header = header_of(lines)
    text = [json.dumps({"header": header}, sort_keys=True)]
    text += [json.dumps(short(line, header), sort_keys=True) for line in lines]
    return "\n".join(text) + "\n"


def replace(path, text):
    """The file has this text, whole, or stays as it was."""
    path = Path(path)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False,
                                     encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
    os.replace(file.name, path)


def machine_of(line):
    """Who measured it, in a few words: the GPUs of a line of them, else the CPU and its kernels'
    instruction set."""
    machine, case = line.get("machine") or {}, line.get("case") or {}
    if line.get("backend") == "cuda":
        return f"{case.get('R') or 1} x {machine.get('gpu', '').replace('NVIDIA ', '') or 'GPU'}"
    cpu = machine.get("cpu", "").replace("(R)", "").replace(" Processor", "")
    return ", ".join(part for part in (cpu, machine.get("isa", "")) if part)


def case_key(line):
    """The same for the same case, also where an older line lacks what was not yet asked."""
    case = {key: value for key, value in line["case"].items() if value}
    return json.dumps(case, sort_keys=True)


def newest(lines):
    """Of what was measured again on the same machine the newest only, in the order of the lines."""
    kept = {}
    for line in lines:
        key = (machine_of(line), line.get("program", ""), case_key(line), line["stage"],
               line.get("bar", ""))
        if key not in kept or kept[key].get("time", "") <= line.get("time", ""):
            kept.pop(key, None)
            kept[key] = line
    return list(kept.values())
