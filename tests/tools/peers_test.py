"""The peers in Python as far as a machine without a GPU can run them: what they say where something
is missing, and the turns of SonicMoE and our layer with stand-ins for both."""

import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
except ImportError:
    torch = None

sys.dont_write_bytecode = True
PEERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "peers")

# A torch that tells the time of whatever ran last: SonicMoE 4 ms, ours 2, a dense product 1.
TORCH = '''
import os
import sys
from unittest.mock import MagicMock

class Tensor(MagicMock):
    """What all operations on it give too."""

    def item(self):
        return float(os.environ["FAKE_DIFFERENCE"])


def two(*_, **__):
    answer = Tensor()
    answer.__iter__.side_effect = lambda: iter((Tensor(), Tensor()))
    return answer


torch = Tensor()
torch.__version__ = "9.9"
torch.ran = []
torch.cuda.is_available.return_value = os.environ["FAKE_GPU"] == "1"
torch.cuda.get_device_properties.return_value.L2_cache_size = 1
torch.cuda.get_device_name.return_value = "stand-in"


class Graph:
    def replay(self):
        torch.ran.append(self.work)


class Captured:
    def __init__(self, graph):
        self.graph = graph

    def __enter__(self):
        pass

    def __exit__(self, *_):
        self.graph.work = torch.ran[-1]


class Event:
    def __init__(self, enable_timing):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, _):
        return {"torch": 8.0, "sonicmoe": 4.0, "ours": 2.0, "dense": 1.0}[torch.ran[-1]]


torch.cuda.CUDAGraph = Graph
torch.cuda.graph = Captured
torch.cuda.Event = Event
torch.topk.side_effect = torch.sort.side_effect = two
torch.autograd.grad.return_value = [Tensor() for _ in range(4)]


def grouped_mm(*_, **__):
    torch.ran.append("torch")
    rows = Tensor()
    rows.chunk.side_effect = two
    return rows


torch._grouped_mm = grouped_mm
square = torch.randn.return_value.bfloat16.return_value
square.__matmul__.side_effect = lambda _: torch.ran.append("dense")
sys.modules["torch"] = torch
'''
SONICMOE = '''
import torch
from unittest.mock import MagicMock
seen = []


def moe_TC_softmax_topk_layer(*arguments):
    if os.environ["FAKE_BREAKS"] == "1" and not seen:
        seen.append(1)
        raise RuntimeError("no kernel\\nfor this shape")
    torch.ran.append("sonicmoe")
    return (MagicMock(),)
'''
SWITCHYARD = '''
import torch


class Layer:
    def __init__(self, gate, w13, w2, top_k, score, device, max_tokens, trainable=False):
        assert (top_k, score, device, max_tokens) == (2, "topk-softmax", "cuda:0", 64)
        self.trainable = trainable

    def __call__(self, x, out=None):
        assert self.trainable == (out is None)
        torch.ran.append("ours")
        return torch.zeros()
'''
REQUEST = {"T": 64, "E": 4, "K": 2, "H": 8, "I": 16, "seed": 17, "rounds": 6}


def program(script):
    """A peer as bench/CMakeLists.txt compiles it in: what they share in front, in place of its import."""
    texts = []
    for name in "peer_process.py", script:
        with open(os.path.join(PEERS, name), encoding="utf-8") as file:
            texts.append(file.read())
    own = re.sub(r"\nfrom peer_process import[^\n]*\n", "\n", texts[1])
    return own if own == texts[1] else texts[0] + own


class FakePrograms:
    """What the stored peers time: works are their names, or raise."""

    name = "peer"

    def __init__(self, us):
        self.us = us

    def captured(self, work):
        return work()[0]

    def sample(self, name):
        return self.us[name]


