#!/usr/bin/env python3
"""usage, in the project's root: write_units.py FOLDER SIZE FILE...

Writes to FOLDER source files of up to SIZE of the files each, their text one after the other, and
prints their paths: most of a compiler's time goes into headers, which it then reads once. What a file
declares in an anonymous namespace or as the memory of a block, and another of its unit names too,
gets a number at its end; files with the same name that a member or a header's function has as well
go apart, and those that open other namespaces. Messages of the compiler name the file and line that
was written.

With `names FILE...` it prints what each file declares there."""
import glob
import os
import re
import sys
from functools import lru_cache

SKIPPED = r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\''
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*", re.M | re.S)
WORD = re.compile(SKIPPED + r"|[A-Za-z_]\w*", re.S)


def without_angles(text):
    """Without what stands in the angle brackets of templates."""
    out, depth, previous = [], 0, ""
    for c in text:
        if c == "<":
            depth += 1
        elif c == ">" and previous != "-":
            depth = max(0, depth - 1)
        elif depth == 0:
            out.append(c)
        previous = c
    return "".join(out)


def declared(text):
    """The name that a declaration gives, or None."""
    text = re.sub(r"\[\[.*?\]\]", "", text, flags=re.S)
    text = re.sub(r"(?:__launch_bounds__|__maxnreg__|alignas|\b[A-Z]\w*_[A-Z_]+)\s*\((?:[^()]|\([^()]*\))*\)", "", text)
    text = re.sub(r"^(?:template\s*)+", "", without_angles(text).strip().rstrip(";").strip())
    named = re.match(r"(?:struct|class|enum class|enum|union)\s+(\w+)\s*(?:final\s*)?"
                     r"(?::[^;{]*)?(?:\{|$)", text)
    named = named or re.match(r"using\s+(\w+)\s*=", text)
    if not named and not re.match(r"(?:using|static_assert|friend)\b", text):
        named = re.search(r"(\w+)\s*(?:\(|=|\{|\[|$)", text)
    name = named.group(1) if named else None
    return None if name and "operator" in text.split("(")[0] else name


def names_of(text):
    """What a source declares in its anonymous namespaces."""
    text = DIRECTIVE.sub(" ", re.sub(SKIPPED, " ", text, flags=re.S))
    names = set()
    for start in re.finditer(r"\bnamespace\s*\{", text):
        depth, declaration = 1, []
        for c in text[start.end():]:
            depth += {"{": 1, "}": -1}.get(c, 0)
            if depth == 0:
                break
            if depth == 1 or (depth == 2 and c == "{"):
                declaration.append(c)
            if depth == 1 and c in ";}":
                whole = "".join(declaration)
                if c == ";" or not re.search(r"=[^()]*\{\}$", whole):
                    names.add(declared(whole))
                    declaration = []
    return {name for name in names if name and not re.fullmatch(r"[A-Z][A-Z0-9_]+", name)}  # TEST


def renamed(text, names, number):
    """The text with the names that are the file's own: not those of members or of a namespace."""
    def replace(match):
        word = match.group(0)
        if word not in names:
            return word
        before = text[max(0, match.start() - 2):match.start()]
        if before.endswith((".", "->", "::")) and not before.endswith(".."):
            return word
        return f"{word}x{number}"  # by the naming rules, whatever it names
    return WORD.sub(replace, text)


def absolute(text, file):
    """With the includes from beside the file by their path."""
    def replace(match):
        path = os.path.join(os.path.dirname(file), match.group(1))
        return f'#include "{path}"' if os.path.exists(path) else match.group(0)
    return re.sub(r'#include "([^"]+)"', replace, text)


@lru_cache(maxsize=None)
def headers_of(file):
    """The project's headers that the file includes, and that these include."""
    headers = set()
    for header in re.findall(r'^#include "([^"]+)"', read(file), re.M):
        for folder in (os.path.dirname(file), "include", "src", "."):
            path = os.path.abspath(os.path.join(folder, header))
            if os.path.exists(path):
                headers |= {path} | headers_of(path)
                break
    return headers


