"""The conformance kit: tests of all promises of `Datastore`, which the tests of an adapter inherit.

The complete test file of an adapter::

    from knnstore.testing import DatastoreTests

    class TestMilvusDatastore(DatastoreTests):
        datastore_class = MilvusDatastore

The tests of a server's adapter also override the fixture `location`, so that each test gets an empty
location. See `knnstore.testing.base.KitBase` for all settings.
"""

from pkgutil import iter_modules

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    raise ImportError(
        "knnstore.testing needs pytest and hypothesis: pip install pytest hypothesis"
    ) from error

# Without this, pytest would not explain failed assertions of these modules.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from knnstore.testing.changing import AddTests, RemoveAndIterateTests  # noqa: E402
from knnstore.testing.histories import (  # noqa: E402
    ConcurrencyTests,
    DatastoreStateMachine,
    RandomHistoryTests,
)
from knnstore.testing.searching import FilterTests, SearchTests, VisitTests  # noqa: E402
from knnstore.testing.sessions import DurabilityTests, LifecycleTests  # noqa: E402

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
    """All cases of the conformance kit; a subclass sets `datastore_class`."""

    def test_no_case_is_missing_or_overridden(self) -> None:
        """A subclass runs every case of the kit unchanged; a known defect is marked as an expected failure.

        If this fails, check that overridden cases carry `@pytest.mark.xfail(reason="...")`.
        """
        for name in dir(DatastoreTests):
            case, kit_case = getattr(type(self), name, None), getattr(DatastoreTests, name)
            if not name.startswith("test_") or case is kit_case:
                continue
            marks = [mark for mark in getattr(case, "pytestmark", []) if mark.name == "xfail"]
            assert any(mark.kwargs.get("reason") for mark in marks), (
                f"{type(self).__name__}.{name} replaces a case of the kit without xfail(reason=...)"
            )
