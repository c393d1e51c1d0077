#!/usr/bin/env python3
"""The manual's reference, docs/reference/*.md, from the headers' comments: reference_pages.py [--check]

docs/reference/contents.txt says which name stands on which page, and in which order. What is said about a name comes from Doxygen's
XML of its comment, how it is declared from the header itself. --check writes nothing: it fails where a committed page differs from
what the headers say now, where a public name is neither on a page nor omitted on purpose, and where a name on a page has no comment.
Exit code 77 where there is no Doxygen (Debian: apt install doxygen). reference_pages.py --self-test checks the generator."""
import dataclasses
import difflib
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree

from reference_filter import header_lines, write_all

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by scripts/reference_pages.py from the headers' comments: change those, and run it again. -->"


# The headers' text: declarations as they are written.

UNUSED = re.compile(r"/\*(\w+)\*/")  # (int /*rank*/)


def without_comments(text: str) -> str:
    """Comments and the insides of strings become spaces, so that places stay what they are. The name of an unused parameter, which is
    such a comment, stays: the text refers to it."""
    blank = lambda found: re.sub(r"[^\n]", " ", found.group())
    strings = r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])'"
    pieces = re.compile(r"//[^\n]*|/\*.*?\*/|" + strings + r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.S | re.M)
    return pieces.sub(lambda m: m.group() if m.group()[0] in "\"'" or UNUSED.fullmatch(m.group()) else blank(m), text)


def of_requires(text: str, brace: int) -> bool:
    """Whether the `{` at this place begins the body of a requires-expression."""
    before = text[:brace].rstrip()
    if before.endswith(")"):
        depth, at = 0, len(before)
        while at > 0:
            at -= 1
            depth += {")": 1, "(": -1}.get(before[at], 0)
            if depth == 0:
                break
        before = before[:at].rstrip()
    return re.search(r"\brequires$", before) is not None


def matching(text: str, at: int, step: int) -> int:
    """The place of the bracket that belongs to the one at `at`."""
    depth = 0
    while True:
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at
        at += step


def declaration(text: str, line: int, name: str, constant: bool = False) -> str:
    """What is declared in this line (from 1) of a header, whose comments are blank: from its template head to its body; a constant
    with its value."""
    start = 0
    for _ in range(line - 1):
        start = text.index("\n", start) + 1
    found = re.compile(r"(?<!\w)" + re.escape(name) + r"(?!\w)").search(text, start)
    at = end = found.start() if found else start
    while at > 0:
        c = text[at - 1]
        if c in ";{" or (c == ":" and re.search(r"\b(public|private|protected)\s*:$", text[:at])):
            break
        if c == "}":
            opening = matching(text, at - 1, -1)
            if not of_requires(text, opening):
                break
            at = opening
        at -= 1
    while end < len(text):
        c = text[end]
        if c == ";":
            break
        if c == "{":
            if not constant and not of_requires(text, end):
                break
            end = matching(text, end, 1)
        elif c in "([":
            end = matching(text, end, 1)
        elif c == ":" and text[end - 1] != ":" and text[end + 1] != ":" and "?" not in text[at:end] and re.search(r"[)\w]\s*$", text[at:end]) \
                and not re.search(r"\b(class|struct|enum)\b", text[at:end].rsplit(">", 1)[-1]):
            break  # what follows initialises members
        end += 1
    said = re.sub(r"\bDDP_(KERNEL|NO_CONTRACTION|INSTANTIATE|DECL)\b\s*|\[\[maybe_unused\]\] |(?<=nodiscard), gnu::always_inline", "",
                  text[at:end])
    said = re.sub(r" +(?=[,)])", "", UNUSED.sub(r"\1", said))
    said = "\n".join(l.rstrip() for l in said.split("\n") if l.strip())
    said = re.sub(r"\s*=\s*\[\][\s\S]*\n[\s\S]*$", "", said)  # a constant that a function computes
    first = re.search(r"\S", text[at:end])
    column = at + first.start() - (text.rfind("\n", 0, at + first.start()) + 1) if first else 0
    return textwrap.dedent(" " * column + said.lstrip()).rstrip() + ";"


# Doxygen's XML: comments as Markdown.

def code(text: str) -> str:
    return f"``{text}``" if "`" in text else f"`{text}`"


# An identifier that nobody takes for a word: with an underscore, a scope, a member, template arguments, or a call.
NAME = r"[A-Za-z_]\w*(?:::\w+)*"
ARGUMENTS = r"(?:<(?:[\w:]+(?:<[\w:]*>)?(?: const)?(?:, |[*&])?)*>)"
CALL = r"(?:\((?!s\))[^()\s]*(?:, [^()\s]+)*\))"
PATH = r"(?:[\w-]+/)+[\w-]+\.(?:hpp|ipp|cpp|md)|--[a-z][\w-]*(?:=[\w@./-]*\w)?"  # a file of ours, an option
TOKEN = re.compile(rf"(?<![\w`/.:-])(?:{PATH}|[A-Z][A-Z_]+=\w+|{NAME}{ARGUMENTS}{CALL}?|{NAME}{CALL}|[a-z_]\w+(?:\.[A-Za-z_]\w+)+{CALL}?|"
                   rf"\w+(?:::\w+)+|[A-Za-z]\w*_\w+)(?![\w`])")
PLAIN = re.compile(r"[\\*<\[\]]|(?<!\w)_|_(?!\w)")


