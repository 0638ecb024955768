"""The conformance suite of storage backends, run over HTTP against the fake stores."""

from __future__ import annotations

import pytest
from tests.object_stores.conftest import Store
from tests.storage.test_storage_conformance import BackendConformance

from holdfast.engine.storage import Location, as_location


class TestS3(BackendConformance):
    @pytest.fixture
    def root(self, s3: Store) -> Location:
        return as_location(f"{s3.url}/a folder/below")


class TestGoogle(BackendConformance):
    @pytest.fixture
    def root(self, gs: Store) -> Location:
        return as_location(f"{gs.url}/a folder/below")


class TestAzure(BackendConformance):
    @pytest.fixture
    def root(self, az: Store) -> Location:
        return as_location(f"{az.url}/a folder/below")
