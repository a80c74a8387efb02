from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.support.browsing import chromium
from tests.support.serving import Serving, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Serving]:
    """Without a model: it echoes."""
    async with serving() as running:
        yield running