def plain(text: str) -> str:
    """Prose: identifiers become code, and nothing becomes markup by accident."""
    out, at = "", 0
    for m in TOKEN.finditer(text):
        out += PLAIN.sub(lambda p: p.group() if p.group() in "[]" else "\\" + p.group(), text[at:m.start()]) + code(m.group())
        at = m.end()
    return out + PLAIN.sub(lambda p: p.group() if p.group() in "[]" else "\\" + p.group(), text[at:])


# Doxygen makes typographic dashes of an option's hyphens; who wants such a dash writes it.
SIGNS = {"sp": " ", "ndash": "--", "mdash": "---", "nonbreakablespace": " ", "linebreak": "\n", "zwj": "", "lsquo": "‘", "rsquo": "’",
         "ldquo": "“", "rdquo": "”", "times": "×", "hellip": "…", "le": "≤", "ge": "≥", "minus": "−"}
BLOCKS = {"para", "itemizedlist", "orderedlist", "verbatim", "preformatted", "programlisting", "simplesect", "parblock"}


def raw(element: ElementTree.Element) -> str:
    if element.tag == "codeline":
        return "".join([element.text or "", *(raw(e) + (e.tail or "") for e in element)]).strip("\n") + "\n"
    return SIGNS.get(element.tag, element.text or "") + "".join(raw(e) + (e.tail or "") for e in element)


def inline(element: ElementTree.Element) -> str:
    """One element of a paragraph."""
    if element.tag in SIGNS:
        return SIGNS[element.tag]
    if element.tag in ("computeroutput", "formula"):
        return code(raw(element))
    if element.tag == "ulink":
        return f"[{raw(element)}]({element.get('url')})"
    inside = plain(element.text or "") + "".join(inline(e) + plain(e.tail or "") for e in element)
    if element.tag in ("bold", "emphasis"):
        sign = "**" if element.tag == "bold" else "*"
        return sign + inside + sign
    if element.tag in ("ref", "small", "highlight"):
        return raw(element) if element.tag != "ref" else plain(raw(element))
    raise ValueError(f"a comment holds <{element.tag}>, which no rule makes Markdown of")


EXAMPLES = "tests/docs/docstring_examples.cpp"
COMMAND = r"\w*run .*"
FORMULA = r"\w+ = (?:(?!::)[^;{}])+"  # which is no C++: a statement would have its semicolon


def language_of(shown: str) -> str:
    """What is before a block of a comment. Whatever is not known to be something else is an example in C++, which tests/docs/pages.py
    then looks for among those that are compiled."""
    for language, pattern in (("sh", COMMAND), ("text", FORMULA)):
        if all(re.fullmatch(pattern, line) for line in shown.split("\n")):
            return language
    return f"cpp file={EXAMPLES}"


def blocks(element: ElementTree.Element) -> list[str]:
    """Paragraphs, lists and code, each as Markdown."""
    result: list[str] = []
    words: list[tuple[bool, str]] = []  # whether it is prose still to be read as a whole

    def flush() -> None:
        said = ""
        text = "".join(t for _, t in words)
        for part in re.split(r"(\0[^\0]*\0)", text):
            said += part.strip("\0") if part.startswith("\0") else plain(part)
        words.clear()
        said = re.sub(r"[ \t]+", " ", said).strip()
        if said:
            result.append(re.sub(r"^(\d+)([.)]) ", r"\1\\\2 ", re.sub(r"^([-+#>]) ", r"\\\1 ", said)))

    def take(text: str | None) -> None:
        if text:
            words.append((True, text.replace("\n", " ")))

    take(element.text)
    for e in element:
        if e.tag not in BLOCKS:
            # a reference is prose: whether Doxygen makes one depends on its version
            if e.tag == "ref":
                take(raw(e))
            elif e.tag in SIGNS:
                take(SIGNS[e.tag])
            else:
                words.append((False, "\0" + inline(e) + "\0"))
            take(e.tail)
            continue
        flush()
        if e.tag in ("verbatim", "preformatted", "programlisting"):
            shown = textwrap.dedent(raw(e).strip("\n")).rstrip().replace("*&zwj;/", "*/")  # what Doxygen makes of a comment's end
            result.append(f"```{language_of(shown)}\n{shown}\n```")
        elif e.tag in ("itemizedlist", "orderedlist"):
            items = []
            for number, item in enumerate(e, 1):
                sign = "- " if e.tag == "itemizedlist" else f"{number}. "
                inside = "\n\n".join(blocks(item))
                items.append(sign + inside.replace("\n", "\n" + " " * len(sign)))
            result.append("\n".join(items))
        else:
            result += blocks(e)
        take(e.tail)
    flush()
    return result


def comment(member: ElementTree.Element) -> list[str]:
    said: list[str] = []
    for part in ("briefdescription", "detaileddescription"):
        element = member.find(part)
        if element is not None:
            said += blocks(element)
    return said


# What there is.

@dataclasses.dataclass
class Entity:
    name: str  # without ddp::
    kind: str
    header: str
    line: int
    declared: str
    said: list[str]
    fields: list[tuple[str, str, str, str]] = dataclasses.field(default_factory=list)  # type, name, default, meaning
    members: list["Entity"] = dataclasses.field(default_factory=list)

    @property
    def short(self) -> str:
        return self.name.rsplit("::", 1)[-1]


