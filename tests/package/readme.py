#!/usr/bin/env python3
"""The README, as a reader follows it: its program and its CMakeLists.txt, built against an installed ddp, run alone and by
ddprun, must print what the README says; where CMake finds no MPI, too. Usage: readme.py README PREFIX WORK CXX GENERATOR"""
import pathlib
import re
import shutil
import subprocess
import sys


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def run(*command: str, cwd: pathlib.Path) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def main() -> None:
    readme, prefix, work, compiler, generator = sys.argv[1:]
    text = pathlib.Path(readme).read_text(encoding="utf-8")
    program, cmake, output = blocks(text, "cpp")[0], blocks(text, "cmake")[0], blocks(text, "output")[0]
    example = (pathlib.Path(readme).parent / "examples/quick_start.cpp").read_text(encoding="utf-8")
    if program.strip() not in example:
        sys.exit("README.md and examples/quick_start.cpp show different programs")
    place = pathlib.Path(work)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "quick_start.cpp").write_text(program, encoding="utf-8")
    (place / "CMakeLists.txt").write_text(cmake, encoding="utf-8")
    run("cmake", "-S", ".", "-B", "build", "-G", generator, f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON", cwd=place)
    run("cmake", "--build", "build", cwd=place)
    alone = run("build/quick_start", cwd=place)
    if alone != "y = 2.00 x + 1.00 (ranks: 1)\n":
        sys.exit(f"alone, the README's program printed:\n{alone}")
    four = run(f"{prefix}/bin/ddprun", "-n", "4", "build/quick_start", cwd=place)
    if four != output:
        sys.exit(f"the README promises:\n{output}ddprun -n 4 printed:\n{four}")
    print("the README's program prints what the README says")


if __name__ == "__main__":
    main()
