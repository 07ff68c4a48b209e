"""The house holds together: imports go down, no circles, CUDA in one place, small files, plain names and docstrings."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("converters", "megatron_ext", "megarl")
"""From the ground up: a package imports from itself and from those before it."""
PROGRAMS = "the programs"
"""The files at the top of megarl, one for each thing that it does; all other files lie in rooms."""
ROOMS = (
    *("process", "schema", "sandbox", "rewards", "data", "tracking", "algorithms", "diagnostics"),
    *("resharding", "rollout", "cluster", "output", "config", "models", "refit", "stages", "run"),
    *(PROGRAMS, "doctor", "planning", "rehearsal", "quickstart", "cli"),
)
"""The rooms of megarl, from the ground up, as the packages above."""
WRITTEN = (*FLOORS, "benchmarks", "tools", "tests")
"""Folders whose docstrings are read by people."""
MAX_LINES = 400
ENGINE_FOLDERS = "megarl/rollout/"
ENGINES_NAMED = {
    "megarl/rollout/__init__.py": "the table of engines",
    "megarl/schema/config.py": "the engine that is used where a recipe names none",
    "megarl/config/renamed_keys.py": "keys of other frameworks are told what they are called here",
    "megarl/config/foreign/engine_arguments.py": "the names that other frameworks have for an engine's arguments",
    "megarl/config/foreign/slime_flags.py": "an argument of slime that begins with the name of its engine",
    "megarl/config/foreign/verl_keys.py": "the engine of verl where it is not named",
}
"""Files that name an engine, with the reason; of all others, only those in the engine's own folder do."""
ENGINES_THAT_ARE_LIBRARIES = ("transformers",)
"""Engines whose name is that of a library for all: they are named where their folder is, or rollout.engine has it."""
INVERTING = re.compile(r"(?:Of|Those|That|What)\b(?!')")
"""Words that keep the reader waiting for the thing."""
CUDA_HOME = ("megatron_ext/device.py", "megatron_ext/cuda_on_cpu.py", "/kernels/")


def source_files(root: Path) -> list[Path]:
    return [file for floor in FLOORS for file in sorted((root / floor).rglob("*.py"))]