class Headers:
    def __init__(self, include: pathlib.Path) -> None:
        self.include = include
        self.texts: dict[str, str] = {}

    def declaration(self, header: str, line: int, name: str, constant: bool = False) -> str:
        if header not in self.texts:
            self.texts[header] = without_comments((self.include / header).read_text(encoding="utf-8"))
        return declaration(self.texts[header], line, name, constant)


def spelt(element: ElementTree.Element | None) -> str:
    """A type or a value without the blanks that Doxygen puts in."""
    text = re.sub(r"\s+", " ", raw(element) if element is not None else "").strip()
    if "<" in text and "<<" not in text:
        text = re.sub(r"\s*>", ">", re.sub(r"\s*<\s*", "<", text))
    return text


def type_of(member: ElementTree.Element) -> str:
    """A field's type; that of a pointer to a function is on both sides of its name."""
    behind = re.sub(r"\s+", " ", member.findtext("argsstring") or "").strip()
    said = spelt(member.find("type"))
    if behind.startswith("["):
        return said + behind
    result = re.sub(r"\s+([*&])", r"\1", said.removesuffix("(*"))
    return result + (" (*" + re.sub(r"\s+([*&])(?=\w)", r"\1 ", behind) if said.endswith("(*") else "")


def entity(member: ElementTree.Element, scope: str, headers: Headers) -> Entity:
    place = member.find("location")
    name, kind = member.findtext("name") or "", member.get("kind", "")
    header, line = place.get("file", ""), int(place.get("line", "0"))
    if "::" in name:
        scope, name = "", name.removeprefix("ddp::")
    declared = headers.declaration(header, line, name.rsplit("::", 1)[-1], kind == "variable")
    result = Entity(scope + name, kind, header, line, declared, comment(member))
    if kind == "enum":
        for value in member.findall("enumvalue"):
            given = spelt(value.find("initializer")).removeprefix("=").strip()
            result.fields.append(("", value.findtext("name") or "", given, " ".join(comment(value))))
        result.declared = re.sub(r"\s*:\s*[\w:]+;$|;$", ";", result.declared)
    return result


def compound(root: ElementTree.Element, headers: Headers) -> Entity:
    """A class, with what is public in it."""
    name = (root.findtext("compoundname") or "").removeprefix("ddp::")
    place = root.find("location")
    header, line = place.get("file", ""), int(place.get("line", "0"))
    result = Entity(name, root.get("kind", ""), header, line, headers.declaration(header, line, name.rsplit("::", 1)[-1]),
                    comment(root))
    for member in root.findall("sectiondef/memberdef"):
        kind, own = member.get("kind"), member.findtext("name") or ""
        if member.get("prot") != "public" or kind == "friend":
            continue
        if kind == "variable" and member.get("static") == "no":
            given = re.sub(r"^\{(.+)\}$", r"\1", spelt(member.find("initializer")).removeprefix("=").strip())
            result.fields.append((type_of(member), own, given, " ".join(comment(member))))
            continue
        one = entity(member, "", headers)
        idle = own.startswith(("~", "operator")) or own == result.short and re.search(rf"\(\s*{own}\b[^()]*(&&?)[^()]*\)", one.declared)
        if "= delete" in one.declared or (idle and not one.said and own not in ("operator()", "operator[]")):
            continue
        if not any(one.declared == other.declared for other in result.members):  # as of `int a, b;`, which declares two
            result.members.append(one)
    result.members.sort(key=lambda m: m.line)
    return result


def macro(member: ElementTree.Element) -> Entity:
    place = member.find("location")
    name = member.findtext("name") or ""
    return Entity(name, "define", place.get("file", ""), int(place.get("line", "0")), f"#define {name}", comment(member))


def inventory(xml: pathlib.Path, headers: Headers) -> dict[str, list[Entity]]:
    """Public names, without ddp::, and what they stand for: several where they are overloaded."""
    found: dict[str, list[Entity]] = {}
    index = ElementTree.parse(xml / "index.xml").getroot()
    for entry in index.findall("compound"):
        name, kind = entry.findtext("name") or "", entry.get("kind")
        if kind == "file":  # macros count as public where a comment says what they are
            root = ElementTree.parse(xml / f"{entry.get('refid')}.xml").getroot().find("compounddef")
            for member in root.findall("sectiondef/memberdef[@kind='define']"):
                if any((one := macro(member)).said) and one.name not in found:
                    found[one.name] = [one]
            continue
        if kind not in ("class", "struct", "concept", "namespace") or not re.match(r"ddp(::|$)", name) or "<" in name:
            continue
        if re.search(r"\bdetail\b", name):
            continue
        root = ElementTree.parse(xml / f"{entry.get('refid')}.xml").getroot().find("compounddef")
        if kind == "namespace":
            scope = (name + "::").removeprefix("ddp::")
            for member in root.findall("sectiondef/memberdef"):
                if not (member.findtext("name") or "").startswith("operator"):
                    one = entity(member, scope, headers)
                    found.setdefault(one.name, []).append(one)
        elif root.get("prot", "public") == "public":
            one = compound(root, headers)
            found.setdefault(one.name, []).append(one)
    for name in sorted(found, key=len, reverse=True):  # nested classes belong to theirs
        for one in found.get(name.rpartition("::")[0], []):
            if one.kind in ("class", "struct"):
                one.members += [inner for inner in found.pop(name, []) if inner.said and all(f[3] for f in inner.fields)]
                one.members.sort(key=lambda m: m.line)
    for entities in found.values():
        entities.sort(key=lambda e: (e.kind == "function", e.header, e.line))
    return found


