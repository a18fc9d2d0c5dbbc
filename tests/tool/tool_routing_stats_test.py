"""run --routing-stats: what is printed is what plain numpy makes of the routing that was written."""

import json
import unittest

import numpy as np

from tool_support import TestWithFolder, make_checkpoint, run_tool
from tool_test import read_safetensors


def entropy(p):
    p = np.asarray(p, dtype=np.float64).ravel()
    p = p[p > 0]
    return -(p * np.log(p)).sum()


class RoutingStats(TestWithFolder):
    def run_with(self, *more):
        done = run_tool("run", "--checkpoint", make_checkpoint(f"{self.d}/model", dtype="f32"), *more,
                        "--routing-stats", "--iterations", "1", "--warmup", "0", "--routing-output",
                        f"{self.d}/routing.safetensors")
        self.assert_fine(done)
        return done.stdout, read_safetensors(f"{self.d}/routing.safetensors")

    def near(self, have, want):
        self.assertAlmostEqual(have, want, delta=1e-9)

    def test_json_has_them_as_numpy_computes_them_over_ranks_and_behind_a_capacity(self):
        out, routing = self.run_with("--text", f"{self.d}/text.txt", "--max-tokens", "64", "--ranks", "2",
                                     "--capacity-factor", "0.8", "--layout", "padded", "--json")
        report = json.loads(out)
        load, found = report["load"], report["routing"]
        counts, kept, expert = (routing[name] for name in ("counts", "kept", "expert"))
        self.near(load["cv"], counts.std() / counts.mean())
        self.near(load["cv_floor"], np.sqrt(3 / 128))
        self.near(load["kl"], np.log(4) - entropy(counts / 128))
        self.near(load["effective_experts"], np.exp(entropy(counts / 128)))
        self.assertEqual(load["dead_experts"], int((counts == 0).sum()))
        self.assertEqual((found["counts"], found["cv"]), (counts.tolist(), load["cv"]))
        self.assertEqual((found["choices"], found["layer"]), (expert.tolist(), 0))
        with open(f"{self.d}/text.txt", "rb") as file:
            text = file.read(64)
        self.assertEqual("".join(found["text"]), text.decode())
        self.near(found["rank_imbalance"], max(counts[:2].sum(), counts[2:].sum()) / 64)
        dropped = found["dropped"]
        self.assertGreater(dropped["assignments"], 0)
        self.near(dropped["assignments"], 1 - kept.mean())
        self.near(dropped["tokens"], (kept.sum(1) == 0).mean())
        self.near(dropped["by_choice"][1], 1 - kept[:, 1].mean())
        weight = routing["weight"].astype(np.float64)
        self.near(dropped["mass"], 1 - (weight * kept).sum() / weight.sum())
        share = weight / weight.sum(1, keepdims=True)
        self.near(found["entropies"]["weights"], np.mean([entropy(row) for row in share]))
        self.near(found["entropies"]["information"],
                  found["entropies"]["marginal"] - found["entropies"]["router"])
        self.assertLess(found["entropies"]["router"], np.log(4))
        rows = report["rows"]
        self.near(found["padding_waste"], 1 - rows["used"] / rows["executed"])
        self.assertGreater(found["padding_waste"], 0)
        hit = (expert[:, :, None] == np.arange(4)).any(1)
        both = hit.T.astype(float) @ hit
        for i in range(4):
            for j in range(4):
                self.near(found["coactivation"][i][j], both[i, j] / max(both[i, i], 1))
        joint = np.zeros((256, 4))
        for byte, ids in zip(text, expert):
            np.add.at(joint[byte], ids, 1)
        information = (entropy(joint.sum(0) / 128) + entropy(joint.sum(1) / 128)
                       - entropy(joint / 128))
        self.near(found["token_type"]["plug_in"], information)
        bias = ((joint > 0).sum() - (joint.sum(1) > 0).sum() - (joint.sum(0) > 0).sum() + 1) / 256
        self.near(found["token_type"]["bias"], bias)
        self.assertLess(found["token_type"]["p"], 0.05)  # equal bytes go to equal experts

    def test_people_read_them_as_lines(self):
        out, routing = self.run_with("--tokens", self.tokens())
        mean = routing["counts"].mean()
        self.assertRegex(out, rf"load +CV {routing['counts'].std() / mean:.3f} \(uniform random 0\.274\)")
        self.assertRegex(out, r"entropy +router \d\.\d{3}, marginal \d\.\d{3} of 1\.386 nats")
        self.assertIn("dropped    assignments 0.00%", out)
        self.assertRegex(out, r"together +\d -> \d \d+\.\d%, \d -> \d")
        self.assertNotIn("token id", out)  # there are none

    def test_a_token_has_the_experts_it_has_and_a_byte_is_shown_as_what_it_is(self):
        with open(f"{self.d}/text.txt", "wb") as file:
            file.write("h\u00e9".encode())
        out, routing = self.run_with("--text", f"{self.d}/text.txt", "--router", "top-p:threshold=0.4",
                                     "--json")
        found = json.loads(out)["routing"]
        self.assertEqual(found["text"], ["h", "\\xc3", "\\xa9"])
        self.assertEqual(found["choices"], [[e for e in row if e >= 0]
                                            for row in routing["expert"].tolist()])

    def test_a_router_without_logits_and_no_tokens_have_what_there_is(self):
        out, _ = self.run_with("--text", f"{self.d}/text.txt", "--router", "hash", "--json")
        self.assertNotIn("entropies", json.loads(out)["routing"])
        out, _ = self.run_with("--text", f"{self.d}/text.txt", "--max-tokens", "0", "--json")
        report = json.loads(out)
        self.assertEqual((report["load"]["cv"], report["load"]["dead_experts"]), (0, 4))
        self.assertNotIn("token_type", report["routing"])


if __name__ == "__main__":
    unittest.main()
