#!/usr/bin/env bash
# Faults at drawn moments of real jobs, so many of each row of the fault matrix (200 by default), and the table of what came
# of them (docs/faults.md). About 40 minutes on two cores for 200. Of rows that take long, and of those over MPI, a tenth to a half
# as many are made; with --in-full as many as of the others, but for row 23g, which takes three to four hours.
#
#   scripts/faults.sh [injections] [option of tests/process/chaos.py …]
#
# The table goes to build/release/faults.md, every single result to build/release/faults.json. Every failure is printed with
# the options that repeat it.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;; esac

injections=${1:-200}
shift || true
build=build/release
[[ -f $build/build.ninja ]] || cmake --preset release --log-level=NOTICE > /dev/null
cmake --build --preset release --target process_programs
DDP_PROGRAMS=$build/tests/process DDPRUN=$build/tools/ddprun \
    python3 tests/process/chaos.py --injections "$injections" --table "$build/faults.md" --json "$build/faults.json" \
    --starve 60 --strangers 5 "$@"
