#!/usr/bin/env python3
"""refusals.py ROOT: a test that expects an error of this library says what its text must contain. THROWS_AS with one of the library's
error types, and THROWS with none, take any text: use THROWS_WITH, or look at the text by other means. And what the headers in MODULES
refuse with a text, some test quotes: a whole piece of it, or QUOTED characters in a row that no other refusal of the module has.
refusals.py --self-test checks the checker."""
import pathlib
import re
import sys

CALL = re.compile(r"\b(?:CHECK|REQUIRE)_THROWS(_AS)?\(")
MODULES = ("adapter", "checkpoint", "collective", "comm", "core", "data", "exchange", "kernel", "model", "nn", "optim", "rendezvous", "sim",
         "strategy", "testing", "train", "transport")
QUOTED = 22
REFUSAL = re.compile(r"\b(?:DDP_EXPECTS|throw [\w:]+|\w*fail\w*|refuse|concat|\w+_error)\(")
TOKEN = re.compile(r'//[^\n]*|\bR"(?P<mark>\w*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<text>(?:\\.|[^"\\\n])*)"|\b(?:TEST_CASE|SECTION)\("[^"]*"',
                   re.S)
PYTHON_TEXT = re.compile(r"""f?"((?:\\.|[^"\\\n])*)"|f?'((?:\\.|[^'\\\n])*)'""")
# Texts that no test brings about, and why.
UNQUOTED = {
    "names and metadata make a header of": "a header of more than 100 MB",
    "zlib cannot start": "no memory, or two versions of zlib",
    "cannot be closed": "close() of a local file does not fail",
    "a trainer ended within a step": "others have heard by then that this rank left a step",
    "rounds once": "a compiler that is told to break what the library says about its kernels",
    "gives no random numbers": "getentropy() of eight bytes does not fail",
    "a Unix-domain socket's name": "a random name of 16 bytes that another socket has",
}


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


def pieces_of(text: str) -> list[str]:
    """Its literals in C++, adjacent ones joined, without what they have at their ends beside words."""
    texts, end = [], -1
    for token in TOKEN.finditer(text):
        piece = token["raw"] if token["raw"] is not None else token["text"]
        if piece is None:
            continue
        if texts and end >= 0 and not text[end:token.start()].strip():
            piece = texts.pop() + piece
        texts.append(piece)
        end = token.end()
    return [piece.replace('\\"', '"').replace("\\n", " ").strip(" :;,") for piece in texts]


def refusals_of(text: str) -> list[tuple[int, list[str]]]:
    """The line of each refusal with a text of two words or more, and the pieces that it is made of."""
    text = TOKEN.sub(lambda token: "" if token[0].startswith("//") else token[0], text)
    found, end = [], 0
    for call in REFUSAL.finditer(text):
        if call.start() < end or text[:call.start()].endswith("#define "):
            continue
        argument = argument_of(text, call.end())
        end = call.end() + len(argument)
        pieces = [piece for piece in pieces_of(argument) if " " in piece]
        if pieces:
            found.append((text.count("\n", 0, call.start()) + 1, pieces))
    return found


def quoted(piece: str, tests: str, others: list[str]) -> bool:
    """Whether tests have all of it, or QUOTED characters in a row which are in none of the others."""
    length = min(QUOTED, len(piece))
    for at in range(len(piece) - length + 1):
        end = at + length
        if piece[at:end] not in tests:
            continue
        while end < len(piece) and piece[at:end + 1] in tests:
            end += 1
        if end - at == len(piece) or not any(piece[at:end] in other for other in others):
            return True
    return False


def check_module(headers: dict[str, str], tests: str) -> list[str]:
    """What no test quotes, of all refusals of a module; `tests` are their texts."""
    every = [(name, line, pieces) for name, text in headers.items() for line, pieces in refusals_of(text)]
    problems = []
    for name, line, pieces in every:
        others = [other for _, _, them in every if them != pieces for other in them]
        known = any(text in piece for text in UNQUOTED for piece in pieces)
        if known or any(quoted(piece, tests, others) for piece in pieces):
            continue
        problems.append(f"{name}:{line}: no test quotes {QUOTED} characters of '{' … '.join(pieces)}'")
    return problems


def texts_of_tests(root: pathlib.Path) -> str:
    texts = []
    for path in sorted((root / "tests").glob("**/*")):
        if path.parent.name in ("docs", "planted") or path.suffix not in (".cpp", ".hpp", ".py"):
            continue
        text = path.read_text(encoding="utf-8")
        texts += [a or b for a, b in PYTHON_TEXT.findall(text)] if path.suffix == ".py" else pieces_of(text)
    texts += re.findall(r'"([^"\n]+)"', (root / "tests/CMakeLists.txt").read_text(encoding="utf-8"))  # of run_expecting.py
    return "\0".join(texts)


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
    header = '''DDP_EXPECTS(n > 0, "stack: there is nothing on it; push something first");  // "not a text"
                throw data_error(errc::format, concat({name, ": the digest of ", n, " blocks is not that of "
                                                       "the file"}));'''
    assert refusals_of(header) == [(1, ["stack: there is nothing on it; push something first"]),
                                   (2, ["the digest of", "blocks is not that of the file"])], refusals_of(header)
    good = 'says("nothing on it; push something"), says("of 7 blocks is not that" " of the")'
    assert not check_module({"x": header}, "\0".join(pieces_of(good)))
    for wrong in (good.replace("nothing on it", "nothing: it"), good.replace("blocks is not", "blocks is"),
                  good.replace("something", "s"), 'TEST_CASE("nothing on it; push something")'):
        assert check_module({"x": header}, "\0".join(pieces_of(wrong))), wrong
    same = header + 'fail("queue: there is nothing on it; push something first");'
    assert len(check_module({"x": same}, "\0".join(pieces_of(good)))) == 2  # which of the two is meant?
    assert not check_module({"x": same}, "\0".join(pieces_of(good)) + "queue: there is nothing on it; stack: there is nothing on it")
    print("the checker finds what it should")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1])
    errors = errors_of("\n".join(p.read_text(encoding="utf-8") for p in (root / "include").glob("**/*.hpp")))
    problems, files = [], sorted(p for kind in ("cpp", "hpp") for p in (root / "tests").glob(f"**/*.{kind}"))
    for path in files:
        problems += check(str(path.relative_to(root)), path.read_text(encoding="utf-8"), errors)
    tests, refused = texts_of_tests(root), []
    for module in MODULES:
        headers = {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in sorted((root / "include/ddp" / module).glob("**/*.?pp"))}
        refused += [piece for text in headers.values() for _, pieces in refusals_of(text) for piece in pieces]
        problems += check_module(headers, tests)
    problems += [f"no refusal has the text '{text}' any more" for text in UNQUOTED if not any(text in piece for piece in refused)]
    print("\n".join(problems) or f"{len(files)} files; each error that they expect has words ({', '.join(sorted(errors))}), and "
          f"each refusal of {', '.join(MODULES)} is quoted")
    sys.exit(1 if problems or len(errors) < 4 or not files or len(refused) < 300 else 0)


if __name__ == "__main__":
    main()
