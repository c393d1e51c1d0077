#!/usr/bin/env python3
"""refusals.py ROOT: a test that expects an error of this library says what its text must contain. THROWS_AS with one of the library's
error types, and THROWS with none, take any text: use THROWS_WITH, or look at the text by other means. refusals.py --self-test checks
the checker."""
import pathlib
import re
import sys

CALL = re.compile(r"\b(?:CHECK|REQUIRE)_THROWS(_AS)?\(")


def errors_of(headers: str) -> set[str]:
    """The names of error and of what is derived from it."""
    names, before = {"error"}, 0
    while before != len(names):
        before = len(names)
        names |= {name for name, base in re.findall(r"\b(?:class|struct) (\w+)[^;{:]*: (?:public )?(\w+)", headers) if base in names}
    return names


def argument_of(text: str, begin: int) -> str:
    """What stands between the bracket before `begin` and its partner."""
    depth, at, quote = 1, begin, ""
    while depth:
        c = text[at]
        if quote:
            at += c == "\\"
            quote = "" if c == quote else quote
        elif c == '"' or (c == "'" and not text[at - 1].isalnum()):  # not 1'000
            quote = c
        else:
            depth += (c in "([{") - (c in ")]}")
        at += 1
    return text[begin:at - 1]


def check(name: str, text: str, errors: set[str]) -> list[str]:
    problems = []
    for call in CALL.finditer(text):
        argument = argument_of(text, call.end())
        kind = argument.rpartition(",")[2].split("::")[-1].strip() if call[1] else "error"
        if kind in errors:
            line = text.count("\n", 0, call.start()) + 1
            problems.append(f"{name}:{line}: {call[0]}…) accepts any text; say which words matter, with THROWS_WITH")
    return problems


def self_test() -> None:
    errors = errors_of("class error : public std::runtime_error {};\nclass usage_error : public error {};\n"
                       "struct own final : usage_error {};\nclass other : public base {};\n")
    assert errors == {"error", "usage_error", "own"}, errors
    for wrong in ("CHECK_THROWS_AS(f(), usage_error);", "REQUIRE_THROWS_AS(f({1, 2}), ddp::own);", "CHECK_THROWS(f());",
                  "CHECK_THROWS_AS(f(')', \"(\", 1'000),\n    error);"):
        assert len(check("x", wrong, errors)) == 1, wrong
    for right in ("CHECK_THROWS_AS(f(), std::bad_alloc);", 'CHECK_THROWS_WITH(f(), Contains("x"));',
                  "CHECK_NOTHROW(f());", "CHECK_THROWS_MATCHES(f(), usage_error, words);"):
        assert not check("x", right, errors), right
    print("the checker finds what it should")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1])
    errors = errors_of("\n".join(p.read_text(encoding="utf-8") for p in (root / "include").glob("**/*.hpp")))
    problems, files = [], sorted(p for kind in ("cpp", "hpp") for p in (root / "tests").glob(f"**/*.{kind}"))
    for path in files:
        problems += check(str(path.relative_to(root)), path.read_text(encoding="utf-8"), errors)
    print("\n".join(problems) or f"{len(files)} files; each error that they expect has words ({', '.join(sorted(errors))})")
    sys.exit(1 if problems or len(errors) < 4 or not files else 0)


if __name__ == "__main__":
    main()
