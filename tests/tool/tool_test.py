"""The tool as a user sees it: files, tables, JSON, exit codes."""

import filecmp
import json
import os
import resource
import signal
import subprocess
import time
import unittest

import numpy as np

from tool_support import TOOL, TestWithFolder, make_checkpoint, run_tool, write_safetensors

FAMILIES = {
    "mixtral": {},
    "qwen3-moe": {},
    "olmoe": {},
    "deepseek-v2": {"shared_experts": 2, "groups": 2, "top_groups": 1},
    "deepseek-v3": {"shared_experts": 1, "groups": 2, "top_groups": 1},
    "gpt-oss": {},
    "qwen2-moe": {"shared_experts": 1},
    "qwen3-next": {"shared_experts": 1},
    "qwen3.5-moe": {"shared_experts": 2},
    "qwen3-vl-moe": {},
    "minimax": {},
    "minimax-m2": {},
    "flex-olmo": {},
    "dots1": {"shared_experts": 1, "groups": 2, "top_groups": 1},
    "glm4-moe-lite": {"shared_experts": 1},
    "solar-open": {"shared_experts": 1},
    "mimo-v2-flash": {},
    "ernie4.5-moe": {"shared_experts": 2},
    "hunyuan-v1-moe": {"shared_experts": 1},
    "lfm2-moe": {},
    "afmoe": {"shared_experts": 1},
    "granite-moe": {},
    "granite-moe-shared": {"shared_experts": 1},
    "jetmoe": {},
    "dbrx": {},
    "phimoe": {},
    "llama4": {"shared_experts": 1, "top_k": 1},
    "longcat-flash": {},
}


def read_safetensors(path):
    """{name: array} of a small file, by the format's description."""
    types = {"I32": np.int32, "I64": np.int64, "F32": np.float32, "U8": np.uint8, "F16": np.float16,
             "BF16": np.uint16}
    with open(path, "rb") as file:
        content = file.read()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + length])
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        out[name] = np.frombuffer(content[begin:end], types[entry["dtype"]]).reshape(entry["shape"])
    return out


class Checkpoints(TestWithFolder):
    def test_every_family_and_type_runs_and_holds_against_the_reference(self):
        for number, (family, options) in enumerate(FAMILIES.items()):
            # All types and both forms of those that differ in more than names.
            for dtype in ("f32", "bf16", "f16") if number < 6 else ("bf16",):
                for shards in (1, 3) if number < 6 else (3,):
                    with self.subTest(family=family, dtype=dtype, shards=shards):
                        directory = f"{self.d}/{family}-{dtype}-{shards}"
                        make_checkpoint(directory, family, dtype=dtype, shards=shards, **options)
                        done = run_tool("run", "--checkpoint", directory, "--text",
                                        f"{self.d}/text.txt", "--check", "--json", "--ranks",
                                        2 if shards == 3 else 1)
                        self.assert_fine(done)
                        report = json.loads(done.stdout)
                        self.assertTrue(report["check"]["holds"])
                        self.assertEqual(report["check"]["tokens_computed"], 90)
                        self.assertEqual(report["layer"]["family"], family)

    def test_shards_hold_the_same_layer_as_one_file(self):
        outputs = []
        for shards in 1, 4:
            directory = make_checkpoint(f"{self.d}/{shards}", shards=shards, seed=5)
            outputs.append(f"{self.d}/{shards}.npy")
            self.assert_fine(run_tool("run", "--checkpoint", directory, "--tokens", self.tokens(),
                                      "--output", outputs[-1]))
        self.assertTrue(filecmp.cmp(*outputs, shallow=False))

    def test_the_same_options_make_the_same_bytes_and_another_seed_others(self):
        for name, seed in ("a", 1), ("b", 1), ("c", 2):
            make_checkpoint(f"{self.d}/{name}", seed=seed)
        same, other = ((f"{self.d}/a/model.safetensors", f"{self.d}/{name}/model.safetensors")
                       for name in "bc")
        self.assertTrue(filecmp.cmp(*same, shallow=False))
        self.assertFalse(filecmp.cmp(*other, shallow=False))