# The table of contents.

@dataclasses.dataclass
class Entry:
    name: str
    having: str = ""  # overloads whose declaration has this, …
    lacking: str = ""  # … and lacks this
    hides: frozenset[str] = frozenset()

    def picks(self, one: Entity) -> bool:
        return self.having in one.declared and not (self.lacking and self.lacking in one.declared)


@dataclasses.dataclass
class Page:
    file: str
    title: str
    intro: list[str] = dataclasses.field(default_factory=list)
    parts: list[tuple[str, list[str], list[Entry]]] = dataclasses.field(default_factory=list)  # heading, text, entries


def contents(text: str) -> tuple[list[Page], list[Entry]]:
    """Lines:  page FILE TITLE · hide MEMBER… · section TITLE · text WORDS · NAME [with TEXT | without TEXT] · omit NAME… · # why"""
    pages: list[Page] = []
    omitted: list[Entry] = []
    hides: frozenset[str] = frozenset()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0] == "#":
            continue
        rest = line.split(None, 1)[1] if len(words) > 1 else ""
        if words[0] == "page":
            pages.append(Page(words[1], rest.split(None, 1)[1]))
            hides = frozenset()
        elif words[0] == "omit":
            omitted += [Entry(w) for w in words[1:]]
        elif not pages:
            raise ValueError(f"line {number}: a page comes first")
        elif words[0] == "hide":
            hides = frozenset(words[1:])
        elif words[0] == "section":
            pages[-1].parts.append((rest, [], []))
        elif words[0] == "text":
            (pages[-1].parts[-1][1] if pages[-1].parts else pages[-1].intro).append(rest)
        elif len(words) == 1 or words[1] in ("with", "without"):
            what = line.split(None, 2)[2] if len(words) > 2 else ""
            having, lacking = (what, "") if len(words) > 1 and words[1] == "with" else ("", what)
            pages[-1].parts[-1][2].append(Entry(words[0], having, lacking, hides))
        else:
            raise ValueError(f"line {number}: '{line}' is no line of this table")
    return pages, omitted


# Pages.

def cell(text: str) -> str:
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
    return text.removesuffix(".") if ". " not in text else text


def table(one: Entity, hides: frozenset[str]) -> list[str]:
    fields = [f for f in one.fields if f[3] or f[1] not in hides]  # what is explained is meant for readers
    if not fields:
        return []
    if one.kind == "enum" and not any(said for _, _, _, said in fields):
        return ["Values: " + ", ".join(code(name) for _, name, _, _ in fields) + "."]
    if one.kind == "enum":
        rows = ["| value | meaning |", "|---|---|"]
        rows += [f"| {code(name)}{' = ' * bool(given)}{given} | {cell(said)} |" for _, name, given, said in fields]
    else:
        rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
        rows += [f"| {code(name)} | {cell(code(type_))} | {cell(code(given)) if given else ''} | {cell(said)} |"
                 for type_, name, given, said in fields]
    return ["\n".join(rows)]


def with_remark(one: Entity) -> Entity:
    """A member whose comment is a remark, not a sentence, has it behind its declaration."""
    if len(one.said) != 1 or not re.match(r"[a-z][^`\\\n]*$", one.said[0]) or len(one.declared) + len(one.said[0]) > 120:
        return one
    return dataclasses.replace(one, declared=f"{one.declared}  // {one.said[0]}", said=[])


def listed(members: list[Entity], functions: bool) -> list[str]:
    """Declarations, each with what is said of it; those of which nothing is said stand together, overloads with those before them
    in their header."""
    result: list[str] = []
    group: list[str] = []
    last: Entity | None = None

    def flush(said: list[str]) -> None:
        if group:
            result.append("```cpp\n" + "\n".join(group) + "\n```")
            group.clear()
        result.extend(said)

    pending: list[str] = []
    for one in map(with_remark, members):
        follows = last is not None and not one.said and one.header == last.header and (
            functions or one.short == last.short or not pending)
        if one.kind in ("class", "struct", "enum"):  # nested
            flush(pending)
            result += [f"```cpp\n{one.declared}\n```", *one.said, *table(one, frozenset())]
            last, pending = None, []
            continue
        if not follows:
            flush(pending)
            pending = one.said
        group.append(one.declared)
        last = one
    flush(pending)
    return result


def render_entry(entities: list[Entity], hides: frozenset[str]) -> list[str]:
    first = entities[0]
    out = ["### " + first.short]
    headers = sorted({e.header for e in entities})
    out.append(f"`{'' if first.kind == 'define' else 'ddp::'}{first.name}` · " + ", ".join(f"`#include <{h}>`" for h in headers))
    classes = [e for e in entities if e.kind != "function"]
    for one in classes:
        out += [f"```cpp\n{one.declared}\n```", *one.said, *table(one, hides)]
        out += listed([m for m in one.members if m.short not in hides], False)
    out += listed([e for e in entities if e.kind == "function"], True)
    return out


