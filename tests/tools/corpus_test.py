"""scripts/corpus on small packages made here: what it takes, cleans, holds out, writes and refuses."""

import gzip
import hashlib
import io
import json
import lzma
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "scripts" / "corpus"

WORDS = "the of router expert token load and layer weight sum norm is a row".split()
LICENCE = "/* SPDX-License-Identifier: GPL-2.0 */\n/*\n * What it does.\n */\n// Copyright (c) Nobody\n"
TRANSLATED = '.\\" Copyright (c) Nobody\n.\\"\n.TH PAGE 1\n'


def text_of(seed, size):
    chosen = random.Random(seed)
    lines = []
    while sum(map(len, lines)) < size:
        lines.append(" ".join(chosen.choice(WORDS) for _ in range(12)) + f" {chosen.random()}\n")
    return "".join(lines)


def numbered(form, count, size, head="", packed=True):
    files = {form.format(i): (head + text_of(form.format(i), size)).encode() for i in range(count)}
    return {name: gzip.compress(content, mtime=0) for name, content in files.items()} if packed else files


def kernel():
    files = numbered("linux-source-6.1/kernel/file{}.c", 250, 4500, LICENCE, packed=False)
    one = files["linux-source-6.1/kernel/file1.c"]
    files |= {
        "linux-source-6.1/lib/again.c": one,
        "linux-source-6.1/lib/table.h": b"int x;\n" + b"#define A_REGISTER 0x1234\n\t0x1, 0x2, 37,\n" * 99,
        "linux-source-6.1/lib/made.h": b"/* Automatically generated, see make.pl */\n" + one,
        "linux-source-6.1/lib/latin.c": one.replace(b"layer", b"\xe9tage"),
        "linux-source-6.1/lib/stub.c": b"int stub;\n",
        "linux-source-6.1/drivers/driver.c": one + b"// of a driver\n",
        "linux-source-6.1/lib/Makefile": one + b"# of no C\n"}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return lzma.compress(out.getvalue(), preset=0)


