#!/usr/bin/env python3
"""Blocks of quantised weights and what they mean, by numpy from the formats' definitions (OCP 8-bit
floating point 1.0; OCP Microscaling Formats 1.0; GPTQ and AWQ: whole numbers less a zero point,
times a scale; NVFP4: e2m1 times an e4m3 scale times a factor): the value in f32, and its roundings
to bf16 and f16.

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
    with np.errstate(over="ignore", under="ignore"):  # of f16
        product = (values * np.float32(scale)).astype(np.float32)
        half = product.astype(np.float16)
    return {"codes": [int(code) for code in codes], "scale": stored_scale,
            "f32": [int(bits) for bits in product.view(np.uint32)],
            "bf16": [int(bits) for bits in bf16_bits(product)],
            "f16": [int(bits) for bits in half.view(np.uint16)]}


def int4_blocks():
    """Codes about every zero point, by scales of either type: usual, with all bits of the mantissa,
    negative, subnormal, the largest whose products f32 has, and 0."""
    codes = np.array(list(range(16)) + [15 - code for code in range(16)])
    scales = {"f16": [1.0, 0.0123, -0.37, 6e-8, 6.1e-5, 65504.0, 0.0],
              "bf16": [1.0, 0.0123, -0.37, 1e-38, 2e-40, 2.0**123, 0.0]}
    blocks = []
    for number, (kind, scale) in enumerate((k, s) for k, all_of in scales.items() for s in all_of):
        if kind == "f16":
            bits = int(np.float16(scale).view(np.uint16))
            value = np.float32(np.float16(scale))
        else:
            bits = int(bf16_bits(np.array([scale], dtype=np.float32))[0])
            value = np.array([bits << 16], dtype=np.uint32).view(np.float32)[0]
        for zero in sorted({8, 0, 15, number % 16}):
            made = block(codes, (codes - zero).astype(np.float32), value, bits)
            blocks.append({**made, "zero": zero, "type": kind})
    return blocks


def nvfp4_blocks():
    codes = list(range(16))
    values = np.array([e2m1(code) for code in codes], dtype=np.float32)
    factors = [1.0, 0.000123456789, 2.0**-100, 1e-30, 2.0**118, 2.0**119, 2.0**-116, 2.0**-117 * 1.25]
    blocks = []
    for number, factor in enumerate(factors):
        factor = np.float32(factor)
        for scale in (0x38, 0x7E, 0x01, 0x07, 0x08, 0x5B, 0xB5, 0x00, 0x11 + number):
            with np.errstate(over="ignore", under="ignore"):
                made = block(codes, values, np.float32(e4m3(scale) * factor), scale)
            blocks.append({**made, "factor": int(factor.view(np.uint32))})
    return blocks


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
        "int4": int4_blocks(),
        "nvfp4": nvfp4_blocks(),
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
