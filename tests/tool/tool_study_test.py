"""study: from a file to findings, what a kill leaves, resuming, and bad input."""

import hashlib
import json
import math
import os
import signal
import subprocess
import unittest

from tool_files_test import content_of, wait_until
from tool_models_test import made_text
from tool_support import SANITIZED, TOOL, TestWithFolder, run_tool


class TestWithStudy(TestWithFolder):
    """A study of three arms that takes a second."""

    def setUp(self):
        super().setUp()
        self.file("book.txt", made_text(6000))
        self.file("held_out.txt", made_text(1500, seed=9))
        self.study = self.write()

    def file(self, name, content):
        with open(f"{self.d}/{name}", "w", encoding="utf-8") as file:
            file.write(content)
        return f"{self.d}/{name}"

    def write(self, name="small.json", **changes):
        study = {"model": {"preset": "smoke", "hidden": 16, "heads": 2, "sequence": 32, "inner": 8,
                           "layers": 1},
                 "train": {"steps": 12, "sequences": 4}, "valid_every": 4,
                 "text": ["book.txt"], "valid": ["held_out.txt"], "seeds": [1, 2],
                 "tuning": {"seed": 7, "steps": 6, "rates": [0.01, 0.02], "extend": 0},
                 "reference": "top-2",
                 "arms": [{"name": "top-2", "router": "top-k:top-k=2"},
                          {"name": "hash", "router": "hash", "model": {"balance": 0, "z": 0}},
                          {"name": "choice", "router": "expert-choice", "model": {"balance": 0}}],
                 **changes}
        return self.file(name, json.dumps(study))

    def args(self, *more, study=None, output="out"):
        return ["study", study or self.study, "--output", f"{self.d}/{output}", "--threads", "1",
                *map(str, more)]

    def run_study(self, *more, **kwargs):
        return run_tool(*self.args(*more, **kwargs))

    def found(self, output="out"):
        with open(f"{self.d}/{output}/study.json", encoding="utf-8") as file:
            return json.load(file)

    def lines(self, output="out"):
        with open(f"{self.d}/{output}/results.jsonl", encoding="utf-8") as file:
            return {line["run"]: line for line in map(json.loads, file)}

    def weights(self, output="out"):
        """Hashes of every model and optimiser, which times have no part in."""
        folder = f"{self.d}/{output}"
        return {os.path.relpath(path, folder): hashlib.sha256(content).hexdigest()
                for path, content in content_of(folder).items() if path.endswith(".safetensors")}

    def finished(self):
        """Hashes of the results of finished runs."""
        found = {}
        for root, _, names in os.walk(f"{self.d}/out"):
            if "result.json" in names:
                with open(f"{root}/result.json", "rb") as file:
                    found[root] = hashlib.sha256(file.read()).hexdigest()
        return found


