"""Cases of the conformance kit: opening, closing, modes, and the shape of the class itself."""

import contextlib
import inspect
from pathlib import Path

import pytest

from knnstore.datastore import Capabilities, Datastore, IdRanges, Metric, SupportsErase, SupportsGet
from knnstore.errors import (
    ConfigError,
    DatastoreClosedError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
    ReadOnlyError,
    StoreUnavailableError,
)
from knnstore.testing.base import (
    KitBase,
    OpenStore,
    Records,
    check_holds,
    check_search,
    require_persistent,
    sample,
    some_queries,
)


class LifecycleTests(KitBase):
    """Needs: `open`, `add`, `count`, `iterate`."""

    def test_has_the_protocol_s_signatures(self, open_store: OpenStore) -> None:
        """Every method takes what the protocol says, by the same names and with the same defaults.

        If this fails, check the spelling of parameters and which of them are keyword-only.
        """
        store = open_store()
        assert isinstance(store, Datastore)
        for name, member in vars(Datastore).items():
            if name.startswith("_") or isinstance(member, property):
                continue
            promised = inspect.signature(getattr(Datastore, name)).parameters
            offered = inspect.signature(getattr(type(store), name)).parameters
            for parameter in promised.values():
                if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                    own = offered.get(parameter.name)
                    assert own is not None, f"{name}() does not take {parameter.name}"
                    assert (own.kind, own.default) == (parameter.kind, parameter.default), f"{name}(): {own}"
            for own in (offered[extra] for extra in offered if extra not in promised):
                is_optional = own.kind is own.VAR_KEYWORD or own.default is not own.empty
                assert is_optional, f"{name}() demands {own}, which no caller will give"

    def test_says_what_it_is(self, open_store: OpenStore, metric: Metric) -> None:
        """`dim`, `metric` and `capabilities` tell what the store was opened with and can do.

        If this fails, check that these are properties.
        """
        store = open_store(metric=metric)
        assert (store.dim, store.metric) == (self.dim, metric)
        assert isinstance(store.capabilities, Capabilities)

    def test_new_store_is_empty(self, open_store: OpenStore, metric: Metric) -> None:
        """A new store counts 0, yields nothing and finds nothing.

        If this fails, check how the engine answers a search of an empty index.
        """
        store = open_store(metric=metric)
        check_holds(store, sample(0, self.dim))
        check_search(store, sample(0, self.dim), 4, some_queries(3, self.dim))

    def test_create_only_refuses_what_exists(self, open_store: OpenStore, records: Records) -> None:
        """Mode "x" creates a store once.

        If this fails, check that "x" looks for a store before it writes anything.
        """
        with require_persistent(open_store(mode="x")) as store:
            records.put(store)
        with pytest.raises(DatastoreExistsError):
            open_store(mode="x")
        check_holds(open_store(), records)

    def test_location_may_be_a_string(
        self, open_store: OpenStore, location: str | Path, records: Records
    ) -> None:
        """A location given as a string is the same place.

        If this fails, make a `Path` of it at the beginning of `open`.
        """
        with require_persistent(open_store(location=str(location))) as store:
            records.put(store)
        check_holds(open_store(), records)

    def test_read_only_needs_a_store(self, open_store: OpenStore, location: str | Path) -> None:
        """Mode "r" creates nothing, not even a directory.

        If this fails, check that "r" makes no directory and takes no lock before it looks.
        """
        with pytest.raises(DatastoreNotFoundError):
            open_store(mode="r")
        assert not isinstance(location, Path) or not location.exists()

    def test_read_only_refuses_changes(self, open_store: OpenStore, records: Records) -> None:
        """A handle of mode "r" reads everything and changes nothing.

        If this fails, check that `add` and `delete` ask for the mode first.
        """
        with require_persistent(open_store()) as store:
            records.put(store)
        reader = open_store(mode="r")
        with pytest.raises(ReadOnlyError):
            records.put(reader)
        with pytest.raises(ReadOnlyError):
            reader.delete(records.positions())
        check_holds(reader, records)

    def test_another_dim_is_refused(self, open_store: OpenStore) -> None:
        """A store cannot be opened with another dim; the message names both.

        If this fails, check that the dim is stored when the store is created.
        """
        require_persistent(open_store()).close()
        for mode in ("a", "r"):
            with pytest.raises(DatastoreMismatchError, match=rf"(?s)(?=.*{self.dim})(?=.*{self.dim * 2})"):
                open_store(dim=self.dim * 2, mode=mode)

    def test_another_metric_is_refused(self, open_store: OpenStore) -> None:
        """A store cannot be opened with another metric; the message names both.

        If this fails, check that the metric is stored when the store is created.
        """
        require_persistent(open_store(metric=Metric.L2)).close()
        for mode in ("a", "r"):
            with pytest.raises(DatastoreMismatchError, match=r"(?s)(?=.*l2)(?=.*ip)"):
                open_store(metric=Metric.IP, mode=mode)

    def test_unknown_parameter_is_refused(self, open_store: OpenStore) -> None:
        """A parameter that the adapter does not know is an error, not ignored.

        If this fails, check that `open` calls `checked_params`.
        """
        with pytest.raises(ConfigError, match=r"no_such_parameter.*accepted"):
            open_store(no_such_parameter=1)

    def test_dim_below_one_is_refused(self, open_store: OpenStore) -> None:
        """A dim of 0 is a mistake in the configuration.

        If this fails, check that `open` compares dim with 1.
        """
        with pytest.raises(ConfigError):
            open_store(dim=0)

    def test_closed_store_refuses_everything(self, open_store: OpenStore, records: Records) -> None:
        """After `close` every operation raises `DatastoreClosedError`; closing again does nothing.

        If this fails, check that each method asks whether the handle is open.
        """
        store = records.put(open_store())
        store.close()
        store.close()
        for operation in (
            lambda: records.put(store),
            lambda: store.search(records.keys[:1], 1),
            lambda: store.delete(IdRanges([(0, 1)])),
            store.count,
            lambda: next(iter(store.iterate())),
            store.flush,
        ):
            with pytest.raises(DatastoreClosedError):
                operation()
        if isinstance(store, SupportsGet):
            with pytest.raises(DatastoreClosedError):
                store.get(records.ids[:1])

    def test_leaving_the_context_closes(self, open_store: OpenStore) -> None:
        """The context manager yields the store, closes it after an error and lets the error through.

        If this fails, check that `__enter__` returns self and `__exit__` returns None.
        """
        store = open_store()
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(ZeroDivisionError))
            assert stack.enter_context(store) is store
            assert 1 // store.count()
        with pytest.raises(DatastoreClosedError):
            store.count()

    def test_erasing_leaves_nothing_and_takes_nothing_else(
        self, open_store: OpenStore, location: str | Path, records: Records
    ) -> None:
        """An engine that can erase removes its datastore; what else is in the folder stays.

        If this fails, check that `erase` removes what `open` and `add` made, by name, and nothing more.
        """
        if not issubclass(self.datastore_class, SupportsErase):
            pytest.skip("it has no erase, which is optional: moving away from it leaves the old keys")
        with require_persistent(open_store()) as store:
            records.put(store)
        strange = Path(location) / "not of the datastore" if isinstance(location, Path) else None
        if strange:
            strange.write_text("kept")
        for _ in range(2):  # the first may have been interrupted
            self.datastore_class.erase(location, **self.params)
        with pytest.raises(DatastoreNotFoundError):
            open_store(mode="r")
        if strange:
            assert strange.read_text() == "kept"
            strange.unlink()
        assert open_store(mode="x").count() == 0

    def test_unreachable_server_is_reported(
        self, open_store: OpenStore, unreachable_location: str | None, records: Records
    ) -> None:
        """A server that does not answer raises `StoreUnavailableError` at the latest when it is used.

        If this fails, check that the client's connection errors and timeouts are translated.
        """
        if unreachable_location is None:
            pytest.skip("the fixture unreachable_location is None: this engine has no server")
        with pytest.raises(StoreUnavailableError):
            records.put(open_store(location=unreachable_location))
