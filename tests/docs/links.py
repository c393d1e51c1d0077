#!/usr/bin/env python3
"""links.py ROOT: every link of a page to a file or a heading leads somewhere, and every page of docs/ can be reached from
docs/README.md. Links to other sites are not followed. links.py --self-test checks the checker."""
import pathlib
import re
import sys
import tempfile

CODE = re.compile(r"^(```|~~~).*?^\1\s*$|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OTHER_SITES = re.compile(r"[a-z]+:")


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links(page: pathlib.Path) -> list[str]:
    return [t for t in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))) if not OTHER_SITES.match(t)]


def check(pages: list[pathlib.Path], root: pathlib.Path) -> tuple[list[str], int]:
    problems, count = [], 0
    for page in pages:
        for target in links(page):
            count += 1
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page.resolve()
            if not there.exists() or root.resolve() not in [there, *there.parents]:
                problems.append(f"{page.relative_to(root)}: {target} is not there")
            elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
                problems.append(f"{page.relative_to(root)}: {target}: no such heading")
    return problems, count


def unreachable(start: pathlib.Path) -> list[str]:
    seen, waiting = set(), [start.resolve()]
    while waiting:
        page = waiting.pop()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        waiting += [p for t in links(page) if (p := (page.parent / t.partition("#")[0]).resolve()).suffix == ".md"]
    return [f"docs/{p.relative_to(start.parent)}: no link leads there from {start.name}"
            for p in sorted(start.parent.glob("**/*.md")) if p.resolve() not in seen]


def self_test() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        (root / "docs").mkdir()
        start, other = root / "docs" / "README.md", root / "docs" / "other.md"
        other.write_text("# Other, with `code`\n", encoding="utf-8")
        for text, wrong in (("[a](other.md) [b](https://example.org/no) `[c](no.md)`\n```\n[d](no.md)\n```\n", 0),
                            ("[a](no.md) [b](other.md)", 1), ("[a](other.md#no-heading)", 1), ("[a](/etc/passwd)", 1),
                            ("[a](other.md#other-with-code)", 0), ("# Here\n[a](#here)\n[b](#there)", 1),
                            ("[a](../../outside.md)", 1)):
            start.write_text(text, encoding="utf-8")
            assert len(check([start], root)[0]) == wrong, text
        start.write_text("nothing", encoding="utf-8")
        assert unreachable(start) == ["docs/other.md: no link leads there from README.md"]
        start.write_text("[a](other.md#x)", encoding="utf-8")
        assert not unreachable(start)
        (root / "docs" / "more").mkdir()
        (root / "docs" / "more" / "page.md").write_text("[back](../other.md)", encoding="utf-8")
        assert unreachable(start) == ["docs/more/page.md: no link leads there from README.md"]
    print("the checker finds what it should")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1])
    pages = [root / "README.md", root / "CHANGELOG.md", root / "CONTRIBUTING.md", root / "SECURITY.md",
             root / "tests" / "planted" / "README.md", *sorted((root / "docs").glob("**/*.md")),
             *sorted((root / "examples").glob("**/*.md"))]
    problems, count = check(pages, root)
    problems += unreachable(root / "docs" / "README.md")
    print("\n".join(problems) or f"{count} links in {len(pages)} pages, all lead somewhere")
    sys.exit(1 if problems or not count else 0)


if __name__ == "__main__":
    main()
