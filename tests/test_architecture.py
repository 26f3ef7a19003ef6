"""The house: each folder has one face, and nobody imports past it but its own folder."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnstore.lazy_imports import find_type_checking_imports

ROOT = Path(__file__).parent.parent
PACKAGES = ("knnstore", *(f"adapters/knnstore_{name}" for name in ("cells", "faiss", "hnswlib", "qdrant")))
MODULES = {
    ".".join(path.relative_to(base.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for base in (ROOT / package for package in PACKAGES)
    for path in base.rglob("*.py")
}


def imports_of(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Every ``from ... import ...`` of a file, wherever it stands: the module and the names."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.ImportFrom) or node.level == 0, f"{path}: relative import"
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)


def is_folder(module: str) -> bool:
    return module in MODULES and MODULES[module].name == "__init__.py"


def faces_passed(importer: str, imported: str) -> list[str]:
    """The folders on the way to a module that the importer is not in, but for the module itself."""
    parts = imported.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts))]
    return [
        folder for folder in above if folder != "knnstore" and not f"{importer}.".startswith(f"{folder}.")
    ]


def test_nobody_imports_past_a_face() -> None:
    past = []
    for importer, path in MODULES.items():
        for module, names in imports_of(path):
            imported = [f"{module}.{name}" if f"{module}.{name}" in MODULES else module for name in names]
            past += [
                f"{importer} imports {target} past its folder's face"
                for target in {module, *imported} & MODULES.keys()
                if not target.startswith("knnstore.datastore.registry")  # a namespace, named by the face
                and faces_passed(importer, target)
            ]
    assert not past


def test_research_imports_faces_only() -> None:
    """It may use what any other package may: faces, modules of the root, and what commands are made of."""
    for path in (ROOT / "research" / "knnstore_research").rglob("*.py"):
        for module, names in imports_of(path):
            inner = {name for name in names if f"{module}.{name}" in MODULES}
            assert not inner, f"{path}: {module} is a folder, and {inner} modules in it"
            if module in MODULES and not is_folder(module):
                assert module.count(".") == 1 or module.startswith("knnstore.cli."), f"{path}: {module}"


@pytest.mark.parametrize("folder", sorted(filter(is_folder, MODULES)))
def test_a_face_names_what_it_offers(folder: str) -> None:
    tree = ast.parse(MODULES[folder].read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and _name(node) == "__all__"]
    offered = [ast.literal_eval(value) for value in lists]
    assert offered or len(tree.body) == 1, "a face without __all__"
    assert all(names == sorted(set(names), key=names.index) for names in offered)


def _name(node: ast.Assign) -> str:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""


def test_the_walks_name_modules_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    walks = text[text.index("### A document goes in") : text.index("## Records")]
    for row in re.findall(r"^\|.*\|(.*)\|$", walks, re.MULTILINE):
        folder = Path()
        for name in re.findall(r"`(.*?)`", row):  # a bare one is beside the one before it, or in the package
            places = [ROOT / "knnstore" / name, ROOT / "knnstore" / folder / name]
            assert any(place.is_dir() or place.with_suffix(".py").is_file() for place in places), name
            folder = Path(name).parent if "/" in name else folder


@pytest.mark.slow
def test_former_names_of_resolve_are_not_used_within() -> None:
    former = {"settings_for", "usable_settings_for", "own_settings_for", "completed", "overridden"}
    former |= {"default_settings", "saved_for", "trained_for"}
    faces = {"knnstore.lm", "knnstore.lm.settings"}
    for module, path in MODULES.items():
        for imported, names in imports_of(path):
            if module not in faces and imported in {*faces, "knnstore.lm.settings.former_names"}:
                assert not former & set(names), f"{module} imports {former & set(names)}"


@pytest.mark.slow
def test_the_mixture_loads_neither_sql_nor_transformers() -> None:
    packages = "knnstore.lm.mixing, knnstore.lm.components, knnstore.lm.row_mixer"
    program = f"import sys, {packages}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "torch" in loaded
    assert not loaded & {"sqlalchemy", "alembic", "transformers"}


LAZY_FACES = [
    face
    for face, path in MODULES.items()
    if is_folder(face) and "attach_lazy_imports(__name__)" in path.read_text()
]


@pytest.mark.parametrize("face", LAZY_FACES)
def test_a_lazy_face_gives_each_name_that_it_offers(face: str) -> None:
    package = importlib.import_module(face)
    places = find_type_checking_imports(MODULES[face].read_text())
    assert set(package.__all__) - set(places) <= {"open"}
    assert set(places) <= set(package.__all__), "imported for type checkers and not offered"
    assert set(package.__all__) <= set(dir(package))
    for name, (home, attribute) in places.items():
        # An attribute of the same name would be the module once that is imported, and the name until then.
        assert f"{face}.{name}" not in MODULES or home == face, f"{face} has a module {name}"
        module = importlib.import_module(f"{home}.{attribute}" if home == face else home)
        assert getattr(package, name) is (module if home == face else getattr(module, attribute))
    with pytest.raises(AttributeError, match=f"module '{face}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018
