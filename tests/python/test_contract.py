"""The package's spellings, which are a contract: every call and every option by name, with its
default, on CPU tensors of torch; bf16 unless told otherwise."""

import inspect
import json
import os
import tempfile
import unittest

try:
    import torch
except ImportError:
    torch = None

import switchyard as sw

from rank_threads import on_threads

T, E, K, H, I, R = 6, 8, 2, 32, 16, 2


def experts_in_double(x, w13, w2, expert, weight, act):
    """What the experts make of x by their definition: tokens [T, H] in double. w13 [E, 2I, H] (gate
    rows, then up rows) or, where plain, [E, I, H]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for e, w in zip(expert[t].tolist(), weight[t].tolist()):
            inner = w13[e].double() @ x[t].double()
            gate, up = (inner[:I], inner[I:]) if inner.shape[0] == 2 * I else (inner, 1.0)
            out[t] += w * (w2[e].double() @ (act(gate) * up).bfloat16().double())
    return out


def tensors_of(path):
    """The bf16 tensors of a .safetensors file by name."""
    with open(path, "rb") as file:
        content = file.read()
    begin = 8 + int.from_bytes(content[:8], "little")
    result = {}
    for name, entry in json.loads(content[8:begin]).items():
        if name == "__metadata__" or entry["dtype"] != "BF16":
            continue
        first, end = entry["data_offsets"]
        words = torch.frombuffer(bytearray(content[begin + first:begin + end]), dtype=torch.bfloat16)
        result[name] = words.reshape(entry["shape"])
    return result


def options_of(call):
    """name -> default, of what has one."""
    return {name: p.default for name, p in inspect.signature(call).parameters.items()
            if p.default is not inspect.Parameter.empty}


class Spellings(unittest.TestCase):
    def expect(self, call, positional, **defaults):
        names = [name for name in inspect.signature(call).parameters if name != "self"]
        self.assertEqual(names[:len(positional)], positional)
        have = options_of(call)
        self.assertEqual({name: have.get(name, "missing") for name in defaults}, defaults)

    def test_functions_and_their_defaults(self):
        self.expect(sw.route, ["logits", "top_k"], score="softmax", renormalize=True)
        self.expect(sw.experts, ["x", "w13", "w2", "expert", "weight"], activation="silu")
        self.expect(sw.Layer.from_checkpoint, ["path"], layer=0, comm=None)
        self.expect(sw.Layer.__init__, ["gate", "w13", "w2", "top_k"], comm=None)
        self.expect(sw.Communicator.__init__, ["rank", "world", "unique_id"])
        self.expect(sw.Communicator.from_torch, [], group=None)
        self.expect(sw.Communicator.from_env, [])

    def test_the_exchange_and_its_defaults(self):
        self.expect(sw.ExpertParallel.__init__,
                    ["comm", "num_experts", "top_k", "hidden", "max_tokens"], dtype="bf16",
                    mode="auto", dispatch_wire=None, combine_wire=None, max_recv_rows=None,
                    capacity_factor=None, drop_policy="token", rank_invariant=False, ctas=None,
                    timeout_s=10.0)
        self.expect(sw.ExpertParallel.dispatch, ["x", "expert", "weight"], async_=False)
        self.expect(sw.ExpertParallel.combine, ["rows", "dispatched"], async_=False)
        self.expect(sw.ExpertParallel.dispatch_bucketed, ["x", "expert", "weight"], capacity=None)
        self.expect(sw.ExpertParallel.combine_bucketed,
                    ["out", "weight", "expert_meta", "expert_y", "expert_num_tokens"])
        self.expect(sw.ExpertParallel.dispatch_flat, ["x", "expert", "weight"])
        self.expect(sw.ExpertParallel.combine_flat, ["rows", "dispatched"])

    def test_an_error_has_a_code_and_a_message(self):
        error = sw.SwitchyardError("timeout", "rank 1 did not come")
        self.assertEqual((error.code, str(error)), ("timeout", "rank 1 did not come"))


@unittest.skipIf(torch is None, "torch is not installed")
class Calls(unittest.TestCase):
    def setUp(self):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(T, H, generator=g).bfloat16()
        self.gate = torch.randn(E, H, generator=g)
        self.w13 = (torch.randn(E, 2 * I, H, generator=g) / H**0.5).bfloat16()
        self.w2 = (torch.randn(E, H, I, generator=g) / I**0.5).bfloat16()
        self.expert, self.weight = sw.route(self.x.float() @ self.gate.T, K, score="softmax",
                                            renormalize=True)

    def expect_close(self, y, want):
        """bf16: half a unit of the result, and what bf16 intermediates that round the other way
        move: 2^-8 of a term each."""
        self.assertEqual((y.dtype, y.shape), (torch.bfloat16, want.shape))
        distance = (y.double() - want).abs()
        self.assertTrue(bool((distance <= 2**-8 * want.abs() + 1e-2).all()), distance.max())

    def test_route_experts_and_layers(self):
        self.assertEqual((self.expert.dtype, tuple(self.expert.shape)), (torch.int32, (T, K)))
        self.assertEqual((self.weight.dtype, tuple(self.weight.shape)), (torch.float32, (T, K)))
        best = (self.x.float() @ self.gate.T).topk(K)
        self.assertEqual(self.expert.tolist(), best.indices.tolist())
        self.assertTrue(torch.allclose(self.weight, best.values.softmax(1), rtol=1e-5))
        silu = torch.nn.functional.silu
        want = experts_in_double(self.x, self.w13, self.w2, self.expert, self.weight, silu)
        y = sw.experts(self.x, self.w13, self.w2, self.expert, self.weight, activation="silu")
        self.expect_close(y, want)
        layer = sw.Layer(gate=self.gate, w13=self.w13, w2=self.w2, top_k=K)
        self.expect_close(layer(self.x), want)
        first = self.w13[:, :I].contiguous()
        plain = sw.experts(self.x, first, self.w2, self.expert, self.weight, activation="relu")
        self.expect_close(plain, experts_in_double(self.x, first, self.w2, self.expert, self.weight,
                                                   torch.relu))

    def test_a_layer_of_a_checkpoint_is_that_of_its_tensors(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "made")
            sw.make_checkpoint(path, family="olmoe", hidden=H, inner=I, num_experts=E, top_k=K)
            layer = sw.Layer.from_checkpoint(path, layer=0, device="cpu", compute="bf16", comm=None)
            have = tensors_of(os.path.join(path, "model.safetensors"))
            name = "model.layers.0.mlp."
            gate, down = (have[f"{name}gate.weight"],
                          torch.stack([have[f"{name}experts.{e}.down_proj.weight"] for e in range(E)]))
            w13 = torch.stack([torch.cat([have[f"{name}experts.{e}.{half}_proj.weight"]
                                          for half in ("gate", "up")]) for e in range(E)])
            # OLMoE weighs by the probabilities among all experts.
            best = (self.x.float() @ gate.float().T).softmax(1).topk(K)
            self.expect_close(layer(self.x), experts_in_double(
                self.x, w13, down, best.indices, best.values, torch.nn.functional.silu))

    def test_strided_weights_are_refused_by_name(self):
        for name, w13, w2 in (("w13", self.w13.transpose(1, 2).contiguous().transpose(1, 2), self.w2),
                              ("w2", self.w13[:, :2 * I], self.w2.transpose(1, 2).contiguous()
                               .transpose(1, 2))):
            with self.assertRaisesRegex(sw.SwitchyardError, f"{name}: stride .* leaves a gap"):
                sw.experts(self.x, w13, w2, self.expert, self.weight)

    def test_every_call_of_the_exchange(self):
        def body(rank, comm):
            ep = sw.ExpertParallel(comm, num_experts=E, top_k=K, hidden=H, max_tokens=T,
                                   mode="auto", dispatch_wire=None, combine_wire="f32",
                                   max_recv_rows=None, capacity_factor=None, drop_policy="token",
                                   rank_invariant=False, ctas=None, timeout_s=10.0)
            want = (self.x.float() * self.weight.sum(1, keepdim=True)).bfloat16()

            def check(y):
                self.assertEqual(y.dtype, torch.bfloat16)
                self.assertTrue(torch.allclose(y.float(), want.float(), rtol=2e-2, atol=2e-2))

            # Both ranks have the same tokens: rank 0's come first.
            mine = range(rank * E // R, (rank + 1) * E // R)
            rows = [(e, source, t, k) for e in mine for source in range(R) for t in range(T)
                    for k in range(K) if self.expert[t, k] == e]

            def check_rows(d):
                begin = [sum(row[0] < e for row in rows) for e in mine] + [len(rows)]
                self.assertEqual(d.num_rows.tolist(), [len(d.x)])
                self.assertEqual(d.expert_begin.tolist(), begin)
                self.assertIsNone(d.scale)
                for i, (_, _, t, k) in enumerate(rows):
                    self.assertTrue(torch.equal(d.x[d.row_x[i].long()], self.x[t]))
                    self.assertEqual(d.row_weight[i], self.weight[t, k])

            d = ep.dispatch(self.x, self.expert, self.weight)
            check_rows(d)
            check(ep.combine(d.x[d.row_x.long()], d))
            h = ep.dispatch(self.x, self.expert, self.weight, async_=True)
            d = h.wait()
            check_rows(d)
            check(ep.combine(d.x[d.row_x.long()], d, async_=True).wait())
            num, ex, meta = ep.dispatch_bucketed(self.x, self.expert, self.weight, capacity=None)
            self.assertEqual(tuple(ex.shape), (E // R, T * R, H))
            self.assertEqual(tuple(meta.shape), (E // R, T * R, 5))
            for local, e in enumerate(mine):
                of_expert = [row for row in rows if row[0] == e]
                self.assertEqual(int(num[local]), len(of_expert))
                for slot, (_, _, t, _) in enumerate(of_expert):
                    self.assertTrue(torch.equal(ex[local, slot], self.x[t]))
            out = torch.empty(T, H, dtype=torch.bfloat16)
            ep.combine_bucketed(out, self.weight, meta, ex, num)
            check(out)
            d = ep.dispatch_flat(self.x, self.expert, self.weight)
            check(ep.combine_flat(d.x, d))
        on_threads(body, R)

    def test_ways_to_a_communicator(self):
        self.assertEqual(sw.Communicator.from_torch(group=None).size, 1)
        self.assertEqual(sw.Communicator.from_env().size, 1)
        comm = sw.Communicator(0, 1, sw.Communicator.unique_id())
        self.assertEqual((comm.rank, comm.size), (0, 1))


if __name__ == "__main__":
    unittest.main()
