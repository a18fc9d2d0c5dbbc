"""switchyard.transformers on blocks of families whose experts have no interface of transformers':
stand-ins with the code of theirs, so that no transformers is needed; tools/peers/transformers_check.py
has the models themselves."""

import unittest

try:
    import torch
    from torch import nn
except ImportError:
    torch = None

import switchyard as sw

HIDDEN, INNER, EXPERTS, IDENTITY = 24, 40, 5, 3

if torch is not None:
    import transformers_stand_ins as stand_ins

    stand_ins.without_transformers()
    import switchyard.transformers as adapter

    class Llama4TextExperts(nn.Module):
        """[E,H,2I] and [E,I,H]; called with every expert's tokens, one expert's after the other's."""

        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER) * HIDDEN**-0.5)
            self.down_proj = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) * INNER**-0.5)
            self.act_fn = nn.SiLU()

        def forward(self, hidden_states):
            rows = hidden_states.view(EXPERTS, -1, HIDDEN)
            gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, dim=-1)
            return torch.bmm(up * self.act_fn(gate), self.down_proj).view(-1, HIDDEN)

    class Llama4Router(nn.Linear):
        def __init__(self, top_k=1):
            super().__init__(HIDDEN, EXPERTS, bias=False)
            self.top_k = top_k

        def forward(self, x):
            logits = super().forward(x)
            best, ids = logits.topk(self.top_k, dim=1)
            scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, best)
            return torch.sigmoid(scores.float()).to(logits.dtype), logits

    class Llama4TextMoe(nn.Module):
        def __init__(self, top_k=1):
            super().__init__()
            self.experts, self.router = Llama4TextExperts(), Llama4Router(top_k)
            self.shared_expert = stand_ins.SharedExpert()

        def forward(self, hidden_states):
            x = hidden_states.reshape(-1, HIDDEN)
            scores, logits = self.router(x)
            routed = self.experts((x.repeat(EXPERTS, 1) * scores.T.reshape(-1, 1)))
            return self.shared_expert(x) + routed.reshape(EXPERTS, -1, HIDDEN).sum(dim=0), logits

    class LongcatFlashExperts(nn.Module):
        """[E+Z,2I,H], of which nobody multiplies the last Z, and [E,H,I]."""

        def __init__(self):
            super().__init__()
            self.num_routed_experts, self.total_experts = EXPERTS, EXPERTS + IDENTITY
            self.gate_up_proj = nn.Parameter(
                torch.randn(EXPERTS + IDENTITY, 2 * INNER, HIDDEN) * HIDDEN**-0.5)
            self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * INNER**-0.5)
            self.act_fn = nn.SiLU()

        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden_states)
            for t, k in ((t, k) for t in range(len(out)) for k in range(top_k_index.shape[1])):
                e, y = int(top_k_index[t, k]), hidden_states[t]
                if e < EXPERTS:
                    gate, up = (self.gate_up_proj[e] @ y).chunk(2)
                    y = self.down_proj[e] @ (self.act_fn(gate) * up)
                out[t] += (top_k_weights[t, k] * y).to(out.dtype)
            return out

    class LongcatFlashTopkRouter(nn.Module):
        def __init__(self, is_odd=False):
            super().__init__()
            self.top_k, self.routed_scaling_factor, self.is_odd = 3, 1.5, is_odd
            self.classifier = nn.Linear(HIDDEN, EXPERTS + IDENTITY, bias=False)
            self.register_buffer("e_score_correction_bias",
                                 torch.randn(EXPERTS + IDENTITY) * 0.05)

        def forward(self, x):
            logits = nn.functional.linear(x.float(), self.classifier.weight.float())
            scores = logits.softmax(-1)
            ids = (scores + self.e_score_correction_bias).topk(self.top_k)[1]
            weights = scores.gather(1, ids) * self.routed_scaling_factor
            return weights**2 if self.is_odd else weights, ids

    class LongcatFlashMoE(nn.Module):
        def __init__(self, is_odd=False):
            super().__init__()
            self.experts, self.router = LongcatFlashExperts(), LongcatFlashTopkRouter(is_odd)

        def forward(self, hidden_states):
            x = hidden_states.view(-1, HIDDEN)
            weights, ids = self.router(x)
            return self.experts(x, ids, weights).view(hidden_states.shape)

    class Holder(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

    def holder(kind, dtype=None, **options):
        torch.manual_seed(0)
        return Holder(kind(**options)).to(dtype or torch.float32).eval()

    def tokens(dtype=None, device="cpu"):
        generator = torch.Generator().manual_seed(1)
        return torch.randn(2, 7, HIDDEN, generator=generator).to(device, dtype or torch.float32)

    @torch.no_grad()
    def result(model, x):
        """The block's tokens, and its logits if it returns them."""
        out = model.block(x)
        return out if isinstance(out, tuple) else (out,)


@unittest.skipIf(torch is None, "torch is not installed")
class Families(unittest.TestCase):
    device = "cpu"
    kinds = "Llama4TextMoe", "LongcatFlashMoE"

    def each(self, dtype=None, **options):
        for name in self.kinds:
            with self.subTest(name):
                yield holder(globals()[name], dtype, **options).to(self.device)

    def test_whole_blocks_give_what_theirs_give_and_return_it_alike(self):
        for m in self.each():
            x = tokens(device=self.device)
            want = result(m, x)
            report = adapter.accelerate(m)
            self.assertEqual([(b.name, b.extent) for b in report.replaced], [("block", "block")])
            self.assertEqual(report.kept, [])
            for got, expected in zip(result(m, x), want, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    def test_in_bf16_a_token_differs_by_rounding_or_by_a_tie(self):
        for m in self.each(torch.bfloat16):
            x = tokens(torch.bfloat16, self.device)
            want = result(m, x)[0].float().reshape(-1, HIDDEN)
            self.assertEqual([b.extent for b in adapter.accelerate(m).replaced], ["block"])
            difference = (result(m, x)[0].float().reshape(-1, HIDDEN) - want).abs().amax(-1)
            near = difference < 0.03 * want.abs().amax(-1)
            self.assertGreaterEqual(int(near.sum()), 13, "of 14 tokens")

    def test_who_hooks_the_router_sees_it_and_our_experts_run_behind(self):
        for m in self.each():
            x, seen = tokens(device=self.device), []
            want = result(m, x)
            adapter.accelerate(m)
            hook = m.block.router.register_forward_hook(lambda *args: seen.append(args[2]))
            for got, expected in zip(result(m, x), want, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            self.assertEqual(len(seen), 1)
            hook.remove()
            result(m, x)
            self.assertEqual(len(seen), 1)

    def test_what_is_written_to_the_router_counts(self):
        for dtype in torch.float32, torch.bfloat16:  # whose biases are copied
            for m in self.each(dtype):
                x = tokens(dtype, self.device)
                adapter.accelerate(m)
                before = result(m, x)[0]
                with torch.no_grad():
                    if hasattr(m.block.router, "classifier"):
                        m.block.router.e_score_correction_bias[-1] += 10.0
                    else:
                        m.block.router.weight.copy_(m.block.router.weight.flip(0))
                got = result(m, x)[0].float()
                self.assertFalse(torch.allclose(got, before.float(), atol=1e-2))
                adapter.release(m)
                own = result(m, x)[0].float()
                near = (got - own).abs().amax(-1) < 0.03 * own.abs().amax(-1)
                self.assertGreaterEqual(int(near.sum()), 13, "of 14 tokens")

    def test_state_dict_and_undo_have_the_bits_that_were_there_also_of_rows_of_no_expert(self):
        for m in self.each():
            state = {name: value.clone() for name, value in m.state_dict().items()}
            parameters = dict(m.named_parameters())
            report = adapter.accelerate(m)
            moved = self.device == "cpu" or hasattr(m.block, "shared_expert")  # Llama 4's, in our order
            self.assertEqual(m.block.experts.down_proj.is_meta, moved)
            for after in (m.state_dict(), report.undo() or m.state_dict()):
                self.assertEqual(list(after), list(state))
                for name, value in state.items():
                    self.assertTrue(torch.equal(after[name], value), name)
            self.assertTrue(all(value is parameters[name] for name, value in m.named_parameters()))


@unittest.skipUnless(torch is not None and torch.cuda.is_available(), "torch sees no GPU")
class FamiliesOnAGpu(Families):
    device = "cuda"


@unittest.skipIf(torch is None, "torch is not installed")
class Refused(unittest.TestCase):
    def test_more_than_one_input_a_token_stays_with_transformers_and_says_why(self):
        m = holder(Llama4TextMoe, top_k=2)
        self.assertEqual([b.reason for b in adapter.accelerate(m).kept],
                         ["its router gives a token 2 experts, each with an input of its own"])
        self.assertFalse(m.block.experts.down_proj.is_meta)

    def test_behind_another_rule_the_experts_alone_are_ours(self):
        m, x = holder(LongcatFlashMoE, is_odd=True), tokens()
        want = result(m, x)
        self.assertEqual([b.extent for b in adapter.accelerate(m).replaced], ["experts"])
        torch.testing.assert_close(result(m, x), want, rtol=1e-5, atol=1e-5)

    def test_gradients_are_an_error(self):
        for kind in Llama4TextMoe, LongcatFlashMoE:
            m = holder(kind)
            adapter.accelerate(m)
            with self.assertRaisesRegex(sw.SwitchyardError, "no gradients yet"):
                m.block(tokens())


if __name__ == "__main__":
    unittest.main()
