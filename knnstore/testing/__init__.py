"""The conformance kit: everything that a `Datastore` promises, as tests that an adapter inherits.

An adapter's whole test file::

    from knnstore.testing import DatastoreTests

    class TestMilvusDatastore(DatastoreTests):
        datastore_class = MilvusDatastore

A server adapter also overrides the fixture `location` with one that gives an empty place for each
test. See `knnstore.testing.base.KitBase` for all that can be set.
"""

from pkgutil import iter_modules

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    raise ImportError(
        "knnstore.testing needs pytest and hypothesis: pip install pytest hypothesis"
    ) from error

# Without this pytest would explain no assertion that fails in these modules.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from knnstore.testing.adding import AddTests  # noqa: E402
from knnstore.testing.concurrency import ConcurrencyTests  # noqa: E402
from knnstore.testing.durability import DurabilityTests  # noqa: E402
from knnstore.testing.filtering import FilterTests  # noqa: E402
from knnstore.testing.lifecycle import LifecycleTests  # noqa: E402
from knnstore.testing.removing import RemoveAndIterateTests  # noqa: E402
from knnstore.testing.searching import SearchTests  # noqa: E402
from knnstore.testing.stateful import DatastoreStateMachine, RandomHistoryTests  # noqa: E402
from knnstore.testing.visiting import VisitTests  # noqa: E402

__all__ = ["DatastoreStateMachine", "DatastoreTests"]


class DatastoreTests(
    LifecycleTests,
    AddTests,
    SearchTests,
    FilterTests,
    VisitTests,
    RemoveAndIterateTests,
    DurabilityTests,
    ConcurrencyTests,
    RandomHistoryTests,
):
    """All cases of the conformance kit; subclass it and name your `datastore_class`."""

    def test_no_case_is_missing_or_overridden(self) -> None:
        """A subclass has every case of the kit as it stands; a known defect is declared as such.

        If this fails, check that overridden cases carry `@pytest.mark.xfail(reason="...")`.
        """
        for name in dir(DatastoreTests):
            own, ours = getattr(type(self), name, None), getattr(DatastoreTests, name)
            if not name.startswith("test_") or own is ours:
                continue
            marks = [mark for mark in getattr(own, "pytestmark", []) if mark.name == "xfail"]
            assert any(mark.kwargs.get("reason") for mark in marks), (
                f"{type(self).__name__}.{name} replaces a case of the kit without xfail(reason=...)"
            )
