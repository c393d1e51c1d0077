#!/usr/bin/env python3
"""What including this library costs: preprocessed lines and compile seconds of the quick start, ddp.hpp and each component.

usage: inclusion_cost.py [COMPILER ...]    default: g++ and the newest clang++ that are there
       inclusion_cost.py --at-most LINES COMPILER    fails if ddp.hpp has more of them

Prints a Markdown table. Lines are those of `-E -P`: they depend on the compiler and the libraries, not on the machine's mood.
Seconds are processor time of `-c -O2` without a compiler cache, the median of three.
"""
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = [  # what the table calls it, what is compiled, which libraries' flags it needs
    ("five standard headers*", "#include <chrono>\n#include <span>\n#include <stdexcept>\n#include <string>\n#include <vector>\n", ""),
    ("`ddp/ddp.hpp`", "#include <ddp/ddp.hpp>\n", ""),
    ("`ddp/rendezvous/run_tcp.hpp`", "#include <ddp/rendezvous/run_tcp.hpp>\n", ""),
    ("`ddp/rendezvous/run_secure.hpp`", "#include <ddp/rendezvous/run_secure.hpp>\n", ""),
    ("`ddp/rendezvous/run_mpi.hpp`", "#include <ddp/rendezvous/run_mpi.hpp>\n", "mpi"),
    ("`ddp/nn/nn.hpp`", "#include <ddp/nn/nn.hpp>\n", "eigen"),
    ("`ddp/data/gzip.hpp`", "#include <ddp/data/gzip.hpp>\n", ""),
    ("`ddp/testing/conformance.hpp`", "#include <ddp/testing/conformance.hpp>\n", ""),
    ("the quick start", (ROOT / "examples/quick_start.cpp").read_text(encoding="utf-8"), "eigen"),
]


def output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def flags_of(libraries: str) -> list[str]:
    if libraries == "eigen":
        return shlex.split(output("pkg-config", "--cflags", "eigen3"))
    if libraries == "mpi":
        return ["-DOMPI_SKIP_MPICXX", *shlex.split(output("mpicxx", "--showme:compile"))]
    return []


def seconds(command: list[str]) -> float:
    child = os.posix_spawnp(command[0], command, {**os.environ, "CCACHE_DISABLE": "1"})
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        sys.exit(f"{shlex.join(command)} failed")
    return usage.ru_utime + usage.ru_stime


def lines(compiler: str, source: str, libraries: str) -> int:
    command = [compiler, "-std=c++20", "-O2", "-I", str(ROOT / "include"), *flags_of(libraries), source]
    return len(output(*command, "-E", "-P").splitlines())


def expect_at_most(bound: int, compiler: str) -> None:
    title, text, libraries = CASES[1]
    with tempfile.TemporaryDirectory() as place:
        source = pathlib.Path(place) / "main.cpp"
        source.write_text(text, encoding="utf-8")
        count = lines(compiler, str(source), libraries)
    print(f"{title}: {count:,} lines, at most {bound:,} are allowed")
    sys.exit(count > bound)


def main() -> None:
    if sys.argv[1:2] == ["--at-most"]:
        expect_at_most(int(sys.argv[2]), sys.argv[3])
    clangs = [f"clang++-{version}" for version in range(30, 15, -1)] + ["clang++"]
    compilers = sys.argv[1:] or [c for c in ["g++", next(filter(shutil.which, clangs), None)] if c and shutil.which(c)]
    names = [output(c, "--version").splitlines()[0] for c in compilers]
    print("| included | " + " | ".join(f"lines, {c} | seconds, {c}" for c in compilers) + " |")
    print("|---|" + "---:|---:|" * len(compilers))
    with tempfile.TemporaryDirectory() as place:
        source, object_file = f"{place}/main.cpp", f"{place}/main.o"
        for title, text, libraries in CASES:
            pathlib.Path(source).write_text(text, encoding="utf-8")
            row = [title]
            for compiler in compilers:
                command = [compiler, "-std=c++20", "-O2", "-I", str(ROOT / "include"), *flags_of(libraries), source]
                row.append(f"{lines(compiler, source, libraries):,}")
                row.append(f"{statistics.median(seconds([*command, '-c', '-o', object_file]) for _ in range(3)):.1f}")
            print("| " + " | ".join(row) + " |", flush=True)
    print("\n\\* `<chrono> <span> <stdexcept> <string> <vector>`, for comparison")
    print(f"\nWith {'; '.join(names)}.")


if __name__ == "__main__":
    main()
