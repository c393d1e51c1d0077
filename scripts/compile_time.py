#!/usr/bin/env python3
"""How long the quick start takes to compile: from headers alone, and with what depends on no type of its own compiled once.

usage: compile_time.py [--runs N] [--against TREE] [COMPILER]    default: three runs of g++

Prints a Markdown table: processor seconds and the most memory of `-O2 -c`, the least of N runs, without a compiler cache.
--against compiles another checkout's quick start with its headers in turn with ours, since machines have moods: compare
what one call has printed. docs/compiling.md says what to do about it.
"""
import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = "examples/quick_start.cpp"


def compile_once(command: list[str]) -> tuple[float, float]:
    """Processor seconds and MiB."""
    child = os.posix_spawnp(command[0], command, {**os.environ, "CCACHE_DISABLE": "1"})
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        sys.exit(f"{shlex.join(command)} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("compiler", nargs="?", default="g++")
    options = parser.parse_args()
    eigen = shlex.split(subprocess.run(["pkg-config", "--cflags", "eigen3"], stdout=subprocess.PIPE, text=True, check=True).stdout)

    def command(tree: pathlib.Path, source: pathlib.Path, *definitions: str) -> list[str]:
        return [options.compiler, "-std=c++20", "-O2", f"-I{tree / 'include'}", *eigen, *definitions, "-c", str(source)]

    once = ["-DDDP_SEPARATE_COMPILATION", "-DDDP_WITH_TCP", "-DDDP_WITH_NN"]
    cases = [
        ("the quick start, headers alone", command(ROOT, ROOT / PROGRAM)),
        ("the quick start, with `ddp::compiled`", command(ROOT, ROOT / PROGRAM, *once)),
        ("`src/ddp.cpp`, once a program", command(ROOT, ROOT / "src/ddp.cpp", *once)),
    ]
    if options.against:
        cases.insert(0, (f"the quick start, headers of {options.against}", command(options.against, options.against / PROGRAM)))
    least = {title: (float("inf"), float("inf")) for title, _ in cases}
    with tempfile.TemporaryDirectory() as place:
        for _ in range(options.runs):
            for title, what in cases:
                seconds, memory = compile_once([*what, "-o", f"{place}/x.o"])
                least[title] = min(least[title][0], seconds), min(least[title][1], memory)
    print("| compiled | seconds | of the first | MiB |\n|---|---:|---:|---:|")
    first = least[cases[0][0]][0]
    for title, (seconds, memory) in least.items():
        print(f"| {title} | {seconds:.1f} | {seconds / first:.2f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
