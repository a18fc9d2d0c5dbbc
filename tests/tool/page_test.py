"""The page of `switchyard report` in a browser without a screen: at 1400 and at 400 pixels, light and
dark, without network. Without chromium these tests are skipped."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zlib

import numpy as np

from tool_support import TOOL, not_sanitized

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "page")
BROWSER = next((path for path in map(shutil.which, ("chromium-headless-shell", "chromium"))
                if path), None)
MOST_BLOCKS = 0.02  # share of a picture that may look otherwise: fonts and browsers differ a little
MOST_STEP = 48      # of 255: from where a block looks otherwise
BLOCK = 6           # pixels

EARLY = """<script>window.problems = [];
addEventListener("error", (event) => problems.push(event.message));</script>"""
LATE = """<script>addEventListener("load", () => setTimeout(() => {
  const wide = [...document.querySelectorAll("main *, header *")].filter((element) => {
    if (element.closest(".scroll, nav")) return false;
    const box = element.getBoundingClientRect();
    return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
  }).map((element) => element.outerHTML.slice(0, 90));
  const cut = [...document.querySelectorAll(".legend, figcaption, .tiles div, .card, h1, h2, h3")]
    .filter((element) => element.scrollWidth > element.clientWidth + 1)
    .map((element) => element.textContent.slice(0, 90));
  const found = {problems, wide, cut, width: innerWidth, page: document.documentElement.scrollWidth,
    plots: document.querySelectorAll("figure.plot").length,
    drawn: document.querySelectorAll("figure.plot canvas").length / 2,
    back: getComputedStyle(document.body).backgroundColor};
  (%s)(found);
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
}, 300));</script>"""

USE = """(found) => {
  const table = document.querySelector("section.suite table");
  const column = [...table.tHead.rows[0].cells].findIndex((head) => head.textContent === "median, µs");
  const button = table.tHead.rows[0].cells[column].querySelector("button");
  const cells = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[column].textContent));
  button.click();
  found.up = cells();
  button.click();
  found.down = cells();
  const search = document.querySelector("section.suite input[type=search]");
  search.value = "gemm2 padded";
  search.dispatchEvent(new Event("input"));
  found.rows = [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => row.textContent);
  const figure = document.querySelector("figure.plot");
  const canvas = figure.querySelector("canvas");
  const box = canvas.getBoundingClientRect();
  for (const kind of ["mouseover", "mousemove"]) {
    canvas.nextElementSibling.dispatchEvent(new MouseEvent(kind, {bubbles: true,
      clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}));
  }
  found.said = figure.querySelector("output").textContent;
  const legend = figure.querySelector(".legend button");
  legend.click();
  found.pressed = legend.getAttribute("aria-pressed");
}"""


def lines():
    """Made-up lines of every part of the page; the same at every run."""
    machine = {"cpu": "a CPU", "isa": "avx2", "gpu": "a GPU", "driver": "1", "bandwidth": 4e12,
               "read_bandwidth": 4.2e12, "flops_bf16": 8e14, "flops_f16": 8e14, "flops_f32": 5e13}
    common = {"schema": 1, "time": "2026-01-02T03:04:05Z", "commit": "0123456", "backend": "cuda",
              "machine": machine, "versions": {"switchyard": "1.0", "compiler": "GNU 12"}}
    stages = {"router_gemm": 1, "plan": 0.5, "gemm1+activation": 6, "gemm2": 3, "combine": 1}
    for layout in "compact", "padded":
        for power in range(1, 13):
            tokens = 2 ** power
            case = {"name": "a-model", "E": 64, "K": 8, "H": 2048, "I": 1024, "T": tokens, "R": 1,
                    "compute": "bf16", "layout": layout, "skew": "uniform", "capacity_factor": 1.25}
            base = (1 + tokens / 100) * (1 if layout == "compact" else 1.3)
            for stage, part in {**stages, "layer": 11}.items():
                us = base * part
                flops = 1e7 * tokens * part
                yield {**common, "suite": "models", "case": case, "stage": stage, "median_us": us,
                       "p95_us": us * 1.1, "limit_us": us * 0.8, "limit_by": "memory", "share": 0.8,
                       "bytes": 4e6 * (1 + tokens / 64), "flops": flops, "gbps": 1500.5,
                       "tflops": flops / us * 1e-6, "load": {"cv": 1 / power, "dropped": 0.3 / power},
                       "peers": {"torch": us * 1.5} if stage == "layer" else {},
                       "bar": "B1" if power < 4 else "B2 long", "value": us, "target": 20.0,
                       "holds": us < 20}
    for step in range(8):
        factor = 1 + step / 4
        yield {**common, "suite": "capacity", "stage": "plan", "median_us": 5.0,
               "case": {"E": 64, "K": 8, "T": 4096, "capacity_factor": factor},
               "capacity": {"dropped": 0.2 / factor ** 4, "expected": 0.2 / factor ** 4 + 0.001,
                            "standard_error": 0.004}}
    words = re.findall(r" ?\S+", "the quick brown fox jumps over 13 lazy dogs, and 7 more")
    yield {**common, "program": "run", "stage": "route", "median_us": 3.0, "routing": {
        "counts": [(7 * e) % 11 + 1 for e in range(32)], "cv": 0.51, "cv_floor": 0.2, "text": words,
        "choices": [[(5 * t) % 32, (11 * t + 3) % 32] for t in range(len(words))],
        "kinds": ["number" if word.strip().isdigit() else "word" for word in words]}}


def pixels_of(path):
    """A PNG of eight-bit RGB or RGBA as [height, width, 3]."""
    with open(path, "rb") as file:
        data = file.read()
    at, body = 8, b""
    while at < len(data):
        size, kind = int.from_bytes(data[at:at + 4], "big"), data[at + 4:at + 8]
        if kind == b"IHDR":
            width, height = (int.from_bytes(data[at + 8 + i:at + 12 + i], "big") for i in (0, 4))
            depth = {2: 3, 6: 4}[data[at + 17]]
        if kind == b"IDAT":
            body += data[at + 8:at + 8 + size]
        at += 12 + size
    raw = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + width * depth)
    out = np.zeros((height + 1, width * depth), np.int64)
    for row in range(height):
        filtered, line = raw[row, 0], raw[row, 1:].astype(np.int64)
        up = out[row]
        if filtered == 1:
            line = np.cumsum(line.reshape(width, depth), axis=0).reshape(-1) & 255
        elif filtered == 2:
            line = (line + up) & 255
        elif filtered > 2:
            done = [0] * depth
            over, corner = up.tolist(), [0] * depth + up.tolist()
            for i, value in enumerate(line.tolist()):
                left, above = done[i], over[i]
                if filtered == 3:
                    guess = (left + above) // 2
                else:
                    near = left + above - corner[i]
                    guess = min((left, above, corner[i]), key=lambda v, near=near: abs(v - near))
                done.append((value + guess) & 255)
            line = np.array(done[depth:])
        out[row + 1] = line
    return out[1:].reshape(height, width, depth)[:, :, :3]


def unlike(left, right):
    """The share of blocks in which two pictures differ; 1 for other sizes."""
    if left.shape != right.shape:
        return 1.0
    height, width = (size // BLOCK * BLOCK for size in left.shape[:2])
    blocks = [image[:height, :width].reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK, 3)
              .mean(axis=(1, 3)) for image in (left, right)]
    return float((np.abs(blocks[0] - blocks[1]).max(axis=2) > MOST_STEP).mean())


def browse(path, width, height, *options):
    """What the browser prints of a page."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--force-prefers-reduced-motion", "--virtual-time-budget=4000",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},{height}", *options,
         f"file://{path}"], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-2000:])
    return done.stdout


