"""The losses share their tiles between two threads in all of these tests."""

import pytest


@pytest.fixture(autouse=True)
def threads(two_threads):
    """See `two_threads`."""
