"""What tools/read_bars.py says of result lines, and the files that they lie in."""

import glob
import json
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TOOLS = os.path.join(ROOT, "tools")
sys.path.insert(0, TOOLS)
sys.dont_write_bytecode = True

import read_bars  # noqa: E402
import result_lines  # noqa: E402

XEON = {"cpu": "Intel(R) Xeon(R) Processor", "gpu": "", "isa": "amx_bf16"}
H200 = {"cpu": "Intel(R) Xeon(R) Processor", "gpu": "NVIDIA H200", "isa": ""}


def line(bar, stage, holds, value=1.0, **more):
    common = {"schema": 1, "backend": "cuda", "machine": H200, "commit": "c0ffee",
              "time": "2026-11-22T01:00:00Z", "target": 1.1}
    return {**common, "bar": bar, "stage": stage, "holds": holds, "value": value, **more}


def run(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


class BarsTest(unittest.TestCase):
    def test_the_stages_of_a_case_are_one_answer_and_the_newest_run_counts(self):
        case = {"name": "qwen3-30b", "T": 32768, "skew": "uniform"}
        new = [line("G5", stage, True, case=case) for stage in ("plan", "layer")]
        old = [line("G5", stage, False, case=case, time="2026-11-21T23:00:00Z", commit="0ld")
               for stage in ("plan", "layer")]
        more = [line("G5", "layer", False, 1.05, case={**case, "skew": "zipf:1"}),
                {"stage": "plan", "case": case}]
        for lines in (new + old + more, old + new + more):
            self.assertEqual(read_bars.table(lines, False), [
                "G5, 1 x H200, at c0ffee: 1 of 2 hold",
                "    missed qwen3-30b T 32768 zipf:1: 1.05, wanted 1.1 (bench)"])
            self.assertEqual(len(read_bars.table(lines, True)), 3)

    def test_a_key_that_older_lines_lack_does_not_make_another_case(self):
        case = {"name": "C7", "T": 1}
        lines = [line("C7", "layer", True, case={**case, "batch_invariant": False}),
                 line("C7", "layer", False, case=case, time="2026-11-21T23:00:00Z")]
        self.assertEqual(read_bars.table(lines, False), ["C7, 1 x H200, at c0ffee: 1 of 1 hold"])

    def test_each_instruction_set_answers_for_itself_and_so_does_each_number_of_gpus(self):
        case = {"name": "C7", "T": 4, "E": 8}
        lines = [line("C7", "layer", isa == "avx2", 0.7, target=0.62, case=case, backend="cpu",
                      machine={**XEON, "isa": isa}) for isa in ("amx_bf16", "avx2")]
        lines += [line("R6", "all", ranks == 4, 0.5, case={"name": "sizes", "R": ranks})
                  for ranks in (2, 4)]
        self.assertEqual(read_bars.table(lines, False), [
            "C7, Intel Xeon, amx_bf16, at c0ffee: 0 of 1 hold",
            "    missed T 4 E 8: 0.7, wanted 0.62 (bench)",
            "C7, Intel Xeon, avx2, at c0ffee: 1 of 1 hold",
            "R6, 2 x H200, at c0ffee: 0 of 1 hold",
            "    missed sizes: 0.5, wanted 1.1 (bench)",
            "R6, 4 x H200, at c0ffee: 1 of 1 hold"])

    def test_a_sweeps_last_line_answers_for_its_estimates(self):
        sweep = {"schema": 1, "backend": "cpu", "machine": XEON, "commit": "c0ffee", "stage": "sweep",
                 "case": {"name": "pack"}, "holds": True,
                 "estimate": {"seconds": 30.0, "measured_seconds": 20.0,
                              "bytes": 104.0, "measured_bytes": 100.0}}
        self.assertEqual(read_bars.table([sweep], False), [
            "L7, Intel Xeon, amx_bf16, at c0ffee: 0 of 1 hold",
            "    missed pack: 0.5, wanted 0.25 (bench)",
            "L7 memory, Intel Xeon, amx_bf16, at c0ffee: 1 of 1 hold"])
        del sweep["estimate"]["measured_bytes"]  # as of a GPU
        sweep["estimate"]["seconds"] = 16.0
        self.assertEqual(read_bars.table([sweep], False),
                         ["L7, Intel Xeon, amx_bf16, at c0ffee: 1 of 1 hold"])

    def test_memory_beside_what_a_layer_needs_is_an_answer_of_its_own(self):
        case = {"name": "preset-s", "T": 32768}
        both = line("B4", "layer", False, 2.0, target=1.35, case=case, memory={"beside": 0.1})
        self.assertEqual(read_bars.table([both], False), [
            "B4, 1 x H200, at c0ffee: 0 of 1 hold",
            "    missed preset-s T 32768: 2, wanted 1.35 (bench)",
            "B5, 1 x H200, at c0ffee: 1 of 1 hold"])
        both["memory"]["beside"] = 0.13
        self.assertIn("    missed preset-s T 32768: 0.13, wanted 0.12 (bench)",
                      read_bars.table([both], False))

    def test_the_stages_of_other_programs_answer_for_themselves(self):
        case = {"name": "pack+combine"}
        lines = [line("G10", stage, stage == "combine", program="stages_bench", case=case)
                 for stage in ("combine", "pack+combine")]
        lines.append(line("G9", "plan", True, program="stages_bench", case=case))
        self.assertEqual([text for text in read_bars.table(lines, False) if text[0] == "G"],
                         ["G9, 1 x H200, at c0ffee: 1 of 1 hold",
                          "G10, 1 x H200, at c0ffee: 1 of 2 hold"])

    def test_a_ratio_to_a_peer_of_another_day_is_no_answer(self):
        case = {"name": "qwen3-30b", "T": 32768}
        scaled = line("G3", "layer", True, 1.3, case=case, peers={})
        self.assertEqual(read_bars.table([scaled], False), [])
        turns = {**scaled, "value": 1.087, "holds": False, "peers": {"sonicmoe": 4719.0}}
        self.assertEqual(read_bars.table([scaled, turns], False)[0],
                         "G3, 1 x H200, at c0ffee: 0 of 1 hold")

    def test_bars_of_eight_gpus_are_read_off_the_exchange_of_fewer(self):
        case = {"R": 2, "T": 4096, "mode": "throughput", "ctas": 16, "skew": "uniform",
                "dispatch_wire": "fp8"}
        point = {"schema": 1, "backend": "cuda", "machine": H200, "commit": "c0ffee",
                 "program": "device_exchange_bench", "stage": "combine", "case": case,
                 "median_us": 190.28, "limit_us": 171.19}
        self.assertEqual(read_bars.table([point, {**point, "case": {**case, "ctas": 24}}], False), [
            "R2, 2 x H200, at c0ffee: 0 of 1 hold",
            "    missed combine T 4096 throughput fp8 16 blocks: 1.112, wanted 1.09 "
            "(device_exchange_bench)"])

    def test_a_file_without_bars_says_so_and_one_that_is_not_of_results_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.jsonl")
            plain = json.dumps({"stage": "copy", "case": {}}) + "\n"
            for text, status, said in ((plain, 0, "no line"), ("words\n", 1, "line 1"),
                                       (plain + "[]\n", 1, "line 2")):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
                done = run(os.path.join(TOOLS, "read_bars.py"), path)
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(said, done.stdout + done.stderr)


class DocumentTest(unittest.TestCase):
    def test_the_table_in_the_document_is_what_the_committed_lines_say(self):
        lines = [one for path in sorted(glob.glob(os.path.join(ROOT, "results", "*.jsonl")))
                 for one in result_lines.read(path)]
        with open(os.path.join(ROOT, "docs", "performance.md"), encoding="utf-8") as file:
            document = file.read()
        self.assertEqual(read_bars.with_table(document, lines), document,
                         "tools/read_bars.py --write docs/performance.md results/*.jsonl")

    def test_a_bar_without_words_and_a_document_without_marks_are_errors(self):
        lines = [line("G99", "layer", True, case={"name": "x"})]
        with self.assertRaisesRegex(ValueError, "G99"):
            read_bars.markdown(lines)
        with self.assertRaisesRegex(ValueError, "begin: tools/read_bars.py"):
            read_bars.with_table("# Performance\n", [])


class CompactTest(unittest.TestCase):
    def test_a_line_by_an_older_name_is_measured_again_by_the_newer_one(self):
        old = {"schema": 1, "program": "decode_bench", "stage": "decode", "case": {"T": 1},
               "time": "2026-11-22"}
        new = {**old, "program": "streaming_bench", "stage": "streaming", "time": "2026-11-23"}
        lines = result_lines.parse(json.dumps(old) + "\n\n" + json.dumps(new), "memory")
        self.assertEqual(lines[0], {**new, "time": "2026-11-22"})
        self.assertEqual(result_lines.newest(lines), [new])

    def lines(self):
        """Two programs on one machine, the second one silent about its instruction set."""
        bench = {"schema": 1, "commit": "c0ffee", "backend": "cuda", "stage": "layer",
                 "machine": {"cpu": "x", "isa": "avx2", "gpu": "H", "bandwidth": 1.5},
                 "versions": {"switchyard": "0.1.0"}, "counters": None, "time": "2026-01-01"}
        other = {**bench, "program": "stages_bench", "versions": {"cuda": "13.0"},
                 "machine": {"cpu": "x", "isa": "", "gpu": "H"}}
        return ([{**bench, "case": {"T": tokens}} for tokens in (1, 2)]
                + [{**other, "case": {"T": tokens}} for tokens in (1, 2)])

    def test_a_compacted_file_says_the_same_and_its_machine_once(self):
        lines = self.lines()
        text = result_lines.compact(lines)
        self.assertEqual(text.count('"cpu"'), 1)
        self.assertEqual(len(text.splitlines()), 1 + len(lines))
        again = result_lines.parse(text, "memory")
        for before, after in zip(lines, again):
            for part in ("machine", "versions"):
                said = {key: value for key, value in before[part].items() if value != ""}
                self.assertLessEqual(said.items(), after[part].items())
            self.assertEqual({**before, "machine": 0, "versions": 0},
                             {**after, "machine": 0, "versions": 0})
        self.assertEqual(result_lines.compact(again), text)

    def test_whole_lines_may_follow_a_header_and_take_nothing_from_it(self):
        text = result_lines.compact(self.lines())
        whole = {"schema": 1, "stage": "plan", "case": {}, "machine": {"cpu": "y"}}
        self.assertEqual(result_lines.parse(text + json.dumps(whole) + "\n", "memory")[-1], whole)

    def test_lines_are_left_out_by_name_and_stage_and_a_file_is_never_emptied(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.jsonl")
            with open(path, "w", encoding="utf-8") as file:
                for one in self.lines() + [{**self.lines()[0], "stage": "plan"}]:
                    file.write(json.dumps(one) + "\n")
            tool = os.path.join(TOOLS, "compact_results.py")
            done = run(tool, path, "--without", "stages_bench", "--stage", "layer")
            self.assertIn("2 of 5 lines kept", done.stdout)
            with open(path, encoding="utf-8") as file:
                before = file.read()
            done = run(tool, path, "--without", "bench")
            self.assertEqual(done.returncode, 1)
            self.assertIn("no line would be left", done.stderr)
            with open(path, encoding="utf-8") as file:
                self.assertEqual(file.read(), before)


if __name__ == "__main__":
    unittest.main()
