"""Networks of a router: layers against torch's own logits, forward and back."""

import unittest

import switchyard as sw

try:
    import torch
except ImportError:
    torch = None

E, K, H, I, T = 6, 2, 24, 16, 20


@unittest.skipUnless(torch, "torch is not installed")
class Networks(unittest.TestCase):
    def setUp(self):
        g = torch.Generator().manual_seed(2)
        self.x = torch.randn(T, H, generator=g, requires_grad=True)
        self.parameters = [torch.nn.Parameter(torch.randn(*shape, generator=g) * 0.3)
                           for shape in ((E, H), (E, 2 * I, H), (E, H, I))]

    def refuse(self, words, call, *args, **kwargs):
        with self.assertRaisesRegex((sw.SwitchyardError, RuntimeError), words):
            call(*args, **kwargs)

    def test_a_network_makes_logits_by_parameters_of_its_own(self):
        _, w13, w2 = self.parameters
        normalize, gelu, width = torch.nn.functional.normalize, torch.nn.functional.gelu, 9
        matrix = width * H

        def cosine(gate, p):
            z = normalize(self.x @ p[:-1].reshape(width, H).T, dim=-1)
            return z @ (p[-1].exp().clamp(max=100) * normalize(gate, dim=-1)).T

        def hidden(p):
            return gelu(self.x @ p[:matrix].reshape(width, H).T + p[matrix:matrix + width])

        def mlp(gate, p):
            return hidden(p) @ gate.T

        def hadamard(gate, p):
            w, b = p[matrix + width:-H].reshape(H, width), p[-H:]
            return (self.x * (hidden(p) @ w.T + b)) @ gate.T

        for make, columns, size in ((cosine, width, matrix + 1), (mlp, width, matrix + width),
                                    (hadamard, H, 2 * matrix + width + H)):
            name = make.__name__
            with self.subTest(name):
                gate = torch.nn.Parameter(torch.randn(E, columns) * 0.3)
                p = torch.nn.Parameter(torch.randn(size) * 0.3)
                bias = torch.nn.Parameter(torch.randn(E) * 0.3)
                r = sw.Router("top-k", num_experts=E, top_k=K, network=name, width=width)
                layer = sw.Layer(gate, w13, w2, router=r, router_network=p, router_bias=bias,
                                 trainable=True)
                y = layer(self.x)
                logits = make(gate, p) + bias
                want = sw.experts(self.x, w13, w2,
                                  assignment=sw.Router("top-k", num_experts=E, top_k=K)(logits))
                torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
                leaves = (self.x, gate, p, bias, w13, w2)
                for got, expected in zip(torch.autograd.grad((y ** 2).sum(), leaves),
                                         torch.autograd.grad((want ** 2).sum(), leaves)):
                    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
                arrays = [t.detach().numpy() for t in (gate, w13, w2, p, bias, self.x)]
                copied = sw.Layer(*arrays[:3], router=r, router_network=arrays[3],
                                  router_bias=arrays[4])
                torch.testing.assert_close(torch.from_numpy(copied(arrays[5])), y.detach())
                self.refuse(f"router has network={name}", r, logits)
                self.refuse("router_network has 0 values", sw.Layer, gate, w13, w2, router=r)
        self.refuse("router_network", sw.Layer, self.parameters[0], w13, w2, K, router_network=p)


if __name__ == "__main__":
    unittest.main()
