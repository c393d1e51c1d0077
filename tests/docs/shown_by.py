#!/usr/bin/env python3
"""shown_by.py ROOT: docs/coming-from-pytorch.md names every argument of DistributedDataParallel's constructor, tests that exist, and
for each row either a test or the words *not there*; and every name of this library that a row has in code is used by one of the row's tests.
Where scripts/setup.sh torch has put PyTorch into build/torch, its signature is compared with the list of arguments here.
shown_by.py --self-test checks the checker."""
import pathlib
import re
import subprocess
import sys

# Of the PyTorch that scripts/setup.sh installs: 2.13.
ARGUMENTS = """module device_ids output_device dim broadcast_buffers init_sync process_group bucket_cap_mb find_unused_parameters
    check_reduction gradient_as_bucket_view static_graph delay_all_reduce_named_params param_to_hook_all_reduce mixed_precision
    device_mesh skip_all_reduce_unused_params bucket_cap_mb_list batched_grad_copy forward_sync_buffers""".split()
# Words in code that are no names of this library: PyTorch's, and what a reader puts other things in place of.
OTHERS = set("""None grad state_dict matrix_approximation_rank start_powerSGD_iter use_error_feedback torchrun python train pattern backbone
    color key load next comm path trainer model""".split())
SECTION = "## What the constructor of DistributedDataParallel takes\n"


def tests_of(root: pathlib.Path) -> dict[str, str]:
    """By name: what stands in it, in the program that it runs, and in the headers of tests that these include."""
    def text_of(path: pathlib.Path, seen: set[pathlib.Path]) -> str:
        if path in seen or not path.is_file():
            return ""
        seen.add(path)
        text = path.read_text(encoding="utf-8")
        for header in re.findall(r'(?m)^#include "(.*)"', text):
            text += text_of(path.parent / header, seen) + text_of(root / "tests" / header, seen)
        return text

    tests = {}
    for kind in ("cpp", "py", "sh"):
        for path in (root / "tests").glob(f"*/*_test.{kind}"):
            stem = path.stem.removesuffix("_test")
            tests[f"{path.parent.name}/{stem}"] = text_of(path, set()) + text_of(path.with_name(f"{stem}_program.cpp"), set())
    for stem in re.findall(r"(?m)^ddp_example_test\(\S+ (\w+) ", (root / "examples/CMakeLists.txt").read_text(encoding="utf-8")):
        tests[f"examples/{stem}"] = text_of(root / "examples" / f"{stem}.cpp", set())
    return tests


def names_in(cell: str) -> set[str]:
    """The names in code of a cell's clauses, but for those that say what is not there."""
    clauses = [c for c in re.split(r"; |\. |: ", re.sub(r"\]\([^)]*\)", "]", cell)) if "*not there*" not in c]
    code = " ".join(span for clause in clauses for span in re.findall(r"`([^`]*)`", clause))
    return {name for name in re.findall(r"[A-Za-z_]\w{2,}", code) if not name.isupper()} - OTHERS


def rows_of(page: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[-1] != "shown by"]


def check(page: str, tests: dict[str, str], arguments: list[str]) -> list[str]:
    problems = []
    for row in rows_of(page):
        if len(row) != 3:
            problems.append(f"the row of {row[0]} has {len(row)} cells")
            continue
        named = re.findall(r"`([^`]*)`", row[2])
        if not named and "*not there*" not in row[1]:
            problems.append(f"the row of {row[0]} names no test, and does not say that it is not there")
        problems += [f"{name}: there is no such test" for name in named if name not in tests]
        if named:
            shown = "\n".join(tests.get(name, "") for name in named)
            problems += [f"the row of {row[0]}: none of its tests has {name}" for name in sorted(names_in(row[1]))
                         if not re.search(rf"\b{name}\b", shown)]
    section = page.partition(SECTION)[2].partition("\n## ")[0].partition("\nWhat ")[0]
    first = " ".join(row[0] for row in rows_of(section))
    problems += [f"the argument {one} is not on the page" for one in arguments if not re.search(rf"`{one}\b", first)]
    problems += [f"{one} is no argument of the constructor" for one in re.findall(r"`(\w+)", first) if one not in arguments]
    return problems


def arguments_of(python: pathlib.Path) -> tuple[str, list[str]]:
    """The version of that interpreter's PyTorch, and what the constructor takes besides self."""
    source = """import inspect, torch
from torch.nn.parallel import DistributedDataParallel
print(torch.__version__, *list(inspect.signature(DistributedDataParallel.__init__).parameters)[1:])"""
    version, *names = subprocess.run([python, "-c", source], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return version, names


def differing(theirs: list[str], ours: list[str]) -> list[str]:
    where = {True: "PyTorch's signature", False: "the list here"}
    return [f"{one}: only in {where[one in theirs]}" for one in sorted(set(theirs) ^ set(ours))]


def self_test() -> None:
    page = (SECTION + "\n| argument | here | shown by |\n|---|---|---|\n| `module` | a model | `train/file` |\n"
            "| `dim`, `extra=False` | *not there* | |\n\nWhat else:\n\n| `y` | `one_thing(more)`; `absent` is *not there* | `train/file` |\n")
    tests, arguments = {"train/file": "one_thing(more);"}, ["module", "dim", "extra"]
    assert not check(page, tests, arguments), check(page, tests, arguments)
    assert check(page, {"train/other": "one_thing(more);"}, arguments)
    assert check(page, {"train/file": "one_thing();"}, arguments) == ["the row of `y`: none of its tests has more"]
    assert check(page, tests, arguments + ["more"]) == ["the argument more is not on the page"]
    assert check(page, tests, arguments[:2]) == ["extra is no argument of the constructor"]
    assert check(page.replace("*not there*", "there"), tests, arguments)
    assert check(page.replace("`y` | `one_thing(more)`; ", "`y` | `z` | "), tests, arguments)
    assert not differing(["dim", "module"], ["module", "dim"])
    assert differing(["module", "dim"], ["module", "extra"]) == ["dim: only in PyTorch's signature", "extra: only in the list here"]
    print("the checker finds what it should")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1])
    page = (root / "docs/coming-from-pytorch.md").read_text(encoding="utf-8")
    problems = check(page, tests_of(root), ARGUMENTS)
    python = root / "build/torch/bin/python"
    compared = "not compared with PyTorch, which scripts/setup.sh torch installs"
    if python.exists():
        version, theirs = arguments_of(python)
        problems += differing(theirs, ARGUMENTS)
        compared = f"as PyTorch {version} has them"
    print("\n".join(problems) or f"{len(rows_of(page))} rows with their tests; {len(ARGUMENTS)} arguments, {compared}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
