#!/usr/bin/env python3
"""pages.py ROOT [PAGE…]: what the pages show is what the files say.

A code block that begins with ```LANGUAGE file=PATH must be a piece of that file, line by line; common indentation does not
count, and a line `…` (alone, behind a comment sign) stands for any number of lines. C++ that is no file's is an error. PAGE: docs/*.md and README.md by
default. Pages named own_*.md teach by an example: each shows at least one, of at most a screen (50 lines) a block.
pages.py --self-test checks the checker."""
import pathlib
import re
import sys
import textwrap

UNSHOWN = re.compile(r"^```cpp\n(.*?)^```$", re.M | re.S)
BLOCK = re.compile(r"^```[a-z]+ file=(\S+)\n(.*?)^```$", re.M | re.S)
ELLIPSIS = re.compile(r"\s*(//|#)\s*…\s*")
SCREEN = 50


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in textwrap.dedent(text).strip("\n").splitlines()]


def find(piece: list[str], lines: list[str], start: int) -> int | None:
    """Where `piece` ends in lines[start:], or None."""
    for at in range(start, len(lines) - len(piece) + 1):
        if lines_of("\n".join(lines[at:at + len(piece)])) == piece:
            return at + len(piece)
    return None


def shows(block: str, text: str) -> bool:
    pieces: list[list[str]] = [[]]
    for line in textwrap.dedent(block).splitlines():
        pieces.append([]) if ELLIPSIS.fullmatch(line) else pieces[-1].append(line)
    position: int | None = 0
    lines = text.splitlines()
    for piece in (lines_of("\n".join(p)) for p in pieces):
        position = find(piece, lines, position) if piece else position
        if position is None:
            return False
    return True


def check(name: str, page: str, root: pathlib.Path) -> tuple[list[str], int]:
    problems, blocks = [], BLOCK.findall(page)
    for path, block in blocks:
        first = block.strip().splitlines()[0]
        if not (root / path).is_file():
            problems.append(f"{name}: shows {path}, which is not there")
        elif not shows(block, (root / path).read_text(encoding="utf-8")):
            problems.append(f"{name}: the block that begins with `{first}` is not in {path}, or not any more")
        if len(block.splitlines()) > SCREEN and pathlib.Path(name).name.startswith("own_"):
            problems.append(f"{name}: the block that begins with `{first}` is longer than a screen")
    # README.md begins with a whole program, which tests/package/readme.py copies and builds.
    for block in UNSHOWN.findall(page)[1 if name == "README.md" else 0:]:
        first = block.strip().splitlines()[0]
        problems.append(f"{name}: the block that begins with `{first}` is no file's: nothing compiles it")
    if pathlib.Path(name).name.startswith("own_") and not blocks:
        problems.append(f"{name}: shows no file")
    return problems, len(blocks)


def self_test() -> None:
    text = "int a;\n\n    void f() {\n        g();\n    }\n    int b;\n"
    assert shows("void f() {\n    g();\n}\n", text)
    assert shows("int a;\n\n    void f() {\n", text)
    assert shows("void f() {\n    // …\n}\n", text)
    assert shows("int a;\n// …\n    int b;\n", text)
    for wrong in ("void f() {\n    h();\n}\n", "void f() {\ng();\n}\n", "void f() {\n}\n", "int b;\n// …\nint a;\n", "g()\n"):
        assert not shows(wrong, text), wrong
    here = pathlib.Path(__file__).parent
    assert check("own_x.md", "words\n", here) == (["own_x.md: shows no file"], 0)
    assert check("x.md", "```cpp file=no.cpp\nx\n```\n", here)[0] == ["x.md: shows no.cpp, which is not there"]
    assert check("x.md", "```python file=pages.py\nimport sys\nimport os\n```\n", here)[0]
    assert check("x.md", "```python file=pages.py\nimport sys\nimport textwrap\n```\n", here) == ([], 1)
    assert check("x.md", "```cpp\nint a;\n```\n", here)[0] == ["x.md: the block that begins with `int a;` is no file's: "
                                                              "nothing compiles it"]
    print("the checker finds what it should")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1])
    pages = [pathlib.Path(p) for p in sys.argv[2:]] or [*sorted((root / "docs").glob("*.md")), root / "README.md"]
    problems, shown = [], 0
    for page in pages:
        found, count = check(page.name, page.read_text(encoding="utf-8"), root)
        problems += found
        shown += count
    print("\n".join(problems) or f"{shown} blocks in {len(pages)} pages, all as in their files")
    sys.exit(1 if problems or not shown else 0)


if __name__ == "__main__":
    main()