@lru_cache(maxsize=None)
def declared_in(header):
    return set(re.findall(r"^(?![ /#]).*?(\w+)\(", read(header), re.M))


@lru_cache(maxsize=None)
def words_in(file):
    return {match.group(0) for match in WORD.finditer(read(file))}


@lru_cache(maxsize=None)
def read(file):
    with open(file, encoding="utf-8") as source:
        return source.read()


class Source:
    """A file: its text, and of the names that are its own those that can be changed, and those that
    cannot: names of members too, or declared by a header as well."""
    def __init__(self, file):
        self.file, self.text = file, read(file)
        own = names_of(self.text)
        code = re.sub(SKIPPED, " ", self.text, flags=re.S)
        own |= {f"gtest_{group}{name}" for group, name in re.findall(
            r"^INSTANTIATE_TEST_SUITE_P\((\w+), (\w+)", code, re.M)}
        own |= set(re.findall(r"extern\s+__shared__[^;]*?(\w+)\s*\[\]", code))  # of any type
        members = set(re.findall(r"(?:\.|->|::)\s*(\w+)", code))
        headers = headers_of(file)
        members |= {name for name in own if name.startswith("gtest_")}
        self.kept = own & (members | set().union(*(declared_in(header) for header in headers)))
        self.free = own - self.kept
        # Short names, which another file may mean something else by; "json" nowhere.
        self.aliases = {whole.split("::")[-1]: whole for whole in
                        re.findall(r"^(?:using|namespace \w+ =) (\w+(?:::\w+)+);", code, re.M)
                        if whole != "nlohmann::json"}
        self.unqualified = set(re.findall(r"(?<![\w:.>])(\w+)", code))
        self.opened = set(re.findall(r"^using namespace ([\w:]+)", code, re.M))
        # Those of the headers too: one that a later file reads first calls what it means.
        self.words = words_in(file).union(*(words_in(header) for header in headers))


def mean_others(one, other):
    """Whether a short name in one file may be that of something else in the other."""
    return any(other.aliases.get(name) != whole and name in other.unqualified
               for name, whole in one.aliases.items())


def make_units(files, size):
    """As even as it goes, in the order of the files but for those that keep the same name."""
    groups = {}
    for source in (Source(file) for file in files):
        groups.setdefault(frozenset(source.opened), []).append(source)
    units = []
    for group in groups.values():
        most = -(-len(group) // -(-len(group) // size))
        some = []
        for source in group:
            for unit in some:
                if len(unit) < most and not any(
                        source.kept & other.kept or mean_others(source, other)
                        or mean_others(other, source) for other in unit):
                    unit.append(source)
                    break
            else:
                some.append([source])
        units += some
    return units


def texts_of(unit):
    """The text of each file, its own names told apart."""
    for number, source in enumerate(unit):
        others = set().union(*(other.words for other in unit if other is not source))
        text = renamed(absolute(source.text, source.file), source.free & others, number)
        yield f'#line 1 "{source.file}"\n{text}\n'


def main():
    if sys.argv[1] == "names":
        for file in sys.argv[2:]:
            source = Source(file)
            print(file, *sorted(source.free), "kept:", *sorted(source.kept))
        return
    folder, size, files = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    os.makedirs(folder, exist_ok=True)
    written = set()
    for number, unit in enumerate(make_units(files, size)):
        path = os.path.join(folder, f"unit_{number}{os.path.splitext(files[0])[1]}")
        text = "".join(texts_of(unit))
        old = None
        if os.path.exists(path):
            old = read(path)
        if text != old:  # what is the same is not compiled again
            with open(path, "w", encoding="utf-8") as out:
                out.write(text)
        print(path)
        written.add(path)
    for old in glob.glob(os.path.join(folder, "unit_*" + os.path.splitext(files[0])[1])):
        if old not in written:
            os.remove(old)


if __name__ == "__main__":
    main()
