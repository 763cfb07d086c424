"""Each test leaves the process without an exporter, whether it passed or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mindspore_exporter import exporter


@pytest.fixture(autouse=True)
def no_exporter_stays() -> Iterator[None]:
    yield
    left = exporter.active()
    if left is not None:
        left.stop()
