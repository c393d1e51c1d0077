#!/usr/bin/env bash
# What the last run of CTest left out: whole tests, and cases within tests that passed.
#
#   scripts/skipped_tests.sh PRESET    after scripts/test.sh --preset PRESET; prints a line each, or nothing
set -euo pipefail
cd "$(dirname "$0")/../build/${1:?usage: skipped_tests.sh PRESET}"

sed -nE 's/^.*Test +#[0-9]+: ([^ ]+) .*\*\*\*(Skipped|Not Run).*$/\1: \2/p' ctest.log
# unittest's cases (tests/process/jobs.py prints them), and what Catch2 warns of, which has no skipping in version 2
awk '/^[0-9]+\/[0-9]+ Testing: / { name = $3 }
    /^case skipped: / { sub(/^case skipped: /, ""); print name ": case " $0 }
    /^ *not tried: / { sub(/^ */, ""); if (!said[name, $0]++) print name ": " $0 }' Testing/Temporary/LastTest.log
