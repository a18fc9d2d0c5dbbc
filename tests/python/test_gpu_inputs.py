"""What a user of a GPU passes: routings elsewhere and of other types, torch.compile, graphs. Skipped
without torch and a GPU."""

import threading
import unittest

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

HAS_GPU = torch is not None and torch.cuda.is_available()
HAS_OPERATORS = hasattr(getattr(torch, "library", None), "register_fake")  # from 2.4 on
T, E, K, H, I = 33, 8, 2, 128, 64


@unittest.skipUnless(HAS_GPU, "torch sees no GPU")
class OnAGpu(unittest.TestCase):
    def setUp(self):
        g = torch.Generator().manual_seed(0)

        def normal(*shape):
            return (torch.randn(*shape, generator=g) / shape[-1]**0.5).bfloat16().cuda()

        self.gate, self.w13, self.w2 = normal(E, H), normal(E, 2 * I, H), normal(E, H, I)
        self.x = normal(T, H) * 4
        self.layer = sw.Layer(self.gate, self.w13, self.w2, K, device="cuda")
        self.experts = sw.Experts(self.w13, self.w2)
        self.expert, self.weight = sw.route(self.x.float() @ self.gate.float().T, K)

    def test_gradients_of_what_was_copied_are_refused_by_name(self):
        p = [torch.nn.Parameter(t) for t in (self.gate, self.w13, self.w2)]
        calls = (("gate requires a gradient", lambda: sw.Layer(*p, K, device="cuda")(self.x)),
                 ("w13 requires a gradient", lambda: sw.Experts(*p[1:])(
                     self.x, self.expert, self.weight)))
        for words, call in calls:
            with self.assertRaisesRegex(sw.SwitchyardError, words) as caught:
                call()
            self.assertEqual(caught.exception.code, "unsupported")

    @torch.no_grad() if torch is not None else lambda f: f
    def test_experts_used_where_they_lie_give_the_same_bits_and_are_followed(self):
        w13 = self.w13.clone()
        layer = sw.Layer(self.gate, w13, self.w2, K, device="cuda", router_in_place=True,
                         experts_in_place=True)
        self.assertTrue(torch.equal(layer(self.x), self.layer(self.x)))
        w13[3] *= -2
        want = sw.Layer(self.gate, w13, self.w2, K, device="cuda")(self.x)
        self.assertTrue(torch.equal(layer(self.x), want))
        with self.assertRaisesRegex(sw.SwitchyardError, "w13|f32"):
            sw.Layer(self.gate, w13.float(), self.w2, K, device="cuda", experts_in_place=True)

    @torch.no_grad() if torch is not None else lambda f: f
    def test_routings_of_any_type_and_place_and_tokens_of_any_shape_give_the_same_bits(self):
        for call in (self.layer, self.experts):
            want = call(self.x, self.expert, self.weight)
            for expert, weight in ((self.expert.long(), self.weight.double()),
                                   (self.expert.cpu(), self.weight.cpu())):
                self.assertTrue(torch.equal(call(self.x, expert, weight), want))
            y = call(self.x.reshape(3, 11, H), self.expert.reshape(3, 11, K),
                     self.weight.reshape(3, 11, K))
            self.assertTrue(torch.equal(y.reshape(T, H), want))
            wide = torch.cat([self.x, self.x], 1)[:, :H]
            self.assertTrue(torch.equal(call(wide, self.expert, self.weight), want))

    @torch.no_grad() if torch is not None else lambda f: f
    def test_an_id_of_64_bits_that_is_no_expert_is_what_check_raises(self):
        expert = self.expert.long()
        expert[3, 1] = 2**32 + 1  # of which 32 bits would be an expert
        for call in (self.layer, self.experts):
            with self.assertRaises(sw.SwitchyardError):
                call(self.x, expert, self.weight)
                call.check()

    @torch.no_grad() if torch is not None else lambda f: f
    def test_weights_as_gpt_oss_stores_them_give_the_same_bits(self):
        mixed = torch.empty_like(self.w13)
        mixed[:, 0::2], mixed[:, 1::2] = self.w13[:, :I], self.w13[:, I:]
        stored = mixed.transpose(1, 2).contiguous(), self.w2.transpose(1, 2).contiguous()
        options = {"w13_layout": "interleaved", "transposed": True}
        want = self.experts(self.x, self.expert, self.weight)
        for y in (sw.Experts(*stored, **options)(self.x, self.expert, self.weight),
                  sw.experts(self.x, *stored, self.expert, self.weight, **options)):
            self.assertTrue(torch.equal(y, want))
        layer = sw.Layer(self.gate, *stored, K, device="cuda", **options)
        self.assertTrue(torch.equal(layer(self.x), self.layer(self.x)))

    @torch.no_grad() if torch is not None else lambda f: f
    def test_a_graph_holds_a_call_and_is_replayed_with_other_tokens(self):
        for call in (lambda x: self.layer(x), lambda x: self.experts(x, self.expert, self.weight)):
            x = self.x.clone()
            call(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = call(x)
            for scale in (1, -2):
                x.copy_(self.x * scale)
                graph.replay()
                self.assertTrue(torch.equal(y, call(self.x * scale)))

    @torch.no_grad() if torch is not None else lambda f: f
    def test_calls_on_other_streams_follow_each_other_from_several_threads_too(self):
        self.check_threads([self.layer] * 4)

    @torch.no_grad() if torch is not None else lambda f: f
    def test_layers_that_share_a_scratch_have_their_bits_and_follow_each_other(self):
        def layers(**options):
            return [sw.Layer(self.gate, self.w13 * (i + 1), self.w2, K, device="cuda", **options)
                    for i in range(4)]

        alone, shared = layers(), layers(scratch=sw.Scratch())  # which the layers keep
        for tokens in self.x[:5].contiguous(), self.x, self.x[:9].contiguous():  # it grows once
            for one, other in zip(alone, shared):
                self.assertTrue(torch.equal(one(tokens), other(tokens)))
        self.check_threads(shared)

    @torch.no_grad() if torch is not None else lambda f: f
    def test_a_scratch_is_had_once_and_is_of_a_gpu(self):
        tokens = 65536

        def taken(**options):
            before = torch.cuda.mem_get_info()[0]
            layers = [sw.Layer(self.gate, self.w13, self.w2, K, device="cuda", max_tokens=tokens, **options)
                      for _ in range(4)]
            after = torch.cuda.mem_get_info()[0]
            del layers
            return before - after

        apart, shared = taken(), taken(scratch=sw.Scratch())
        rows = 2 * tokens * K * (I + H)  # bytes of a layer's rows between and behind its products
        self.assertGreater(apart - shared, 2 * rows)
        for device, words in (("cpu", "scratch is given to a layer on a CPU"), ("cuda:7", "GPU|device")):
            with self.assertRaisesRegex(sw.SwitchyardError, words):
                sw.Layer(self.gate, self.w13, self.w2, K, device=device, scratch=sw.Scratch("cuda:0"))

    def check_threads(self, layers):
        x = torch.randn(4096, H, device="cuda").bfloat16()
        inputs = [x * (i + 1) for i in range(4)]
        want = [layer(i) for layer, i in zip(layers, inputs)]
        torch.cuda.synchronize()

        def body(number):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), torch.no_grad():
                for _ in range(50):
                    results[number].append(layers[number](inputs[number]))
                stream.synchronize()

        results = [[] for _ in inputs]
        threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for have, right in zip(results, want):
            self.assertEqual(len(have), 50)
            self.assertTrue(all(torch.equal(y, right) for y in have))

    @unittest.skipUnless(HAS_OPERATORS, "torch is older than 2.4")
    @torch.no_grad() if torch is not None else lambda f: f
    def test_torch_compile_takes_calls_in_one_graph_also_in_cuda_graphs(self):
        for mode in ("default", "reduce-overhead"):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: self.layer(x * 2) + x, fullgraph=True, mode=mode)
            for _ in range(4):  # the third and later ones are replays
                y = compiled(self.x).clone()
            torch.testing.assert_close(y, self.layer(self.x * 2) + self.x)

    def test_routers_by_name_choose_and_learn_there_as_on_a_cpu(self):
        g = torch.Generator().manual_seed(3)
        for name in ("gshard", "adamoe", "expert-choice", "expert-threshold", "top-p", "relu", "v-moe",
                     "noisy-top-k", "hash", "uniform", "zipf"):
            router = sw.Router(name, num_experts=E, seed=5)
            logits, noise = (torch.randn(T, router.num_logits, generator=g) for _ in range(2))
            bias = torch.full((E,), -0.1) if name == "expert-threshold" else None
            slope = torch.randn(T, router.columns, generator=g)
            found = []
            for device in ("cpu", "cuda"):
                given = logits.to(device).requires_grad_()
                of_noise = noise.to(device).requires_grad_() if name == "noisy-top-k" else None
                a = router(given, token_ids=torch.arange(T, device=device), step=4,
                           noise_logits=of_noise, selection_bias=bias)
                if router.has_logits:
                    (a.topk_weight * slope.to(device)).sum().backward()
                gradients = [t.grad.cpu() for t in (given, of_noise) if t is not None and t.grad is not None]
                found.append((a.topk_expert.cpu(), a.topk_weight.detach().cpu(), *gradients))
            with self.subTest(name):
                for want, have in zip(*found):
                    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
        sw.route_check()


if __name__ == "__main__":
    unittest.main()
