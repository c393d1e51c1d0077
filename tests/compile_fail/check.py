#!/usr/bin/env python3
"""check.py SOURCE COMPILER [FLAGS…]: compiles SOURCE as it is and with -DCORRECTED, without generating code.

As it is, the statement below every comment `// expect: WORDS` must be an error whose first 24 lines contain each of the
words, or the first N lines, `// expect within N: WORDS`, and not behind a third candidate; any other error is a failure, too. With
-DCORRECTED the compiler must have nothing to say."""
import pathlib
import re
import subprocess
import sys

SCREEN = 24  # lines: 21 are needed
CANDIDATES = 2  # as many functions may be named until the words come


def compile_it(source: str, command: list[str], *more: str) -> tuple[int, list[str]]:
    all_errors = ["-ferror-limit=0"] if "clang" in command[0] else []  # it stops after 20
    done = subprocess.run([*command, "-fsyntax-only", *all_errors, *more, source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=False, timeout=240, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"})
    return done.returncode, done.stdout.splitlines()


def beginning(block: list[str], most: int) -> list[str]:
    """Its first lines, up to one candidate too many."""
    candidates = [n for n, line in enumerate(block) if ": note: candidate" in line]
    return block[:min([most, *candidates[CANDIDATES:]])]


def blocks(name: str, lines: list[str]) -> dict[int, list[str]]:
    """What is said from one error in SOURCE to the next one at another line of it. An error in a header belongs to the line
    of SOURCE that asked for what is in error: GCC names it before, Clang behind."""
    here = rf"(?:.*/)?{re.escape(name)}:(\d+):\d+: "
    found: dict[int, list[str]] = {}
    current = None
    elsewhere: list[str] | None = None  # an error in a header, of which no line of SOURCE is known yet
    for line in lines:
        at = re.match(here + r"(?:fatal )?error:", line)
        asked = re.match(here + r".*(?:required from here|requested here)", line)
        if at:
            current = found.setdefault(int(at[1]), [])
        elif asked and elsewhere is not None:  # Clang
            current = found.setdefault(int(asked[1]), [])
            current += elsewhere
            elsewhere = None
        elif asked and (current is None or int(asked[1]) not in found):  # GCC
            current = found.setdefault(int(asked[1]), [])
        elif re.match(r"\S+:\d+:\d+: (?:fatal )?error:", line):
            elsewhere = []
        if elsewhere is not None:
            elsewhere.append(line)
        if current is not None:
            current.append(line)
    # GCC's "required from here" also stands within what is said of an error in SOURCE.
    return {line: block for line, block in found.items() if any("error:" in said for said in block)}


def main() -> None:
    source, *command = sys.argv[1:]
    text = pathlib.Path(source).read_text(encoding="utf-8").splitlines()
    expected, mark_of = {}, {}  # lines and words of a mark, by its line; the mark of each line of the statement below it
    for number, line in enumerate(text, 1):
        if mark := re.match(r" *// expect(?: within (\d+))?: (.*)", line):
            expected[number] = (int(mark[1] or SCREEN), mark[2])
            end = next(n for n in range(number, len(text)) if text[n].endswith((";", "}")))
            mark_of.update({n: number for n in range(number + 1, end + 2)})
    problems = []
    code, said = compile_it(source, command, "-DCORRECTED", "-Werror")
    if code != 0 or said:
        problems += ["with every mistake put right, the compiler still says:", *said[:SCREEN]]
    code, said = compile_it(source, command)
    found = {mark_of.get(line, line): block for line, block in blocks(pathlib.Path(source).name, said).items()}
    for line, (most, words) in expected.items():
        screen = "\n".join(beginning(found.get(line, []), most))
        # A phrase is a concept's name, or an expression with its arguments.
        missing = [word for word in re.findall(r"[^\s(]+(?:\([^)]*\))?", words) if word not in screen]
        if line not in found:
            problems.append(f"line {line}: no error, expected one that says: {words}")
        elif missing:
            problems += [f"line {line}: the first {most} lines of the error, or its first {CANDIDATES} candidates, do not say "
                         f"{', '.join(missing)}:", screen]
    problems += [f"line {line}: an error that no mark expects: {found[line][0]}" for line in found.keys() - expected.keys()]
    if not expected:
        problems.append("nothing is expected anywhere: is this the right source?")
    print("\n".join(problems) or f"{len(expected)} mistakes, each explained within {SCREEN} lines")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
