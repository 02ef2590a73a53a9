"""Waits that end: each has a limit from the configuration and names what it waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from deploy.graph.handles import WaitedTooLong

T = TypeVar("T")


async def within(work: Awaitable[T], timeout_s: float, what: str, key: str) -> T:
    """The result of `work`; raises WaitedTooLong that names `what` and the setting `cluster.<key>_timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise WaitedTooLong(
            f"Waited {timeout_s:g} s for {what}: look at its log, or raise cluster.{key}_timeout_s."
        ) from error