def dictionary():
    entries = ["00-database-info\n   no word\n"]
    for i in range(1300):
        word = "".join(chr(ord("a") + i // 2 // 26**n % 26) for n in (2, 1, 0)).capitalize() + "ae"[i % 2]
        entries.append(f"{word} \\{word}\\, n.\n   {text_of(i, 800)}".rstrip("\n"))
    return gzip.compress(("\n\n".join(entries) + "\n").encode(), mtime=0)


PACKAGES = {
    "anarchism": numbered("usr/share/doc/anarchism/markdown/sec{}.md.gz", 300, 1500,
                          "See [section A](secA.md#a).\n\n"),
    "dict-gcide": {"usr/share/dictd/gcide.dict.dz": dictionary()},
    "linux-doc-6.1": numbered("usr/share/doc/linux-doc-6.1/Documentation/page{}.rst.gz", 600, 1800,
                              ".. SPDX-License-Identifier: GPL-2.0\n\n")
    | numbered("usr/share/doc/linux-doc-6.1/Documentation/translations/ko/page{}.rst.gz", 9, 6000),
    "linux-source-6.1": {"usr/src/linux-source-6.1.tar.xz": kernel()},
    **{f"manpages-{language}": numbered(f"usr/share/man/{language}/man1/page{{}}.1.gz", 300, 1000, TRANSLATED)
       for language in ("de", "fr", "ja")},
}


def make_package(folder, name, files, version="1.0"):
    """A .deb of those files."""
    with tempfile.TemporaryDirectory() as tree:
        control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: none\nDescription: made up\n"
        statement = {f"usr/share/doc/{name}/copyright": f"of {name}".encode()}
        for path, content in {"DEBIAN/control": control.encode(), **files, **statement}.items():
            path = pathlib.Path(tree, path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        os.chmod(tree, 0o755)
        subprocess.run(["dpkg-deb", "-Znone", "--root-owner-group", "--build", tree,
                        f"{folder}/{name}_{version}_all.deb"], check=True, capture_output=True)


class Corpus(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.made = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.made.cleanup)
        for name, files in PACKAGES.items():
            make_package(cls.made.name, name, files)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.d = pathlib.Path(folder.name)
        self.out = self.d / "out"

    def run_corpus(self, *args, packages=None, output=None, env=None, largest_file=resource.RLIM_INFINITY):
        command = [sys.executable, TOOL, "--packages", packages or self.made.name, "--output", output or self.out]
        return subprocess.run([*map(str, command), *map(str, args)], capture_output=True, text=True, check=False,
                              timeout=300, env={**os.environ, **(env or {})},
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file,) * 2))

    def make(self, *args, **kwargs):
        done = self.run_corpus("--megabytes", 1, *args, **kwargs)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.contents(kwargs.get("output") or self.out)

    def contents(self, folder):
        return {path.relative_to(folder).as_posix(): path.read_bytes()
                for path in sorted(folder.rglob("*")) if path.is_file()}

    def assert_same(self, a, b):
        """Of {name: content}; a difference by names alone, contents are megabytes."""
        self.assertEqual(sorted(a), sorted(b))
        self.assertEqual([name for name in a if a[name] != b[name]], [])

    def assert_refused(self, code, words, done):
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for word in ("corpus: ", *words):
            self.assertIn(word, done.stderr)
        self.assertEqual([path.name for path in self.d.iterdir() if path.name.startswith(".")], [])

    def manifest(self, contents):
        return json.loads(contents["manifest.json"])

    def test_the_same_packages_give_the_same_bytes_of_the_size_asked_for(self):
        first, second = self.make(), self.make(output=self.d / "second")
        self.assert_same(first, second)
        manifest = self.manifest(first)
        files = {line["file"]: line for line in manifest["files"]}
        self.assertEqual(len(files), 14)
        for name, line in files.items():
            self.assertEqual(line["sha256"], hashlib.sha256(first[name]).hexdigest())
            self.assertEqual(line["bytes"], len(first[name]))
        shares = {"prose": 10, "dictionary": 20, "manual": 20, "c": 36, "german": 5, "french": 4, "japanese": 5}
        for domain, share in shares.items():  # less than a line or a stub short of it
            for folder, of in ("train", 9800), ("valid", 200):
                size = len(first[f"{folder}/{domain}.txt"])
                self.assertLessEqual(size, share * of)
                self.assertGreater(size, share * of - 257, f"{folder}/{domain}")
        source = next(of for of in manifest["packages"] if of["package"] == "linux-source-6.1")
        content = pathlib.Path(self.made.name, "linux-source-6.1_1.0_all.deb").read_bytes()
        self.assertEqual(source, {"package": "linux-source-6.1", "version": "1.0", "licence": "GPL-2",
                                  "sha256": hashlib.sha256(content).hexdigest()})
        self.assertEqual(first["licences/manpages-de"], b"of manpages-de")

    def test_documents_are_held_out_whole_and_by_all_sizes_alike(self):
        train, valid = set(), set()
        for size in 1, 1.15:
            contents = self.make("--megabytes", size)
            for line in self.manifest(contents)["files"]:
                documents = contents[line["file"]].split(b"\0")
                self.assertEqual(len(documents), len(line["documents"]))
                for document in documents:
                    self.assertTrue(document.endswith(b"\n") and len(document) >= 256)
                (train if line["file"].startswith("train") else valid).update(line["documents"])
        self.assertEqual(train & valid, set())
        self.assertGreater(len(valid), 7)

    def test_text_is_cleaned_and_what_is_none_is_left_out(self):
        contents = self.make("--domains", "c,manual,german,dictionary,prose", "--megabytes", 1)
        everything = b"".join(contents[f"{folder}/{domain}.txt"] for folder in ("train", "valid")
                              for domain in ("c", "manual", "german", "dictionary", "prose"))
        for word in (b"SPDX", b"Copyright", b"0x1234", b"of a driver", b"of no C", b"](", b"no word"):
            self.assertFalse(word in everything, word)
        code = contents["train/c.txt"]
        self.assertTrue(all(document.startswith(b"/*\n * What it does.\n */\n") for document in code.split(b"\0")))
        self.assertTrue(contents["train/german.txt"].startswith(b".TH PAGE 1\n"))
        self.assertTrue(b"See section A." in contents["train/prose.txt"])
        self.assertEqual(self.manifest(contents)["left_out"]["c"],
                         {"duplicate": 1, "generated": 1, "not UTF-8": 1, "short": 1, "table": 1})
        names = [name for line in self.manifest(contents)["files"] for name in line["documents"]]
        self.assertEqual([name for name in names if "translations" in name], [])
        for document in contents["train/dictionary.txt"].split(b"\0"):  # a document is of three letters
            words = [line.split(b" ")[0][:3] for line in document.split(b"\n") if b"\\, n." in line]
            self.assertEqual(len(set(words)), 1)

    def test_books_are_prose_and_what_one_has_of_another_is_there_once(self):
        books = self.d / "books"
        (books / "deep").mkdir(parents=True)
        paragraphs = [f"Chapter {i}. " + text_of(f"book{i}", 1000) for i in range(400)]
        (books / "a_part.txt").write_text("\n\n".join(paragraphs[100:300]))
        (books / "deep" / "whole.txt").write_text("\r\n\r\n".join(paragraphs))
        contents = self.make("--domains", "prose,french", "--books", books)  # most of all prose
        self.assertEqual([of["book"] for of in self.manifest(contents)["books"]], ["a_part.txt", "deep/whole.txt"])
        text = contents["train/prose.txt"] + contents["valid/prose.txt"]
        found = [text.count(f"Chapter {i}. ".encode()) for i in range(400)]
        self.assertEqual(max(found), 1)
        self.assertGreater(sum(found), 200)

    def test_one_archive_has_the_same_files(self):
        some = "--domains", "german,c,manual"
        folder = self.make(*some)
        archives = []
        for place in "here", "there":
            path = self.d / place / "mixture.tar.xz"
            done = self.run_corpus(*some, "--megabytes", 1, "--compress", output=path)
            self.assertEqual(done.returncode, 0, done.stderr)
            archives.append(path.read_bytes())
        self.assertTrue(archives[0] == archives[1])
        with tarfile.open(self.d / "here" / "mixture.tar.xz") as archive:
            self.assert_same({member.name: archive.extractfile(member).read() for member in archive},
                             {f"mixture/{name}": content for name, content in folder.items()})

    def test_a_mixture_is_replaced_whole_and_nothing_else_is(self):
        some = "--domains", "german,manual"
        before = self.make(*some)
        after = self.make(*some, "--megabytes", 1.1)
        self.assertFalse(before == after)
        self.assertEqual([path.name for path in self.d.iterdir()], ["out"])
        packages = self.d / "packages"  # the second one of them is cut off
        shutil.copytree(self.made.name, packages)
        path = packages / "manpages-de_1.0_all.deb"
        path.write_bytes(path.read_bytes()[:100000])
        self.assert_refused(1, [str(path), "no whole package"],
                            self.run_corpus("--domains", "manual,german", "--megabytes", 1, packages=packages))
        self.assert_same(self.contents(self.out), after)
        shutil.rmtree(packages)
        for more, output in ((), self.out), (("--compress",), self.d / "out.tar.xz"):  # a disk that is full
            self.assert_refused(1, ["File too large"], self.run_corpus(
                *some, "--megabytes", 1, *more, output=output, largest_file=50000))
        self.assertEqual([path.name for path in self.d.iterdir()], ["out"])
        self.assert_same(self.contents(self.out), after)
        other = self.d / "other"
        other.mkdir()
        (other / "thesis.txt").write_text("years of work")
        self.assert_refused(2, ["--output", "other"], self.run_corpus(*some, output=other))
        self.assert_refused(2, ["--output", "other", "--compress"], self.run_corpus(*some, "--compress", output=other))
        self.assert_refused(2, ["--books", "--output"], self.run_corpus("--books", self.out / "train"))
        self.assertEqual(self.contents(other), {"thesis.txt": b"years of work"})
        self.assert_same(self.contents(self.out), after)

    def test_what_is_asked_for_is_checked(self):
        empty = self.d / "empty"
        empty.mkdir()
        for words, args in ((["--megabytes", "0.5"], ["--megabytes", 0.5]), (["--megabytes"], ["--megabytes", "nan"]),
                            (["--domains", "'latin'", "prose"], ["--domains", "c,latin"]),
                            (["--domains", "twice"], ["--domains", "c,c"]), (["--books"], ["--books", self.d / "absent"]),
                            (["no *.txt"], ["--books", empty, "--domains", "prose"]),
                            (["--books", "--domains"], ["--books", empty, "--domains", "c"]),
                            (["--packages"], ["--packages", TOOL]),
                            (["--megabytes", "c to train on", "at most"], ["--domains", "german,c"])):
            self.assert_refused(2, words, self.run_corpus("--megabytes", 16, *args))
        self.assertEqual(self.run_corpus("--size", 3).returncode, 2)
        shutil.copytree(self.made.name, self.d / "packages")
        make_package(self.d / "packages", "anarchism", PACKAGES["anarchism"], version="1.1")
        self.assert_refused(2, ["anarchism_1.0", "anarchism_1.1", "one version"],
                            self.run_corpus(packages=self.d / "packages"))
        self.assertFalse(self.out.exists())

    def test_what_is_not_there_is_downloaded_by_its_name_and_kept(self):
        programs, packages = self.d / "programs", self.d / "packages"
        programs.mkdir()
        program = programs / "apt-get"
        program.write_text(f'#!/bin/sh\n[ "$4" = download ] && cp "{self.made.name}/$5"_*.deb .\n')
        program.chmod(0o755)
        path = {"PATH": f"{programs}:{os.environ['PATH']}"}
        first = self.make("--domains", "german,manual", packages=packages, env=path)
        self.assertEqual([path.name for path in sorted(packages.iterdir())],
                         ["linux-doc-6.1_1.0_all.deb", "manpages-de_1.0_all.deb"])
        program.write_text("#!/bin/sh\necho 'E: Unable to locate package' >&2\nexit 100\n")
        self.assert_same(self.make("--domains", "german,manual", packages=packages, env=path), first)
        self.assert_refused(1, ["apt-get download", "anarchism", "E: Unable to locate package", "apt-get update"],
                            self.run_corpus(packages=packages, env=path))
        self.assertEqual(len(list(packages.iterdir())), 2)


if __name__ == "__main__":
    unittest.main()
