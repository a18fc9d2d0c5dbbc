#!/usr/bin/env python3
"""Blocks of quantised weights and what they mean, by numpy from the formats' definitions (OCP 8-bit
floating point 1.0; OCP Microscaling Formats 1.0): the product of code and scale in f32, and its
roundings to bf16 and f16.

usage: stored_golden.py [--check]     write stored_golden.json beside it, or fail if it is not what
                                      would be written
"""
import json
import pathlib
import sys

import numpy as np


def e4m3(code):
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return np.float32(-size if code & 0x80 else size)


def e2m1(code):
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    return np.float32(-size if code & 8 else size)


def bf16_bits(values):
    """To nearest, ties to even, in whole numbers; no NaN among them."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def block(codes, values, scale, stored_scale):
    with np.errstate(over="ignore", under="ignore"):
        product = (values * np.float32(scale)).astype(np.float32)
        half = product.astype(np.float16)
    return {"codes": [int(code) for code in codes], "scale": stored_scale,
            "f32": [int(bits) for bits in product.view(np.uint32)],
            "bf16": [int(bits) for bits in bf16_bits(product)],
            "f16": [int(bits) for bits in half.view(np.uint16)]}


def main():
    codes8 = [code for code in range(256) if code & 0x7F != 0x7F] + [0x01, 0x80]
    values8 = np.array([e4m3(code) for code in codes8], dtype=np.float32)
    # Usual ones, ones at both borders of what tables in registers can do, and 0.
    scales8 = [1.0, 2.0**-7, 0.0123456789, -0.37, 3.3e-5, 1.1754944e-38, 2.0**-117, 2.0**-118 * 1.5,
               2.0**118 * 1.999, 2.0**119, 2.0**120, 1e37, 0.0]
    codes4 = list(range(16)) + [15 - code for code in range(16)]
    values4 = np.array([e2m1(code) for code in codes4], dtype=np.float32)
    document = {
        "e4m3": [block(codes8, values8, np.float32(scale),
                       int(np.array(scale, dtype=np.float32).view(np.uint32)))
                 for scale in scales8],
        "mxfp4": [block(codes4, values4, np.float32(2.0 ** (scale - 127)), scale)
                  for scale in (0, 1, 2, 3, 100, 112, 126, 127, 128, 140, 200, 251, 252, 253, 254)],
    }
    path = pathlib.Path(__file__).with_name("stored_golden.json")
    text = json.dumps(document, separators=(",", ":")).replace('{"codes"', '\n{"codes"') + "\n"
    if "--check" in sys.argv[1:]:
        if path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path}: not what the definitions give")
        return
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
