"""Quantised weights as they are stored, at the command line."""

import filecmp
import json
import os
import struct
import unittest

from tool_support import TestWithFolder, make_checkpoint, run_tool

PREFIX = "model.layers.0.mlp.experts."


def patch(path, tensor, index, value):
    """Writes a byte of a tensor of a .safetensors file."""
    with open(path, "r+b") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        begin, end = json.loads(file.read(size))[tensor]["data_offsets"]
        assert begin + index < end
        file.seek(8 + size + begin + index)
        file.write(bytes([value]))


def rename(path, tensor, other):
    """Gives a tensor another name of the same length."""
    with open(path, "r+b") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = file.read(size)
        assert header.count(f'"{tensor}"'.encode()) == 1 and len(tensor) == len(other)
        file.seek(8)
        file.write(header.replace(f'"{tensor}"'.encode(), f'"{other}"'.encode()))


class StoredWeights(TestWithFolder):
    def checkpoint(self, family):
        options = {"gpt-oss": {"hidden": 96, "inner": 160, "dtype": "bf16"},
                   "deepseek-v3": {"hidden": 200, "inner": 136, "dtype": "fp8", "groups": 2,
                                   "top_groups": 1},
                   "qwen3-moe": {"hidden": 200, "inner": 136, "dtype": "fp8"}}[family]
        return make_checkpoint(f"{self.d}/{family}", family, **options)

    def run_layer(self, checkpoint, *options):
        return run_tool("run", "--checkpoint", checkpoint, "--text", f"{self.d}/text.txt",
                        "--max-tokens", "40", "--iterations", "1", *options)

    def test_the_output_is_that_of_dequantised_weights(self):
        for family in "gpt-oss", "deepseek-v3", "qwen3-moe":
            checkpoint = self.checkpoint(family)
            outputs = []
            for options in (["--weights", "exact"], ["--weights", "dequantised"],
                            ["--weights", "stored", "--check"],
                            ["--weights", "stored", "--check", "--ranks", "2"],
                            ["--weights", "stored", "--isa", "portable", "--check"]):
                outputs.append(f"{self.d}/{len(outputs)}.npy")
                self.assert_fine(self.run_layer(checkpoint, "--output", outputs[-1],
                                                "--output-dtype", "f32", *options))
            for other in outputs[1:4]:  # another instruction set has other sums
                self.assertTrue(filecmp.cmp(outputs[0], other, shallow=False), (family, other))

    def test_what_cannot_be_computed_with_is_named(self):
        def refused(checkpoint, *words):
            self.assert_one_line(self.run_layer(checkpoint, "--weights", "stored"), 2, words)

        refused(make_checkpoint(f"{self.d}/plain"), "weights=stored", "stored as bf16", "want exact")
        cases = (("gpt-oss", PREFIX + "down_proj_scales", 7, 0xff),
                 ("gpt-oss", PREFIX + "gate_up_proj_scales", 3, 0xff),
                 ("deepseek-v3", PREFIX + "1.up_proj.weight", 205, 0x7f),
                 ("deepseek-v3", PREFIX + "2.down_proj.weight", 11, 0xff),
                 ("deepseek-v3", PREFIX + "2.gate_proj.weight_scale_inv", 3, 0x7f))
        for family, tensor, index, value in cases:
            checkpoint = self.checkpoint(family)
            if tensor.endswith("scale_inv"):  # 0x7fff....: NaN
                patch(f"{checkpoint}/model.safetensors", tensor, index - 1, 0xff)
            patch(f"{checkpoint}/model.safetensors", tensor, index, value)
            refused(checkpoint, f"'{tensor}'")
        checkpoint = self.checkpoint("deepseek-v3")
        scales = PREFIX + "3.up_proj.weight_scale_inv"
        rename(f"{checkpoint}/model.safetensors", scales, scales.replace("inv", "out"))
        refused(checkpoint, f"has no tensor '{scales}'")
        checkpoint = self.checkpoint("gpt-oss")
        size = os.path.getsize(f"{checkpoint}/model.safetensors")
        os.truncate(f"{checkpoint}/model.safetensors", size - 100)
        refused(checkpoint, "model.safetensors")

    def test_blocks_of_another_size_are_refused(self):
        checkpoint = self.checkpoint("deepseek-v3")
        with open(f"{checkpoint}/config.json", encoding="utf-8") as file:
            config = json.load(file)
        config["quantization_config"]["weight_block_size"] = [64, 64]
        with open(f"{checkpoint}/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        self.assert_one_line(self.run_layer(checkpoint), 2, ["weight_block_size", "[128,128]"])

    def test_every_packing_of_four_bits_is_made_and_read(self):
        for packing in "gptq", "awq", "pack-quantized", "nvfp4-pack-quantized", "modelopt":
            checkpoint = make_checkpoint(f"{self.d}/{packing}", "qwen3-moe", hidden=96, inner=160,
                                         weights=packing)
            outputs = []
            for options in (["--weights", "exact", "--check"], ["--weights", "stored", "--check"],
                            ["--weights", "stored", "--check", "--ranks", "2"]):
                outputs.append(f"{self.d}/{len(outputs)}.npy")
                self.assert_fine(self.run_layer(checkpoint, "--output", outputs[-1],
                                                "--output-dtype", "f32", *options))
            for other in outputs[1:]:
                self.assertTrue(filecmp.cmp(outputs[0], other, shallow=False), (packing, other))

    def test_what_four_bits_cannot_be_is_named(self):
        def changed(packing, **entries):
            checkpoint = make_checkpoint(f"{self.d}/{packing}", "qwen3-moe", hidden=64, inner=64,
                                         weights=packing)
            with open(f"{checkpoint}/config.json", encoding="utf-8") as file:
                config = json.load(file)
            config["quantization_config"].update(entries)
            with open(f"{checkpoint}/config.json", "w", encoding="utf-8") as file:
                json.dump(config, file)
            return checkpoint

        def refused(checkpoint, *words):
            self.assert_one_line(self.run_layer(checkpoint), 2, words)

        refused(changed("gptq", desc_act=True), "desc_act=true")
        refused(changed("gptq", bits=8), "bits=8")
        refused(changed("gptq", checkpoint_format="marlin"), "checkpoint_format='marlin'")
        refused(changed("awq", version="gemv"), "version='gemv'")
        order = changed("gptq")
        patch(f"{order}/model.safetensors", PREFIX + "1.up_proj.g_idx", 4 * 5, 1)
        refused(order, PREFIX + "1.up_proj.g_idx", "act-order")
        scale = changed("modelopt")
        patch(f"{scale}/model.safetensors", PREFIX + "2.down_proj.weight_scale", 9, 0x7f)
        refused(scale, PREFIX + "2.down_proj.weight_scale", "NaN")
        done = run_tool("make-checkpoint", "--family", "gpt-oss", "--weights", "awq", "--hidden", "64",
                        "--inner", "64", "--experts", "4", "--top-k", "2",
                        "--output", f"{self.d}/none")
        self.assert_one_line(done, 2, ["awq", "gpt-oss"])

    def test_verify_and_bench_have_layers_of_them(self):
        for weights in "fp8", "mxfp4", "int4", "nvfp4":
            self.assert_fine(run_tool("verify", "--cases", "40", "--weights", weights))
            self.assert_fine(run_tool(
                "bench", "--weights", weights, "--num-tokens", "3", "--experts", "4", "--top-k", "2",
                "--hidden", "64", "--inner", "32", "--iterations", "1", "--threads", "1"))
        done = run_tool("verify", "--weights", "fp8", "--fault", "absent")
        self.assert_one_line(done, 2, ["--weights", "--fault"])
        done = run_tool("bench", "--weights", "mxfp4", "--pass", "both", "--hidden", "64",
                        "--inner", "32", "--experts", "4", "--top-k", "2")
        self.assert_one_line(done, 2, ["--pass", "--weights exact"])


if __name__ == "__main__":
    unittest.main()
