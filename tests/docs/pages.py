#!/usr/bin/env python3
"""pages.py ROOT [PAGE…]: what the pages show is what the files say.

A code block that begins with ```LANGUAGE file=PATH must be a piece of that file, line by line; common indentation does not
count, and a line `…` (alone, behind a comment sign) stands for any number of lines. C++ or CMake that is no file's is an error, except
for the declarations in docs/reference. PAGE: docs/*.md, docs/reference/*.md and README.md by default. Pages named own_*.md teach by an example:
each shows at least one, of at most a screen (50 lines) a block.

scripts/reference_pages.py writes file=tests/docs/docstring_examples.cpp before every example of a header's comment. All that stands in
that file between `// example: NAME` and `// end` must be a whole block under the heading NAME of a page of docs/reference, and each such
block must be there.
pages.py --self-test checks the checker."""
import pathlib
import re
import sys
import textwrap

UNSHOWN = re.compile(r"^ *```(cpp|cmake)\n(.*?)^ *```$", re.M | re.S)
BLOCK = re.compile(r"^ *```[a-z]+ file=(\S+)\n(.*?)^ *```$", re.M | re.S)
EXAMPLES = "tests/docs/docstring_examples.cpp"
EXAMPLE = re.compile(r"^ *// example: (\S+)\n(.*?)^ *// end$", re.M | re.S)
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
        elif path != EXAMPLES and not shows(block, (root / path).read_text(encoding="utf-8")):
            problems.append(f"{name}: the block that begins with `{first}` is not in {path}, or not any more")
        if len(block.splitlines()) > SCREEN and pathlib.Path(name).name.startswith("own_"):
            problems.append(f"{name}: the block that begins with `{first}` is longer than a screen")
    # tests/package/readme.py copies and builds the first C++ and the first CMake of README.md: a whole program and its project.
    built = {"cpp", "cmake"} if name == "README.md" else set()
    for language, block in UNSHOWN.findall(page) if not name.startswith("reference/") else ():
        if language in built:
            built.remove(language)
            continue
        first = block.strip().splitlines()[0]
        problems.append(f"{name}: the block that begins with `{first}` is no file's: nothing compiles it")
    if pathlib.Path(name).name.startswith("own_") and not blocks:
        problems.append(f"{name}: shows no file")
    return problems, len(blocks)


def differences(source: str, reference: list[str]) -> list[str]:
    """Between the examples in `source` (the text of EXAMPLES) and those on the pages of the reference."""
    compiled = {(name, *lines_of(block)) for name, block in EXAMPLE.findall(source)}
    shown = set()
    for page in reference:
        for part in re.split(r"^### ", page, flags=re.M):
            shown |= {(part.split("\n", 1)[0], *lines_of(block)) for path, block in BLOCK.findall(part) if path == EXAMPLES}
    return ([f"{EXAMPLES}: the reference shows no such example under {name}: {first}" for name, first, *_ in sorted(compiled - shown)] +
            [f"the example of {name} that begins with `{first}` is not in {EXAMPLES}, or not any more: nothing compiles it"
             for name, first, *_ in sorted(shown - compiled)])


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
    assert len(check("x.md", "- a\n\n  ```cpp\n  int a;\n  ```\n", here)[0]) == 1
    assert len(check("x.md", "```cmake\nproject(a)\n```\n", here)[0]) == 1
    readme = "```cpp\nint a;\n```\n```cmake\nproject(a)\n```\n"
    assert check("README.md", readme, here) == ([], 0) and len(check("README.md", 2 * readme, here)[0]) == 2
    assert check("reference/x.md", "```cpp\nint a;\n```\n", here) == ([], 0)
    assert len(check("reference/x.md", "```cpp file=pages.py\nimport os\n```\n", here)[0]) == 1
    block = f"```cpp file={EXAMPLES}\nf();\n  g();\n```\n"
    for source, page, count in (("f();\n      g();", f"### a\n{block}", 0), ("f();\n      h();", f"### a\n{block}", 2),
                                ("f();\n      g();\n    h();", f"### a\n{block}", 2), ("f();\n      g();", f"### b\n{block}", 2),
                                ("f();\n      g();", f"### a\nwords\n### b\n{block}", 2), ("f();", f"### a\n{block}", 2),
                                ("f();\n      g();", "### a\n```cpp\nf();\n  g();\n```\n", 1),
                                ("f();\n      g();", f"### a\n{block}\n### b\n{block}", 1)):
        found = differences(f"    // example: a\n    {source}\n    // end\n    f();\n      g();\n", [page])
        assert len(found) == count, (source, page, found)
    print("the checker finds what it should")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1])
    reference = sorted((root / "docs/reference").glob("*.md"))
    pages = [pathlib.Path(p) for p in sys.argv[2:]] or [*sorted((root / "docs").glob("*.md")), *reference, root / "README.md"]
    problems, shown = [], 0
    for page in pages:
        name = f"reference/{page.name}" if page.parent.name == "reference" else page.name
        found, count = check(name, page.read_text(encoding="utf-8"), root)
        problems += found
        shown += count
    if not sys.argv[2:]:
        problems += differences((root / EXAMPLES).read_text(encoding="utf-8"), [p.read_text(encoding="utf-8") for p in reference])
    print("\n".join(problems) or f"{shown} blocks in {len(pages)} pages, all as in their files")
    sys.exit(1 if problems or not shown else 0)


if __name__ == "__main__":
    main()
