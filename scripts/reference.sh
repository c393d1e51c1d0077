#!/usr/bin/env bash
# The reference of all public names, as HTML: reference.sh [DIRECTORY]   (default: build/reference)
#
# Fails if Doxygen has something to warn of; exit code 77 where there is no Doxygen (Debian: apt install doxygen).
set -euo pipefail
cd "$(dirname "$0")/.."
directory=${1:-build/reference}

command -v doxygen > /dev/null || { echo "reference: skipped, for doxygen is not installed"; exit 77; }
version=$(sed -n 's/.*constexpr int version_[a-z]* = \([0-9]*\);.*/\1/p' include/ddp/core/version.hpp | paste -sd.)
mkdir -p "$directory"
doxygen - < <(cat docs/Doxyfile; printf 'PROJECT_NUMBER = %s\nOUTPUT_DIRECTORY = "%s"\n' "$version" "$directory")
# Pages link to examples from README.md's place, and from docs/.
cp -r examples "$directory"
ln -sfn ../examples "$directory/html/examples"
echo "reference: $directory/html/index.html"
