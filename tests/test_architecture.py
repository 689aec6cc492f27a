"""Imports point one way: read from the syntax tree, so that no module needs to be run."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent

# The library: what a training loop needs. Earlier modules never import later ones.
CORE = """
    configuration autocast parameters hashing batches losses memory progress products
    importance structure layers sites squares signed_sums finite coupling writing gradients
    rows views regrouping
    kernels matrices approximation history
    penalty preservation regularizer storage analysis diagnosis
""".split()

# The experiments on top of it.
EXPERIMENTS = """
    seeds settings augmentation data streams multi_head wide_resnet models
    backpropagation adam penalised_step training metrics original_diagonal
    experiment results boundaries checkpoint fisher_study execution jobs sharing
    display process sweep worker recipes reproduction report bench
    cli_errors cli_bench cli_data cli_show cli
""".split()

ORDER = CORE + EXPERIMENTS

LINES = 350  # one idea per file
CORE_NEEDS = {"torch", "numpy", "safetensors"}
OPTIONAL = {"matplotlib", "typer", "jinja2"}  # the "experiments" extra


@dataclass(frozen=True)
class Import:
    """One imported module."""

    source: str  # dotted, "holdfast" left out; "" is the package itself
    target: str  # dotted, whole
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.source or '__init__'} imports {self.target}"


def files() -> dict[str, Path]:
    """Dotted name without "holdfast" -> file."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = files()


def _walk(source: str, node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue  # never executed
        if isinstance(child, ast.Import):
            yield from (Import(source, alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{source}: relative import"
            assert child.module is not None
            for alias in child.names:  # "from holdfast import losses" imports a module
                inner = f"{child.module}.{alias.name}"
                is_module = inner.removeprefix("holdfast.") in FILES
                yield Import(source, inner if is_module else child.module, lazy)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(source, child, lazy or inside)


def imports() -> list[Import]:
    return [
        found
        for source, path in FILES.items()
        for found in _walk(source, ast.parse(path.read_text()), lazy=False)
    ]


IMPORTS = imports()
OURS = [i for i in IMPORTS if i.target.split(".")[0] == "holdfast"]


def unit(dotted: str) -> str:
    """The file or folder of the first level a module belongs to."""
    return dotted.removeprefix("holdfast").removeprefix(".").split(".")[0]


def place(dotted: str) -> int:
    return ORDER.index(unit(dotted))


def test_every_module_has_its_place() -> None:
    units = {unit(name) for name in FILES} - {""}
    assert units - set(ORDER) == set(), "a new module: give it its place in ORDER"
    assert set(ORDER) - units == set(), "no such module"
    assert len(ORDER) == len(set(ORDER))


def test_imports_point_to_earlier_modules() -> None:
    wrong = [
        str(i)
        for i in OURS
        if not i.lazy and unit(i.source) and unit(i.source) != unit(i.target)
        if not unit(i.target) or place(i.target) >= place(i.source)
    ]
    assert wrong == []


def test_the_library_never_imports_the_experiments() -> None:
    """Not even inside a function, and the package itself offers the library alone."""
    wrong = [
        str(i) for i in OURS if unit(i.source) in {"", *CORE} and unit(i.target) not in {"", *CORE}
    ]
    assert wrong == []


def test_modules_of_a_folder_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for i in OURS:
        if not i.lazy and i.target != "holdfast":
            graph.setdefault(i.source, set()).add(i.target.removeprefix("holdfast."))
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError and shows it


def test_importances_and_approximations_do_not_know_each_other() -> None:
    known = {unit(i.target) for i in OURS if unit(i.source) == "importance"}
    assert known <= {"importance", "configuration", "losses", "batches"}
    known = {unit(i.target) for i in OURS if unit(i.source) == "approximation"}
    assert not known & {"importance", "gradients", "losses", "batches", "penalty", "regularizer"}
    known = {unit(i.target) for i in OURS if unit(i.source) == "matrices"}
    assert known <= {"matrices", "autocast", "kernels", "products", "memory"}


def test_the_library_needs_little() -> None:
    standard = sys.stdlib_module_names
    needed = {
        i.target.split(".")[0] for i in IMPORTS if unit(i.source) in {"", *CORE} and not i.lazy
    } - standard
    assert needed - {"holdfast"} <= CORE_NEEDS


def loaded_after(code: str) -> set[str]:
    """The modules of a fresh interpreter: what else tests have imported does not count."""
    code += "; import sys; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_package_imports_nothing_optional() -> None:
    """Not even when every public name has been used."""
    loaded = loaded_after("import holdfast as hf; [getattr(hf, name) for name in hf.__all__]")
    assert "holdfast.regularizer" in loaded
    assert {name.split(".")[0] for name in loaded} & (OPTIONAL | {"rich"}) == set()
    assert {unit(name) for name in loaded if name.startswith("holdfast.")} <= set(CORE)


def test_importing_the_package_alone_is_instant() -> None:
    """The command line shows its help without waiting for torch."""
    assert "torch" not in loaded_after("import holdfast")


def test_public_names_are_the_same_for_people_and_type_checkers() -> None:
    tree = ast.parse(FILES[""].read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n))
    seen = {a.name for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == set(holdfast.__all__)
    assert set(holdfast.__all__) <= set(dir(holdfast))
    with pytest.raises(AttributeError, match="Regulariser"):
        holdfast.Regulariser  # noqa: B018


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_keep_the_habits(name: str) -> None:
    text = FILES[name].read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= LINES, "more than one idea in this file?"
    assert ast.get_docstring(tree) or not tree.body, "a module says what it is about"
    assert not {"utils", "helpers", "common", "misc"} & set(name.split(".")), (
        "whose function is it?"
    )
    assert "from __future__" not in text
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"line {node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) == "Exception"
            assert not broad, f"line {node.lineno}: which error is expected?"
