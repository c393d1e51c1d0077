#!/usr/bin/env python3
"""Checks that the headers keep to the rules of docs/design.md: levels, modules and components.

 - a header includes its own module and lower levels; modules of one level do not see each other
 - heavy libraries are included by components' headers only (cmake/components.txt), and these by components' headers only
 - the umbrella ddp/ddp.hpp includes no component's header; no header asks what there is (#if DDP_HAVE...)
 - definitions in <module>/impl/x.ipp belong to the module and component of <module>/x.hpp; that header includes them, unless they are
   compiled once, and src/ddp.cpp, which defines DDP_WITH_… for a component's; nobody else does
 - whoever compiles as C++17 is told so, whichever header comes first: a header without others of ours, and one with <coroutine>,
   begins with ddp/core/language.hpp
 - secrets, and proofs of them, are compared in constant time: by CRYPTO_memcmp, or same_secret in core/secret_bytes.hpp
 - every header has `#pragma once`, begins with `/// \\file`, includes nothing twice or in a circle, and has at most 400 lines

usage: check_layers.py [ROOT]    checks the repository at ROOT (default: this one)
       check_layers.py --self-test    checks the checker: each kind of mistake, put into a small tree, is found
"""
import fnmatch
import pathlib
import re
import sys
import tempfile

LEVELS = {
    0: ["core"],
    1: ["kernel", "model", "comm", "data"],
    2: ["transport", "optim", "nn"],
    3: ["collective", "rendezvous"],
    4: ["exchange"],
    5: ["train"],
    6: ["strategy", "sim", "adapter", "checkpoint", "testing"],
}
LEVEL_OF = {module: level for level, modules in LEVELS.items() for module in modules}
UMBRELLA = "ddp/ddp.hpp"
LANGUAGE = "ddp/core/language.hpp"
LONGEST = 400  # lines of a file