class FromFileToFindings(TestWithStudy):
    def test_all_of_it(self):
        done = self.run_study()
        self.assert_fine(done)
        for word in ("estimate: 12 runs", "hash/seed-2", "choice against top-2", "Holm's p",
                     "12 runs in"):
            self.assertIn(word, done.stdout)
        found, lines = self.found(), self.lines()
        self.assertEqual(found["runs"], {"planned": 12, "finished": 12, "whole": True})
        self.assertEqual(len(lines), 12)
        for line in lines.values():
            for key in "commit", "machine", "versions", "seed", "case", "model", "time":
                self.assertIn(key, line)
        self.assertEqual(len(found["floors"]), 8)
        self.assertEqual(found["tokens"], 12 * 4 * 32)
        arms = {arm["name"]: arm for arm in found["arms"]}
        for name, arm in arms.items():
            losses = [lines[f"{name}/seed-{seed}"]["loss"] for seed in (1, 2)]
            self.assertAlmostEqual(arm["loss"]["mean"], sum(losses) / 2, places=12)
            self.assertEqual([loss for _, loss in arm["losses"]], losses)
            self.assertEqual(len(arm["curve"]), 3)
            self.assertIn(arm["rate"], (0.01, 0.02))
            # The last step's model, by the command that measures any.
            run = f"{self.d}/out/{name}/seed-1"
            alone = json.loads(run_tool("evaluate", "--model", run, "--text",
                                        f"{self.d}/held_out.txt", "--json").stdout)
            self.assertAlmostEqual(alone["nats_per_byte"], losses[0], places=9)
            blocks = lines[f"{name}/seed-1"]["blocks"]
            self.assertEqual(sum(targets for targets, _ in blocks), 1499)
            self.assertAlmostEqual(sum(nats for _, nats in blocks) / 1499, losses[0], places=9)
        # Student's interval of two pairs, by hand: 12.706 s / sqrt 2 = 12.706 |d1 - d2| / 2.
        d = [lines[f"hash/seed-{s}"]["loss"] - lines[f"top-2/seed-{s}"]["loss"] for s in (1, 2)]
        difference = arms["hash"]["difference"]
        self.assertAlmostEqual(difference["high"] - difference["mean"],
                               12.706204736174705 * abs(d[0] - d[1]) / 2, places=9)
        p = 1 - 2 / math.pi * math.atan(abs(sum(d)) / abs(d[0] - d[1]))
        self.assertAlmostEqual(difference["holm"], p, places=9)  # alone in its family
        self.assertEqual(arms["choice"]["difference"]["verdict"], "leaks")
        self.assertGreater(arms["choice"]["leaks"]["later tokens"], 0)
        self.assertEqual(arms["hash"]["leaks"], {"later tokens": 0, "other sequences": 0})
        self.assertFalse(arms["choice"]["causal"])
        self.assertIn("proves nothing", " ".join(found["sentences"]))
        # Once more: nothing is trained, the same is found.
        again = self.run_study("--json")
        self.assert_fine(again)
        self.assertEqual(json.loads(again.stdout)["arms"], found["arms"])
        self.assertEqual(self.lines(), lines)
        # As a page, whole and without anything from outside.
        page = f"{self.d}/page.html"
        self.assert_fine(run_tool("report", f"{self.d}/out", "--output", page))
        with open(page, encoding="utf-8") as file:
            page = file.read()
        for word in ("study small", "What may be said", "hash against top-2", "Learning rates",
                     "Leaks", "Floors", f"{arms['hash']['loss']['mean']:.4f}"):
            self.assertIn(word, page)
        self.assertNotIn("http://", page.split("<body>")[1].split("<script")[0])
        # Its lines are those of bench.
        self.assert_fine(run_tool("report", f"{self.d}/out/results.jsonl", "--output",
                                  f"{self.d}/lines.html"))

    def test_an_estimate_makes_nothing(self):
        done = self.run_study("--estimate", "--json")
        self.assert_fine(done)
        estimate = json.loads(done.stdout)["estimate"]
        self.assertEqual((estimate["runs"], estimate["left"]), (12, 12))
        self.assertGreater(estimate["seconds"], 0)
        self.assertFalse(os.path.exists(f"{self.d}/out"))

    def test_arms_by_and_by_are_those_at_once(self):
        self.assert_fine(self.run_study("--only", "hash"))
        self.assertFalse(self.found()["runs"]["whole"])
        self.assertEqual(self.found()["arms"][1]["n"], 2)
        self.assertIsNone(self.found()["arms"][1]["difference"])
        self.file("out/study.json", json.dumps({**self.found(), "floors": [7.5]}))
        self.assert_fine(self.run_study())
        self.assertEqual(self.found()["floors"], [7.5])  # counted once
        self.assert_fine(self.run_study(output="whole"))
        self.assertEqual(self.weights(), self.weights("whole"))
        self.assertFalse([name for name in self.weights() if "/tune-" in name])

    def test_more_seeds_and_equal_time(self):
        self.assert_fine(self.run_study())
        before = self.weights()
        self.write(seeds=[1, 2, 3], equal_time=True)
        done = self.run_study("--only", "top-2,hash")
        self.assert_fine(done)
        self.assertIn("equal time", done.stdout)
        arm = self.found()["arms"][1]
        self.assertEqual((arm["n"], arm["difference"]["n"], arm["time"]["n"]), (3, 3, 3))
        steps = {line["steps"] for name, line in self.lines().items() if name.startswith("hash/time")}
        self.assertEqual(steps, {round(arm["time"]["steps"])})
        self.assertLessEqual(before.items(), self.weights().items())

    ARMS = [{"name": "joint"},
            {"name": "experts-frozen", "freeze": "experts", "init": "joint"},
            {"name": "router-frozen", "freeze": ["router"], "model": {"balance": 0, "z": 0}}]

    def test_arms_begin_with_others_and_freeze(self):
        self.write(arms=self.ARMS, reference="joint", seeds=[1])
        done = self.run_study()
        self.assert_fine(done)
        for words in "experts frozen, begins with joint", "router frozen":
            self.assertIn(words, done.stdout)
        found, lines = self.found(), self.lines()
        self.assertEqual(found["runs"], {"planned": 9, "finished": 9, "whole": True})
        best = min((line for line in lines.values() if line["run"].startswith("joint/tune")),
                   key=lambda line: line["loss"])["run"]
        name = "experts-frozen/seed-1"
        self.assertEqual(lines[name]["freeze"], ["experts"])
        self.assertTrue(lines[name]["init"].endswith("out/joint/seed-1"))
        for line in lines.values():
            if line["run"].startswith("experts-frozen/tune"):
                self.assertTrue(line["init"].endswith("out/" + best), line["init"])
        # It goes on where the other has ended: far below the loss that random weights have.
        self.assertLess(lines[name]["curve"][0]["loss"], lines["joint/seed-1"]["curve"][0]["loss"])
        self.assertEqual(lines["router-frozen/seed-1"]["freeze"], ["router"])
        self.assertNotIn("init", lines["router-frozen/seed-1"])
        self.assertIn("all runs were done", self.run_study().stdout)
        # Alone an arm is not begun with what is not there.
        self.assert_one_line(self.run_study("--only", "experts-frozen", output="alone"), 2,
                             ["experts-frozen/", "joint/", "not done", "--only"])

    def test_what_begins_with_a_run_that_diverged_has_diverged(self):
        self.write(arms=self.ARMS[:2], reference="joint", tuning={"seed": 7, "rates": [1e3]},
                   train={"steps": 6, "sequences": 2, "warmup": 0, "clip": 0})
        self.assert_fine(self.run_study())
        lines = self.lines()
        for seed in 1, 2:
            diverged = lines[f"joint/seed-{seed}"]["diverged"]
            if diverged is not None:
                self.assertIn(f"begins with joint/seed-{seed}",
                              lines[f"experts-frozen/seed-{seed}"]["diverged"])

    def test_a_run_that_diverges_stays(self):
        self.write(tuning={"seed": 7, "rates": [1e3]}, train={"steps": 6, "sequences": 2,
                                                              "warmup": 0, "clip": 0})
        self.assert_fine(self.run_study("--only", "top-2,hash"))
        found = self.found()
        text = " ".join(found["sentences"])
        if any(arm["diverged"] for arm in found["arms"]):
            self.assertIn("diverged with seed", text)
        self.assertIn("was not tuned", text)


