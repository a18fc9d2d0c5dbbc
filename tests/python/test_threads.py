"""Whose threads compute on a CPU, with and without torch in the process: each case a process.

Run as test_switchyard.py.
"""

import os
import subprocess
import sys
import unittest

try:
    import torch
except ImportError:
    torch = None

LAYER = """
import numpy as np
g = np.random.default_rng(0)
normal = lambda *shape: g.standard_normal(shape).astype(np.float32) / 8
import switchyard as sw
x = normal(300, 64)
layer = sw.Layer(gate=normal(8, 64), w13=normal(8, 64, 64), w2=normal(8, 64, 32), top_k=2{options})
digest = lambda: __import__("hashlib").sha256(layer(x).tobytes()).hexdigest()
print(digest())
"""


def run(program, runtime=""):
    """(stdout, the lines of stderr that say whose threads) of a Python program."""
    environment = dict(os.environ, SWITCHYARD_VERBOSE="1", SWITCHYARD_THREAD_RUNTIME=runtime)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if " threads, " in line]


class Threads(unittest.TestCase):
    def test_without_torch_a_layer_has_one_thread_unless_told(self):
        self.assertEqual(run(LAYER.format(options=""))[1], [])
        self.assertEqual(run(LAYER.format(options=", num_threads=3"))[1],
                         ["switchyard: 3 threads, its own"])

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_beside_torch_a_layer_has_torchs_threads_and_the_same_bits(self):
        with_torch = "import torch; torch.set_num_threads(3)\n" + LAYER
        want, _ = run(LAYER.format(options=""))
        out, said = run(with_torch.format(options=""))
        self.assertEqual(out, want)
        self.assertEqual(len(said), 1)
        self.assertRegex(said[0], r"^switchyard: 3 threads, OpenMP's, as torch: .*omp")
        out, said = run(with_torch.format(options=", num_threads=2"))
        self.assertEqual(out, want)
        self.assertRegex(said[0], r"^switchyard: 2 threads, OpenMP's, as torch: .*omp")
        out, said = run(with_torch.format(options=", num_threads=3"), runtime="own")
        self.assertEqual((out, said), (want, ["switchyard: 3 threads, its own"]))

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_torch_on_its_threads_and_a_layer_on_them_work_in_turns(self):
        program = "import torch; torch.set_num_threads(2)\n" + LAYER.format(options="") + """
a = torch.randn(500, 500)
want = (a @ a).sum()
first = digest()
for _ in range(20):
    assert (a @ a).sum() == want
    assert digest() == first
"""
        run(program)

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_a_child_of_fork_calls_and_frees_a_layer_of_its_parent(self):
        program = "import torch; torch.set_num_threads(2)\n" + LAYER.format(options="") + """
import os, signal
want = digest()
for _ in range(2):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        same = digest() == want
        del layer
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
assert digest() == want
"""
        run(program)


if __name__ == "__main__":
    unittest.main()
