#!/usr/bin/env python3
"""build_options.py SOURCE DIRECTORY COMPILER: what a build of the sources is by default: a Release, whose tools run on every machine of
the architecture, whatever DDP_ARCH says of the examples; a build type that is given, or left to a generator of several, stays. And that
the build of tests/planted, where each test file is a program, finds the headers."""
import json
import os
import pathlib
import subprocess
import sys

source, directory, compiler = sys.argv[1:]
ARCH = "-march=x86-64-v3"


def configure(name: str, *options: str) -> tuple[str, str, dict[str, str]]:
    """What CMake says, the build type in its cache, and the command by source file."""
    build = pathlib.Path(directory, name)
    clean = {key: value for key, value in os.environ.items() if key != "CMAKE_BUILD_TYPE"}
    said = subprocess.run(["cmake", "-S", source, "-B", build, f"-DCMAKE_CXX_COMPILER={compiler}", "-DDDP_BUILD_TESTS=OFF",
                           "-DDDP_BUILD_FASHION=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options],
                          stdout=subprocess.PIPE, text=True, check=True, env=clean).stdout
    cache = (build / "CMakeCache.txt").read_text().splitlines()
    kind = next((line.partition("=")[2] for line in cache if line.startswith("CMAKE_BUILD_TYPE:")), "")
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        commands.setdefault(pathlib.Path(entry["file"]).name, []).append(entry["command"])
    return said, kind, commands


said, kind, commands = configure("default", "-G", "Ninja", "-DDDP_ARCH=x86-64-v3")
assert kind == "Release" and "CMAKE_BUILD_TYPE is empty" in said, (kind, said)
for name in ("ddprun.cpp", "ddp-perf.cpp"):
    for command in commands[name]:
        assert "-march" not in command and "-O" in command, command
assert all(ARCH in command for command in commands["quick_start.cpp"]), commands["quick_start.cpp"]
assert {ARCH in command for command in commands["ddp.cpp"]} == {True, False}, "the examples' and the tools'"
assert len({ARCH in command for command in commands["once_mpi.cpp"]}) == 2, commands["once_mpi.cpp"]

said, kind, commands = configure("given", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DDDP_TOOLS_ARCH=x86-64-v3", "-DDDP_BUILD_EXAMPLES=OFF")
assert kind == "Debug" and "CMAKE_BUILD_TYPE is empty" not in said, (kind, said)
assert all(ARCH in command for name in ("ddprun.cpp", "ddp-perf.cpp") for command in commands[name]), commands

said, kind, _ = configure("several", "-G", "Ninja Multi-Config", "-DDDP_BUILD_EXAMPLES=OFF")
assert kind == "" and "CMAKE_BUILD_TYPE is empty" not in said, (kind, said)

_, _, commands = configure("planted", "-G", "Ninja", "-DDDP_BUILD_TESTS=ON", "-DDDP_TEST_PROGRAM_A_FILE=ON", "-DDDP_BUILD_EXAMPLES=OFF")
for part in ("exchange.cpp", "transportDDP_WITH_MPI.cpp"):  # of src/ddp.cpp
    assert len(commands[part]) == 3 and all(f"-I{source}/include" in command for command in commands[part]), commands[part]
print("a Release by default, and tools for every machine of the architecture")
