"""What tools/read_bars.py says of result lines."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools")
sys.path.insert(0, TOOLS)
sys.dont_write_bytecode = True

import read_bars  # noqa: E402


def line(bar, stage, holds, value=1.0, **more):
    return {"bar": bar, "stage": stage, "holds": holds, "value": value, "target": 1.1, **more}


class BarsTest(unittest.TestCase):
    def test_the_stages_of_a_case_are_one_answer_and_the_last_run_counts(self):
        case = {"name": "qwen3-30b", "T": 32768, "skew": "uniform"}
        lines = [line("G3", stage, False, case=case) for stage in ("plan", "layer")]
        lines += [line("G3", stage, True, case=case) for stage in ("plan", "layer")]
        lines += [line("G3", "layer", False, 1.05, case={**case, "skew": "zipf:1"}),
                  {"stage": "plan", "case": case}]
        self.assertEqual(read_bars.table(lines, False), [
            "G3: 1 of 2 hold",
            "    missed qwen3-30b T=32768 zipf:1: 1.05, wanted 1.1 (bench)"])
        self.assertEqual(len(read_bars.table(lines, True)), 3)

    def test_the_stages_of_other_programs_answer_for_themselves(self):
        case = {"name": "pack+combine"}
        lines = [line("G10", stage, stage == "combine", program="stages_bench", case=case)
                 for stage in ("combine", "pack+combine")]
        lines.append(line("G9", "plan", True, program="stages_bench", case=case))
        self.assertEqual([text for text in read_bars.table(lines, False) if text[0] == "G"],
                         ["G9: 1 of 1 hold", "G10: 1 of 2 hold"])

    def test_a_file_without_bars_says_so_and_one_that_is_not_of_results_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.jsonl")
            tool = [sys.executable, os.path.join(TOOLS, "read_bars.py"), path]
            for text, status, said in ((json.dumps({"stage": "copy"}) + "\n", 0, "no line"),
                                       ("words\n", 1, "line 1")):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
                done = subprocess.run(tool, capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, status)
                self.assertIn(said, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
