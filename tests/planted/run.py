#!/usr/bin/env python3
"""Plants each bug of tests/planted/*.patch in a copy of the tree, builds what it touches, runs the tests that should turn
red, and says which bugs nobody has noticed. See README.md.

A patch says in the lines before its first `diff --git`:
    What: one sentence
    Expect: a regular expression of the CTest names that should turn red, without anchors
    Build: the CMake targets that these tests need
    Sanitize: address, where only AddressSanitizer sees it: these have a build of their own
    Not found: why; of a bug that no test finds, and that is known
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent.parent
# Not optimised, without debug information: a patch is compiled once and run for a second.
CONFIGURE = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -D_GLIBCXX_ASSERTIONS",
             "-DDDP_TEST_PROGRAM_A_FILE=ON", "-DDDP_TOOLS_ARCH=tests", "-DDDP_INSTALL=OFF", "-DDDP_WERROR=OFF"]
SANITIZED = {"": [], "address": ["-DCMAKE_CXX_FLAGS=-fsanitize=address", "-DDDP_TEST_TIMEOUT_SCALE=3"]}
SLACK = 120  # seconds that CTest itself may need beyond its tests' own time limits
FOUND, ONCE, MISSED, NO_BUILD, NO_APPLY, RED, NO_TEST, HANGS = (
    "found", "red only once", "not found", "does not build", "does not apply", "red without it", "no such test", "hangs")


class Patch:
    def __init__(self, path):
        self.name = path.stem
        self.text = text = path.read_text()
        head = text[:text.index("diff --git ")]
        fields = dict(re.findall(r"^([A-Z][a-z ]+): (.*)$", head, re.MULTILINE))
        for word in ("What", "Expect", "Build"):
            if word not in fields:
                raise SystemExit(f"{path.name}: says no {word}")
        self.what, self.expect, self.build = fields["What"], fields["Expect"], fields["Build"].split()
        self.known = fields.get("Not found")
        self.sanitize = fields.get("Sanitize", "")
        if self.sanitize not in SANITIZED:
            raise SystemExit(f"{path.name}: Sanitize: {self.sanitize}? It is one of {', '.join(filter(None, SANITIZED))}")


def call(command, where, timeout=None, **more):
    """Exit code (None: it took too long) and all that was said."""
    done = subprocess.Popen(command, cwd=where, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, errors="replace", start_new_session=True, **more)
    try:
        text, _ = done.communicate(timeout=timeout)
        return done.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)  # of ctest, and what it has started
        text, _ = done.communicate()
        return None, text


class Copy:
    """A copy of the working tree, uncommitted changes included, and build directories: all are used again next time."""

    def __init__(self, directory):
        self.directory, self.tree = directory, directory / "tree"

    def build(self, sanitize):
        return str(self.directory / "-".join(filter(None, ("build", sanitize))))

    def refresh(self):
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=SOURCE,
                                check=True, capture_output=True, text=True).stdout.split("\0")
        wanted = {name for name in listed if name and (SOURCE / name).is_file() and not name.startswith("tests/planted/")}
        for path in [p for p in self.tree.rglob("*") if p.is_file()] if self.tree.is_dir() else []:
            if path.relative_to(self.tree).as_posix() not in wanted:
                path.unlink()
        for name in sorted(wanted):
            source, target = SOURCE / name, self.tree / name
            if target.is_file() and target.read_bytes() == source.read_bytes():
                continue  # keeps its time: what was built of it stays
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    def tree_hash(self):
        digest = hashlib.sha256()
        for path in sorted(p for p in self.tree.rglob("*") if p.is_file()):
            digest.update(path.relative_to(self.tree).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def red_without_patch(self, expects, sanitize):
        """The tests of these that are red in the tree as it is. A file says in which tree none of them was."""
        file = self.directory / "-".join(filter(None, ("baseline", sanitize, "json")))
        tree = self.tree_hash()
        known = json.loads(file.read_text()) if file.is_file() else {}
        if known.get("tree") == tree and expects <= set(known["expects"]):
            return []
        ended, _ = self.test("|".join(sorted(expects)), sanitize)
        found = red(ended or {})
        if ended is not None and not found:
            file.write_text(json.dumps({"tree": tree, "expects": sorted(expects)}) + "\n")
        return found

    def configure(self, sanitize):
        code, text = call(["cmake", "-S", str(self.tree), "-B", self.build(sanitize), *CONFIGURE, *SANITIZED[sanitize]], self.tree)
        if code != 0:
            raise SystemExit(f"the copy cannot be configured:\n{text[-4000:]}")

    def apply(self, patch, *how):
        # The copy may lie inside the repository: git must not take that for its own.
        alone = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        alone["GIT_CEILING_DIRECTORIES"] = str(self.tree.parent)
        done = subprocess.run(["git", "apply", *how, "-"], cwd=self.tree, env=alone, input=patch.text, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        return done.returncode, done.stdout

    def make(self, targets, sanitize):
        return call(["cmake", "--build", self.build(sanitize), "--parallel", "1", "--target", *sorted(targets)], self.tree)

    def test(self, expect, sanitize):
        """How each test that fits has ended; None if CTest itself did not end."""
        fits = f"^({expect})$"
        code, listing = call(["ctest", "--test-dir", self.build(sanitize), "-N", "-R", fits, "--show-only=json-v1"], self.tree)
        tests = json.loads(listing[listing.index("{"):])["tests"] if code == 0 else []
        limits = [p["value"] for t in tests for p in t.get("properties", ()) if p["name"] == "TIMEOUT"]
        code, text = call(["ctest", "--test-dir", self.build(sanitize), "-R", fits, "--output-on-failure"], self.tree,
                          timeout=sum(limits) + SLACK)
        if code is None:
            return None, text
        ended = {}
        for name, how in re.findall(r"Test +#\d+: (\S+) \.*(.*)$", text, re.MULTILINE):
            known = re.match(r" *(?:\**)(Passed|Not Run|Skipped|Timeout)", how)
            ended[name] = known[1] if known else "red"  # failed or crashed
        return ended, text


def red(ended):
    return sorted(name for name, how in ended.items() if how in ("red", "Timeout"))


def try_patch(copy, patch, always_red):
    start = time.monotonic()

    def result(how, tests=(), said=""):
        return {"patch": patch.name, "result": how, "red": list(tests), "seconds": round(time.monotonic() - start, 1),
                "known": patch.known, "what": patch.what, "expect": patch.expect, "said": said[-3000:]}

    if (applied := copy.apply(patch))[0] != 0:
        return result(NO_APPLY, said=applied[1])
    try:
        code, text = copy.make(patch.build, patch.sanitize)
        if code != 0:
            return result(NO_BUILD, said=text)
        ended, text = copy.test(patch.expect, patch.sanitize)
        if ended is None:
            return result(HANGS, said=text)
        if not ended or any(how in ("Skipped", "Not Run") for how in ended.values()):
            return result(NO_TEST, said=text)
        if fresh := [name for name in red(ended) if name not in always_red]:
            if all(ended[name] == "Timeout" for name in fresh):
                return result(FOUND, fresh, said=text)
            # Chance may have turned it red, so it must be red again.
            again, said = copy.test("|".join(fresh), patch.sanitize)
            if again is None or red(again):
                return result(FOUND, red(again or {}) or fresh, said=text)
            return result(ONCE, fresh, said=text + said)
        return result(RED if red(ended) else MISSED, red(ended), said=text)
    finally:
        if (back := copy.apply(patch, "-R"))[0] != 0:
            raise SystemExit(f"{patch.name} cannot be taken back:\n{back[1]}")


def work(directory, patches):
    """The result of each patch, one after the other, in one copy."""
    copy = Copy(directory)
    copy.refresh()
    always_red = {}
    for sanitize in sorted({p.sanitize for p in patches}):
        copy.configure(sanitize)
        some = [p for p in patches if p.sanitize == sanitize]
        targets = {t for p in some for t in p.build}
        print(f"{directory.name}: builds {len(targets)} targets without any patch", flush=True)
        code, text = copy.make(targets, sanitize)
        if code != 0:
            raise SystemExit(f"what is not patched does not build:\n{text[-6000:]}")
        always_red[sanitize] = copy.red_without_patch({p.expect for p in some}, sanitize)
        if always_red[sanitize]:
            print(f"{directory.name}: red without any patch: {', '.join(always_red[sanitize])}", flush=True)
    for patch in patches:
        yield try_patch(copy, patch, always_red[patch.sanitize])


def divided(patches, jobs):
    """Shares of about the same cost. Patches of neighbouring names are in one: they are of the same files, and little is built again."""
    costs = [3 if "process/" in p.expect else 1 for p in patches]
    shares = [[] for _ in range(jobs)]
    spent = 0
    for patch, cost in zip(patches, costs):
        shares[jobs * spent // sum(costs)].append(patch)
        spent += cost
    return [share for share in shares if share]


def table(results):
    lines = ["| patch | what is wrong | result | red | s |", "|---|---|---|---|---|"]
    for r in results:
        lines.append(f"| {r['patch']} | {r['what']} | {r['result']} | {', '.join(r['red']) or '-'} | {r['seconds']:.0f} |")
    return "\n".join(lines)


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    words.add_argument("--jobs", type=int, default=1, help="copies at work at once, each with one compiler and one test")
    words.add_argument("--only", default="", help="a regular expression of patches' names")
    words.add_argument("--build-dir", type=pathlib.Path, default=SOURCE / "build" / "planted", help="for copies and builds")
    words.add_argument("--json", type=pathlib.Path, help="a file for the results, written after every patch")
    words.add_argument("--resume", action="store_true", help="do not try again what is in the --json file already")
    words.add_argument("--check", action="store_true", help="only see whether all patches apply, and have a row in README.md")
    with_ = words.parse_args()
    patches = [Patch(path) for path in sorted(HERE.glob("*.patch")) if re.search(with_.only, path.stem)]
    if not patches:
        raise SystemExit("no patch has such a name")
    if with_.check:
        bad = [p.name for p in patches
               if subprocess.run(["git", "apply", "--check", "-"], cwd=SOURCE, input=p.text, text=True, check=False).returncode]
        print(f"{len(patches) - len(bad)} of {len(patches)} apply" + "".join(f"\n  not {name}" for name in bad))
        rows = re.findall(r"^\| (\d{3}) \|", (HERE / "README.md").read_text(), re.MULTILINE)
        unlisted = [p.name for p in patches if p.name[:3] not in rows]
        if unlisted:
            print("no row in README.md: " + ", ".join(unlisted))
        return 1 if bad or unlisted else 0

    done = []
    if with_.resume:
        if not with_.json:
            raise SystemExit("--resume needs --json FILE")
        done = json.loads(with_.json.read_text()) if with_.json.is_file() else []
        patches = [p for p in patches if p.name not in {r["patch"] for r in done}]
    shares = divided(patches, max(1, with_.jobs))

    def one(k):
        for result in work(with_.build_dir.resolve() / f"copy-{k}", shares[k]):
            done.append(result)  # of any thread: a list's append is whole
            print(f"{result['result']:>14}  {result['seconds']:6.1f} s  {result['patch']}  {' '.join(result['red'])}", flush=True)
            if with_.json:
                with_.json.write_text(json.dumps(sorted(done, key=lambda r: r["patch"]), indent=1) + "\n")

    with concurrent.futures.ThreadPoolExecutor(max(1, len(shares))) as pool:
        for nothing in pool.map(one, range(len(shares))):
            assert nothing is None  # what a thread has thrown comes out here
    done.sort(key=lambda r: r["patch"])
    print("\n" + table(done) + "\n")
    counts = {how: sum(r["result"] == how for r in done) for how in (FOUND, ONCE, MISSED, NO_BUILD, NO_APPLY, RED, NO_TEST, HANGS)}
    print(f"{len(done)} planted: " + ", ".join(f"{n} {how}" for how, n in counts.items() if n or how == FOUND))
    unknown = [r["patch"] for r in done if r["result"] != FOUND and not r["known"]]
    surprise = [r["patch"] for r in done if r["result"] == FOUND and r["known"]]
    if surprise:
        print("found, though listed as not found: " + ", ".join(surprise))
    if unknown:
        print("to be looked at: " + ", ".join(unknown))
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
