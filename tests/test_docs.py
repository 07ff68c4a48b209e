"""The pages are true where a program can see it: links, files, tests, commands and recipes that they name exist."""

import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from pages import FENCE, ROOT, pages, write

from megarl.algorithms import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES
from megarl.cli.main import COMMANDS
from megarl.schema import MegarlConfig

README_LINES = 150
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
IN_REPOSITORY = re.compile(
    r"(?:\.ci|benchmarks|configs|constraints|converters|docs|megarl|megatron_ext|slurm|tests|tools)/[\w./-]*\w/?"
)
NO_KEYS = {"json", "parquet", "py", "yaml", "layers"}
"""Endings of file names, and what HuggingFace calls tensors."""
CODE_FOLDERS = ("benchmarks", "converters", "megarl", "megatron_ext", "tests", "tools")
NAMES_OF_OTHERS = {
    *("geo_mean", "return_sampling_mask", "terminationGracePeriodSeconds"),
    *("sharded_rdt", "nccl_m2n", "nccl_reshard"),
}
"""Names of verl, of vLLM and of Kubernetes; and of vLLM and NeMo-RL."""
OF_OTHERS = {"pretrain_gpt.py", "rewards.py"}
"""Files of other programs, and of a reader."""
OF_VERSIONS = re.compile(r"megatron-bridge \S+|mbridge \S+|verl \d\S+|TRL \d\S+")
CHOSEN = re.compile(r"/[A-Z]+/")
"""A part of a path that stands for one which a reader chooses."""


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def links_to_nothing(root: Path) -> Iterator[str]:
    """Relative links whose file or heading does not exist."""
    texts = pages(root)
    for page, text in texts.items():
        for link in LINK.findall(FENCE.sub("", text)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (root / page).parent / path if path else root / page
            if not target.exists():
                yield f"{page}: {link}"
            elif anchor and anchor not in anchors(target.read_text()):
                yield f"{page}: {link} names no heading"


def paths_to_nothing(root: Path) -> Iterator[str]:
    """Files and folders of the repository that are named and do not exist, tests after `::` included."""
    for page, text in pages(root).items():
        for code in CODE.findall(FENCE.sub("", text)):
            path, _, name = code.partition("::")
            if not IN_REPOSITORY.fullmatch(path) or CHOSEN.search(path):
                continue
            target = next((each for each in (root / path, root / "tests" / path) if each.exists()), None)
            if target is None:
                yield f"{page}: {path}"
            elif name and not re.search(rf"^def {re.escape(name)}\(", target.read_text(), re.MULTILINE):
                yield f"{page}: {code} is no test"


def modules_that_are_gone(root: Path) -> Iterator[str]:
    """Python files that are named by their end alone, `refit.py` or `vllm/kind.py`, and lie nowhere."""
    files = [
        f"/{path.relative_to(root).as_posix()}" for folder in CODE_FOLDERS for path in (root / folder).rglob("*.py")
    ]
    for page, text in pages(root).items():
        for name in re.findall(r"`([\w/]+\.py)`", FENCE.sub("", text)):
            if (
                name not in OF_OTHERS
                and not CHOSEN.search(name)
                and not any(file.endswith(f"/{name}") for file in files)
            ):
                yield f"{page}: {name}"


def identifiers(text: str) -> Iterator[str]:
    """Names with an underscore or a capital inside, in code that is no path."""
    for code in CODE.findall(FENCE.sub("", text)):
        if not re.search(r"/|\.(?:py|md)\b", code):
            yield from re.findall(r"\b[A-Za-z]\w*[a-z0-9](?:_[a-z]|[A-Z])\w*\b", code)


def identifiers_that_are_gone(root: Path) -> Iterator[str]:
    """Identifiers that no file of the code has. The page of Megatron's own options has a test of its own."""
    files = [path for folder in (*CODE_FOLDERS, "configs", "slurm") for path in sorted((root / folder).rglob("*.*"))]
    read = [file for file in files if file.suffix in (".py", ".yaml", ".sh", ".json") and file.stem != "test_docs"]
    known = NAMES_OF_OTHERS.union(*(re.findall(r"\w+", f"{file.stem} {file.read_text()}") for file in read))
    for page, text in pages(root).items():
        for name in identifiers(text) if page != "docs/options.md" else ():
            if name not in known:
                yield f"{page}: {name}"


def claims_without_proof(root: Path) -> Iterator[str]:
    """Lines of the guarantees that name neither a test nor what else shows the claim."""
    for line in pages(root).get("docs/guarantees.md", "").splitlines():
        if line.startswith("| ") and not line.startswith("| claim"):
            proof = line.strip("| ").split(" | ")[-1]
            if not CODE.search(proof):
                yield line


def unknown_names(root: Path) -> Iterator[str]:
    """Commands, recipes, presets and targets of make that are named and do not exist."""
    recipes = {path.stem for path in (root / "configs").glob("*.yaml")}
    presets = {path.stem for path in (root / "configs" / "algorithm").glob("*.yaml")}
    makefile = (root / "Makefile").read_text() if (root / "Makefile").exists() else ""
    targets = {name for rule in re.findall(r"^([a-z][a-z -]*):", makefile, re.MULTILINE) for name in rule.split()}
    known = {
        r"(?:^ *(?:\$ )?|\| )megarl ([a-z][a-z-]*)": {*COMMANDS},
        r"--config-name ([a-z]\w*)": recipes | {"mine"},
        r"\+algorithm=([a-z]\w*)": presets,
        r"^ *make ([a-z][a-z-]*)": targets,
    }
    for page, text in pages(root).items():
        code = "\n".join([*FENCE.findall(text), *re.findall(r"^ {4}.*$", text, re.MULTILINE), *re.findall(CODE, text)])
        for pattern, names in known.items():
            for name in re.findall(pattern, code, re.MULTILINE):
                if name not in names:
                    yield f"{page}: {name}"


def unknown_keys(root: Path) -> Iterator[str]:
    """Keys of the configuration that are named and do not exist."""
    groups = {name: get_type_hints(kind) for name, kind in get_type_hints(MegarlConfig).items() if is_dataclass(kind)}
    key = re.compile(rf"(?<![\w./-])({'|'.join(groups)})\.([a-z]\w*)(?![\w(/]|\.\.\.)")
    for page, text in pages(root).items():
        for code in [*FENCE.findall(text), *CODE.findall(text)]:
            for group, name in key.findall(code):
                if name not in groups[group] and name not in NO_KEYS:
                    yield f"{page}: {group}.{name}"


def missing_rooms(root: Path) -> Iterator[str]:
    """Rooms of megarl that the map in the concepts leaves out."""
    concepts = pages(root).get("docs/concepts.md", "")
    for folder in sorted(path.parent for path in (root / "megarl").glob("*/__init__.py")):
        if f"| `megarl/{folder.name}/` |" not in concepts:
            yield folder.name


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose: paragraphs, items of lists, cells of tables; no code."""
    prose = re.sub(r"^ {4}.*$|^#.*$", "", FENCE.sub("", text), flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|^ *(?:- |\d+\. )|\|", prose, flags=re.MULTILINE):
        yield from re.split(r"(?<=[.!?])\s+", re.sub(r"[*_`]", "", block).strip())


def inverted_sentences(root: Path) -> Iterator[str]:
    """Sentences that begin with a word which keeps the reader waiting for the thing."""
    for page, text in pages(root).items():
        for sentence in sentences(text):
            if re.match(r"(?:Of|Those|That|What)\b(?!'s)", sentence) and not sentence.endswith("?"):
                yield f"{page}: {sentence[:60]}"


def figures(text: str) -> Iterator[str]:
    """Numbers of a text that somebody must have measured: with a fraction, or of at least three digits."""
    for number in re.findall(r"(?<![\w.,/-])(?:\d*\.\d+|\d[\d,]*\d\d)(?![\w-]|[.,]\d)", text):
        yield number.replace(",", "")


def results_in(text: str) -> set[str]:
    """Pages of results that a text links."""
    return {f"benchmarks/results/{name}" for name in re.findall(r"\]\([\w./]*benchmarks/results/(\w+\.md)", text)}


def figures_with_sources(root: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Texts that tell of benchmarks, by their names: each with the pages of results that its figures may be from.

    A section of the page of benchmarks has those that it links, and that its row in the first table does; a row or a
    sentence of README has those of the row with the same command, or of the section that it links.
    """
    texts = pages(root)
    beginning, *parts = re.split(r"^## +(.+)$", texts.get("docs/benchmarks.md", ""), flags=re.MULTILINE)
    rows = re.findall(r"^\|.*$", beginning, re.MULTILINE)
    sections = {
        f"#{anchor}": text
        for name, text in zip(parts[::2], parts[1::2], strict=True)
        for anchor in anchors(f"# {name}")
    }
    of_sections = {
        anchor: results_in("\n".join([text, *(row for row in rows if f"({anchor})" in row)]))
        for anchor, text in sections.items()
    }
    of_commands = {name: results_in(row) for row in rows for name in re.findall(r"`(make benchmark[\w-]*)`", row)}
    yield from ((anchor, text, of_sections[anchor]) for anchor, text in sections.items())
    readme = texts.get("README.md", "")
    prose = re.sub(r"^\|.*$", "", readme, flags=re.MULTILINE)
    for text in (*re.findall(r"^\|.*$", readme, re.MULTILINE), *sentences(prose)):
        told = [of_commands.get(name, set()) for name in re.findall(r"make benchmark[\w-]*", text)]
        told += [of_sections.get(anchor, set()) for anchor in re.findall(r"docs/benchmarks\.md(#[\w-]+)", text)]
        if told:
            yield text, text, set().union(*told)


def unmeasured_figures(root: Path) -> Iterator[str]:
    """Figures of the page of benchmarks, and of README, to which none rounds in the results that are named there."""
    texts = pages(root)
    for where, text, sources in figures_with_sources(root):
        if not sources:
            yield f"{where} names no results"
            continue
        results = {float(figure) for source in sources for figure in figures(texts.get(source, ""))}
        measured = re.sub(r"^ {4}.*$", "", OF_VERSIONS.sub("", text), flags=re.MULTILINE)
        for figure in figures(measured):
            places = len(figure.partition(".")[2])
            if float(figure) not in {round(each, places) for each in results}:
                yield f"{where}: {figure}"


def long_readme(root: Path) -> Iterator[str]:
    """The README where it has become too long for somebody who only wants to know."""
    lines = pages(root).get("README.md", "").count("\n")
    if lines > README_LINES:
        yield f"README.md has {lines} lines"


CHECKS: dict[str, Callable[[Path], Iterator[str]]] = {
    "links lead somewhere": links_to_nothing,
    "named files and tests exist": paths_to_nothing,
    "named modules exist": modules_that_are_gone,
    "named identifiers exist": identifiers_that_are_gone,
    "every claim has a proof": claims_without_proof,
    "named commands and recipes exist": unknown_names,
    "named keys exist": unknown_keys,
    "every figure is measured": unmeasured_figures,
    "the map has every room": missing_rooms,
    "sentences begin with the thing": inverted_sentences,
    "the README is short": long_readme,
}
RESULTS = {"benchmarks/results/a.md": "| 0.26 | 1,024 |", "benchmarks/results/b.md": "0.77, 10.25, 4,095"}
MEASURED = """
| | command | every figure |
|---|---|---|
| [a](#a) | `make benchmark-a` | [a.md](../benchmarks/results/a.md) |
| [b](#b) | `make benchmark-b` | [b.md](../benchmarks/results/b.md) |

"""
"""The first table of a page of benchmarks."""
BROKEN = [
    ("links lead somewhere", {"README.md": "[a](docs/a.md)"}),
    ("links lead somewhere", {"README.md": "[a](docs/a.md#b)", "docs/a.md": "# A\n\n```\n# B\n```\n"}),
    ("links lead somewhere", {"docs/a.md": "[b](#b)\n"}),
    ("named files and tests exist", {"docs/a.md": "`tests/test_gone.py`"}),
    ("named files and tests exist", {"docs/a.md": "`megarl/gone/`"}),
    (
        "named files and tests exist",
        {"docs/a.md": "`tests/test_a.py::test_b`", "tests/test_a.py": "def test_bc(): ..."},
    ),
    ("named modules exist", {"docs/a.md": "`b.py`", "megarl/ab.py": "", "docs/b.py": ""}),
    ("named identifiers exist", {"docs/a.md": "`SomeClass.run`", "megarl/a.py": "class SomeClas: ..."}),
    ("named identifiers exist", {"docs/a.md": "`some_function(a)`", "megarl/a.py": "def some_functions(a): ..."}),
    ("every claim has a proof", {"docs/guarantees.md": "| claim | proof |\n|---|---|\n| it works | we think |\n"}),
    ("named commands and recipes exist", {"docs/a.md": "    megarl trane --help"}),
    ("named commands and recipes exist", {"docs/a.md": "`megarl train --config-name gone`"}),
    ("named commands and recipes exist", {"docs/a.md": "```\nmegarl train +algorithm=gone\n```"}),
    ("named commands and recipes exist", {"README.md": "`make haste`", "Makefile": "test: setup\n"}),
    ("named keys exist", {"docs/a.md": "`loop.gone=1`"}),
    ("named keys exist", {"docs/a.md": "```\nmegarl train model.gone=a\n```"}),
    ("every figure is measured", {"docs/benchmarks.md": "## A\nIt takes 0.25 s.", "benchmarks/results/a.md": "0.25"}),
    *(
        ("every figure is measured", {"docs/benchmarks.md": text, **RESULTS})
        for text in (
            f"{MEASURED}## A\nIt takes 0.25 s.",
            f"{MEASURED}## B\nIt takes 0.26 s.",
            f"{MEASURED}## C\n0.26 and 0.77 are [from there](../benchmarks/results/a.md).",
        )
    ),
    *(
        ("every figure is measured", {"README.md": text, "docs/benchmarks.md": f"{MEASURED}## A\n", **RESULTS})
        for text in (
            "| 4,096 | `make benchmark-b` |",
            "| 0.25 | `make benchmark-a` |",
            "It takes 4,096 s\n(`make benchmark-b`).",
            "| 0.26 | `make benchmark-c` |",
            "[It](docs/benchmarks.md#a) takes 0.77 s.",
        )
    ),
    ("the map has every room", {"megarl/attic/__init__.py": "", "docs/concepts.md": "| `megarl/cellar/` | |"}),
    *(
        ("sentences begin with the thing", {"docs/a.md": text})
        for text in (
            "Of these one is.",
            "It is. Those\nare.",
            "- **That** is it.",
            "1. What is said is.",
            "| a | What is |",
            "Is it?\nWhat is.",
        )
    ),
    ("the README is short", {"README.md": "a\n" * (README_LINES + 1)}),
]
SOUND = {
    "README.md": (
        "# T\n[a](docs/a.md#b-c), [t](#t), 0.77 s (`make benchmark-b`)\n    make quick-start\n"
        "`megarl dpo --config-name r +algorithm=p`\n"
    ),
    "docs/d.md": "`SomeClass.some_function(a)`, `plain`, `test_a.py`",
    "megarl/a.py": "class SomeClass:\n    def some_function(self): ...",
    "docs/c.md": "It is of those.\n\n    What is code\n\nWhat? Ask of\nThose that know.",
    "docs/b.md": "`loop.steps=3`, `data.parquet`, `model.path`",
    "docs/a.md": "# `B`: C?\n# B c\n`tests/test_a.py::test_b`, `megarl/gone`, `megarl/NAME/a.py`, `test_a.py`, https://x.y\n",
    "docs/guarantees.md": "| claim | proof |\n|---|---|\n| it works | `tests/test_a.py` |\n",
    "tests/test_a.py": "def test_b(): ...",
    "docs/benchmarks.md": (
        f"{MEASURED}## A\nOn 2 cores, .3 s and 1,024 MB, beside verl 0.9.1.\n\n    python b.py 512\n\n"
        "## B\nIt takes 0.8 s."
    ),
    **RESULTS,
    "megarl/gone": "",
    "configs/r.yaml": "",
    "configs/algorithm/p.yaml": "",
    "Makefile": "quick-start benchmark-a benchmark-b: setup\n",
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_pages_are_true(check: str) -> None:
    assert list(CHECKS[check](ROOT)) == []


@pytest.mark.parametrize(("check", "files"), BROKEN)
def test_each_check_can_fail(tmp_path: Path, check: str, files: dict[str, str]) -> None:
    assert list(CHECKS[check](write(tmp_path, files))) != []


@pytest.mark.parametrize("check", CHECKS)
def test_sound_pages_pass(tmp_path: Path, check: str) -> None:
    assert list(CHECKS[check](write(tmp_path, SOUND))) == []


def test_the_checks_see_the_real_pages() -> None:
    assert {"README.md", "docs/guarantees.md", "benchmarks/results/step_cpu.md"} <= set(pages(ROOT))
    assert "what-is-refused" in anchors(pages(ROOT)["docs/algorithms.md"])


def test_the_readme_counts_the_parts_of_algorithms() -> None:
    text = " ".join(pages(ROOT)["README.md"].split())
    parts = {
        "advantage estimators": ADVANTAGES,
        "policy losses": POLICY_LOSSES,
        "KL estimators": KL_ESTIMATORS,
        "aggregations": AGGREGATIONS,
        "corrections": CORRECTIONS,
    }
    assert {name: int(re.findall(rf"(\d+) {name}", text)[0]) for name in parts} == {
        name: len(registry) for name, registry in parts.items()
    }