class Peers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.d = folder.name

    def write(self, name, text):
        path = os.path.join(self.d, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def stand_ins(self, but=""):
        modules = {"torch.py": TORCH, "sonicmoe/__init__.py": "__version__ = '0.1.2.dev'",
                   "sonicmoe/functional.py": "import os\n" + SONICMOE,
                   "sonicmoe/enums.py": "class ActivationType:\n    SWIGLU = 1\n",
                   "switchyard.py": SWITCHYARD}
        for name, text in modules.items():
            missing = but and name.startswith(but)
            self.write(name, f"raise ImportError('no {but} in this folder')" if missing else text)

    def ask(self, script, *requests, word="cuda", gpu="1", difference="0.01", breaks="0"):
        env = {**os.environ, "PYTHONPATH": self.d, "FAKE_GPU": gpu, "PYTHONDONTWRITEBYTECODE": "1",
               "FAKE_DIFFERENCE": difference, "FAKE_BREAKS": breaks}
        words = [sys.executable, "-c", program(script), word]  # as the tool starts it
        text = "".join(json.dumps(request) + "\n" for request in requests)
        done = subprocess.run(words, input=text, env=env, capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_every_peer_can_be_compiled_into_the_tool(self):
        files = glob.glob(os.path.join(PEERS, "*.py"))
        self.assertGreater(len(files), 3)
        for path in files:
            with open(path, encoding="utf-8") as file:
                text = file.read()
            compile(text, path, "exec")
            self.assertNotIn(')python"', text)  # would end the literal that holds it

    def test_sonicmoe_and_ours_take_turns_in_one_process_and_their_medians_are_compared(self):
        self.stand_ins()
        hello, answer = self.ask("sonicmoe_peer.py", REQUEST)
        self.assertEqual(hello, {"version": "0.1.2.dev", "device": "stand-in"})
        self.assertEqual(answer, {"median_us": {"sonicmoe": 4000.0, "ours": 2000.0, "dense": 1000.0},
                                  "ratio": 2.0, "difference": 0.01, "max_over_mean": 0.01,
                                  "rounds": 6})

    def test_there_and_back_has_torch_beside_both(self):
        self.stand_ins()
        _, answer = self.ask("sonicmoe_peer.py", REQUEST | {"pass": "both", "zipf": 1.0})
        self.assertEqual(answer.get("median_us"), {"sonicmoe": 4000.0, "ours": 2000.0,
                                                   "torch": 8000.0, "dense": 1000.0}, answer)
        _, answer = self.ask("sonicmoe_peer.py", REQUEST | {"pass": "both"}, difference="0.5")
        self.assertRegex(answer["error"], "differ by 0.5 ")

    def imported(self):
        sys.path.insert(0, PEERS)
        self.addCleanup(sys.path.remove, PEERS)

    def test_another_program_begins_every_round(self):
        self.imported()
        import sonicmoe_peer
        ran = []
        works = {name: name for name in "abc"}
        sonicmoe_peer.in_turns(works, 3, lambda work: ran.append(work) or 1.0)
        self.assertEqual("".join(ran), "abc" "bca" "cab")

    def test_outputs_that_differ_are_no_answer(self):
        self.stand_ins()
        for difference in "1.4", "nan":
            _, answer = self.ask("sonicmoe_peer.py", REQUEST, difference=difference)
            self.assertRegex(answer["error"], f"differ by {difference} .*not the same layer")

    def test_a_shape_that_breaks_does_not_break_the_next(self):
        self.stand_ins()
        _, broken, fine = self.ask("sonicmoe_peer.py", REQUEST, REQUEST, breaks="1")
        self.assertEqual(broken, {"error": "RuntimeError: no kernel"})
        self.assertEqual(fine["ratio"], 2.0)

    def test_what_is_missing_is_said_in_words(self):
        for missing in "torch", "sonicmoe", "switchyard":
            self.stand_ins(but=missing)
            (hello,) = self.ask("sonicmoe_peer.py", REQUEST)
            self.assertRegex(hello["error"], f"{missing}.* cannot be imported.*: no {missing} in "
                                             "this folder .*python3 is")
        for script, word in (("sonicmoe_peer.py", ""), ("torch_peer.py", "cuda"),
                             ("stored_peer.py", "deepgemm"), ("stored_peer.py", "triton-mxfp4")):
            self.stand_ins()
            (hello,) = self.ask(script, word=word, gpu="0")
            self.assertRegex(hello["error"], "torch 9.9 of .* sees no GPU")
        for word, module in ("deepgemm", "deep_gemm"), ("triton-mxfp4", "triton"):
            (hello,) = self.ask("stored_peer.py", word=word)
            self.assertRegex(hello["error"], f"^{module} cannot be imported: No module named")

    @unittest.skipUnless(torch, "no torch")
    def test_torch_on_a_cpu_times_a_layer_and_refuses_what_it_has_not(self):
        tensors = {"tokens": torch.randn(6, 8), "gate": torch.randn(4, 8),
                   "expert": torch.randint(0, 4, (6, 2), dtype=torch.int32), "weight": torch.rand(6, 2)}
        header, data = {}, b""
        for name, tensor in tensors.items():
            raw = tensor.numpy().tobytes()
            header[name] = {"dtype": "I32" if tensor.dtype == torch.int32 else "F32",
                            "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
        words = json.dumps(header).encode()
        path = os.path.join(self.d, "inputs.safetensors")
        with open(path, "wb") as file:
            file.write(len(words).to_bytes(8, "little") + words + data)
        request = {"work": "layer", "file": path, "E": 4, "K": 2, "H": 8, "I": 16, "seed": 1, "gated": True,
                   "activation": "silu"}
        hello, layer, select, unknown, none = self.ask(
            "torch_peer.py", request, request | {"work": "select"}, request | {"activation": "tanh"},
            request | {"file": path + ".none"}, word="cpu")
        self.assertEqual(hello, {"version": torch.__version__, "device": "cpu"})
        self.assertEqual(set(layer["median_us"]), {"experts+combine", "layer"})
        self.assertGreater(layer["median_us"]["layer"], 0)
        self.assertEqual((set(select["median_us"]), select["eager"]), ({"select", "router_gemm"}, ""))
        self.assertEqual(unknown, {"error": "no peer for the activation tanh"})
        self.assertRegex(none["error"], "^FileNotFoundError: ")

    def test_a_stored_peer_that_has_another_activation_says_so(self):
        self.stand_ins()
        self.write("deep_gemm/__init__.py", "m_grouped_fp8_gemm_nt_contiguous = None\n__version__ = '1'")
        self.write("deep_gemm/utils/__init__.py", "")
        self.write("deep_gemm/utils/math.py", "")
        self.write("deep_gemm/utils/layout.py", "def get_mn_major_tma_aligned_tensor(scales): pass")
        (hello,) = self.ask("stored_peer.py", word="deepgemm")
        self.assertRegex(hello["error"], "deep_gemm has not the names that are used")
        self.write("deep_gemm/__init__.py", "def m_grouped_fp8_gemm_nt_contiguous(*_): pass\n__version__ = '1'")
        hello, answer = self.ask("stored_peer.py", REQUEST | {"activation": "gelu"}, word="deepgemm")
        self.assertEqual(hello, {"version": "1", "device": "stand-in"})
        self.assertEqual(answer, {"error": "ValueError: want the activation silu, not gelu"})

    @unittest.skipUnless(torch, "no torch")
    def test_a_made_up_routing_has_distinct_experts_and_favours_the_first_ones(self):
        self.imported()
        import stored_peer
        even, tilted = (stored_peer.routing(torch, {"T": 400, "E": 16, "K": 4, "zipf": zipf},
                                            torch.Generator().manual_seed(3)) for zipf in (0, 2))
        for ids, weight in even, tilted:
            self.assertTrue(all(len(set(row)) == 4 for row in ids.tolist()))
            torch.testing.assert_close(weight.sum(1), torch.ones(400))
        counts = [stored_peer.by_expert(torch, ids, 16)[1].tolist() for ids, _ in (even, tilted)]
        self.assertGreater(min(counts[0]), 60)  # 100 in the mean
        self.assertGreater(counts[1][0], 4 * counts[1][8])

    @unittest.skipUnless(torch, "no torch")
    def test_an_experts_rows_begin_at_a_multiple_for_deepgemm(self):
        self.imported()
        import stored_peer
        ids = torch.tensor([[2, 0], [2, 3], [0, 2]])
        order, counts = stored_peer.by_expert(torch, ids, 4)
        of = ids.flatten()[order]
        place, owner = stored_peer.rows_of_experts(torch, order, counts, of)
        self.assertEqual(place.tolist(), [0, 1, 128, 129, 130, 256])
        self.assertEqual(owner[place].tolist(), of.tolist())
        self.assertEqual((owner >= 0).sum().item(), 6)
        self.assertEqual(owner.numel(), 384)

    def timed(self, us, works, difference=0.01):
        import stored_peer
        stored_peer.relative = lambda a, b: difference if "ours" in (a, b) else 0.0
        return stored_peer.timed(FakePrograms(us), {"rounds": 3}, works, [4, 8])

    def test_of_a_stored_peers_ways_the_faster_counts_and_one_that_fails_is_left_out(self):
        self.imported()

        def fails():
            raise RuntimeError("no kernel")

        works = {"ours": [lambda: "ours"], 4: [lambda: "four"], 8: [lambda: "eight"]}
        us = {"ours": 2.0, "four": 6.0, "eight": 3.0}
        answer = self.timed(us, works)
        self.assertEqual((answer["median_us"], answer["ratio"], answer["way"]),
                         ({"ours": 2.0, "peer": 3.0}, 1.5, 8))
        self.assertEqual(self.timed(us, works | {8: [fails]})["way"], 4)
        with self.assertRaisesRegex(RuntimeError, "no kernel"):
            self.timed(us, works | {4: [fails], 8: [fails]})
        with self.assertRaisesRegex(ValueError, "differ by 0.4 "):
            self.timed(us, works, difference=0.4)


if __name__ == "__main__":
    unittest.main()
