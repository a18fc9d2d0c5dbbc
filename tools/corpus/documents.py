"""Documents of a mixture: what becomes of a raw file, which are held out, and which are chosen."""

import hashlib
import re

LEAST_BYTES = 256  # what is shorter is a stub
# One document of so many is never trained on, whatever the size of a mixture: what is held out of
# one is in no other's training text.
RESERVED = 25


class LeftOut(Exception):
    """Why a file is no document."""


class Document:
    def __init__(self, name, content):
        self.name, self.content = name, content
        self.rank = hashlib.sha256(name.encode()).digest()
        self.reserved = int.from_bytes(self.rank[:8], "big") % RESERVED == 0


def cleaned(name, raw, clean):
    """The document. Raises LeftOut."""
    if b"\0" in raw:
        raise LeftOut("not text")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise LeftOut("not UTF-8") from None
    content = (clean(text.replace("\r\n", "\n")).strip("\n") + "\n").encode()
    if len(content) < LEAST_BYTES:
        raise LeftOut("short")
    return Document(name, content)


def choose(documents, budget):
    """Documents in the order of their names' hashes, the last cut behind a line, that take at most
    `budget` bytes with a NUL between them; and the name of the one that was cut, or None."""
    chosen, left = [], budget
    for document in sorted(documents, key=lambda of: of.rank):
        if left < LEAST_BYTES:
            break
        if len(document.content) <= left:
            chosen.append(document)
            left -= len(document.content) + 1
            continue
        end = document.content.rfind(b"\n", 0, left) + 1
        if end >= LEAST_BYTES:
            return [*chosen, Document(document.name, document.content[:end])], document.name
    return chosen, None


def size_of(documents):
    """Bytes that a choice of all of them has at least room for."""
    return sum(len(document.content) + 1 for document in documents)


# --- Cleaning --------------------------------------------------------------------------------------

LEGAL = re.compile(r"copyright|\(c\)|spdx|licen[cs]e|warranty|all rights reserved", re.I)
COMMENT = re.compile(r"\s*(/\*.*?\*/|//[^\n]*(?:\n[ \t]*//[^\n]*)*)", re.S)
GENERATED = re.compile(r"auto\w*[- ]?generated|machine[- ]generated|do not (edit|modify)"
                       r"|generated (by|from|with|using)", re.I)
NUMBER_DEFINED = re.compile(r"\s*#define\s+\w+\s+\(?-?(0x)?[0-9a-fA-F]+[uUlL]*\)?\s*(/\*.*|//.*)?")
NUMERIC = set(" \t{}()[]=,;+-xXuUlL.0123456789abcdefABCDEF")


def plain(text):
    return text


def is_number_line(line):
    if NUMBER_DEFINED.fullmatch(line):
        return True
    return any(c.isdigit() for c in line) and not set(line) - NUMERIC


def clean_c(text):
    """Without the comments at its head that say whose it is. Left out: tables, and what a program
    wrote."""
    head, at = [], 0
    while match := COMMENT.match(text, at):
        comment = match.group(1)
        if GENERATED.search(comment):
            raise LeftOut("generated")
        if not LEGAL.search(comment):
            head.append(comment + "\n")
        at = match.end()
    text = "".join(head) + text[at:].lstrip()
    numbers = sum(len(line) for line in text.splitlines() if is_number_line(line))
    if numbers * 2 > len(text):
        raise LeftOut("table")
    return text


def clean_page(text):
    """A manual page without the comments at its head: whose it is, and what wrote it."""
    return re.sub(r"\A(?:[.']?\\\"[^\n]*\n|[.']\n|\s*\n)*", "", text)


def clean_rst(text):
    return re.sub(r"\A(?:\.\. *(?:SPDX|Copyright|\|copy\|)[^\n]*\n|\s*\n)*", "", text, flags=re.I)


def clean_markdown(text):
    """Prose without links, and without the way to the next page."""
    text = re.sub(r"!?\[([^\[\]]*)\]\([^()]*\)", r"\1", text)
    return re.sub(r"\n\n(?:‹|up\b)[^\n]*(?:\n[^\n]+)*\s*\Z", "\n", text)
