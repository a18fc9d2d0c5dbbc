"""switchyard.transformers on blocks with the structure of transformers' (transformers_stand_ins.py),
and, where transformers is installed, on models of its own."""

import copy
import os
import pickle
import tempfile
import unittest
from unittest import mock

try:
    import torch
    from torch import nn
    from torch.overrides import TorchFunctionMode
except ImportError:
    torch = None

import switchyard as sw

if torch is not None:
    import transformers_stand_ins as stand_ins

    stand_ins.without_transformers()
    import switchyard.transformers as adapter

    def model(seed=0, dtype=None):
        """Every extent: whole blocks, experts behind an unknown router, and one left alone."""
        torch.manual_seed(seed)
        s = stand_ins
        blocks = (s.Block(s.TopKRouter(), s.Experts()),
                  s.Block(s.TopKRouter(norm_topk_prob=False), s.Experts(),
                          shared_expert=s.SharedExpert()),
                  s.Block(s.SigmoidRouter(), s.Experts(), shared_experts=s.SharedExpert()),
                  s.Block(s.OddRouter(), s.Experts(act_fn=nn.ReLU())),
                  s.TupleBlock(s.TopKRouter(), s.Experts(like_gpt_oss=True)),
                  s.Block(s.TopKRouter(), s.Experts(act_fn=nn.Tanh())))
        return s.Model(*blocks).to(dtype or torch.float32).eval()

    def tokens(seed=1, dtype=None):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(2, 7, 24, generator=generator).to(dtype or torch.float32)

    def outputs(of, x):
        with torch.no_grad():
            return of(x)

    class DefaultDevice(TorchFunctionMode):
        """What `with torch.device(...)` is from torch 2 on."""

        MAKERS = {getattr(torch, name) for name in (
            "arange as_tensor empty empty_strided eye full linspace ones rand randint randn randperm "
            "tensor zeros").split()}

        def __init__(self, device):
            super().__init__()
            self.device = device

        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if function in self.MAKERS:
                kwargs.setdefault("device", self.device)
            return function(*args, **kwargs)


EXTENTS = ["block", "block", "block", "experts", "experts"]


@unittest.skipUnless(torch is not None and torch.cuda.is_available(), "torch sees no GPU")
class OnAGpu(unittest.TestCase):
    def test_each_block_is_taken_as_far_as_on_a_cpu_and_gives_the_same(self):
        for dtype in torch.float32, torch.bfloat16:
            with self.subTest(dtype):
                m, x = model(dtype=dtype).cuda(), tokens(dtype=dtype).cuda()
                want = outputs(m, x)
                report = adapter.accelerate(m)
                extents = [block.extent for block in report.replaced]
                if dtype == torch.float32:
                    self.assertEqual(extents, EXTENTS)
                else:  # logits of 16 bits tie: a router of it may choose otherwise, and is not proved
                    self.assertEqual(len(extents), len(EXTENTS))
                difference = (outputs(m, x).float() - want.float()).abs().amax(-1)
                bound = 1e-4 if dtype == torch.float32 else 0.03
                near = (difference < bound * want.float().abs().amax(-1)).sum(dim=(1, 2))
                self.assertGreaterEqual(int(near.min()), 13, "of 14 tokens")
                report.undo()
                self.assertTrue(torch.equal(outputs(m, x), want))

    def test_a_block_of_sizes_that_no_kernel_takes_stays_with_the_reason(self):
        s = stand_ins
        m = s.Model(s.Block(s.TopKRouter(), s.Experts(inner=20))).bfloat16().eval().cuda()
        report = adapter.accelerate(m)
        self.assertEqual(report.replaced, [])
        self.assertRegex(report.kept[0].reason, "multiples of 16 bytes")

    def test_weights_are_used_where_they_lie(self):
        m, x = model().cuda(), tokens().cuda()
        adapter.accelerate(m)
        experts = m.layers[0].experts
        self.assertFalse(experts.gate_up_proj.is_meta)
        before = outputs(m.layers[0], x)
        with torch.no_grad():
            experts.down_proj.mul_(2)
        torch.testing.assert_close(outputs(m.layers[0], x), 2 * before)