# Which third party a component may include; whoever is not named here includes none.
THIRD_PARTY = {
    "tcp": r"boost/(asio|system)[/.].*|xxhash\.h",
    "mpi": r"boost/(mpi|serialization)[/.].*|mpi\.h",
    "secure": r"openssl/.*",
    "nn": r"Eigen/.*",
    "gzip": r"zlib\.h",
}
STANDS_ON = {"secure": "tcp"}  # a component that includes another
STANDARD = r"[a-z_0-9]+"
SYSTEM = r"(sys|arpa|net|netinet|linux)/[a-z_0-9]+\.h|(dirent|dlfcn|errno|fcntl|ifaddrs|netdb|poll|pthread|pwd|sched|signal|spawn|time|ulimit|unistd)\.h"

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
# What stops at the first byte that differs tells by its time how many were right.
COMPARES = r"(?<!CRYPTO_)\b(?:memcmp|strn?cmp|(?:ranges::)?(?:equal|mismatch)|lexicographical_compare\w*)\s*\("
HASTY = re.compile(rf"{COMPARES}[^;]*\b\w*(?:secret|proof|tag|claim)\w*"
                   r"|\b\w*secret_?(?:\.bytes|\.data\(\))?\s*(?:[!=]=|<=>)|(?:[!=]=|<=>)\s*(?:\w+(?:\.|->))*\w*secret_?(?:\.bytes)?\b(?![\w.(])")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def read_components(root):
    components = []
    for line in (root / "cmake" / "components.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            components.append(tuple(line.split()))
    return components


def header_of(file):
    """A header itself; of an .ipp file, which holds a header's definitions, that header."""
    return re.sub(r"/impl/([^/]+)\.ipp$", r"/\1.hpp", file)


def component_of(header, components):
    header = header_of(header)
    return next((component for component, pattern in components if fnmatch.fnmatchcase(header, pattern)), None)


def module_of(header):
    parts = header.split("/")
    return parts[1] if len(parts) > 2 else None


def check_include(header, kind, included, known, components):
    """What is wrong with one include, or None."""
    component = component_of(header, components)
    if kind == '"':
        return f'write <ddp/...> instead of "{included}"'
    if not included.startswith("ddp/"):
        if re.fullmatch(STANDARD, included) or re.fullmatch(SYSTEM, included):
            return None
        if component is None:
            return f"<{included}> is a heavy library: only a component's header (cmake/components.txt) includes one"
        if not re.fullmatch(THIRD_PARTY.get(component, ""), included):
            return f"<{included}> does not belong to the component {component}"
        return None
    if included not in known:
        return f"<{included}> is not there"
    other_component = component_of(included, components)
    if other_component is not None and component is None:
        return f"<{included}> belongs to the component {other_component}: only components' headers include one another's"
    if other_component is not None and other_component not in (component, STANDS_ON.get(component)):
        return f"<{included}> belongs to the component {other_component}, this header to {component}"
    if header == UMBRELLA:
        return None
    if included == UMBRELLA:
        return "the umbrella is for users"
    module, other = module_of(header), module_of(included)
    if module != other and LEVEL_OF.get(other, 99) >= LEVEL_OF.get(module, -1):
        return f"{module}/ (level {LEVEL_OF[module]}) must not see {other}/ (level {LEVEL_OF.get(other, '?')})"
    return None


def check_compiled_once(root, files, components):
    """src/ddp.cpp includes every .ipp file, a component's inside #if defined(DDP_WITH_...); each header ends with its own."""
    source = root / "src" / "ddp.cpp"
    problems, component, found = [], None, {}
    for line in source.read_text().splitlines() if source.is_file() else []:
        if re.match(r"\s*#\s*if", line):
            name = re.match(r"\s*#\s*if defined\(DDP_WITH_([A-Z]+)\)$", line)
            component = name[1].lower() if name else None
        elif re.match(r"\s*#\s*endif", line):
            component = None
        elif include := INCLUDE.match(line):
            found[include[2]] = component
    for file in files:
        if not file.endswith(".ipp"):
            continue
        if file not in found:
            problems.append(f"{file}: is not in src/ddp.cpp, so that programs compiled once would miss it")
        elif found[file] != component_of(file, components):
            problems.append(f"{file}: src/ddp.cpp includes it for the component {found[file]}, its header is {component_of(file, components)}")
        own = f"\n#if !defined(DDP_SEPARATE_COMPILATION)\n#include <{file}>\n#endif\n"
        if not files.get(header_of(file), own).endswith(own):
            problems.append(f"{file}: its header does not end with #include <{file}>, unless DDP_SEPARATE_COMPILATION")
    return problems


def find_circles(includes):
    problems, state = [], {}

    def visit(header, path):
        state[header] = "open"
        for included in includes.get(header, ()):
            if state.get(included) == "open":
                problems.append(f"{header}: a circle of includes: {' > '.join([*path, header, included])}")
            elif included not in state:
                visit(included, [*path, header])
        state[header] = "done"

    for header in includes:
        if header not in state:
            visit(header, [])
    return problems


def check(root):
    """All problems, as lines; and the number of headers looked at."""
    include_dir = root / "include"
    paths = sorted([*include_dir.rglob("*.hpp"), *include_dir.rglob("*.ipp")])
    files = {path.relative_to(include_dir).as_posix(): path.read_text() for path in paths}
    components = read_components(root)
    problems, includes = [], {}
    for header, text in files.items():
        module = module_of(header)
        if header != UMBRELLA and module not in LEVEL_OF:
            problems.append(f"{header}: the rules have no module {module}; name it, with its level, in scripts/check_layers.py")
            continue
        if not text.startswith("/// \\file\n/// "):
            problems.append(f"{header}: does not begin with /// \\file and a sentence that says what it is")
        if "\n#pragma once\n" not in text:
            problems.append(f"{header}: has no #pragma once")
        if text.count("\n") > LONGEST:
            problems.append(f"{header}: is longer than {LONGEST} lines: what else is it about that has a header of its own?")
        code = COMMENT.sub("", text)
        if re.search(r"^\s*#\s*if.*DDP_HAVE", code, re.MULTILINE):
            problems.append(f"{header}: asks for a feature with #if; a feature is there because its header was included")
        if hasty := HASTY.search(code) or "secret" in header and re.search(COMPARES, code):
            problems.append(f"{header}: compares a secret, or a proof of one, byte by byte: {' '.join(hasty[0].split())}")
        listed = [included for _, included in INCLUDE.findall(code)]
        alone = not any(included.startswith("ddp/") and header_of(included) != header for included in listed)
        if header.endswith(".hpp") and header != LANGUAGE and (alone or "coroutine" in listed) and listed[:1] != [LANGUAGE]:
            problems.append(f"{header}: does not begin with #include <{LANGUAGE}>, which tells who compiles as C++17")
        seen = set()
        for kind, included in INCLUDE.findall(code):
            if included in seen and included.startswith("ddp/"):
                problems.append(f"{header}: includes <{included}> twice")
            seen.add(included)
            problem = check_include(header, kind, included, files, components)
            if problem:
                problems.append(f"{header}: {problem}")
        if header.endswith(".ipp") and header_of(header) not in files:
            problems.append(f"{header}: holds the definitions of {header_of(header)}, which is not there")
        if any(included.endswith(".ipp") and header_of(included) != header for included in seen):
            problems.append(f"{header}: an .ipp file is included by its own header and by src/ddp.cpp")
        # A header ends with its .ipp file, which may be compiled alone and so includes the header: no circle.
        includes[header] = [included for included in seen if included in files and included != header_of(header)]
    for component, pattern in components:
        if component not in THIRD_PARTY:
            problems.append(f"cmake/components.txt: {component} ({pattern}) is not a component that scripts/check_layers.py knows")
    return problems + check_compiled_once(root, files, components) + find_circles(includes), len(files)


def self_test():
    bare = "/// \\file\n/// A sentence.\n#pragma once\n\n"
    good = bare + "#include <ddp/core/language.hpp>\n"

    def ends_with(file):
        return f"\n#if !defined(DDP_SEPARATE_COMPILATION)\n#include <ddp/{file}>\n#endif\n"

    source = "../../src/ddp.cpp"
    base = {
        source: "#define DDP_SOURCE_FILE\n#include <ddp/comm/impl/framed.ipp>\n"
        + "#if defined(DDP_WITH_TCP)\n#include <ddp/comm/impl/tcp.ipp>\n#endif\n",
        "core/language.hpp": bare,
        "core/error.hpp": good + "#include <string>\n#include <sys/socket.h>\n",
        "comm/framed.hpp": good + "#include <ddp/core/error.hpp>\n// #include <boost/asio.hpp>\n" + ends_with("comm/impl/framed.ipp"),
        "comm/impl/framed.ipp": good + "#include <ddp/comm/framed.hpp>\n",
        "comm/tcp.hpp": good + "#include <ddp/comm/framed.hpp>\n#include <utility>\n#include <boost/asio.hpp>\n" + ends_with("comm/impl/tcp.ipp"),
        "comm/impl/tcp.ipp": good + "#include <ddp/comm/tcp.hpp>\n#include <xxhash.h>\n",
        "model/model.hpp": good,
        "nn/linear.hpp": good + "#include <ddp/model/model.hpp>\n#include <Eigen/Core>\n",
        "train/engine.hpp": good + "#include <ddp/comm/framed.hpp>\n#include <ddp/model/model.hpp>\n",
        "ddp.hpp": good + "#include <ddp/train/engine.hpp>\n",
    }
    mistakes = {
        "upward": ("core/error.hpp", "#include <ddp/model/model.hpp>\n", "must not see model/"),
        "sideways": ("comm/framed.hpp", "#include <ddp/model/model.hpp>\n", "must not see model/"),
        "heavy": ("comm/framed.hpp", "#include <boost/asio.hpp>\n", "heavy library"),
        "heavy by its C header": ("train/engine.hpp", "#include <mpi.h>\n", "heavy library"),
        "heavy in the wrong component": ("nn/linear.hpp", "#include <zlib.h>\n", "does not belong to the component nn"),
        "OpenSSL in the TCP component": ("comm/tcp.hpp", "#include <openssl/hmac.h>\n", "does not belong to the component tcp"),
        "a component's header in the library": ("train/engine.hpp", "#include <ddp/nn/linear.hpp>\n", "only components' headers"),
        "a component in the umbrella": ("ddp.hpp", "#include <ddp/comm/tcp.hpp>\n", "only components' headers"),
        "the umbrella used": ("train/engine.hpp", "#include <ddp/ddp.hpp>\n", "umbrella is for users"),
        "missing": ("train/engine.hpp", "#include <ddp/core/nothing.hpp>\n", "is not there"),
        "quoted": ("train/engine.hpp", '#include "bucket.hpp"\n', "instead of"),
        "twice": ("train/engine.hpp", "#include <ddp/model/model.hpp>\n", "twice"),
        "feature macro": ("core/error.hpp", "#if defined(DDP_HAVE_MPI)\n#endif\n", "header was included"),
        "circle": ("comm/framed.hpp", "#include <ddp/comm/link.hpp>\n", "circle"),
        "unknown module": ("attic/box.hpp", "", "no module attic"),
        "definitions of no header": ("comm/impl/gone.ipp", "", "which is not there"),
        "another header's definitions": ("train/engine.hpp", "#include <ddp/comm/impl/framed.ipp>\n", "by its own header"),
        "definitions that nobody compiles": ("core/impl/error.ipp", "#include <ddp/core/error.hpp>\n", "is not in src/ddp.cpp"),
        "a component's definitions for all": (source, "#include <ddp/comm/impl/tcp.ipp>\n", "for the component None, its header is tcp"),
        "definitions not at the end": ("comm/framed.hpp", "int more;\n", "does not end with"),
        "heavy in definitions": ("comm/impl/framed.ipp", "#include <boost/asio.hpp>\n", "heavy library"),
        "a secret compared by memcmp": ("comm/framed.hpp", "bool a = std::memcmp(at, one.secret.data(),\n n) == 0;\n", "byte by byte"),
        "a tag compared by equal": ("comm/tcp.hpp", "bool a = std::equal(tag.begin(), tag.end(), at);\n", "byte by byte"),
        "a secret compared in its own header": ("comm/secret.hpp", good + "bool a = std::memcmp(a.bytes, b.bytes, n) == 0;\n", "byte by byte"),
        "a secret compared by ==": ("comm/framed.hpp", "bool a = hello.secret.bytes == secret_.bytes;\n", "byte by byte"),
        "no word of the language": ("core/alone.hpp", bare, "does not begin with #include <ddp/core/language.hpp>"),
        "no word of the language before coroutines": ("core/late.hpp", bare + "#include <coroutine>\n#include <ddp/core/error.hpp>\n",
                                                      "does not begin with #include <ddp/core/language.hpp>"),
        "too long": ("train/engine.hpp", "// a line\n" * 400, "longer than 400 lines"),
        "no guard": ("core/bare.hpp", None, "no #pragma once"),
        "no sentence": ("core/bare.hpp", None, "does not begin"),
    }
    failures = []
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        (root / "cmake").mkdir()
        (root / "cmake" / "components.txt").write_text("# components\ntcp  ddp/comm/tcp.hpp\nnn   ddp/nn/*.hpp\n")

        def write(files):
            for path in (root / "include").rglob("*.?pp"):
                path.unlink()
            for name, text in files.items():
                path = root / "include" / "ddp" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return check(root)[0]

        problems = write(base)
        if problems:
            failures.append(f"a tree without mistakes is refused: {problems}")
        for name, (header, line, expected) in mistakes.items():
            files = dict(base)
            files["comm/link.hpp"] = good + "#include <ddp/comm/framed.hpp>\n"
            whole = line is not None and line.startswith("/// ")
            files[header] = "int bare;\n" if line is None else line if whole else files.get(header, good) + line
            problems = write(files)
            if not any(expected in problem for problem in problems):
                failures.append(f"{name}: expected '{expected}', found {problems}")
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{len(mistakes)} mistakes tried, {len(failures)} failures")
    return 1 if failures else 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).resolve().parent.parent)
    problems, count = check(root)
    for problem in problems:
        print(f"include/{problem}" if not problem.startswith("cmake/") else problem, file=sys.stderr)
    print(f"{count} headers, {len(problems)} problems")
    return 1 if problems or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
