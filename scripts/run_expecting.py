#!/usr/bin/env python3
"""Runs a program and checks both its exit code and its output.

usage: run_expecting.py REGEX [--exit CODE|nonzero] [--stderr] -- PROGRAM ARGS...

The regular expression is searched in standard output, or in standard error; ^ and $ match at lines. (CTest's own PASS_REGULAR_EXPRESSION
forgives any exit code.)
"""
import re
import subprocess
import sys


def main():
    split = sys.argv.index("--")
    regex, *options = sys.argv[1:split]
    expected = options[options.index("--exit") + 1] if "--exit" in options else "0"
    stream = "stderr" if "--stderr" in options else "stdout"
    done = subprocess.run(sys.argv[split + 1:], check=False, **{stream: subprocess.PIPE})
    output = getattr(done, stream).decode(errors="replace")
    print(output, end="", flush=True)
    problems = []
    if done.returncode == 0 if expected == "nonzero" else done.returncode != int(expected):
        problems.append(f"exit code {done.returncode}, expected {expected}")
    if not re.search(regex, output, re.MULTILINE):
        problems.append(f"{stream} does not contain {regex!r}")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
