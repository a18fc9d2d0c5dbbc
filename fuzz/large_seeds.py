#!/usr/bin/env python3
"""Inputs of about a megabyte each, well formed and not, for what reads files: as many entries as fit.

usage: large_seeds.py FOLDER     writes FOLDER/TARGET/NAME"""

import json
import os
import struct
import sys

CORPUS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")
COUNT = 12000  # entries of a header or index: about a megabyte


def safetensors(tensors):
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + b"x" * len(tensors)


def stage_line(i):
    return {"case": {"name": f"n{i}", "compute": "bf16", "layout": "compact", "R": 1, "E": 8, "K": 2,
                     "H": 64, "I": 32, "T": i}, "machine": {"cpu": "c", "isa": "avx2", "gpu": ""},
            "commit": "0", "stage": f"s{i}", "limit_by": "memory", "median_us": 1.5, "p95_us": 2,
            "gbps": 1, "tflops": 1, "limit_us": 1, "share": 0.5}


def seeds():
    entry = lambda i: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
    names = [f"model.layers.{i}.mlp.experts.0.gate_proj.weight" for i in range(COUNT)]
    in_order = {name: entry(i) for i, name in enumerate(names)}
    yield "safetensors", "in_order", safetensors(in_order)
    yield "safetensors", "backwards", safetensors(dict(reversed(in_order.items())))
    yield "safetensors", "overlapping", safetensors({name: entry(0) for name in names})
    yield "index", "missing", json.dumps({"weight_map": {name: "s" for name in names}}).encode()
    yield "config", "long", json.dumps({"model_type": "olmoe", "x": list(range(150000))}).encode()
    yield "config", "keys", json.dumps({f"k{i}": i for i in range(60000)}).encode()
    lines = [json.dumps(stage_line(i)) for i in range(3000)]
    yield "report", "cases", "\n".join(lines).encode()
    same = [json.dumps({**stage_line(i), "case": stage_line(0)["case"]}) for i in range(3000)]
    yield "report", "stages", "\n".join(same).encode()
    yield "case", "deep", b'{"seed":' + b"[" * 500000 + b"]" * 500000 + b"}"
    yield "case", "words", json.dumps({"seed": 1, "data": "x" * 1000000}).encode()
    study = json.load(open(os.path.join(CORPUS, "study", "smoke.json")))
    arms = [{"name": f"a{i}", "router": "top-k:top-k=2"} for i in range(COUNT)]
    yield "study", "arms", json.dumps({**study, "arms": arms, "reference": "a0"}).encode()
    results = json.load(open(os.path.join(CORPUS, "study", "study.json")))
    arms = [{**results["arms"][0], "name": f"a{i}"} for i in range(400)]
    yield "study", "results", json.dumps({**results, "arms": arms}).encode()
    yield "unique_id", "long", b"0" * 1000000
    yield "contents", "long", bytes(range(256)) * 4000


def main():
    for target, name, content in seeds():
        os.makedirs(os.path.join(sys.argv[1], target), exist_ok=True)
        with open(os.path.join(sys.argv[1], target, name), "wb") as file:
            file.write(content)


if __name__ == "__main__":
    main()
