#!/usr/bin/env python3
"""What numpy.save writes, as a record for tests/data/readers_test.cpp.

    build/torch/bin/python tests/oracle/npy.py           writes tests/oracle/npy.csv anew
    build/torch/bin/python tests/oracle/npy.py --check   compares the record with this NumPy, byte by byte

scripts/setup.sh torch installs NumPy. No test runs this: the record is kept, so that the tests need no NumPy. Lines of the record,
behind a line of column names:

    case,the header in hexadecimal up to the blanks that end it,how many bytes these and the line feed are,the data in hexadecimal
"""

import io
import pathlib
import re
import sys

import numpy

RECORD = pathlib.Path(__file__).with_name("npy.csv")
ARRAYS = {
    "f4": numpy.array([[1.5, -2, 0.1], [-0.0, numpy.inf, 2.0**-149]], dtype="<f4"),
    "f8": numpy.array([1e300, -0.1, 5e-324], dtype="<f8"),
    "u1": numpy.arange(250, 258).astype("u1").reshape(2, 2, 2),
    "i4": numpy.array([-1, 2**31 - 1, -(2**31)], dtype="<i4"),
    "i8": numpy.array([[-1], [2**63 - 1], [-(2**63)]], dtype="<i8"),
    "scalar": numpy.float64(0.1),
    "empty": numpy.zeros((0, 3), dtype="<f4"),
    "column of Fortran": numpy.asfortranarray(numpy.array([[1], [2]], dtype="<i4")),
    "Fortran": numpy.asfortranarray(numpy.arange(6, dtype="<f4").reshape(2, 3)),
    "slice": numpy.arange(12, dtype="<i4").reshape(3, 4)[:, ::2],
    "big endian": numpy.array([1.5, -2], dtype=">f8"),
    "half": numpy.array([1.5, -2], dtype="<f2"),
    "bool": numpy.array([True, False]),
    "text": numpy.array(["a", "bc"]),
    "records": numpy.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
}


def files():
    """By case, what is written."""
    for case, array in ARRAYS.items():
        out = io.BytesIO()
        numpy.save(out, array)
        yield case, out.getvalue()
    for version in ((2, 0), (3, 0)):
        out = io.BytesIO()
        numpy.lib.format.write_array(out, ARRAYS["f4"], version)
        yield f"version {version[0]}", out.getvalue()


def written(content):
    found = re.search(rb" +\n", content)
    blanks = found.end() - found.start()
    return f"{content[:found.start()].hex()},{blanks},{content[found.end():].hex()}"


def main():
    lines = ["case,header,blanks and line feed,data", *(f"{case},{written(content)}" for case, content in files())]
    if sys.argv[1:] == ["--check"]:
        same = RECORD.read_text().splitlines() == lines
        print(f"{len(lines) - 1} files, NumPy {numpy.__version__}: {'the same' if same else 'NOT the same'}")
        return 0 if same else 1
    RECORD.write_text("\n".join(lines) + "\n")
    print(f"{RECORD}: {len(lines) - 1} files, NumPy {numpy.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
