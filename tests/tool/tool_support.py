"""What the tests of the tool share: running it, and files made by hand."""

import json
import os
import struct
import subprocess
import tempfile
import unittest

import numpy as np

TOOL = os.environ["SWITCHYARD_TEST_TOOL"]
SANITIZED = os.environ.get("SWITCHYARD_TEST_SANITIZED", "") not in ("", "OFF", "0")
# What makes its class one of the slowest under the sanitizers, of C++ that others go through there.
not_sanitized = unittest.skipIf(SANITIZED, "others go through its C++ under the sanitizers")


def run_tool(*args, env=None, timeout=600, cwd=None):
    """The finished process; its output as text."""
    return subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})}, cwd=cwd)


def make_checkpoint(directory, family="mixtral", **options):
    """A small checkpoint; options as on the command line, "_" for "-"."""
    sizes = {"hidden": 64, "inner": 32, "experts": 4, "top_k": 2, **options}
    words = [word for key, value in sizes.items() for word in ("--" + key.replace("_", "-"), value)]
    done = run_tool("make-checkpoint", "--family", family, "--output", directory, *words)
    assert done.returncode == 0, done.stderr
    return directory


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    write_raw_safetensors(path, json.dumps(header).encode(), data)


def write_raw_safetensors(path, header, data=b"", length=None):
    """A file with that header, and perhaps a length that lies."""
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header) if length is None else length) + header + data)


class ToolTest(unittest.TestCase):
    """Assertions on a finished process."""

    def assert_fine(self, done):
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)

    def assert_one_line(self, done, code, words):
        """Exit code, and one line on stderr with all the words."""
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("switchyard: "), done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)


class TestWithFolder(ToolTest):
    """With a folder of its own, a text and made-up tokens."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.d = self.folder.name
        with open(f"{self.d}/text.txt", "w", encoding="utf-8") as file:
            file.write("All happy families are alike. " * 3)

    def tokens(self, num_tokens=20, hidden=64, seed=1):
        path = f"{self.d}/tokens.npy"
        random = np.random.default_rng(seed)
        np.save(path, random.standard_normal((num_tokens, hidden)).astype(np.float32))
        return path
