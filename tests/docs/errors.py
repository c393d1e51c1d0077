#!/usr/bin/env python3
"""errors.py ROOT: each code of ddp/core/error.hpp has a row in docs/errors.md with cause and remedy, the page has no other
codes, and some test expects each. errors.py --self-test checks the checker."""
import pathlib
import re
import sys


def codes_of(header: str) -> dict[str, tuple[str, str]]:
    """E101 -> (environment, its name in messages)"""
    numbers = re.findall(r"^    (\w+) = (\d+),", header, re.M)
    names = dict(re.findall(r'case errc::(\w+): return "([^"]+)";', header))
    return {"E" + number: (name, names.get(name, "")) for name, number in numbers}


def check(header: str, page: str, tests: str) -> list[str]:
    codes = codes_of(header)
    rows = {r[0]: r[1:] for r in re.findall(r"^\| (E\d+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", page, re.M)}
    problems = [] if codes else ["no codes in the header"]
    for code, (name, said) in codes.items():
        if code not in rows:
            problems.append(f"{code} ({name}) is not on the page")
        elif rows[code][0].strip() != said:
            problems.append(f"{code}: messages call it '{said}', the page '{rows[code][0]}'")
        elif not all(len(cell.split()) >= 3 for cell in rows[code][1:]):
            problems.append(f"{code}: the page lacks a cause or a remedy")
        if not re.search(rf"\bDDP-{code}\b|[^\w]{code}\b|\berrc::{name}\b", tests):
            problems.append(f"{code} ({name}): no test expects it")
    problems += [f"{code} is on the page, but not in the header" for code in rows.keys() - codes.keys()]
    problems += [f"{code} is mentioned, but there is none" for code in set(re.findall(r"\bE\d{3}\b", page)) - codes.keys()
                 if code not in rows]
    return problems


def self_test() -> None:
    header = '    usage = 100,  ///< x\n    file = 301,\ncase errc::usage: return "usage";\ncase errc::file: return "a file";\n'
    page = "| E100 | usage | what has happened | what to do |\n| E301 | a file | what has happened | what to do |\n"
    tests = '"DDP-E100 usage" errc::file'
    assert not check(header, page, tests), check(header, page, tests)
    assert check(header, page.replace("a file", "file"), tests)
    assert check(header, page.replace("what to do |\n| E3", "|\n| E3"), tests)
    assert check(header, page.split("\n")[0], tests)
    assert check(header, page + "| E999 | more | what has happened | what to do |\n", tests)
    assert check(header, page + "see E102", tests)
    assert check(header, page, "errc::file")
    assert check(header, page, "DDP-E1001 errc::file")
    assert check("", page, tests)
    print("the checker finds what it should")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1])
    header = (root / "include/ddp/core/error.hpp").read_text(encoding="utf-8")
    page = (root / "docs/errors.md").read_text(encoding="utf-8")
    sources = [p for kind in ("cpp", "hpp", "py") for p in (root / "tests").glob(f"**/*.{kind}") if p.parent.name != "docs"]
    problems = check(header, page, "\n".join(p.read_text(encoding="utf-8") for p in sources))
    print("\n".join(problems) or f"{len(codes_of(header))} codes, each with cause, remedy and a test")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
