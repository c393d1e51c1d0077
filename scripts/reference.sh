#!/usr/bin/env bash
# The reference of all public names, as HTML: reference.sh [DIRECTORY]   (default: build/reference)
#
# Fails if Doxygen has something to warn of; exit code 77 where there is no Doxygen (Debian: apt install doxygen). Its looks are those
# of doxygen-awesome-css where that is installed, Doxygen's own otherwise. It has a search, which needs JavaScript and no server.
set -euo pipefail
cd "$(dirname "$0")/.."
directory=${1:-build/reference}

command -v doxygen > /dev/null || { echo "reference: skipped, for doxygen is not installed"; exit 77; }
version=$(sed -n 's/.*constexpr int version_[a-z]* = \([0-9]*\);.*/\1/p' include/ddp/core/version.hpp | paste -sd.)
style=/usr/share/doxygen-awesome-css
settings="PROJECT_NUMBER = $version"
if [[ -f $style/doxygen-awesome.css ]]; then
    settings+=$(printf '\nHTML_EXTRA_STYLESHEET = %s/doxygen-awesome.css %s/doxygen-awesome-sidebar-only.css\n' "$style" "$style")
    # Its colours go with Doxygen's light ones; a Doxygen that does not know the word has no others.
    ! doxygen -g - | grep -q '^HTML_COLORSTYLE ' || settings+=$'\nHTML_COLORSTYLE = LIGHT\n'
else
    echo "not tried: doxygen-awesome-css, which is not installed: the reference has Doxygen's own style"
fi
mkdir -p "$directory"
directory=$(realpath "$directory")
rm -rf "$directory/input"
scripts/reference_filter.py "$directory/input"
(cd "$directory/input" && doxygen - < <(cat docs/Doxyfile; printf '%s\n' "$settings" "OUTPUT_DIRECTORY = \"$directory\""))
# A link that Doxygen leaves as it is stands behind a code span that goes over two lines.
if grep -l '@ref' "$directory"/html/*.html; then
    echo "reference: these pages show the text of a link" >&2
    exit 1
fi
[[ -s $directory/html/search/search.js ]] || { echo "reference: the site has no search" >&2; exit 1; }
# Pages link to examples from README.md's place, and from docs/.
cp -r examples "$directory"
ln -sfn ../examples "$directory/html/examples"
echo "reference: $directory/html/index.html"