def linked(block: str, here: str, seen: set[str], places: dict[str, tuple[str, str]], functions: set[str]) -> str:
    """Names of other entries, where they are first mentioned, lead to them; a call only to a function."""
    if block.startswith("```"):
        return block

    def link(found: re.Match) -> str:
        said = found.group("code") or found.group("word") or ""
        name = said.strip("`").removeprefix("ddp::").removesuffix("()")
        if name in seen or name not in places or ("()" in said and name not in functions):
            return found.group()
        seen.add(name)
        file, anchor = places[name]
        return f"{found.group('see') or ''}[{code(said.strip('`'))}]({'' if file == here else file}#{anchor})"

    # a link; code; or a word that can only be a name: a concept's, or one that the reader is told to see
    pieces = re.compile(r"\[[^\]\n]*\]\([^)\n]*\)|``.*?``|(?P<code>`[^`\n]+`)|"
                        r"(?P<see>\b[Ss]ee )?(?P<word>(?(see)\w+|\b[A-Z][a-z]+[A-Z]\w*))")
    return pieces.sub(link, block)


def wrapped(block: str) -> str:
    """Prose in lines that a diff can show."""
    if block.startswith(("```", "|", "#", "<!--")) or "` · `#include" in block:
        return block
    lines = []
    for line in block.split("\n"):
        indent = re.match(r" *(?:- |\d+\. )?", line).group()
        lines.append(textwrap.fill(line[len(indent):], 120, initial_indent=indent, subsequent_indent=" " * len(indent),
                                   break_long_words=False, break_on_hyphens=False) if line.strip() else "")
    return "\n".join(lines)


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def functions_of(found: dict[str, list[Entity]]) -> set[str]:
    return {n for name, entities in found.items() if all(e.kind == "function" for e in entities)
            for n in (name, name.rsplit("::", 1)[-1])}


def render(pages: list[Page], found: dict[str, list[Entity]]) -> dict[str, str]:
    places: dict[str, tuple[str, str]] = {}
    for page in pages:
        for _, _, entries in page.parts:
            for e in entries:
                places.setdefault(e.name, (page.file, anchor_of(e.name.rsplit("::", 1)[-1])))
                places.setdefault(e.name.rsplit("::", 1)[-1], places[e.name])
    functions = functions_of(found)
    result = {}
    for page in pages:
        out = [f"# Reference: {page.title}", NOTE, *page.intro]
        shown = [(h, [e for e in entries if e.name in found]) for h, _, entries in page.parts]
        out.append("\n".join(f"- [{h}](#{anchor_of(h)}): " + ", ".join(
            f"[{code(n)}](#{anchor_of(n)})" for n in (e.name.rsplit("::", 1)[-1] for e in entries)) if entries
            else f"- [{h}](#{anchor_of(h)})" for h, entries in shown))
        for heading, text, entries in page.parts:
            out += ["## " + heading, *text]
            for e in entries:
                picked = [one for one in found.get(e.name, []) if e.picks(one)]
                if picked:
                    body = render_entry(picked, e.hides)
                    inside = [each for one in picked for each in (one, *one.members)]
                    seen = {e.name.rsplit("::", 1)[-1], *(each.short for each in inside)}  # and what these names mean here
                    seen |= {field[1] for each in inside for field in each.fields}
                    out += body[:2] + [wrapped(linked(block, page.file, seen, places, functions)) for block in body[2:]]
        result[page.file] = "\n\n".join(out) + "\n"
    return result


OUT_OF_PLACE = r"(The same\b(?! on all ranks)|Likewise|As above|One of them|All of them|See there|Of them)"
DAMAGES = (  # what a page must not show: in prose and tables, and in declarations
    ("a character that Doxygen has written as an entity", r"&#?\w+;", r"&#?\w+;"),
    ("a dash where an option's hyphens stood", r"(?<![\w–—])[–—](?=[a-z])", None),
    ("a product that was taken for a call", r"\)`(?=[/(\[])", None),
    ("one declaration twice", None, r"^(.+;)\n\1$"),
    ("a type that is cut", r"^\| `\w+` \| \[?`(?:[^`(]*\([^`)]*|[^`<]*<[^`>]*)`", None))


def damages(file: str, text: str, functions: set[str], anchors: dict[tuple[str, str], str], hidden: set[str]) -> list[str]:
    """What the generator, or Doxygen, has spoilt in a page; and names that it speaks of although they are on no page."""
    problems = []
    for part in re.split(r"(^ *```.*?^ *```$)", text, flags=re.S | re.M):
        declared = part.lstrip().startswith("```")
        for what, in_prose, in_code in DAMAGES:
            pattern = in_code if declared else in_prose
            if pattern and (hit := re.search(pattern, part, re.M)):
                problems.append(f"{file} shows {what}: {part[max(0, hit.start() - 30):hit.end() + 20].strip()!r}")
        if not declared:
            for said, target, anchor in re.findall(r"\[`([^`]*)`\]\(([\w.]*)#([\w-]+)\)", part):
                if said.endswith("()") and anchors.get((target or file, anchor)) not in functions:
                    problems.append(f"{file} links {said} to {target}#{anchor}, which is no function")
        words = set(re.findall(r"(?<![\w.])(?:ddp::|nn::)*(\w+)", part if declared else " ".join(re.findall(r"`([^`]+)`", part))))
        problems += [f"{file} speaks of {name}, which is on no page" for name in sorted(words & hidden)]
    return problems