@not_sanitized
@unittest.skipIf(BROWSER is None, "there is no chromium")
class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
        cls.addClassCleanup(cls.folder.cleanup)
        cls.d = cls.folder.name
        with open(f"{cls.d}/lines.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines())
        subprocess.run([TOOL, "report", f"{cls.d}/lines.jsonl", "--output", f"{cls.d}/page.html"],
                       check=True, capture_output=True)
        with open(f"{cls.d}/page.html", encoding="utf-8") as file:
            cls.page = file.read()
        if "built without dygraphs" in cls.page:
            raise unittest.SkipTest("the tool was built without dygraphs")

    def write(self, name, page):
        with open(f"{self.d}/{name}", "w", encoding="utf-8") as file:
            file.write(page)
        return f"{self.d}/{name}"

    def found(self, width, *options, page=None, then="() => {}"):
        """What the probe saw at this width."""
        page = page or self.page
        path = self.write("probed.html", page.replace("<head>", "<head>" + EARLY)
                          .replace("</body>", LATE % then + "</body>"))
        printed = browse(path, width, 12000, "--dump-dom", *options)
        return json.loads(html.unescape(
            re.search('<pre id="found">(.*?)</pre>', printed, re.S).group(1)))

    def test_nothing_is_wider_than_the_page_nothing_is_cut_and_every_plot_is_drawn(self):
        for width in 1400, 400:
            with self.subTest(width=width):
                found = self.found(width)
                self.assertEqual((found["problems"], found["wide"], found["cut"]), ([], [], []))
                self.assertEqual((found["width"], found["page"]), (width, width))
                self.assertGreaterEqual(found["plots"], 4)
                self.assertEqual(found["drawn"], found["plots"])

    def test_so_does_the_page_of_a_study(self):
        study = {"model": {"preset": "smoke", "hidden": 16, "heads": 2, "sequence": 32, "inner": 8},
                 "train": {"steps": 12, "sequences": 4}, "text": ["a.txt"], "valid": ["b.txt"],
                 "seeds": [1, 2], "tuning": {"rates": [0.01]}, "equal_time": True,
                 "arms": [{"name": "top-2", "model": {"capacity_factor": 1}},
                          {"name": "a-name-of-no-less-than-forty-letters-abc", "router": "switch"}]}
        self.write("study.json", json.dumps(study))
        self.write("a.txt", "all happy families are alike " * 100)
        self.write("b.txt", "every unhappy family is unhappy in its own way " * 10)
        for args in (["study", f"{self.d}/study.json", "--output", f"{self.d}/study", "--threads", "1"],
                     ["report", f"{self.d}/study", "--output", f"{self.d}/study.html"]):
            subprocess.run([TOOL, *args], check=True, capture_output=True)
        with open(f"{self.d}/study.html", encoding="utf-8") as file:
            page = file.read()
        for width in 1400, 400:
            with self.subTest(width=width):
                found = self.found(width, page=page)
                self.assertEqual((found["problems"], found["wide"], found["cut"]), ([], [], []))
                self.assertEqual((found["width"], found["page"]), (width, width))
                self.assertEqual((found["plots"], found["drawn"]), (9, 9))

    def test_the_probe_sees_what_is_too_wide(self):
        found = self.found(400, page=self.page.replace(
            "</style>\n</head>", "figure .legend { width: 500px; }</style>\n</head>"))
        self.assertNotEqual(found["wide"], [])

    def test_dark_where_the_reader_wants_it(self):
        light = self.found(1400)["back"]
        dark = self.found(1400, "--blink-settings=preferredColorScheme=0")["back"]
        self.assertGreater(sum(map(int, re.findall(r"\d+", light))), 700)
        self.assertLess(sum(map(int, re.findall(r"\d+", dark))), 120)

    def test_tables_sort_and_search_and_plots_tell_the_point_under_the_pointer(self):
        found = self.found(1400, then=USE)
        self.assertEqual(found["up"], sorted(found["up"]))
        self.assertEqual(found["down"], sorted(found["up"], reverse=True))
        self.assertGreater(len(found["up"]), 100)
        self.assertEqual(len(found["rows"]), 12, found["rows"])
        self.assertRegex(found["said"], r"\w.*: .* operations per byte, .* TFLOP/s")
        self.assertEqual(found["pressed"], "false")
        self.assertEqual(found["problems"], [])

    def test_it_looks_as_it_did(self):
        """With SWITCHYARD_KEEP_PICTURES=1 the pictures become those to compare with."""
        os.makedirs(FOLDER, exist_ok=True)
        for width, scale in (1400, 0.25), (400, 0.5):
            with self.subTest(width=width):
                picture = f"{self.d}/{width}.png"
                shot = [f"--force-device-scale-factor={scale}", f"--screenshot={picture}"]
                browse(f"{self.d}/page.html", width, 4600, *shot)
                kept = os.path.join(FOLDER, f"{width}.png")
                if os.environ.get("SWITCHYARD_KEEP_PICTURES"):
                    shutil.copy(picture, kept)
                share = unlike(pixels_of(picture), pixels_of(kept))
                print(f"{width} pixels: {100 * share:.2f}% looks otherwise", file=sys.stderr)
                self.assertLess(share, MOST_BLOCKS)
                if width > 400:
                    continue  # that another page looks otherwise is seen once
                browse(self.write("other.html", self.page.replace(
                    "</style>\n</head>", "figure { display: none; }</style>\n</head>")),
                       width, 4600, *shot)
                self.assertGreater(unlike(pixels_of(picture), pixels_of(kept)), 2 * MOST_BLOCKS)


if __name__ == "__main__":
    unittest.main()