class StudiesThatEndEarly(TestWithStudy):
    def test_a_run_that_is_refused_is_named_and_those_before_it_are_kept(self):
        os.mkdir(f"{self.d}/out")
        self.file("out/choice", "a file, where an arm's runs would lie")
        done = self.run_study()
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn(": choice/tune-0.01: cannot make the directory", done.stderr)
        self.assertEqual(done.returncode, 2)
        before = self.finished()
        self.assertEqual(len(before), 4)
        os.remove(f"{self.d}/out/choice")
        self.assert_fine(self.run_study())
        self.assertLessEqual(before.items(), self.finished().items())

    def test_a_kill_loses_nothing_finished(self):
        self.assert_fine(self.run_study(output="whole"))
        for runs in 2, 5, 9:
            process = subprocess.Popen([TOOL, *self.args()], stdout=subprocess.DEVNULL,
                                       stderr=subprocess.PIPE, text=True)
            try:
                wait_until(lambda: len(self.finished()) >= runs, process)
            finally:
                process.kill()
                process.communicate()
            finished = self.finished()
        self.assert_fine(self.run_study())
        self.assertLessEqual(finished.items(), self.finished().items())
        self.assertEqual(self.weights(), self.weights("whole"))
        self.assertEqual({name: line["loss"] for name, line in self.lines().items()},
                         {name: line["loss"] for name, line in self.lines("whole").items()})

    def test_an_interrupt_says_what_there_is(self):
        self.write(train={"steps": 100000, "sequences": 4}, tuning={"rates": [0.01]})
        process = subprocess.Popen([TOOL, *self.args()], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        log = f"{self.d}/out/top-2/seed-1/log.jsonl"
        wait_until(lambda: os.path.exists(log) and os.path.getsize(log) > 500, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, out + err)
        self.assertEqual(self.found()["runs"], {"planned": 6, "finished": 0, "whole": False})
        self.assertEqual(self.found()["floors"], [])  # which would take a while of large texts
        self.assertTrue(any(name.startswith("step-")
                            for name in os.listdir(f"{self.d}/out/top-2/seed-1")))


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class StudiesOfTheProject(TestWithStudy):
    def test_each_is_valid_and_documented(self):
        with open(f"{ROOT}/docs/studies.md", encoding="utf-8") as file:
            page = file.read()
        names = sorted(os.listdir(f"{ROOT}/studies"))
        self.assertIn("smoke.json", names)
        for name in names:
            with self.subTest(name):
                with open(f"{ROOT}/studies/{name}", encoding="utf-8") as file:
                    study = json.load(file)
                self.assertEqual(f"{study['name']}.json", name)
                self.assertTrue(f"`studies/{name}`" in page, "docs/studies.md does not name it")
                done = self.run_study("--estimate", "--json", "--text", f"{self.d}/book.txt", "--valid",
                                      f"{self.d}/held_out.txt", study=f"{ROOT}/studies/{name}")
                self.assert_fine(done)
                arms, rates = len(study["arms"]), len(study["tuning"]["rates"])
                runs = arms * (rates + len(study["seeds"]))
                if study.get("equal_time"):
                    runs += (arms - 1) * len(study["seeds"])
                self.assertEqual(json.loads(done.stdout)["estimate"]["runs"], runs)
        self.assertFalse(os.path.exists(f"{self.d}/out"))

    @unittest.skipIf(SANITIZED, "twenty runs are too many for a sanitizer")
    def test_the_smallest_one_runs(self):
        done = run_tool("study", f"{ROOT}/studies/smoke.json", "--output", f"{self.d}/smoke",
                        "--threads", 2)
        self.assert_fine(done)
        found = self.found("smoke")
        self.assertEqual((found["runs"]["finished"], found["runs"]["whole"]), (20, True))
        for arm in found["arms"]:
            self.assertLess(arm["loss"]["mean"], 3.7, arm["name"])  # ln 256 = 5.5; unigrams 3.3
            leaks = sum(arm["leaks"].values()) > 0
            self.assertEqual(leaks, arm["name"] == "expert-choice", arm["leaks"])
            self.assertEqual(arm["diverged"], [])


class TestBadStudy(TestWithStudy):
    def refused(self, words, *args):
        before = content_of(self.d)
        self.assert_one_line(run_tool(*args), 2, words)
        self.assertEqual(content_of(self.d), before)


class BadStudies(TestBadStudy):
    def test_files(self):
        self.refused(["absent.json"], *self.args(study=f"{self.d}/absent.json"))
        self.refused(["bad.json"], *self.args(study=self.file("bad.json", "{")))
        for words, changes in ((["'colour'", "arms"], {"colour": 1}),
                               (["'d'", "top-2"], {"reference": "d"}),
                               (["7", "tuned"], {"seeds": [1, 7]}),
                               (["arms[0]", "top-q"], {"arms": [{"name": "a", "router": "top-q"}]}),
                               (["absent.txt"], {"text": ["absent.txt"]}),
                               (["rates", "0.0100001", "0.01", "ascending"],
                                {"tuning": {"rates": [0.01, 0.0100001]}}),
                               (["held_out.txt", "trained on"], {"text": ["held_out.txt"]}),
                               (["sequences of 8192"], {"model": {"preset": "smoke",
                                                                  "sequence": 8192}})):
            self.refused(words, *self.args(study=self.write("bad.json", **changes)))
        for words, arm in ((["init", "'later'", "before"], {"init": "later"}),
                           (["init", "parameters"], {"init": "top", "model": {"inner": 16}}),
                           (["freeze", "'gate'", "experts"], {"freeze": ["gate"]}),
                           (["freeze: 3"], {"freeze": 3}),
                           (["freeze", "router", "balance"], {"freeze": "router"})):
            arms = [{"name": "top"}, {"name": "second", **arm}, {"name": "later"}]
            self.refused(words, *self.args(study=self.write("bad.json", arms=arms,
                                                            reference="top")))
        with open(self.study, encoding="utf-8") as file:
            study = json.load(file)
        del study["text"]
        self.refused(["'text'", "--text"],
                     *self.args(study=self.file("bad.json", json.dumps(study))))

    def test_options(self):
        self.refused(["--only", "'d'", "choice"], *self.args("--only", "d"))
        self.refused(["--output"], *self.args(output="book.txt"))
        self.refused(["--output"], "study", self.study)
        self.refused(["FILE"], "study", "--output", f"{self.d}/new")
        self.refused(["other.json"], *self.args("other.json"))
        self.refused(["--valid", "windows"],
                     *self.args("--valid", self.file("short.txt", "x" * 40)))

    def test_what_it_reads_is_not_what_it_writes(self):
        os.mkdir(f"{self.d}/out")
        with open(self.study, encoding="utf-8") as file:
            study = file.read().replace("book.txt", f"{self.d}/book.txt")
        study = study.replace("held_out.txt", f"{self.d}/held_out.txt")
        self.refused(["FILE", "--output", "study.json"],
                     *self.args(study=self.file("out/study.json", study)))
        os.remove(f"{self.d}/out/study.json")
        os.link(f"{self.d}/book.txt", f"{self.d}/out/results.jsonl")
        self.refused(["--text", "--output", "results.jsonl"], *self.args())

    def test_pages(self):
        page = ["--output", f"{self.d}/page.html"]
        self.refused(["no study.json"], "report", self.d, *page)
        os.mkdir(f"{self.d}/made")
        for content in ("{", "{}", '{"study": "a", "arms": [{}], "sentences": [], "reference": 1}'):
            self.file("made/study.json", content)
            self.refused(["study.json"], "report", f"{self.d}/made", *page)
        self.file("made/results.jsonl", "{}")
        for name in ("study.json", "results.jsonl"):
            self.refused(["--output", "FILE"], "report", f"{self.d}/made", "--output",
                         f"{self.d}/made/{name}")

    def test_another_study_in_the_directory(self):
        self.assert_fine(self.run_study("--only", "hash"))
        self.write(train={"steps": 13, "sequences": 4})
        self.refused(["hash/", "schedule/", "another directory"], *self.args())
        self.write()
        self.file("book.txt", made_text(6000, seed=3))
        self.refused(["text/fingerprint"], *self.args())
        self.file("book.txt", made_text(6000))
        path = f"{self.d}/out/hash/seed-1/result.json"
        with open(path, "w", encoding="utf-8") as file:
            file.write("{}")
        self.refused(["hash/seed-1/result.json", "no result"], *self.args())
        path = f"{self.d}/out/hash/seed-2/result.json"
        with open(path, encoding="utf-8") as file:
            whole = json.load(file)
        os.remove(f"{self.d}/out/hash/seed-1/result.json")
        absent = object()
        for member, value in (("seed", absent), ("seed", "2"), ("kind", absent), ("kind", "new"),
                              ("curve", absent), ("diverged", absent), ("loss", "abc"),
                              ("loss", None)):
            damaged = {key: of for key, of in whole.items() if key != member}
            if value is not absent:
                damaged[member] = value
            with open(path, "w", encoding="utf-8") as file:
                json.dump(damaged, file)
            self.refused(["hash/seed-2/result.json", "no result"], *self.args())


if __name__ == "__main__":
    unittest.main()
