"""The architecture as docs/architecture.md declares it, held against the tree.

The page's table "Who may include whom" is read here: there is no second list of directions."""

import collections
import os
import re
import subprocess
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
PAGE = "docs/architecture.md"
MOST_FILES = 30  # of one folder
MOST_LINES = 400  # of one file
CODE = (".cpp", ".hpp", ".cu", ".cuh", ".c", ".h")
# Folders of data, one file a case: no rooms of code.
DATA = ("fuzz/corpus/", "results/", "docs/history")


def text_of(path):
    with open(os.path.join(ROOT, path), encoding="utf-8", errors="replace") as file:
        return file.read()


def tracked_files():
    """What git has, or, in an archive without git, what lies there."""
    try:
        out = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True,
                             check=True).stdout
        return [f for f in out.splitlines() if os.path.isfile(os.path.join(ROOT, f))]
    except (OSError, subprocess.CalledProcessError):
        found = []
        for folder, names, files in os.walk(ROOT):
            names[:] = [n for n in names if not n.startswith((".", "build", "bundle", "__pycache__"))]
            found += [os.path.relpath(os.path.join(folder, f), ROOT) for f in files]
        return found


FILES = sorted(tracked_files())
KNOWN = set(FILES)


def room_of(path):
    """The room of a file, as the table names it: "core", "route", ..., or the top folder."""
    parts = path.split("/")
    return parts[1] if parts[0] == "src" else parts[0]


def included(path, name):
    """The file of the project that `#include "name"` in `path` means, or None."""
    beside = os.path.normpath(os.path.join(os.path.dirname(path), name))
    for candidate in ("src/" + name, "include/" + name, name, beside):
        if candidate in KNOWN:
            return candidate
    return None