def run_together(header: str, lines: list[str]) -> list[str]:
    """Lines at the margin right behind an item of a list, of which Doxygen makes a part of that item."""
    problems = []
    item = 0  # the column of the item's text, while its lines follow each other
    for number, line in enumerate(lines, 1):
        said = re.match(r"\s*///(?!<)( *)(.*)$", line)
        mark = said and re.match(r"(-|\d+\.) +", said.group(2))
        if not said or not said.group(2):
            item = 0
        elif mark:
            item = len(said.group(1)) + len(mark.group())
        elif item and len(said.group(1)) <= 2:
            problems.append(f"{header}:{number}: '{said.group(2)[:40]}…' becomes a part of the list's item before it")
            item = 0
    return problems


def complaints(pages: list[Page], omitted: list[Entry], found: dict[str, list[Entity]]) -> list[str]:
    problems = []
    entries = [(p.file, e) for p in pages for _, _, names in p.parts for e in names]
    entries += [("omit", e) for e in omitted]
    placed: dict[int, str] = {}
    for file, entry in entries:
        picked = [one for one in found.get(entry.name, []) if entry.picks(one)]
        if not picked:
            problems.append(f"contents.txt: {file}: there is no {entry.name} that is public")
        for one in picked:
            if id(one) in placed:
                problems.append(f"contents.txt: {entry.name} ({one.header}:{one.line}) stands twice: {placed[id(one)]}, {file}")
            placed[id(one)] = file
        if file == "omit" or not picked:
            continue
        for header in sorted({one.header for one in picked}):  # an overload has the comment of one before it in its header, if any
            here = [one for one in picked if one.header == header]
            if not any(one.said for one in here):
                problems.append(f"{header}:{here[0].line}: {entry.name} is on {file}, and no comment says what it is")
        opening = next((one.said[0] for one in picked if one.said), "")
        if re.match(OUT_OF_PLACE, opening):
            problems.append(f"{picked[0].header}:{picked[0].line}: {entry.name} is on {file}, and its comment begins with "
                            f"'{opening.split('.')[0]}', as if something stood before it")
        for one in picked:
            silent = [name for _, name, _, said in one.fields if not said and name not in entry.hides]
            if one.kind != "enum" or len(silent) < len(one.fields):  # an enumeration explains all of its values, or none
                problems += [f"{one.header}: {one.name}::{name} is on {file}, and no comment says what it means" for name in silent]
    for page in pages:
        headings = [h for h, _, _ in page.parts] + [e.name.rsplit("::", 1)[-1] for _, _, names in page.parts for e in names]
        anchors = [anchor_of(h) for h in headings]
        problems += [f"contents.txt: {page.file} has two headings that are linked to as #{a}"
                     for a in sorted(set(anchors)) if anchors.count(a) > 1]
    for name, entities in sorted(found.items()):
        for one in entities:
            if id(one) not in placed:
                problems.append(f"{one.header}:{one.line}: {name} is public, but on no page and not omitted")
    return problems


def read_headers() -> dict[str, list[Entity]]:
    if shutil.which("doxygen") is None:
        print("reference pages: skipped, for doxygen is not installed")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as directory:
        settings = (ROOT / "docs/Doxyfile").read_text(encoding="utf-8") + textwrap.dedent(f"""
            INPUT = include/ddp
            USE_MDFILE_AS_MAINPAGE =
            JAVADOC_AUTOBRIEF = NO
            GENERATE_HTML = NO
            GENERATE_XML = YES
            XML_PROGRAMLISTING = NO
            OUTPUT_DIRECTORY = "{directory}"
            """)
        write_all(ROOT, pathlib.Path(directory) / "input")
        done = subprocess.run(["doxygen", "-"], cwd=f"{directory}/input", input=settings, text=True)
        if done.returncode != 0:
            sys.exit("reference pages: doxygen failed")
        return inventory(pathlib.Path(directory) / "xml", Headers(ROOT / "include"))