class Run(TestWithFolder):
    def setUp(self):
        super().setUp()
        self.checkpoint = make_checkpoint(f"{self.d}/model", dtype="f32")

    def run_layer(self, *args):
        done = run_tool("run", "--checkpoint", self.checkpoint, *args)
        self.assert_fine(done)
        return done.stdout

    def test_the_output_has_the_tokens_type_unless_told_otherwise(self):
        tokens = self.tokens()
        np.save(f"{self.d}/half.npy", np.load(tokens).astype(np.float16))
        for source, options, want in ((tokens, [], np.float32), (f"{self.d}/half.npy", [], np.float16),
                                      (tokens, ["--output-dtype", "f16"], np.float16)):
            out = f"{self.d}/out.npy"
            self.run_layer("--tokens", source, "--output", out, *options)
            self.assertEqual(np.load(out).dtype, want)
            self.assertEqual(np.load(out).shape, (20, 64))
        out = f"{self.d}/out.safetensors"
        self.run_layer("--tokens", tokens, "--output", out, "--output-dtype", "bf16")
        (tensor,) = read_safetensors(out).values()
        self.assertEqual((tensor.dtype, tensor.shape), (np.uint16, (20, 64)))

    def test_verbose_says_what_ran_every_call_of_a_stage_and_json_carries_it(self):
        want = {"router_gemm": "cpu.fma", "select": "cpu.scan", "plan": "cpu.counting",
                "gemm1+activation": "cpu.grouped", "gemm2+combine": "cpu.grouped", "layer": ""}
        done = run_tool("run", "--checkpoint", self.checkpoint, "--tokens", self.tokens(), "--json")
        self.assert_fine(done)
        self.assertEqual(done.stderr, "")
        stages = json.loads(done.stdout)["stages"]
        self.assertEqual({s["stage"]: s["implementation"] for s in stages}, want)
        done = run_tool("run", "--checkpoint", self.checkpoint, "--tokens", self.tokens(), "--json",
                        "--ranks", 2)
        self.assert_fine(done)
        stages = json.loads(done.stdout)["stages"]
        self.assertEqual({s["stage"]: s["implementation"] for s in stages},
                         {**want, "exchange": "cpu.threads"})
        for args, env in (["--verbose"], {}), ([], {"SWITCHYARD_VERBOSE": "1"}):
            done = run_tool("run", "--checkpoint", self.checkpoint, "--tokens", self.tokens(),
                            "--warmup", 0, "--iterations", 1, "--threads", 2, *args, env=env)
            self.assert_fine(done)
            lines = [line.split(" of ")[0] for line in done.stderr.splitlines()
                     if " threads, " not in line]
            self.assertEqual(lines, [f"switchyard: {stage}" for stage in
                                     ("router_gemm", "route", "capacity", "plan", "experts")])
            self.assertIn("switchyard: 2 threads, ", done.stderr)
            self.assertIn("plan of 20 tokens x 2, 4 experts, compact: cpu.counting", done.stderr)
            self.assertIn("cpu.grouped; not", done.stderr)
            self.assertIn("cpu.blocks: wants the aligned layout", done.stderr)

    def test_a_variable_that_nobody_reads_is_one_line_of_warning(self):
        done = run_tool("run", "--checkpoint", self.checkpoint, "--tokens", self.tokens(),
                        env={"SWITCHYARD_VERBOS": "1"})
        self.assert_one_line(done, 0, ["SWITCHYARD_VERBOS is set"])

    def test_tokens_of_a_named_tensor_and_of_npy_give_the_same(self):
        tokens = np.load(self.tokens())
        write_safetensors(f"{self.d}/t.safetensors", {"a": ("F32", [20, 64], tokens.tobytes()),
                                                      "b": ("F32", [2, 64], bytes(512))})
        for index, source in enumerate(("tokens.npy", "t.safetensors:a")):
            self.run_layer("--tokens", f"{self.d}/{source}", "--output", f"{self.d}/{index}.npy")
        self.assertTrue(filecmp.cmp(f"{self.d}/0.npy", f"{self.d}/1.npy", shallow=False))

    def test_ranks_and_threads_change_no_bit(self):
        outputs = []
        for ranks, threads in (1, 1), (1, 2), (2, 2), (4, 4), (8, 8):
            outputs.append(f"{self.d}/{ranks}-{threads}.npy")
            self.run_layer("--tokens", self.tokens(), "--ranks", ranks, "--threads", threads,
                           "--batch-invariant", "--output", outputs[-1])
        for other in outputs[1:]:
            self.assertTrue(filecmp.cmp(outputs[0], other, shallow=False), other)

    def test_every_layout_wire_and_drop_policy_holds(self):
        tokens = self.tokens(50)
        drop = ["--capacity-factor", "0.6", "--drop-policy"]
        for options in (["--layout", "padded"], ["--layout", "aligned:8"],
                        ["--ranks", "3", "--combine-wire", "bf16"], ["--ranks", "2", "--wire", "f16"],
                        ["--ranks", "2", "--combine-wire", "bf16", "--rank-invariant"],
                        ["--dispatch-wire", "fp8"], ["--ranks", "2", "--dispatch-wire", "bf16"],
                        [*drop, "token"], [*drop, "choice"], [*drop, "probs", "--ranks", "2"],
                        [*drop, "bpr", "--layout", "padded"], [*drop, "reroute"], ["--compute", "bf16"],
                        ["--compute", "f16", "--batch-invariant"], ["--isa", "portable"], ["--weights", "q8"]):
            with self.subTest(options):
                report = json.loads(self.run_layer("--tokens", tokens, "--check", "--json",
                                                   *options))
                self.assertTrue(report["check"]["holds"])
                self.assertEqual(report["load"]["dropped"] > 0, "--capacity-factor" in options)

    def test_routing_written_can_be_read_and_gives_the_same_output(self):
        tokens = self.tokens(30)
        routing = f"{self.d}/routing.safetensors"
        self.run_layer("--tokens", tokens, "--routing-output", routing, "--output",
                       f"{self.d}/a.npy", "--ranks", "2")
        self.run_layer("--tokens", tokens, "--routing-input", routing, "--output",
                       f"{self.d}/b.npy", "--check")
        self.assertTrue(filecmp.cmp(f"{self.d}/a.npy", f"{self.d}/b.npy", shallow=False))
        r = read_safetensors(routing)
        self.assertEqual({k: (v.dtype, v.shape) for k, v in r.items()}, {
            "expert": (np.int32, (30, 2)), "weight": (np.float32, (30, 2)),
            "kept": (np.uint8, (30, 2)), "counts": (np.int64, (4,)),
            "counts_kept": (np.int64, (4,)), "expert_begin": (np.int64, (5,)),
            "row_token": (np.int32, (60,)), "row_weight": (np.float32, (60,))})
        order = np.argsort(r["expert"].ravel(), kind="stable")
        self.assertTrue((r["row_token"] == order // 2).all())
        self.assertTrue((r["row_weight"] == r["weight"].ravel()[order]).all())
        self.assertTrue((r["counts"] == np.bincount(r["expert"].ravel(), minlength=4)).all())
        self.assertTrue((np.diff(r["expert_begin"]) == r["counts_kept"]).all())

    def test_no_token_and_one_token_work(self):
        for count in 0, 1:
            for ranks in 1, 3:
                self.run_layer("--tokens", self.tokens(count), "--check", "--ranks", ranks,
                               "--output", f"{self.d}/out.npy")
                self.assertEqual(np.load(f"{self.d}/out.npy").shape, (count, 64))

    def test_text_goes_through_embedding_and_norm(self):
        self.run_layer("--text", f"{self.d}/text.txt", "--max-tokens", "7", "--output",
                       f"{self.d}/text.npy")
        tensors = read_safetensors(f"{self.checkpoint}/model.safetensors")
        rows = tensors["model.embed_tokens.weight"][list(b"All hap")].astype(np.float64)
        norm = next(v for k, v in tensors.items() if "post_attention_layernorm" in k)
        with open(f"{self.checkpoint}/config.json", encoding="utf-8") as file:
            eps = json.load(file).get("rms_norm_eps", 1e-6)
        rows /= np.sqrt((rows * rows).mean(axis=1, keepdims=True) + eps)
        np.save(f"{self.d}/rows.npy", (rows * norm).astype(np.float32))
        self.run_layer("--tokens", f"{self.d}/rows.npy", "--output", f"{self.d}/out.npy")
        np.testing.assert_allclose(np.load(f"{self.d}/text.npy"), np.load(f"{self.d}/out.npy"),
                                   rtol=1e-3, atol=1e-5)

    def test_the_table_and_the_json_show_every_stage(self):
        table = self.run_layer("--tokens", self.tokens(), "--ranks", "2", "--check")
        report = json.loads(self.run_layer("--tokens", self.tokens(), "--ranks", "2", "--json"))
        stages = [stage["stage"] for stage in report["stages"]]
        self.assertEqual(stages[-1], "layer")
        for stage in "router_gemm", "select", "plan", "exchange", "layer":
            self.assertIn(stage, stages)
            self.assertIn(stage, table)
        self.assertIn("check: holds", table)
        for stage in report["stages"]:
            self.assertGreater(stage["median_us"], 0)
        self.assertEqual(len(report["traffic"]["rows"]), 4)
        self.assertEqual(report["options"]["ranks"], 2)

    def test_a_layer_that_is_not_the_first_can_be_named(self):
        make_checkpoint(f"{self.d}/two", layers=2)
        outputs = [f"{self.d}/{layer}.npy" for layer in (0, 1)]
        for layer, out in enumerate(outputs):
            self.assert_fine(run_tool("run", "--checkpoint", f"{self.d}/two", "--layer", layer,
                                      "--tokens", self.tokens(), "--output", out))
        self.assertFalse(filecmp.cmp(*outputs, shallow=False))

    def test_an_interrupt_is_130_and_leaves_no_file(self):
        tokens = self.tokens(2000)
        before = sorted(os.listdir(self.d))
        process = subprocess.Popen([TOOL, "run", "--checkpoint", self.checkpoint, "--tokens",
                                    tokens, "--output", f"{self.d}/out.npy", "--iterations",
                                    "100000"], stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(10), 130)
        self.assertEqual(sorted(os.listdir(self.d)), before)

    def test_a_full_disk_is_3_and_leaves_no_file(self):
        tokens = self.tokens()
        before = sorted(os.listdir(self.d))
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        process = subprocess.run([TOOL, "run", "--checkpoint", self.checkpoint, "--tokens", tokens,
                                  "--output", f"{self.d}/out.npy"], capture_output=True, text=True,
                                 preexec_fn=limit, check=False)
        self.assert_one_line(process, 3, ["out.npy"])
        self.assertEqual(sorted(os.listdir(self.d)), before)
        with open("/dev/full", "w", encoding="utf-8") as full:
            process = subprocess.run([TOOL, "help"], stdout=full, stderr=subprocess.PIPE, text=True,
                                     check=False)
        self.assertEqual(process.returncode, 3)
        self.assertIn("stdout", process.stderr)


class Others(TestWithFolder):
    def test_devices_shows_limits_that_were_measured(self):
        done = run_tool("devices", "--json", env={"SWITCHYARD_ROOFS": "measured"})
        self.assert_fine(done)
        devices = json.loads(done.stdout)
        self.assertTrue(any(isa["in_use"] for isa in devices["isas"]))
        engines = {engine["name"]: engine for engine in devices["engines"]}
        self.assertEqual(list(engines), ["threads", "mpi", "nccl", "nccl-pairs"])
        self.assertTrue(engines["threads"]["usable"])
        self.assertTrue(all(e["usable"] or e["reason"] for e in engines.values()))
        for limit in devices["limits"].values():
            self.assertGreater(limit, 1e8)
        self.assert_fine(run_tool("devices"))

    def test_limits_are_measured_or_rough_and_another_word_is_named(self):
        rough = run_tool("devices", "--json", env={"SWITCHYARD_ROOFS": "rough"})
        self.assert_fine(rough)
        for limit in json.loads(rough.stdout)["limits"].values():
            self.assertGreater(limit, 1e6)
        other = run_tool("devices", env={"SWITCHYARD_ROOFS": "none"})
        self.assert_one_line(other, 2, ["SWITCHYARD_ROOFS=none", "measured or rough"])

    def test_an_instruction_set_is_used_or_refused_with_the_reason_by_option_and_by_environment(self):
        done = run_tool("devices", "--json")
        self.assert_fine(done)
        for isa in json.loads(done.stdout)["isas"]:
            name = isa["name"]
            for args, env in ((["--isa", name], {}), ([], {"SWITCHYARD_ISA": name})):
                done = run_tool("devices", "--json", *args, env={"SWITCHYARD_ISA": "", **env})
                if isa["usable"]:
                    self.assert_fine(done)
                    used = [i["name"] for i in json.loads(done.stdout)["isas"] if i["in_use"]]
                    self.assertEqual(used, [name])
                elif "grant" not in isa["reason"]:  # refused tiles fall back instead
                    self.assert_one_line(done, 2, [name, isa["reason"]])
        self.assert_one_line(run_tool("devices", env={"SWITCHYARD_ISA": "mmx"}), 2,
                             ["SWITCHYARD_ISA=mmx", "portable"])

    def test_the_page_of_the_command_line_is_what_the_table_says(self):
        done = run_tool("help", "--markdown")
        self.assert_fine(done)
        page = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "cli.md")
        with open(page, encoding="utf-8") as file:
            self.assertEqual(done.stdout, file.read(), "run switchyard help --markdown > docs/cli.md")

    def test_help_shows_every_option_of_every_command(self):
        with open(os.path.join(os.path.dirname(__file__), "..", "..", "docs", "cli.md"),
                  encoding="utf-8") as file:
            sections = file.read().split("\n## switchyard ")[1:]
        self.assertGreater(len(sections), 5)
        for section in sections:
            done = run_tool(section.split()[0], "--help")
            self.assert_fine(done)
            for line in section.splitlines():
                if line.startswith("| `--"):
                    self.assertIn(line.split("`")[1].split()[0], done.stdout)

    def test_bash_completes_commands_options_and_words(self):
        script = f"{self.d}/completion"
        with open(script, "w", encoding="utf-8") as file:
            file.write(run_tool("completion", "bash").stdout)
        for words, want in ((["switchyard", "be"], "bench"),
                            (["switchyard", "run", "--checkp"], "--checkpoint"),
                            (["switchyard", "run", "--compute", "b"], "bf16")):
            command = (f"source {script}; COMP_WORDS=({' '.join(words)}); "
                       f"COMP_CWORD={len(words) - 1}; _switchyard; echo ${{COMPREPLY[@]}}")
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True,
                                  check=True)
            self.assertEqual(done.stdout.strip(), want)

    def test_verify_runs_a_few_cases(self):
        done = run_tool("verify", "--cases", "20", "--ranks", "1,2", "--threads", "1", "--json")
        self.assert_fine(done)
        json.loads(done.stdout)

    def test_verify_checks_the_way_back_where_there_is_one(self):
        done = run_tool("verify", "--pass", "both", "--cases", "20", "--ranks", "1,2", "--json")
        self.assert_fine(done)
        result = json.loads(done.stdout)
        self.assertEqual((result["pass"], result["holds"]), ("both", True))
        self.assertIn(result["backward"], range(1, 20))
        done = run_tool("verify", "--pass", "backward", "--cases", "10", "--ranks", "2,3")
        self.assert_fine(done)
        self.assertIn("of them backward: all hold", done.stdout)


if __name__ == "__main__":
    unittest.main()