def module_of(file: Path, root: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Several checks ask for them, and to read all files takes seconds."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_modules(file: Path, root: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it; of `from package import name` both spellings."""
    package = module_of(file, root).split(".")
    package = package if file.name == "__init__.py" else package[:-1]
    for node in imports(file.read_text()):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imports_that_go_up(root: Path) -> list[str]:
    return [
        f"{module_of(file, root)} imports {module}"
        for file in source_files(root)
        for module in imported_modules(file, root)
        if module.split(".")[0] in FLOORS
        and FLOORS.index(module.split(".")[0]) > FLOORS.index(file.relative_to(root).parts[0])
    ]


def room_of(module: str, file: Path) -> str:
    """The room of a module of megarl."""
    is_program = file.parent.name == "megarl"
    return PROGRAMS if is_program else module.split(".")[1]


def rooms_that_go_up(root: Path) -> list[str]:
    """Imports of a higher room of megarl, and rooms that have no place in the order."""
    files = {module_of(file, root): file for file in sorted((root / "megarl").rglob("*.py"))}
    rooms = {name: room_of(name, file) for name, file in files.items() if name != "megarl"}
    unknown = [f"{name} is in no room of the order" for name, room in rooms.items() if room not in ROOMS]
    return unknown or [
        f"{name} imports {target}"
        for name, room in rooms.items()
        for target in imported_modules(files[name], root)
        if target in rooms and ROOMS.index(rooms[target]) > ROOMS.index(room)
    ]


def import_cycle(root: Path) -> list[str]:
    """The modules of one circle of imports; empty where there is none."""
    files = {module_of(file, root): file for file in source_files(root)}
    edges = {}
    for name, file in files.items():
        found = [module for module in imported_modules(file, root) if module in files and module != name]
        # `from package import module` builds on the module; the package's __init__ is only passed on the way.
        edges[name] = {m for m in found if not any(other.startswith(f"{m}.") for other in found)}
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in finished:
            return []
        for target in sorted(edges[name]):
            if cycle := visit(target, [*path, name]):
                return cycle
        finished.add(name)
        return []

    return next((cycle for name in files if (cycle := visit(name, []))), [])


def cuda_mentions(root: Path) -> list[str]:
    """Places outside the device layer that name torch.cuda or move a tensor with .cuda()."""
    found = []
    for file in source_files(root):
        where = file.relative_to(root).as_posix()
        source = file.read_text()
        if any(home in where for home in CUDA_HOME) or "cuda" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            named = isinstance(node, ast.Attribute) and node.attr == "cuda"
            if named or (isinstance(node, ast.Import | ast.ImportFrom) and "torch.cuda" in imported_text(node)):
                found.append(f"{where}:{node.lineno}")
    return found


def imported_text(node: ast.Import | ast.ImportFrom) -> str:
    start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return " ".join(f"{start}{alias.name}" for alias in node.names)


def engines_named(root: Path) -> list[str]:
    """Places that import or name an engine, docstrings aside, and lie neither in its folder nor in the list."""
    engines = [folder.name for folder in sorted((root / ENGINE_FOLDERS).glob("*/"))]
    found = []
    for file in source_files(root):
        where = file.relative_to(root).as_posix()
        others = [
            rf"(?:rollout[./]|engine=){name}\b" if name in ENGINES_THAT_ARE_LIBRARIES else name
            for name in engines
            if not where.startswith(f"{ENGINE_FOLDERS}{name}/")
        ]
        source = file.read_text()
        if where not in ENGINES_NAMED and any(name in source.lower() for name in engines):
            found += [
                f"{where}:{line} names {name}"
                for line, text in spoken(ast.parse(source))
                for name in others
                if re.search(name, text.lower())
            ]
    return found


def spoken(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every import and every string of a file that does something: docstrings do nothing."""
    idle = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node.lineno, imported_text(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in idle:
            yield node.lineno, node.value


def long_files(root: Path) -> list[str]:
    lengths = {file.relative_to(root).as_posix(): len(file.read_text().splitlines()) for file in source_files(root)}
    return [name for name, length in lengths.items() if length > MAX_LINES]


def nameless_files(root: Path) -> list[str]:
    return [
        file.relative_to(root).as_posix()
        for file in source_files(root)
        if "utils" in file.relative_to(root).parts or "utils" in file.stem
    ]


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, also those within others; not the expressions in them, which are most of a tree."""
    for each in body:
        yield each
        for part in ("body", "orelse", "finalbody"):
            yield from statements(getattr(each, part, []))
        for handler in (*getattr(each, "handlers", ()), *getattr(each, "cases", ())):
            yield from statements(handler.body)


def docstrings(source: str) -> Iterator[str]:
    """Docstrings of modules, classes and functions, and texts below a name that say what it is."""
    for node in statements(ast.parse(source).body):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def comments(source: str) -> Iterator[str]:
    """Blocks of comments, of which each line has nothing before it."""
    for block in re.findall(r"(?:^[ \t]*# .*\n)+", source, flags=re.MULTILINE):
        yield re.sub(r"^[ \t]*# ", "", block, flags=re.MULTILINE)


def inverted_sentences(root: Path) -> list[str]:
    """Sentences of docstrings and comments that begin with a word which keeps the reader waiting for the thing."""
    return [
        f"{file.relative_to(root)}: {' '.join(sentence.split())[:60]}"
        for folder in WRITTEN
        for file in sorted((root / folder).rglob("*.py"))
        for source in [file.read_text()]
        if INVERTING.search(source)
        for text in (*docstrings(source), *comments(source))
        for block in re.split(r"\n\s*\n|^\s*(?:- |\d+\. )", text, flags=re.MULTILINE)
        for sentence in re.split(r"(?<=[.!?])\s+", block.strip())
        if INVERTING.match(sentence) and not sentence.endswith("?")
    ]


def calls_by_name(root: Path) -> list[str]:
    """Calls of worker processes by the name of a method, which no checker sees, outside the groups that type them."""
    return [
        f"{file.relative_to(root).as_posix()}:{node.lineno}"
        for file in sorted((root / "megarl").rglob("*.py"))
        if "cluster" not in file.relative_to(root).parts
        for source in [file.read_text()]
        if re.search(r"\b(?:begin|begin_each|call|stream)\b", source)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("begin", "begin_each", "call", "stream")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ]


def namesakes_among_tests(root: Path) -> list[str]:
    """pytest imports a test file by its name alone, and refuses the second one only where both are collected."""
    files = sorted((root / "tests").rglob("test_*.py"))
    names = Counter(file.name for file in files)
    return [file.relative_to(root).as_posix() for file in files if names[file.name] > 1]


CHECKS = {
    "imports go down": imports_that_go_up,
    "rooms import down": rooms_that_go_up,
    "no import cycles": import_cycle,
    "torch.cuda only in the device layer": cuda_mentions,
    "engines are named in their folders": engines_named,
    "workers are called by name in their room alone": calls_by_name,
    "small files": long_files,
    "names that say something": nameless_files,
    "sentences begin with the thing": inverted_sentences,
    "test files have names of their own": namesakes_among_tests,
}
BROKEN_TREES = {
    "imports go down": [
        {"converters/a.py": "from megarl import b", "megarl/b.py": ""},
        {"converters/a.py": "def f():\n    import megatron_ext.b", "megatron_ext/b.py": ""},
        {"megatron_ext/sub/a.py": "from ...megarl.b import x", "megarl/b.py": "x = 1"},
    ],
    "rooms import down": [
        {"megarl/data/a.py": "from megarl.algorithms import x", "megarl/algorithms/__init__.py": "x = 1"},
        {"megarl/stages/a.py": "def f():\n    from megarl import train", "megarl/train.py": ""},
        {"megarl/rollout/vllm/a.py": "from megarl.cluster.b import x", "megarl/cluster/b.py": "x = 1"},
        {"megarl/attic/a.py": ""},
    ],
    "no import cycles": [
        {
            "megarl/a.py": "import megarl.b",
            "megarl/b.py": "from megarl.c import x",
            "megarl/c.py": "from megarl import a",
        },
        {"megarl/p/__init__.py": "from megarl.p.a import x", "megarl/p/a.py": "from megarl.p import y"},
        {"megarl/p/a.py": "from . import b", "megarl/p/b.py": "from .a import x"},
    ],
    "torch.cuda only in the device layer": [
        {"megarl/a.py": "import torch\ntorch.cuda.synchronize()"},
        {"megarl/a.py": "from torch import cuda"},
        {"megatron_ext/a.py": "from torch.cuda import Stream"},
        {"converters/a.py": "import torch.cuda.nvtx"},
        {"converters/a.py": "def f(x):\n    return x.cuda()"},
    ],
    "engines are named in their folders": [
        {"megarl/rollout/swift/engine.py": "", "megarl/cluster/a.py": "from megarl.rollout.swift import engine"},
        {"megarl/rollout/swift/engine.py": "", "megarl/cluster/a.py": "def f():\n    import swift"},
        {"megarl/rollout/swift/engine.py": "", "megarl/doctor/a.py": "PACKAGES = ('torch', 'swift-cpu')"},
        {"megarl/rollout/swift/engine.py": "", "megarl/refit/a.py": "raise ValueError(f'{x}: SWIFT keeps them')"},
        {"megarl/rollout/swift/engine.py": "", "megarl/rollout/other/a.py": "import swift"},
        {
            "megarl/rollout/transformers/engine.py": "",
            "megarl/data/a.py": "from megarl.rollout.transformers import engine",
        },
        {"megarl/rollout/transformers/engine.py": "", "megarl/data/a.py": "x = 'use rollout.engine=transformers'"},
    ],
    "workers are called by name in their room alone": [
        {"megarl/refit/a.py": "def f(group):\n    group.begin('send', 1)"}
    ],
    "small files": [{"megarl/a.py": "x = 1\n" * (MAX_LINES + 1)}],
    "names that say something": [
        {"megarl/utils.py": ""},
        {"megarl/utils/a.py": ""},
        {"converters/tensor_utils.py": ""},
    ],
    "sentences begin with the thing": [
        {"megarl/a.py": '"""Of this module."""'},
        {"tests/test_a.py": 'def f():\n    """Do it.\n\n    What is\n    left is done.\n    """'},
        {"tools/a.py": 'class A:\n    """It is. Those are."""'},
        {"benchmarks/a.py": 'X = 1\n"""- One.\n- That one."""'},
        {"converters/a.py": "if True:\n    # It is so. What\n    # else?\n    # Of it more.\n    x = 1"},
    ],
    "test files have names of their own": [{"tests/run/test_a.py": "", "tests/parallel/test_a.py": ""}],
}
SOUND_TREE = {
    "converters/a.py": "import torch",
    "megatron_ext/device.py": "import torch\ntorch.cuda.synchronize()",
    "megatron_ext/kernels/copy.py": "import torch\ntorch.cuda.synchronize()",
    "megarl/data/__init__.py": "from megarl.data.b import x",
    "megarl/data/b.py": "from converters.a import torch\nfrom . import c",
    "megarl/data/c.py": "from megatron_ext import device\n" * MAX_LINES,
    "megarl/data/d.py": '"""The sum of\nthose."""\nx = "What is no docstring"  # Of none\ny = """Of a text"""\n',
    "megarl/rollout/swift/engine.py": "import swift\nNAME = 'swift'",
    "megarl/rollout/transformers/engine.py": "import transformers",
    "megarl/data/e.py": "from transformers import AutoTokenizer\nPACKAGES = ('transformers',)",
    "megarl/cluster/group.py": "def f(group):\n    group.begin('send', 1)",
    "megarl/refit/a.py": "def f(group, send):\n    group.begin(send, 'x')",
    "tests/run/conftest.py": "",
    "tests/data/conftest.py": "",
    "megarl/train.py": '"""As swift does."""\nfrom megarl.data import x',
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("check", CHECKS)
def test_the_house_holds(check: str) -> None:
    assert CHECKS[check](ROOT) == []


@pytest.mark.parametrize(("check", "tree"), [(name, tree) for name, trees in BROKEN_TREES.items() for tree in trees])
def test_each_check_can_fail(tmp_path: Path, check: str, tree: dict[str, str]) -> None:
    write_tree(tmp_path, tree)
    assert CHECKS[check](tmp_path) != []


@pytest.mark.parametrize("check", CHECKS)
def test_a_sound_house_passes(tmp_path: Path, check: str) -> None:
    write_tree(tmp_path, SOUND_TREE)
    assert CHECKS[check](tmp_path) == []


def test_the_checks_see_the_real_files() -> None:
    modules = {module_of(file, ROOT) for file in source_files(ROOT)}
    assert {"converters.errors", "megatron_ext.device", "megarl.train", "megarl.config"} <= modules