@unittest.skipIf(torch is None, "torch is not installed")
class Accelerate(unittest.TestCase):
    def test_what_the_library_does_not_compute_stays_with_its_words_and_other_errors_are_raised(self):
        def refuse(code):
            def held(*_):
                raise sw.SwitchyardError(code, "hidden and inner must be something")
            return mock.patch("switchyard.transformers._held.HeldExperts.__call__", held)

        m, x = model(), tokens()
        want = outputs(m, x)
        with refuse("unsupported"):
            report = adapter.accelerate(m)
        self.assertEqual(report.replaced, [])
        self.assertEqual({block.reason for block in report.kept[:-1]},
                         {"hidden and inner must be something"})
        self.assertTrue(torch.equal(outputs(m, x), want))
        with refuse("timeout"), self.assertRaisesRegex(sw.SwitchyardError, "must be something"):
            adapter.accelerate(m)
        self.assertTrue(torch.equal(outputs(m, x), want))

    def test_a_block_whose_experts_have_no_such_interface_is_told_too(self):
        class DbrxExperts(nn.Module):
            def __init__(self):
                super().__init__()
                self.down_proj = nn.Parameter(torch.zeros(4, 8, 24))

            def forward(self, hidden_states, *_):
                return hidden_states

        s = stand_ins
        m = s.Model(s.Block(s.TopKRouter(), s.Experts()),
                    s.Block(s.TopKRouter(), DbrxExperts())).eval()
        report = adapter.accelerate(m)
        self.assertEqual([block.name for block in report.replaced], ["layers.0"])
        self.assertEqual([(block.name, block.reason) for block in report.kept],
                         [("layers.1", "DbrxExperts is none of the experts whose "
                                       "implementation transformers lets others choose")])
        self.assertIn("Switchyard runs 1 of 2 Mixture-of-Experts blocks", str(report))

    def test_each_block_is_taken_as_far_as_it_was_proved_and_gives_the_same(self):
        m, x = model(), tokens()
        want = outputs(m, x)
        report = adapter.accelerate(m)
        self.assertEqual([block.extent for block in report.replaced], EXTENTS)
        self.assertEqual([(block.name, block.reason) for block in report.kept],
                         [("layers.5", "its activation is Tanh")])
        torch.testing.assert_close(outputs(m, x), want, rtol=1e-5, atol=1e-5)
        self.assertIs(adapter.report(m), report)
        text = str(report)
        self.assertIn("Switchyard runs 5 of 6 Mixture-of-Experts blocks", text)
        self.assertIn("layers.5: Block stays with transformers: its activation is Tanh", text)

    def test_torchs_default_device_is_nothing_to_it(self):
        m, x = model(), tokens()
        want, state = outputs(m, x), {n: v.clone() for n, v in m.state_dict().items()}
        with DefaultDevice("meta"):
            report = adapter.accelerate(m)
            again = m.state_dict()
        self.assertEqual([block.extent for block in report.replaced], EXTENTS)
        torch.testing.assert_close(outputs(m, x), want, rtol=1e-5, atol=1e-5)
        self.assertTrue(all(torch.equal(again[name], value) for name, value in state.items()))

    def test_an_activation_may_be_a_function(self):
        s = stand_ins
        torch.manual_seed(0)
        m, x = s.Model(s.Block(s.TopKRouter(), s.Experts(act_fn=nn.functional.silu))).eval(), tokens()
        want = outputs(m, x)
        self.assertEqual([block.extent for block in adapter.accelerate(m).replaced], ["block"])
        torch.testing.assert_close(outputs(m, x), want, rtol=1e-5, atol=1e-5)

    def test_in_16_bits_it_agrees_within_their_rounding(self):
        m, x = model(dtype=torch.bfloat16), tokens(dtype=torch.bfloat16)
        want = outputs(m, x)
        report = adapter.accelerate(m)
        self.assertEqual(len(report.replaced), 5)
        difference = (outputs(m, x).float() - want.float()).abs().amax(-1)
        # A token may go to another expert where two are as good but for the rounding of logits.
        near = (difference < 0.03 * want.float().abs().amax(-1)).sum(dim=(1, 2))
        self.assertGreaterEqual(int(near.min()), 13, "of 14 tokens")

    def test_the_weights_are_held_once_and_state_dict_reads_them_back(self):
        m = model()
        state = {name: value.clone() for name, value in m.state_dict().items()}
        adapter.accelerate(m)
        self.assertTrue(m.layers[0].experts.gate_up_proj.is_meta)
        self.assertTrue(m.layers[4].experts.down_proj_bias.is_meta)
        self.assertFalse(m.layers[5].experts.gate_up_proj.is_meta)
        again = m.state_dict()
        self.assertEqual(list(again), list(state))
        for name, value in state.items():
            self.assertTrue(torch.equal(again[name], value), name)
        with self.assertRaisesRegex(sw.SwitchyardError, "layers.0.experts: the weights are Switch"):
            m.load_state_dict(state)

    def test_undo_gives_the_same_parameters_their_values_back(self):
        m, x = model(), tokens()
        want, before = outputs(m, x), dict(m.named_parameters())
        values = {name: value.detach().clone() for name, value in before.items()}
        with adapter.accelerate(m):
            self.assertIn("forward", m.layers[0].__dict__)
        for name, value in m.named_parameters():
            self.assertIs(value, before[name])
            self.assertTrue(torch.equal(value, values[name]), name)
        self.assertTrue(torch.equal(outputs(m, x), want))
        self.assertNotIn("forward", m.layers[0].__dict__)
        m.load_state_dict(m.state_dict())
        self.assertIsNone(adapter.report(m))

    def test_a_second_time_says_that_it_runs_already_and_changes_nothing(self):
        m, x = model(), tokens()
        adapter.accelerate(m)
        want = outputs(m, x)
        self.assertEqual({block.reason for block in adapter.accelerate(m).kept},
                         {"Switchyard runs it already", "its activation is Tanh"})
        self.assertTrue(torch.equal(outputs(m, x), want))

    def test_gradients_are_an_error_that_says_what_to_do(self):
        m = model()
        adapter.accelerate(m)
        for x in (tokens(), tokens().requires_grad_()):
            with self.assertRaisesRegex(sw.SwitchyardError, "no gradients yet: call the model with"):
                m(x)
        only_experts = model()
        for name, parameter in only_experts.named_parameters():
            parameter.requires_grad_("experts" in name)
        adapter.accelerate(only_experts)
        with self.assertRaisesRegex(sw.SwitchyardError, "no gradients yet"):
            only_experts(tokens())
        for parameter in only_experts.parameters():
            parameter.requires_grad_(False)
        only_experts(tokens())

    def test_who_hooks_the_router_sees_it(self):
        m, x = model(), tokens()
        want = outputs(m, x)
        adapter.accelerate(m)
        seen = []
        hook = m.layers[0].gate.register_forward_hook(lambda *args: seen.append(args[2][0].shape))
        torch.testing.assert_close(outputs(m, x), want, rtol=1e-5, atol=1e-5)
        self.assertEqual(seen, [(14, 6)])
        hook.remove()
        outputs(m, x)
        self.assertEqual(len(seen), 1)

    def test_what_is_written_to_the_router_counts_in_place_and_as_another_tensor(self):
        for replace in (False, True):
            m, x = model(), tokens()
            adapter.accelerate(m)
            before = outputs(m, x)
            weight = m.layers[0].gate.weight
            flipped = weight.detach().flip(0).clone()
            with torch.no_grad():
                if replace:
                    m.layers[0].gate.weight = nn.Parameter(flipped)
                else:
                    weight.copy_(flipped)
            got = outputs(m, x)
            self.assertFalse(torch.allclose(got, before, atol=1e-3))
            adapter.release(m)
            torch.testing.assert_close(got, outputs(m, x), rtol=1e-5, atol=1e-5)

    def test_experts_that_compute_something_else_stay_as_they_are(self):
        class Twice(stand_ins.Experts):
            def _one(self, expert, x):
                return 2 * super()._one(expert, x)

        torch.manual_seed(0)
        m = stand_ins.Model(stand_ins.Block(stand_ins.TopKRouter(), Twice())).eval()
        report = adapter.accelerate(m)
        self.assertEqual([block.reason for block in report.kept],
                         ["Switchyard's experts do not compute the same"])
        self.assertNotIn("forward", m.layers[0].experts.__dict__)
        self.assertFalse(m.layers[0].experts.down_proj.is_meta)

    def test_a_block_that_does_something_else_keeps_its_own_forward(self):
        class Scaled(stand_ins.Block):
            def forward(self, hidden_states):
                return super().forward(3 * hidden_states)

        torch.manual_seed(0)
        m, x = stand_ins.Model(Scaled(stand_ins.TopKRouter(), stand_ins.Experts())).eval(), tokens()
        want = outputs(m, x)
        self.assertEqual([block.extent for block in adapter.accelerate(m).replaced], ["experts"])
        torch.testing.assert_close(outputs(m, x), want, rtol=1e-5, atol=1e-5)

    def test_8_bit_weights_are_near_and_state_dict_has_what_they_stand_for(self):
        m, x = model(), tokens()
        want, own = outputs(m, x), m.layers[0].experts.down_proj.detach().clone()
        report = adapter.accelerate(m, weights="q8")
        self.assertIn("weights='q8' need a router", report.kept[0].reason)
        self.assertLess(float((outputs(m, x) - want).abs().max()), 0.1 * float(want.abs().max()))
        read = m.state_dict()["layers.0.experts.down_proj"]
        self.assertFalse(torch.equal(read, own))
        self.assertLess(float((read - own).abs().max()), float(own.abs().max()) / 200)

    def test_copies_and_pickles_are_errors_that_say_what_to_do(self):
        m = model()
        adapter.accelerate(m)
        for copied in (copy.deepcopy, pickle.dumps):
            with self.assertRaisesRegex(sw.SwitchyardError, r"undo\(\) what accelerate\(\) did"):
                copied(m)

    def test_bad_arguments_are_named(self):
        for arguments, message in (((None,), "model is a NoneType"),
                                   ((model(), None, "int3"), "weights='int3' is none of")):
            with self.assertRaisesRegex(sw.SwitchyardError, message):
                adapter.accelerate(*arguments)

    def test_the_implementation_that_transformers_finds_takes_a_modules_weights(self):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        run = ALL_EXPERTS_FUNCTIONS["switchyard"]
        torch.manual_seed(0)
        experts, x = stand_ins.Experts(), tokens()[0]
        ids, weights = torch.tensor([[0, 5]] * 7), torch.full((7, 2), 0.5)
        want = outputs(lambda x: experts(x, ids, weights), x)
        got = outputs(lambda x: run(experts, x, top_k_weights=weights, top_k_index=ids), x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        self.assertTrue(experts.down_proj.is_meta)
        adapter.release(experts)
        self.assertTrue(torch.equal(outputs(lambda x: experts(x, ids, weights), x), want))
        with self.assertRaisesRegex(sw.SwitchyardError, "Experts: its activation is Tanh; choose"):
            run(stand_ins.Experts(act_fn=nn.Tanh()), x, ids, weights)


try:
    from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
except ImportError:
    OlmoeConfig = None


@unittest.skipIf(OlmoeConfig is None, "transformers is not installed")
class RealModels(unittest.TestCase):
    SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_experts_per_tok": 2, "vocab_size": 96,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

    def models(self):
        torch.manual_seed(0)
        yield OlmoeForCausalLM(OlmoeConfig(num_experts=8, **self.SIZES)).eval()
        yield Qwen2MoeForCausalLM(Qwen2MoeConfig(
            num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=40,
            **self.SIZES)).eval()

    def test_logits_tokens_and_saved_files_are_those_of_transformers(self):
        for m in self.models():
            ids = torch.arange(3, 20)[None]
            want = outputs(lambda x: m(x).logits, ids)
            text = m.generate(ids, max_new_tokens=8, do_sample=False)
            with tempfile.TemporaryDirectory() as folder, adapter.accelerate(m) as report:
                self.assertEqual([block.extent for block in report.replaced], ["block"] * 2)
                torch.testing.assert_close(outputs(lambda x: m(x).logits, ids), want, rtol=1e-5,
                                           atol=1e-5)
                self.assertTrue(torch.equal(m.generate(ids, max_new_tokens=8, do_sample=False), text))
                self.assertEqual(len(outputs(lambda x: m(x, output_router_logits=True).router_logits,
                                             ids)), 2)
                compiled = torch.compile(m, fullgraph=True, backend="eager")
                torch.testing.assert_close(
                    outputs(lambda x: compiled(x, use_cache=False).logits, ids), want, rtol=1e-5,
                    atol=1e-5)
                m.save_pretrained(folder)
                self.assertIn("model.safetensors", os.listdir(folder))
                loaded = adapter.from_pretrained(folder, type(m), dtype=torch.float32)
                self.assertEqual([b.extent for b in adapter.report(loaded).replaced], ["block"] * 2)
                torch.testing.assert_close(outputs(lambda x: loaded(x).logits, ids), want, rtol=1e-5,
                                           atol=1e-5)
                chosen = type(m).from_pretrained(folder, experts_implementation="switchyard",
                                                 dtype=torch.float32)
                torch.testing.assert_close(outputs(lambda x: chosen(x).logits, ids), want, rtol=1e-5,
                                           atol=1e-5)
                adapter.release(loaded)
                state = m.state_dict()
                for name, value in loaded.state_dict().items():
                    self.assertTrue(torch.equal(value, state[name]), name)


if __name__ == "__main__":
    unittest.main()