def table_below(page, heading):
    """Rows of the first table below a heading, as lists of cells without the header."""
    match = re.search(rf"^##+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", page, re.M | re.S)
    if match is None:
        raise AssertionError(f"{PAGE} has no heading '{heading}'")
    rows = [line.strip().strip("|").split("|") for line in match.group(1).splitlines()
            if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names_in(cell):
    return re.findall(r"`([^`]+)`", cell)


def rows_of(page):
    """{room: rooms that it may include} and [(file pattern, file pattern, reason)]."""
    allowed = {}
    for rooms, may in table_below(page, "Who may include whom"):
        for room in names_in(rooms):
            allowed[room] = set(names_in(may))
    fused = [(names_in(file)[0], names_in(what)[0], why)
             for file, what, why in table_below(page, "Fused kernels")]
    return allowed, fused


def wrong_includes(allowed, fused, files, text):
    """Lines that say which include goes against the declaration, and exceptions nobody needs."""
    wrong, used = [], set()
    for path in files:
        if not path.endswith(CODE):
            continue
        room = room_of(path)
        for name in re.findall(r'^#include "([^"]+)"', text(path), re.M):
            target = included(path, name)
            if target is None or room_of(target) == room:
                continue
            if room not in allowed:
                wrong.append(f"{path}: the room '{room}' is not declared")
                break
            if room_of(target) in allowed[room]:
                continue
            exception = [i for i, (a, b, _) in enumerate(fused)
                         if path.startswith(a) and target.startswith(b)]
            used.update(exception)
            if not exception:
                wrong.append(f"{path} includes {target}: '{room}' may not include '{room_of(target)}'")
    wrong += [f"the exception {a} -> {b} is used by no file" for i, (a, b, _) in enumerate(fused)
              if i not in used]
    return wrong


def crowded(files):
    count = collections.Counter(os.path.dirname(f) for f in files if not f.startswith(DATA))
    return [f"{folder}: {n} files, at most {MOST_FILES}" for folder, n in sorted(count.items())
            if n > MOST_FILES]


def too_long(files, reasons, text):
    """Files over the limit without a reason, and reasons for files that are short or gone."""
    found = []
    for path in files:
        if path.endswith(CODE + (".py",)) and len(text(path).splitlines()) > MOST_LINES:
            if path not in reasons:
                found.append(f"{path}: {len(text(path).splitlines())} lines, at most {MOST_LINES}")
            elif not reasons[path]:
                found.append(f"{path}: its reason is empty")
    for path in reasons:
        if path not in files or len(text(path).splitlines()) <= MOST_LINES:
            found.append(f"{path} needs no reason: it is gone, or at most {MOST_LINES} lines long")
    return found


PATH = re.compile(r"^[\w.-]+(/[\w.*-]+)*/?$")
ENDINGS = CODE + (".py", ".md", ".json", ".jsonl", ".txt", ".cmake", ".sh", ".in")
# A name that documents use for what a build, a run or a checkpoint makes.
MADE = ("build/", "bundle/", "config.json", "model.safetensors", "device.jsonl", "output.npy",
        "compile_commands.json", "model.safetensors.index.json", "results.jsonl")


def missing_paths(page, text):
    """What a document names as a file or folder of the project and is not there."""
    folders = {os.path.dirname(f) for f in FILES}
    folders |= {"/".join(f.split("/")[:n]) for f in folders for n in range(1, f.count("/") + 1)}
    basenames = {os.path.basename(f) for f in FILES}
    named = set(re.findall(r"`([^`\s]+)`", text)) | set(re.findall(r"\]\(([^)\s#]+)\)", text))
    missing = []
    for name in sorted(named):
        tops = {f.split("/")[0] for f in FILES}
        looks = name.endswith(ENDINGS) or ("/" in name and name.split("/")[0] in tops)
        if not PATH.match(name) or not looks or name.startswith(MADE):
            continue
        path = os.path.normpath(os.path.join(os.path.dirname(page), name)) if name.startswith("..") \
            else name.rstrip("/")
        beside = os.path.normpath(os.path.join(os.path.dirname(page), name.rstrip("/")))
        places = (path, beside, "src/" + path, "include/" + path)
        if any(p in KNOWN or p in folders for p in places):
            continue
        if any(p + ending in KNOWN for p in places for ending in CODE):  # a program, by its source
            continue
        if "/" not in name and name in basenames:
            continue
        if "*" in name and any(re.fullmatch(path.replace("*", "[^/]*"), f) for f in FILES):
            continue
        missing.append(f"{page}: names '{name}', which is not there")
    return missing


class Architecture(unittest.TestCase):
    maxDiff = None

    def test_includes_go_the_way_that_the_page_declares(self):
        allowed, fused = rows_of(text_of(PAGE))
        self.assertEqual(wrong_includes(allowed, fused, FILES, text_of), [])

    def test_no_two_rooms_include_each_other(self):
        allowed, _ = rows_of(text_of(PAGE))
        both = [f"{a} and {b}" for a in allowed for b in allowed[a]
                if a < b and a in allowed.get(b, ())]
        self.assertEqual(both, [])

    def test_no_folder_is_a_warehouse(self):
        self.assertEqual(crowded(FILES), [])

    def test_long_files_have_a_reason(self):
        reasons = {names_in(row[0])[0]: row[1]
                   for row in table_below(text_of(PAGE), "Files over 400 lines")}
        self.assertEqual(too_long(FILES, reasons, text_of), [])

    def test_every_public_header_is_installed(self):
        build = text_of("CMakeLists.txt").split()
        headers = [f for f in FILES if f.startswith("include/switchyard/")]
        self.assertEqual([f for f in headers if f not in build], [])

    def test_every_path_that_a_document_names_exists(self):
        pages = [f for f in FILES if f.endswith(".md") and f != "CHANGELOG.md"
                 and not f.startswith("docs/history/")]
        missing = [line for page in pages for line in missing_paths(page, text_of(page))]
        self.assertEqual(missing, [])


    def test_the_quickstart_builds_the_library_that_the_readme_gives_python(self):
        target = re.search(r"SWITCHYARD_LIBRARY=build/release/lib(\w+)\.so", text_of("README.md"))
        built = [line for line in text_of("scripts/quickstart").splitlines() if "--build" in line]
        self.assertEqual(target[1], "switchyard")  # of the target switchyard_c
        self.assertRegex(built[0], r"--target .*\bswitchyard_c\b")


class TheTestItself(unittest.TestCase):
    """Each check finds what it is there to find."""

    def test_an_include_against_the_direction_is_found(self):
        allowed, _ = rows_of(text_of(PAGE))
        text = {"src/core/x.hpp": '#include "layer/layer_runner.hpp"\n'}.get
        found = wrong_includes(allowed, [], ["src/core/x.hpp"], text)
        self.assertEqual(len(found), 1)
        self.assertIn("'core' may not include 'layer'", found[0])

    def test_an_undeclared_room_is_found(self):
        text = {"src/new/x.hpp": '#include "core/check.hpp"\n'}.get
        self.assertIn("'new' is not declared",
                      wrong_includes({}, [], ["src/new/x.hpp"], text)[0])

    def test_an_exception_that_nobody_needs_is_found(self):
        self.assertEqual(len(wrong_includes({}, [("src/a", "src/b", "why")], [], str)), 1)

    def test_a_crowded_folder_is_found(self):
        self.assertEqual(len(crowded([f"src/core/{i}.hpp" for i in range(MOST_FILES + 1)])), 1)
        self.assertEqual(crowded([f"src/core/{i}.hpp" for i in range(MOST_FILES)]), [])

    def test_a_long_file_is_found_and_a_stale_reason_too(self):
        text = {"a.cpp": "x\n" * (MOST_LINES + 1), "b.cpp": "x\n"}.get
        self.assertEqual(len(too_long(["a.cpp", "b.cpp"], {}, text)), 1)
        self.assertEqual(too_long(["a.cpp"], {"a.cpp": "one kernel"}, text), [])
        self.assertEqual(len(too_long(["b.cpp"], {"b.cpp": "was long"}, text)), 1)

    def test_a_path_that_is_gone_is_found(self):
        text = "see `src/core/check.hpp`, `check.hpp`, [x](../README.md) and `src/core/gone.hpp`"
        self.assertEqual(missing_paths("docs/page.md", text),
                         ["docs/page.md: names 'src/core/gone.hpp', which is not there"])


if __name__ == "__main__":
    unittest.main()
