"""Finding adapters in real distributions: no pip, no mocks."""

import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest

from knnstore.datastore import Capabilities, registry
from knnstore.datastore.memory import MemoryDatastore
from knnstore.errors import AdapterConflictError, AdapterLoadError, AdapterNotFoundError
from knnstore.testing import DatastoreTests


@pytest.mark.usefixtures("stranger")
@pytest.mark.slow
class TestStrangersAdapter(DatastoreTests):
    """An adapter that knnstore has never heard of, found by its name, passes the whole kit."""

    @property
    def datastore_class(self):
        return registry.load_adapter("stranger")


def _problem(name, distribution):
    rows = [
        row for row in registry.describe_adapters() if (row.name, row.distribution) == (name, distribution)
    ]
    assert len(rows) == 1
    return rows[0].problem


def test_memory_is_found():
    assert "memory" in registry.list_adapters()
    assert registry.load_adapter("memory") is MemoryDatastore
    assert _problem("memory", "knnstore") is None


@pytest.mark.usefixtures("stranger")
def test_describe_says_who_offers_an_adapter_and_what_it_can_do():
    row = next(row for row in registry.describe_adapters() if row.name == "stranger")
    can = Capabilities(exact_search=True, exact_keys=False, persistent=True, shared_writers=False)
    assert row == registry.AdapterInfo("stranger", "stranger-vectors", "1.0", None, {}, can)


def test_describe_names_the_engine_s_library_and_its_version(install):
    install("plain-vectors", "plain = plain_vectors:A", requires=["numpy>=2", "knnstore", "not-there>=1"])
    install(
        "extra-vectors",
        "extra = extra_vectors:A",
        requires=[
            "filelock",
            'numpy>=2; extra == "extra"',
            "not-there; python_version > '3' and extra == 'dev'",
        ],
        extras=("extra", "dev"),
    )
    install("odd-vectors", "odd = odd_vectors:A", requires=["no requirement"])
    libraries = {row.name: row.libraries for row in registry.describe_adapters()}
    assert libraries["plain"] == {"not-there": None}
    assert libraries["extra"] == {"numpy": np.__version__}
    assert libraries["faiss"] == {"faiss-cpu": version("faiss-cpu")}
    assert libraries["memory"] == libraries["odd"] == {}


def test_an_adapter_that_opens_no_folder_is_listed_with_the_reason(install):
    source = "from knnstore.datastore.memory import MemoryDatastore\n\nclass A(MemoryDatastore):\n"
    source += (
        "    @classmethod\n    def open(cls, *a, **o):\n        raise OSError('only servers\\nare served')\n"
    )
    install("server-vectors", "server = server_vectors:A", source)
    row = next(row for row in registry.describe_adapters() if row.name == "server")
    assert (row.problem, row.capabilities, row.note) == (None, None, "only servers")


def test_unknown_name_gets_a_guess():
    with pytest.raises(AdapterNotFoundError, match=r"did you mean 'memory'\? installed: .*memory"):
        registry.load_adapter("memroy")
    with pytest.raises(AdapterNotFoundError, match=r"no adapter 'xyzzy'; installed: .*memory"):
        registry.load_adapter("xyzzy")


def test_two_owners_of_a_name_conflict_only_when_it_is_loaded(install):
    install("red-vectors", "clash = red_vectors:A", "A = 1")
    install("blue-vectors", "clash = blue_vectors:B", "B = 1")
    assert registry.list_adapters().count("clash") == 1
    assert registry.load_adapter("memory") is MemoryDatastore
    with pytest.raises(AdapterConflictError, match=r"(?=.*blue-vectors)(?=.*red-vectors)"):
        registry.load_adapter("clash")
    assert "red-vectors" in _problem("clash", "blue-vectors")


def test_memory_is_not_replaced_silently(install):
    install("evil-vectors", "memory = evil_vectors:A", "A = 1")
    with pytest.raises(AdapterConflictError, match=r"(?=.*evil-vectors)(?=.*knnstore)"):
        registry.load_adapter("memory")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line$"),
        ("def (", "SyntaxError"),
        ("import broken_vectors.part", "broken_vectors"),
        ("", "AttributeError"),
        ("class Broken:\n    def add(self): ...", r"is not a Datastore: it lacks open, .*search"),
    ],
)
def test_broken_plug_in_harms_no_other(install, source, reason):
    install("broken-vectors", "broken = broken_vectors:Broken", source)
    assert {"broken", "memory"} <= set(registry.list_adapters())
    assert registry.load_adapter("memory") is MemoryDatastore
    with pytest.raises(AdapterLoadError, match=reason) as caught:
        registry.load_adapter("broken")
    assert "\n" not in str(caught.value)
    assert "broken-vectors" in str(caught.value)
    assert _problem("broken", "broken-vectors") == str(caught.value)


def test_unreadable_metadata_harms_no_other(install, caplog, tmp_path):
    install("damaged-vectors", "this line is no entry point")
    install("nameless-vectors", "nameless = nameless_vectors:A")
    next((tmp_path / "nameless-vectors").glob("*.dist-info/METADATA")).unlink()
    assert registry.load_adapter("memory") is MemoryDatastore
    assert {"damaged", "nameless"}.isdisjoint(row.name for row in registry.describe_adapters())
    assert caplog.text.count("cannot be read") == 2  # two, looked at once


@pytest.mark.parametrize(
    ("extras", "command"),
    [((), "pip install needy-vectors"), (("needy",), r"pip install 'needy-vectors\[needy\]'")],
)
def test_missing_dependency_says_what_to_install(install, extras, command):
    install("needy-vectors", "needy = needy_vectors:A", "import not_there.at_all", extras=extras)
    with pytest.raises(AdapterLoadError, match=rf"needs 'not_there'\. Install it with: {command}$") as caught:
        registry.load_adapter("needy")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_missing_dependency_of_our_own_adapter_names_our_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    for module in [name for name in sys.modules if name.startswith("knnstore_faiss")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(AdapterLoadError, match=r"needs 'faiss'\. .*: pip install 'knnstore\[faiss\]'$"):
        registry.load_adapter("faiss")


def test_of_two_copies_the_first_on_the_path_counts(install, tmp_path):
    install("twice-vectors", "twice = twice_vectors:A", "A = 1")
    again = tmp_path / "again"
    (tmp_path / "twice-vectors").rename(again)
    install("twice-vectors", "twice = twice_vectors:B", "B = 1")
    sys.path.insert(1, str(again))
    try:
        with pytest.raises(AdapterLoadError, match="is not a Datastore"):
            registry.load_adapter("twice")
    finally:
        sys.path.remove(str(again))


def test_nothing_installed_says_how_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert registry.list_adapters() == []
    with pytest.raises(AdapterNotFoundError, match=r"not installed; run `pip install -e \.`"):
        registry.load_adapter("memory")


def test_importing_the_package_loads_no_engine():
    script = (
        "import sys, knnstore.datastore as d; d.registry.list_adapters();"
        "print(sorted({'torch', 'faiss', 'sqlalchemy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
