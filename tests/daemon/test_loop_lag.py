"""The lag of a loop that somebody holds up."""

import asyncio
import time

from daemon.loop_lag import LoopLag


async def test_who_holds_the_loop_up_is_seen_in_its_lag() -> None:
    lags: asyncio.Queue[float] = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(LoopLag(lags.put_nowait, interval_s=0.01).run())
        quiet_s = min([await lags.get() for _ in range(20)])
        time.sleep(0.2)  # noqa: ASYNC251
        held_up_s = await lags.get()
        watch.cancel()
    assert quiet_s < 0.1 < held_up_s
