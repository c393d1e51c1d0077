#!/usr/bin/env python3
"""check_installed.py SOURCE PREFIX: the installed headers are the source tree's, no more and no less; so is src/ddp.cpp."""
import pathlib
import sys

source, prefix = (pathlib.Path(argument) for argument in sys.argv[1:])
ours = {path.relative_to(source).as_posix() for path in (source / "include").rglob("*.[hi]pp")}
installed = {path.relative_to(prefix).as_posix() for path in (prefix / "include").rglob("*") if path.is_file()}
for path in sorted(ours - installed):
    print(f"not installed: {path}")
for path in sorted(installed - ours):
    print(f"installed, but not ours: {path}")
print(f"{len(installed)} headers installed")
compiled_once = prefix / "share/ddp/src/ddp.cpp"
if not compiled_once.is_file() or compiled_once.read_text() != (source / "src/ddp.cpp").read_text():
    sys.exit("share/ddp/src/ddp.cpp is not src/ddp.cpp")
sys.exit(bool(ours ^ installed) or not installed)
