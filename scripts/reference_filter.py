#!/usr/bin/env python3
"""Doxygen's view of headers and pages: reference_filter.py DIRECTORY writes them there, and other files of docs/ as they are. (All at
once: as Doxygen's own filter, a process for each file, this took most of its time.)

Of a header: the tables in its comments become lists. Line for line, so that warnings point to the source.

    /// Throws  data_error; and a line      ->      /// - **Throws** data_error; and a line
    ///         that goes on                ->      ///         that goes on
    ///  rank()    who we are               ->      /// - `rank()` who we are
    ///  send(message, peer)                ->      /// - `send(message, peer)`
    ///            that stands alone        ->      ///            that stands alone

And of a page of docs/reference: Doxygen finds headings by names of their own, which are one name space for all pages, and shows
the signs around code in a link.

    ### share_of                            ->      ### share_of {#data-share_of}
    [`share_of`](data.md#share_of)          ->      [share_of](#data-share_of)"""
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable, Iterator

# A term is a word or two, a call, or a list of these; two spaces or more are the column's edge.
CALL = r"(?:\([^)]*\))?"
TERM = rf"[A-Z][a-z]+ [a-z]+|[^\s`*\\@-][^\s(]*{CALL}(?:, \w+{CALL})*"
ROW = re.compile(rf"^(\s*///) {{1,2}}((?:\d+\. +)?)({TERM}) {{2,}}(\S.*)$")
ALONE = re.compile(r"^(\s*///) {1,2}()(\w+\([^)]*\))()$")  # in a table: its text begins in the next line
TIGHT = re.compile(r"^(\s*///) {1,2}()([A-Z][a-z]+|\w+\([^)]*\)) (\S.*)$")  # one space will do where the column is that of the row before

HEADING = re.compile(r"^(##+) (.+)$")
LINK = re.compile(r"\[(`?)([^\]\n]+)\1\]\(([\w-]*)(?:\.md)?#([\w-]+)\)")


def of_header(line: str, column: int) -> str:
    row = ROW.match(line) or TIGHT.match(line) or ALONE.match(line)
    if not row or (not ROW.match(line) and row.group(4) and row.start(4) != column) or (not row.group(4) and not column):
        return line
    start, number, term, text = row.groups()
    mark = "`" if re.search(r"[(_<]", term) else "**"
    return f"{start} {number.strip() or '-'} {mark}{term}{mark} {text}".rstrip() + "\n"


def of_page(line: str, page: str) -> str:
    heading = HEADING.match(line)
    if heading:
        anchor = re.sub(r"[^\w\- ]", "", heading.group(2).lower()).replace(" ", "-")
        return f"{line.rstrip()} {{#{page}-{anchor}}}\n"
    return LINK.sub(lambda m: f"[{m.group(2)}](#{m.group(3) or page}-{m.group(4)})", line)


def header_lines(lines: Iterable[str]) -> Iterator[str]:
    column = 0  # of the text in the table that the line before belongs to
    for line in lines:
        yield of_header(line, column)
        row = ROW.match(line)
        column = row.start(4) if row else column if re.match(r"\s*/// .*\S", line) else 0


def write_all(root: pathlib.Path, directory: pathlib.Path) -> None:
    for path in [root / "README.md", *(root / "docs").rglob("*"), *(root / "include").rglob("*.hpp")]:
        if path.is_dir():
            continue
        copy = directory / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".hpp":
            copy.write_text("".join(header_lines(path.read_text(encoding="utf-8").splitlines(True))), encoding="utf-8")
        elif path.suffix == ".md" and path.parent.name == "reference":
            lines = path.read_text(encoding="utf-8").splitlines(True)
            copy.write_text("".join(of_page(line, path.stem) for line in lines), encoding="utf-8")
        else:
            shutil.copyfile(path, copy)


if __name__ == "__main__":
    write_all(pathlib.Path(__file__).resolve().parent.parent, pathlib.Path(sys.argv[1]))
