"""What device_check makes of ncu's tables."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools")
sys.path.insert(0, TOOLS)
sys.dont_write_bytecode = True

import read_counters  # noqa: E402

METRICS = ["dram__bytes.sum.per_second", "gpu__time_duration.sum", "l1tex__t_sector_hit_rate.pct",
           "lts__t_sector_hit_rate.pct", "sm__inst_executed.avg.per_cycle_active",
           "sm__warps_active.avg.pct_of_peak_sustained_active"]
FIXED = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
         "Block Size", "Grid Size", "Device", "CC"]


def row(*cells):
    return ",".join(f'"{cell}"' for cell in cells)


def launch(index, kernel, grid, *values):
    return row(index, 77, "switchyard", "127.0.0.1", kernel, 1, 13, "(256, 1, 1)", grid, 0, "9.0",
               *values)


def table(units, *launches):
    """As ncu writes it, with its own words before and after."""
    return "\n".join(["==PROF== Connected to process 77 (/build/switchyard)",
                      '==PROF== Profiling "pack_kernel" - 0: 0%....50%....100% - 4 passes',
                      "==PROF== Disconnected from process 77", row(*FIXED, *METRICS),
                      row(*[""] * len(FIXED), *units), *launches, ""])


BASE = ["byte/second", "ns", "%", "%", "inst/cycle", "%"]
PACK = "void switchyard::<unnamed>::pack_kernel(switchyard::<unnamed>::PackParams)"
ROUTE = "void switchyard::unnamed>::route_kernel<(int)8, (bool)0>(RouteParams)"


class CountersTest(unittest.TestCase):
    def test_a_kernel_has_the_medians_of_its_launches(self):
        text = table(BASE,
                     launch(0, PACK, "(4224, 1, 1)", "3,500,000,000,000.50", "107,000", "0.00",
                            "50.1", "0.41", "81.5"),
                     launch(1, ROUTE, "(528, 1, 1)", "1,000,000,000,000", "8,900", "12.5", "70",
                            "2.5", "60"),
                     launch(2, PACK, "(4224, 1, 1)", "3,700,000,000,000", "105,000", "2", "52.1",
                            "0.43", "83.5"))
        pack, route = read_counters.read(text, "bench")
        self.assertEqual(pack["case"], {"name": "pack_kernel", "grid": "(4224, 1, 1)",
                                        "block": "(256, 1, 1)"})
        self.assertEqual(pack["samples"], 2)
        self.assertEqual(pack["median_us"], 106.0)
        self.assertEqual(pack["counters"], {"occupancy_pct": 82.5, "ipc": 0.42, "dram_gbps": 3600.0,
                                            "l1_hit_pct": 1.0, "l2_hit_pct": 51.1})
        self.assertEqual(route["case"]["name"], "route_kernel")
        self.assertEqual(route["counters"]["ipc"], 2.5)

    def test_scaled_units_are_understood_and_strange_ones_are_not(self):
        for units in (["Tbyte/second", "us", "%", "%", "inst/cycle", "%"],
                      ["Gbyte/s", "usecond", "%", "%", "inst/cycle", "%"]):
            rate = "2.5" if units[0].startswith("T") else "2,500"
            (line,) = read_counters.read(
                table(units, launch(0, PACK, "(1, 1, 1)", rate, "9.5", "1", "2", "3", "4")), "x")
            self.assertEqual(line["counters"]["dram_gbps"], 2500.0)
            self.assertEqual(line["median_us"], 9.5)
        (line,) = read_counters.read(
            table(["sector", *BASE[1:]], launch(0, PACK, "(1, 1, 1)", *"123456")), "x")
        self.assertIsNone(line["counters"])
        self.assertIn("sector", line["reason"])

    def test_without_figures_the_line_says_why(self):
        denied = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"
        for text, words in ((f"==PROF== Connected\n{denied}\n", "ERR_NVGPUCTRPERM"),
                            ("", "no kernel"), (table(BASE), "no kernel"),
                            (table(BASE, launch(0, PACK, "(1, 1, 1)", *["n/a"] * 6)), "no kernel")):
            (line,) = read_counters.read(text, "bench")
            self.assertIsNone(line["counters"])
            self.assertEqual(line["case"], {"name": "bench"})
            self.assertIn(words, line["reason"])

    def test_one_missing_counter_leaves_the_others(self):
        (line,) = read_counters.read(
            table(BASE, launch(0, PACK, "(1, 1, 1)", "1000000000", "1000", "n/a", "2", "3", "4")), "x")
        self.assertIsNone(line["counters"]["l1_hit_pct"])
        self.assertEqual(line["counters"]["dram_gbps"], 1.0)

    def test_lines_are_appended_with_commit_machine_and_versions(self):
        with tempfile.TemporaryDirectory() as folder:
            results = os.path.join(folder, "results.jsonl")
            ncu = os.path.join(folder, "ncu.csv")
            with open(ncu, "w", encoding="utf-8") as file:
                file.write(table(BASE, launch(0, PACK, "(1, 1, 1)", *"123456")))
            script = os.path.join(TOOLS, "read_counters.py")
            for options in (["--csv", ncu], ["--reason", "no ncu here"]):
                subprocess.run([sys.executable, script, "--results", results, "--program", "bench",
                                *options], check=True, capture_output=True)
            with open(results, encoding="utf-8") as file:
                counted, missing = map(json.loads, file)
        self.assertEqual(counted["counters"]["occupancy_pct"], 6)
        self.assertEqual(missing["reason"], "no ncu here")
        for line in counted, missing:
            self.assertLessEqual({"schema", "time", "commit", "machine", "versions", "program"},
                                 line.keys())
            self.assertIn("ncu", line["versions"])


if __name__ == "__main__":
    unittest.main()
