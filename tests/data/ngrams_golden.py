#!/usr/bin/env python3
"""Witten-Bell floors of a small text: ngrams_golden.json, counted by dictionaries of slices and
recursion from the definition, with nothing of the library's.

usage: ngrams_golden.py [--check]     write the file, or fail if it is not what would be written
"""

import collections
import json
import math
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
FILE = os.path.join(HERE, "ngrams_golden.json")
TEXT = os.path.join(HERE, "..", "..", "LICENSE")
HELD_OUT = 2500  # last bytes of the text
ORDERS = 8


def count(documents, order):
    """{context of order - 1 bytes: {next byte: times}}."""
    counts = collections.defaultdict(collections.Counter)
    for text in documents:
        for i in range(order - 1, len(text)):
            counts[text[i - order + 1:i]][text[i]] += 1
    return counts


def probability(counts, before, byte, order):
    """Of a byte behind these, by contexts of up to order - 1 bytes."""
    if order == 0:
        return 1 / 256
    shorter = probability(counts, before, byte, order - 1)
    if len(before) < order - 1:
        return shorter
    followers = counts[order].get(before[len(before) - order + 1:])
    if not followers:
        return shorter
    types = len(followers)
    return (followers[byte] + types * shorter) / (sum(followers.values()) + types)


def floors(train, held_out):
    counts = {order: count(train, order) for order in range(1, ORDERS + 1)}
    out = []
    for order in range(1, ORDERS + 1):
        losses = [-math.log(probability(counts, text[max(0, i - ORDERS):i], text[i], order))
                  for text in held_out for i in range(1, len(text))]
        out.append(math.fsum(losses) / len(losses))
    return out


def main():
    with open(TEXT, "rb") as file:
        text = file.read()
    train, held_out = text[:-HELD_OUT], text[-HELD_OUT:]
    halves = [train[:4000], train[4000:]]
    result = {"held_out": HELD_OUT, "cut": 4000,
              "one_document": floors([train], [held_out]),
              "documents": floors(halves, [held_out[:700], held_out[700:]]),
              "same_text": floors([train], [train[:1000]])}
    words = json.dumps(result, indent=1) + "\n"
    if "--check" in sys.argv:
        with open(FILE, encoding="utf-8") as file:
            found = json.load(file)
        for key, value in result.items():
            same = found.get(key) == value if isinstance(value, int) else all(
                abs(a - b) < 1e-12 for a, b in zip(found[key], value, strict=True))
            if not same:
                sys.exit(f"{FILE}: {key} is {found.get(key)}, counted anew {value}")
        return
    with open(FILE, "w", encoding="utf-8") as file:
        file.write(words)


main()
