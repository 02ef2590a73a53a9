"""The two actors that belong to the graph itself, thin around `Coordinator` and `Recorder`.

Invariant: neither owns logic; both can be killed at any moment and be started again with the same arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from deploy.folder import RunFolder
from deploy.graph.coordinator import Coordinator
from deploy.graph.events import ControlMeasured, KernelConfirmed, SampleLeft, SeedEvaluated
from deploy.graph.plan import RunPlan
from deploy.graph.recorder import Recorder
from deploy.graph.remote import remote_handles
from deploy.graph.state import Group
from deploy.graph.tools import Rules, Tools
from exemplar_store import ExemplarStore, RunStream, StoreConfig
from tasks.integrity import check_integrity
from tasks.records import Prompt, Sample, Task


class CoordinatorActor:
    """Runs the loop; `run` may be called again on the actor that replaces a dead one."""

    def __init__(
        self, plan: RunPlan, location: str, store: StoreConfig, recorder: str, generators: Sequence[str], learner: str,
        source: str,
    ) -> None:  # fmt: skip
        """The three are names of actors."""
        import ray

        check_integrity(source)
        stream = RunStream(ExemplarStore.connect(location, store), plan.run_id)
        handles = remote_handles(
            stream, ray.get_actor(recorder), [ray.get_actor(name) for name in generators], ray.get_actor(learner)
        )
        self._coordinator = Coordinator(plan, handles)

    async def run(self) -> str:
        """Runs to the end; returns the closing status."""
        return (await self._coordinator.run()).closed

    async def stop(self) -> None:
        """Asks the run to end in order."""
        self._coordinator.stop()


class RecorderActor:
    """Serves prompts and records samples."""

    def __init__(
        self, run: RunFolder, location: str, store: StoreConfig, tasks: Mapping[str, Task],
        make_tools: Callable[[], Tools], rules: Rules, source: str,
    ) -> None:  # fmt: skip
        check_integrity(source)
        self._recorder = Recorder(run, ExemplarStore.connect(location, store), tasks, make_tools(), rules)

    async def open_group(self, group: Group) -> None:
        """Opens a group; the prompt itself is fetched by `prompt`."""
        await self._recorder.open_group(group)

    async def prompt(self, group: Group) -> Prompt:
        """The prompt of an open group."""
        return await self._recorder.open_group(group)

    async def turn_prompt(self, group: Group, index: int) -> Prompt:
        """The prompt of a sample of a later turn."""
        return await self._recorder.turn_prompt(group, index)

    async def recorded(self, group: Group) -> list[SampleLeft]:
        """Events of what is on record."""
        return await self._recorder.recorded(group)

    async def cancel(self, group: Group, indices: Sequence[int]) -> None:
        """Samples leave unevaluated."""
        await self._recorder.cancel(group, indices)

    async def score(self, group: Group, sample: Sample, *, last: bool) -> SampleLeft:
        """Evaluates and records one sample."""
        return await self._recorder.score(group, sample, last=last)

    async def give_up(self, group: Group, sample: Sample) -> SampleLeft:
        """Records one sample as unscored."""
        return await self._recorder.give_up(group, sample)

    async def confirm(self, group: Group, sample_id: str) -> KernelConfirmed:
        """Measures a kernel again."""
        return await self._recorder.confirm(group, sample_id)

    async def seed(self, task_id: str, device_type: str) -> list[SeedEvaluated]:
        """Evaluates a task's seed kernels."""
        return await self._recorder.seed(task_id, device_type)

    async def control(self, task_id: str, device_type: str) -> ControlMeasured | None:
        """Measures a reference against itself where that is due."""
        return await self._recorder.control(task_id, device_type)

    async def ping(self) -> bool:
        """True once the actor serves."""
        await asyncio.sleep(0)
        return True
