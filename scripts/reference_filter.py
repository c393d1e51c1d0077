#!/usr/bin/env python3
"""Doxygen's view of a header: the tables in its comments become lists. Line for line, so that warnings point to the source.

    /// Throws  data_error; and a line      ->      /// - **Throws** data_error; and a line
    ///         that goes on                ->      ///         that goes on
    ///  rank()    who we are               ->      /// - `rank()` who we are"""
import re
import sys

# A term is a word or two, a call, or a list of these; two spaces or more are the column's edge.
CALL = r"(?:\([^)]*\))?"
TERM = rf"[A-Z][a-z]+ [a-z]+|[^\s`*\\@-][^\s(]*{CALL}(?:, \w+{CALL})*"
ROW = re.compile(rf"^(\s*///) {{1,2}}((?:\d+\. +)?)({TERM}) {{2,}}(\S.*)$")


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as header:
        for line in header:
            row = ROW.match(line)
            if row:
                start, number, term, text = row.groups()
                mark = "`" if re.search(r"[(_<]", term) else "**"
                line = f"{start} {number.strip() or '-'} {mark}{term}{mark} {text}\n"
            sys.stdout.write(line)


if __name__ == "__main__":
    main()