def self_test() -> None:
    text = without_comments(textwrap.dedent("""\
        struct options {  // {
            int a = 1;  // one
            int b{};
        };
        template <class T>
            requires requires(T const& t) {
                { t.x() } -> same<int>;
            }
        [[nodiscard]] int f(T const& t,  // "
                            int n = g({1}));
        class thing : public other<int> {
        public:
            explicit thing(int a) : a_(a) {}
            ~thing();
            DDP_KERNEL static void go(int* p = nullptr, int n = {}) noexcept { ++*p; }
        };
        template <class T>
        concept X = requires(T t) { t.go(); };
        enum class colour : int { red, green };
        inline constexpr int n = int{1} * int{2};
        inline constexpr bool b = [] {
            return true;
        }();
        [[nodiscard, gnu::always_inline]] bool same([[maybe_unused]] int left, int /*right*/, int = 0 /* the third */) noexcept;
        """))
    for line, name, expected in (
            (1, "options", "struct options;"), (3, "b", "int b;"), (11, "thing", "class thing : public other<int>;"),
            (13, "thing", "explicit thing(int a);"), (15, "go", "static void go(int* p = nullptr, int n = {}) noexcept;"),
            (18, "X", "template <class T>\nconcept X = requires(T t) { t.go(); };"), (19, "colour", "enum class colour : int;"),
            (20, "n", "inline constexpr int n = int{1} * int{2};"), (21, "b", "inline constexpr bool b;"),
            (24, "same", "[[nodiscard]] bool same(int left, int right, int = 0) noexcept;"),
            (9, "f", "template <class T>\n    requires requires(T const& t) {\n        { t.x() } -> same<int>;\n    }\n"
                     "[[nodiscard]] int f(T const& t,\n                    int n = g({1}));")):
        said = declaration(text, line, name, constant=line > 19)
        assert said == expected, said

    def said(xml: str) -> list[str]:
        return blocks(ElementTree.fromstring(f"<d>{xml}</d>"))
    assert said("<para>Throws <ref refid='x'>usage_error</ref> if a * b &lt; c, see f().</para>") == \
        ["Throws `usage_error` if a \\* b \\< c, see `f()`."]
    assert said("<para>a_<bold>b</bold> <computeroutput>x * y</computeroutput></para>") == ["a\\_**b** `x * y`"]
    assert said("<para>One:<itemizedlist><listitem><para>x</para></listitem><listitem><para>y</para></listitem></itemizedlist>two"
                "</para>") == ["One:", "- x\n- y", "two"]
    for words, expected in (("run<threads, tcp>(body) of a communicator<>", "`run<threads, tcp>(body)` of a `communicator<>`"),
                            ("sqrt(inputs), e.g. in [0, p)", "`sqrt(inputs)`, e.g. in [0, p)"), ("a < b > c", "a \\< b > c"),
                            ("f() throws errc::file in model.step().", "`f()` throws `errc::file` in `model.step()`.")):
        assert plain(words) == expected, plain(words)
    assert said("<para>of --signal=USR1@120, in ddp/core/text.hpp; <ndash/>version: a<ndash/>b</para>") == \
        ["of `--signal=USR1@120`, in `ddp/core/text.hpp`; `--version`: a--b"]
    assert said("<para><verbatim>f(/* a *&amp;zwj;/);</verbatim></para>") == [f"```cpp file={EXAMPLES}\nf(/* a */);\n```"]
    for type_, behind, expected in (("std::span&lt; a&lt; E &gt; const &gt;", "", "std::span<a<E> const>"), ("E const *", "", "E const*"),
                                    ("b&lt; c &gt; const &amp;", "", "b<c> const&"), ("int", "[4]", "int[4]"),
                                    ("std::unique_ptr&lt; d &gt;(*", ")(e const &amp;f, bool g)",
                                     "std::unique_ptr<d> (*)(e const& f, bool g)")):
        field = ElementTree.fromstring(f"<m><type>{type_}</type><argsstring>{behind}</argsstring></m>")
        assert type_of(field) == expected, type_of(field)
    assert said("<para><verbatim>  a\n    b\n</verbatim></para>") == [f"```cpp file={EXAMPLES}\na\n  b\n```"]
    for shown, expected in (("mpirun a\nsrun b", "sh"), ("g = 2 * v   (n > 0)\nv = a ? v + g : |v|^2", "text"), ("f(x)", "cpp"),
                            ("run(x);", "cpp"), ("mpirun a\nf()", "cpp"), ("v = f(x);", "cpp"), ("v = f(x)\ng(v)", "cpp"),
                            ("v = a::f(x)", "cpp"), ("v = t{1}", "cpp"), ("a b = f(x)", "cpp")):
        assert language_of(shown).split(" ")[0] == expected, shown
    try:
        said("<para><image/></para>")
        raise SystemExit("what no rule is for must not be lost")
    except ValueError:
        pass

    f, g = Entity("f", "function", "f.hpp", 1, "void f(int);", ["Says f."]), Entity("f", "function", "f.hpp", 2, "void f(lane);", [])
    s = Entity("n::s", "struct", "s.hpp", 1, "struct s;", ["An s, unlike `f`."], [("int", "a", "1", "one | two")])
    found = {"f": [f, g], "n::s": [s]}
    table_of = lambda text: contents(textwrap.dedent(text))
    pages, omitted = table_of("""\
        page a.md Words and names
        text Some words.
        section First
        f without lane
        n::s
        # because
        omit f
        """)
    assert len(complaints(pages, omitted, found)) == 1, complaints(pages, omitted, found)  # f(int) stands twice
    pages, omitted = table_of("page a.md A\nsection First\nf without lane\nn::s\npage b.md B\nsection First\nf with lane\n")
    assert complaints(pages, omitted, found) == ["f.hpp:2: f is on b.md, and no comment says what it is"]
    assert complaints(*table_of("page a.md A\nsection First\nf\n"), found) == \
        ["s.hpp:1: n::s is public, but on no page and not omitted"]
    assert len(complaints(*table_of("page a.md A\nsection First\nf\nn::s\nomit no\n"), found)) == 1
    assert len(complaints(*table_of("page a.md A\nsection F\nf\nn::s\n"), found)) == 1
    s.fields.append(("int", "b", "", ""))
    assert len(complaints(*table_of("page a.md A\nsection First\nf\nn::s\n"), found)) == 1
    places = {"f": ("b.md", "f"), "AnX": ("a.md", "anx")}
    for words, expected in (("see f, or AnX", "see [`f`](b.md#f), or [`AnX`](#anx)"), ("`f` f `f`", "[`f`](b.md#f) f `f`"),
                            ("[AnX](x) `see f`", "[AnX](x) `see f`"), ("see g", "see g")):
        assert linked(words, "a.md", set(), places, {"f"}) == expected, linked(words, "a.md", set(), places, {"f"})
    assert linked("`s()` `f()`", "a.md", set(), places | {"s": ("a.md", "s")}, {"f"}) == "`s()` [`f()`](b.md#f)"

    assert "| `a` |" in table(s, frozenset({"a"}))[0]  # a field with a comment is for readers, whatever is hidden elsewhere

    # members: remarks stand behind, overloads under the comment before them, nested types with their values
    colour = Entity("colour", "enum", "m.hpp", 3, "enum class colour;", ["A colour."], [("", "red", "", "")])
    shown = listed([Entity("a", "variable", "m.hpp", 1, "int a;", ["in bytes"]), Entity("b", "variable", "m.hpp", 2, "int b;", ["Not a."]),
                    colour, Entity("c", "function", "m.hpp", 4, "int c();", [])], False)
    assert shown == ["```cpp\nint a;  // in bytes\n```", "```cpp\nint b;\n```", "Not a.", "```cpp\nenum class colour;\n```", "A colour.",
                     "Values: `red`.", "```cpp\nint c();\n```"], shown
    elsewhere = listed([f, dataclasses.replace(g, header="h.hpp")], True)
    assert elsewhere == ["```cpp\nvoid f(int);\n```", "Says f.", "```cpp\nvoid f(lane);\n```"], elsewhere
    other = Entity("f", "function", "h.hpp", 1, "void f(double);", [])
    assert len(complaints(*table_of("page a.md A\nsection First\nf\nn::s\n"), found | {"f": [f, g, other]})) == 2
    late = dataclasses.replace(f, said=["The same for sums."])
    assert len(complaints(*table_of("page a.md A\nsection First\nf\nn::s\n"), found | {"f": [late]})) == 2

    # what a page must not show
    for text, count in (("a &zwj; b", 1), ("Slurm's –signal, 1–2", 1), ("`b(P-1)`/P, `f()`, (`g()`)", 1),
                        ("| `a` | `std::unique_ptr<b>(*` | |", 1), ("| `a` | [`std::span<b`](#b) | |", 1),
                        ("| `a` | `b<c> (*)(int d)` | `e(1)` |", 0), ("see `the_hidden`, hidden", 1),
                        ("see [`g()`](#g), [`f()`](#f)", 1), ("```cpp\nint a;\nint a;\n```", 1),
                        ("```cpp\nint a;\nint b;\n```", 0), ("```cpp\nthe_hidden a;\n```", 1)):
        found_ = damages("a.md", text, {"f"}, {("a.md", "f"): "f", ("a.md", "g"): "g"}, {"the_hidden"})
        assert len(found_) == count, (text, found_)
    for text, count in (("/// - a\n///   b\n///\n/// c", 0), ("/// - a\n/// b\n", 1), ("/// 1. a\n///    b\n/// b\n", 1),
                        ("/// a\n/// b\n", 0)):
        assert len(run_together("a.hpp", text.split("\n"))) == count, text
    table_ = ["///  f(a)  is f\n", "///  g(a, b)\n", "///        is g\n", "int x;\n", "/// This is\n"]
    assert list(header_lines(table_)) == ["/// - `f(a)` is f\n", "/// - `g(a, b)`\n", "///        is g\n", "int x;\n", "/// This is\n"]

    page = render(table_of("page a.md A\nsection First\nf\nn::s\n")[0], found)["a.md"]
    for expected in ("### f\n\n`ddp::f` · `#include <f.hpp>`\n\n```cpp\nvoid f(int);\nvoid f(lane);\n```\n\nSays f.\n",
                     "| `a` | `int` | `1` | one \\| two |", "An s, unlike [`f`](#f)."):
        assert expected in page, page
    print("the generator does what it should")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    folder = ROOT / "docs/reference"
    pages, omitted = contents((folder / "contents.txt").read_text(encoding="utf-8"))
    found = read_headers()
    problems = complaints(pages, omitted, found)
    texts = render(pages, found)
    for path in sorted(folder.glob("*.md")):
        if path.name not in texts:
            problems.append(f"docs/reference/{path.name}: no page of contents.txt")
    functions = functions_of(found)
    anchors = {(p.file, anchor_of(e.name.rsplit("::", 1)[-1])): e.name for p in pages for _, _, names in p.parts for e in names}
    members = {m for entities in found.values() for e in entities for m in [f[1] for f in e.fields] + [m.short for m in e.members]}
    hidden = {n for e in omitted if "_" in (n := e.name.rsplit("::", 1)[-1]) or re.match(r"[A-Z][a-z]+[A-Z]", n)} - members
    for path in sorted((ROOT / "include").rglob("*.hpp")):
        problems += run_together(path.relative_to(ROOT).as_posix(), list(header_lines(path.open(encoding="utf-8"))))
    for name, text in texts.items():
        problems += damages(name, text, functions, anchors, hidden)
        path = folder / name
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        if before == text:
            continue
        if sys.argv[1:]:
            change = list(difflib.unified_diff(before.splitlines(), text.splitlines(), name, "headers", lineterm="", n=1))
            problems.append(f"docs/reference/{name} is not what the headers say; run scripts/reference_pages.py:\n  " +
                            "\n  ".join(change[:20]))
        else:
            path.write_text(text, encoding="utf-8")
    shown = sum(len(names) for p in pages for _, _, names in p.parts)
    print("\n".join(problems) or f"{shown} names on {len(pages)} pages, {len(omitted)} omitted, as the headers say")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
