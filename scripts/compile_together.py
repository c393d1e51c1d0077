#!/usr/bin/env python3
"""Writes one source file that holds several test sources: compile_together.py OUTPUT SOURCE...

Templates that all of them use are then instantiated once: eight files cost about half of what they cost one by one. The includes come
first; what follows them in a source is put into a namespace named after it, so the names of one do not meet those of another. `#line`
keeps __FILE__ and the compiler's messages as they are.

A source must have all its includes before anything else, and must not define macros, C functions or replacements of operator new;
tests/CMakeLists.txt compiles those by themselves.
"""

import re
import sys
from pathlib import Path

INCLUDE = re.compile(r"\s*#\s*include\b")


def with_path(include, directory):
    """The include of a file beside its source, with the whole path."""
    quoted = re.search(r'"(.*)"', include)
    beside = directory / quoted[1] if quoted else None
    return f'#include "{beside.resolve()}"' if beside and beside.exists() else include


def parts(source):
    """The lines of a source that include, those behind the last of them, and the number of the first of these."""
    lines = source.read_text().splitlines()
    includes = [with_path(line, source.parent) for line in lines if INCLUDE.match(line)]
    last = max((number for number, line in enumerate(lines) if INCLUDE.match(line)), default=-1)
    for number, line in enumerate(lines[:last], 1):
        if not re.match(r"\s*(//.*)?$", line) and not INCLUDE.match(line):
            sys.exit(f"{source}:{number}: this stands before the last include, so the file cannot be compiled with others")
    return includes, lines[last + 1 :], last + 2


def main():
    output, *sources = map(Path, sys.argv[1:])
    includes, bodies = {}, []
    for source in sources:
        its_includes, body, line = parts(source)
        for include in its_includes:
            includes.setdefault(include)
        name = re.sub(r"\W", "_", f"{source.parent.name}_{source.stem}")
        bodies += [f"namespace {name} {{", f'#line {line} "{source}"', *body, f"}}  // namespace {name}"]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join([*includes, "", *bodies, ""]))


main()
