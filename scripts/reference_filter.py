#!/usr/bin/env python3
"""Doxygen's view of a header: the tables in its comments become lists. Line for line, so that warnings point to the source.

    /// Throws  data_error; and a line      ->      /// - **Throws** data_error; and a line
    ///         that goes on                ->      ///         that goes on
    ///  rank()    who we are               ->      /// - `rank()` who we are

And of a page of docs/reference: Doxygen finds headings by names of their own, which are one name space for all pages, and shows
the signs around code in a link.

    ### share_of                            ->      ### share_of {#data-share_of}
    [`share_of`](data.md#share_of)          ->      [share_of](#data-share_of)"""
import pathlib
import re
import sys

# A term is a word or two, a call, or a list of these; two spaces or more are the column's edge.
CALL = r"(?:\([^)]*\))?"
TERM = rf"[A-Z][a-z]+ [a-z]+|[^\s`*\\@-][^\s(]*{CALL}(?:, \w+{CALL})*"
ROW = re.compile(rf"^(\s*///) {{1,2}}((?:\d+\. +)?)({TERM}) {{2,}}(\S.*)$")
TIGHT = re.compile(r"^(\s*///) {1,2}()([A-Z][a-z]+|\w+\([^)]*\)) (\S.*)$")  # one space will do where the column is that of the row before

HEADING = re.compile(r"^(##+) (.+)$")
LINK = re.compile(r"\[(`?)([^\]\n]+)\1\]\(([\w-]*)(?:\.md)?#([\w-]+)\)")


def of_header(line: str, column: int) -> str:
    row = ROW.match(line) or TIGHT.match(line)
    if not row or (not ROW.match(line) and row.start(4) != column):
        return line
    start, number, term, text = row.groups()
    mark = "`" if re.search(r"[(_<]", term) else "**"
    return f"{start} {number.strip() or '-'} {mark}{term}{mark} {text}\n"


def of_page(line: str, page: str) -> str:
    heading = HEADING.match(line)
    if heading:
        anchor = re.sub(r"[^\w\- ]", "", heading.group(2).lower()).replace(" ", "-")
        return f"{line.rstrip()} {{#{page}-{anchor}}}\n"
    return LINK.sub(lambda m: f"[{m.group(2)}](#{m.group(3) or page}-{m.group(4)})", line)


def main() -> None:
    path = pathlib.Path(sys.argv[1])
    column = 0  # of the text in the table that the line before belongs to
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if path.suffix == ".md":
                shown = of_page(line, path.stem) if path.parent.name == "reference" else line
            else:
                shown = of_header(line, column)
                row = ROW.match(line)
                column = row.start(4) if row else column if line.strip(" /\n") else 0
            sys.stdout.write(shown)


if __name__ == "__main__":
    main()
