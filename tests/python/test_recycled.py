"""Gradients on a CPU take memory that torch has given back: never what somebody still holds."""

import gc
import os
import subprocess
import sys
import unittest
import weakref

import switchyard as sw
from switchyard import _recycled

try:
    import torch
except ImportError:
    torch = None

E, K, H, I, T = 8, 2, 256, 128, 24


def parameters(dtype=None):
    g = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter((0.1 * torch.randn(*shape, generator=g)).to(dtype or torch.float32))
            for shape in ((E, H), (E, 2 * I, H), (E, H, I))]


class Step:
    """A layer, and what a step of it computes."""

    def __init__(self, dtype=None):
        self.parameters = parameters(dtype)
        self.layer = sw.Layer(*self.parameters, K, trainable=True)
        g = torch.Generator().manual_seed(4)
        self.x = torch.randn(T, H, generator=g).to(self.parameters[0].dtype)

    def __call__(self, scale=1.0, keep=False):
        if not keep:
            for p in self.parameters:
                p.grad = None
        (scale * self.layer(self.x).float().square().sum()).backward()
        return self.parameters[1].grad


@unittest.skipIf(torch is None, "no torch")
class RecycledTest(unittest.TestCase):
    def test_memory_that_nobody_holds_is_used_again(self):
        for dtype in (torch.float32, torch.bfloat16):
            step = Step(dtype)
            first = step().data_ptr()
            want = step.parameters[1].grad.clone()
            for _ in range(3):
                self.assertEqual(step().data_ptr(), first)
                self.assertTrue(torch.equal(step.parameters[1].grad, want))

    def test_what_somebody_holds_stays_as_it_is(self):
        step = Step()
        held = step()
        want = held.clone()
        part = step(2.0)[1, :3]  # shares the memory of a gradient that nobody holds
        want_of_part = part.clone()
        step(3.0)
        step(4.0)
        self.assertTrue(torch.equal(held, want))
        self.assertTrue(torch.equal(part, want_of_part))
        self.assertFalse(torch.equal(step.parameters[1].grad, want))

    def test_gradients_are_added_up(self):
        step = Step()
        once = step().clone()
        for times in (2, 3):
            step(keep=True)
            torch.testing.assert_close(step.parameters[1].grad, times * once)

    def test_steps_have_the_bits_of_steps_on_fresh_memory(self):
        def losses():
            step = Step()
            optimizer = torch.optim.AdamW(step.parameters, lr=1e-2)
            out = []
            for _ in range(4):
                step()
                optimizer.step()
                out.append(step.layer(step.x).detach().clone())
            return out

        recycled = losses()
        least, _recycled._LEAST_BYTES = _recycled._LEAST_BYTES, 1 << 60
        try:
            fresh = losses()
        finally:
            _recycled._LEAST_BYTES = least
        for a, b in zip(recycled, fresh):
            self.assertTrue(torch.equal(a, b))

    def test_gradients_outlive_the_layer_and_memory_ends_with_both(self):
        step = Step()
        held = step()
        want = held.clone()
        memory = weakref.ref(step.layer._pool._memory)
        for p in step.parameters:
            p.grad = None
        del step
        gc.collect()
        self.assertIsNotNone(memory())
        self.assertTrue(torch.equal(held, want))
        del held
        gc.collect()
        self.assertIsNone(memory())

    def test_only_memory_of_parameters_is_kept(self):
        step = Step()
        step()
        free = step.layer._pool._memory._free
        for num_tokens in (1100, 1200, 1300):
            step.x = torch.ones(num_tokens, H, requires_grad=True)  # more than a MiB
            step()
            step()
        for p in step.parameters:
            p.grad = None
        del step.x
        gc.collect()
        sizes = {4 * p.numel() for p in step.parameters if 4 * p.numel() >= _recycled._LEAST_BYTES}
        self.assertEqual({size: len(blocks) for size, blocks in free.items()}, dict.fromkeys(sizes, 1))

    def test_experts_alone_have_it_too(self):
        _, w13, w2 = parameters()
        experts = sw.Experts(w13, w2, trainable=True)
        ids = torch.arange(T * K).reshape(T, K).remainder(E).int()
        weights = torch.full((T, K), 0.5)
        x = torch.ones(T, H)

        def address():
            w13.grad = w2.grad = None
            experts(x, ids, weights).sum().backward()
            return w13.grad.data_ptr()

        self.assertEqual(address(), address())

    def test_a_process_that_ends_with_gradients_says_nothing(self):
        code = "import test_recycled as t; s = t.Step(); g = s(); s(2.0)"
        folder = os.path.dirname(os.path.abspath(__file__))
        paths = [folder, os.path.dirname(os.path.dirname(os.path.abspath(sw.__file__)))]
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                               env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
