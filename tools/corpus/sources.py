"""What a mixture is of: packages of Debian 12, and own books."""

import collections
import gzip
import hashlib
import lzma
import os
import pathlib
import re
import subprocess
import tarfile
import tempfile
import zlib

from documents import clean_c, clean_markdown, clean_page, clean_rst, plain

BOOK_PART = 1 << 16  # bytes: books are held out by parts, as chapters would be
LEAST_PARAGRAPH = 64  # bytes: one that books have once more is left out


class Refused(Exception):
    """What was asked for is not right."""


class Failed(Exception):
    """What should have worked did not."""


class Source:
    """Files of a package: `paths` is a pattern of their names, `inside` one of an archive in the
    package that has them; `split` makes several documents of one file."""

    def __init__(self, package, licence, paths, clean=plain, inside=None, split=None):
        self.package, self.licence, self.clean, self.split = package, licence, clean, split
        self.paths = re.compile(paths)
        self.inside = re.compile(inside) if inside else None


def words_of(raw):
    """{letters: the entries of a dictionary that begin with these three}."""
    words = collections.defaultdict(list)
    for entry in re.split(rb"\n\n(?=[A-Za-z][^\n]*\\)", raw)[1:]:
        letters = re.sub(rb"[^a-z]", b"", entry[:40].split(b"\\")[0].lower())[:3]
        words[letters.decode()].append(entry.strip(b"\n") + b"\n")
    return {letters: b"\n".join(entries) for letters, entries in words.items()}


def man_pages(language):
    return Source(f"manpages-{language}", "by page", rf"usr/share/man/{language}/man\d/.*\.gz",
                  clean_page)


DOCUMENTATION = r"usr/share/doc/linux-doc-6\.1/Documentation/(?!translations/).*\.(rst|txt)(\.gz)?"
# Of the kernel's folders those that are no drivers: those are eight tenths, much of it tables.
KERNEL = r"[^/]+/(block|crypto|fs|init|io_uring|ipc|kernel|lib|mm|net|security|sound)/.*\.[ch]"

# Name: (share in percent, source). Own books are prose.
DOMAINS = {
    "prose": (10, Source("anarchism", "GPL-2+", r"usr/share/doc/anarchism/markdown/.*\.md(\.gz)?",
                         clean_markdown)),
    "dictionary": (20, Source("dict-gcide", "GPL-2+", r"usr/share/dictd/gcide\.dict\.dz",
                              split=words_of)),
    "manual": (20, Source("linux-doc-6.1", "GPL-2", DOCUMENTATION, clean_rst)),
    "c": (36, Source("linux-source-6.1", "GPL-2", KERNEL, clean_c,
                     inside=r"usr/src/linux-source-6\.1\.tar\.xz")),
    "german": (5, man_pages("de")),
    "french": (4, man_pages("fr")),
    "japanese": (5, man_pages("ja")),
}


def unpacked(name, content):
    return gzip.decompress(content) if name.endswith((".gz", ".dz")) else content


def wanted_files(archive, source, in_package):
    """(name, content) of what is wanted of a tar that is read once, front to back: the source's
    files, and the package's statement of copyright."""
    statement = f"usr/share/doc/{source.package}/copyright"
    for member in archive:
        name = member.name.removeprefix("./")
        if not member.isfile():
            continue
        if in_package and name == statement:
            yield name, archive.extractfile(member).read()
        elif in_package and source.inside:
            if source.inside.fullmatch(name):
                with tarfile.open(fileobj=archive.extractfile(member), mode="r|xz") as inner:
                    yield from wanted_files(inner, source, False)
        elif source.paths.fullmatch(name):
            yield name, unpacked(name, archive.extractfile(member).read())


def read_package(path, source):
    """[(name, raw)] of a package's documents, and its statement of copyright."""
    found, statement = [], b""
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    try:
        with process, tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for name, content in wanted_files(archive, source, True):
                if name.endswith("/copyright"):
                    statement = content
                elif source.split:
                    parts = source.split(content)
                    found += [(f"{source.package}/{part}", raw) for part, raw in parts.items()]
                else:
                    found.append((f"{source.package}/{name}", content))
            while process.stdout.read(1 << 20):  # what is behind the tar's end
                pass
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise Failed(f"{path}: no whole package: {error}") from None
    if process.returncode != 0:
        raise Failed(f"{path}: no whole package: dpkg-deb ended with {process.returncode}")
    if not found:
        raise Failed(f"{path}: no file in it is named like {source.paths.pattern}")
    return found, statement


def package_at(folder, package, say):
    """The file of a package in a folder; it is downloaded where it is not there."""
    found = sorted(folder.glob(f"{package}_*.deb"))
    if len(found) > 1:
        raise Refused(f"--packages: {found[0].name} and {found[1].name}: want one version")
    if found:
        return found[0]
    say(f"downloading {package}")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as partial:
        command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package]
        try:
            done = subprocess.run(command, cwd=partial, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise Failed(f"{package}: there is no apt-get: packages are those of Debian 12, and "
                         "--packages takes a folder that has them") from None
        made = sorted(pathlib.Path(partial).glob("*.deb"))
        if done.returncode != 0 or len(made) != 1:
            why = (done.stderr.strip().splitlines() or ["it made no file"])[-1]
            raise Failed(f"apt-get download {package}: {why} (packages are those of Debian 12; "
                         "`apt-get update` as root makes the list of them)")
        os.replace(made[0], folder / made[0].name)
    return folder / made[0].name


def identity_of(path, source):
    """A line of the manifest."""
    done = subprocess.run(["dpkg-deb", "--field", str(path), "Version"], capture_output=True,
                          text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{path}: no package")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"package": source.package, "version": done.stdout.strip(), "sha256": digest,
            "licence": source.licence}


def read_books(folder):
    """[(name, raw)] of parts of books, and lines of the manifest. A paragraph that was there before
    is left out: what is held out of one book is not trained on in another that contains it."""
    parts, books, seen = [], [], set()
    for path in sorted(folder.rglob("*.txt")):
        name, raw = path.relative_to(folder).as_posix(), path.read_bytes()
        books.append({"book": name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
        part, size, number = [], 0, 0
        for paragraph in re.split(rb"\n[ \t]*\n", raw.replace(b"\r\n", b"\n")):
            paragraph = paragraph.strip(b"\n")
            known = hashlib.sha256(b" ".join(paragraph.split())).digest()
            if len(paragraph) >= LEAST_PARAGRAPH and known in seen:
                continue
            seen.add(known)
            part.append(paragraph)
            size += len(paragraph)
            if size >= BOOK_PART:
                parts.append((f"books/{name}/{number}", b"\n\n".join(part)))
                part, size, number = [], 0, number + 1
        if part:
            parts.append((f"books/{name}/{number}", b"\n\n".join(part)))
    if not books:
        raise Refused(f"--books: {folder} has no *.txt")
    return parts, books
