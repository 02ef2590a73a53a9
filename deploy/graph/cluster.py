"""The Ray cluster of a run: joined where there is one, started here where there is none.

Invariants: a cluster that was joined is left as it was found; a local one listens on loopback only and ends with this
process; usage reporting stays off in every worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from deploy.config import Config
from deploy.graph.logs import collect_logs
from deploy.graph.placement import Node, Request
from deploy.graph.reaper import reaping
from deploy.quiet import usage_reporting_off
from tasks.errors import KontrastError

OBJECT_STORE_BYTES = 512 * 2**20
"""Of a cluster started here: completions and prompts are small, weights do not go through it."""
PASSED_ON = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "KONTRAST_KERNELBENCH", "KONTRAST_SHARED", "PYTHONPATH")


class ClusterUnreachable(KontrastError):
    """No Ray cluster answers where one was named."""

    exit_code = 3


def requests_of(config: Config) -> list[Request]:
    """What the roles of a configuration ask for."""
    cluster, types = config.cluster, config.device_types()
    requests = [
        Request(
            "evaluator", count, cluster.evaluator_cpus, 0.0 if device_type == "cpu" else cluster.evaluator_gpus,
            "" if device_type == "cpu" else device_type, setting=f"evaluator.pool.{device_type}",
            without=f"set evaluator.pool.{device_type} to 0" if len(types) > 1 else "",
            share="cluster.evaluator_cpus",
        )
        for device_type, count in types.items()
    ]  # fmt: skip
    requests.append(
        Request(
            "learner", cluster.learner_ranks, cluster.learner_cpus, cluster.learner_gpus, one_node=True,
            setting="cluster.learner_ranks", share="cluster.learner_cpus",
        )
    )  # fmt: skip
    requests.append(
        Request(
            "generator", cluster.generators, cluster.generator_cpus, cluster.generator_gpus,
            setting="cluster.generators", share="cluster.generator_cpus",
        )
    )  # fmt: skip
    if config.review.mode != "off":
        review = config.review
        requests.append(
            Request("reviewer", 1, review.cpus, review.gpus, without="set review.mode to off", share="review.cpus")
        )
    return requests


def named_address(config: Config, environment: Mapping[str, str]) -> str:
    """The cluster to join; empty to start one here. A submitted job finds its cluster in RAY_ADDRESS."""
    return config.cluster.address or environment.get("RAY_ADDRESS", "")


@contextmanager
def joined(config: Config, logs: Path | None = None, *, folders: Sequence[Path] = ()) -> Iterator[Any]:
    """Connects to the run's cluster and yields the module `ray`; raises ClusterUnreachable.

    At the end the logs of this process's workers on this machine go into the folder `logs`. A cluster that is started
    here takes `folders` with it when this process is killed.

    Ray keeps the authentication of a process's first cluster: after one that was started here, a cluster with another
    token is joined from another process.
    """
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment = {**usage_reporting_off(os.environ), **passed_on}
    address = named_address(config, os.environ)
    with contextlib.nullcontext() if address else _private_cluster(folders):
        import ray

        common: dict[str, Any] = {
            "namespace": "kontrast", "log_to_driver": False, "logging_level": logging.ERROR,
            "configure_logging": False, "runtime_env": {"env_vars": environment},
        }  # fmt: skip
        try:
            if address:
                context = ray.init(address=address, **common)
            else:
                context = ray.init(
                    address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1", **common,
                )  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ClusterUnreachable(_unreachable(address, error)) from error
        session, job = Path(context.address_info["session_dir"]), ray.get_runtime_context().get_job_id()
        try:
            yield ray
        finally:
            ray.shutdown()
            if logs is not None:
                collect_logs(session, job, logs)


@contextmanager
def _private_cluster(folders: Sequence[Path]) -> Iterator[None]:
    """What Ray started here leaves in this process ends with the block: its processes and, in the environment, its
    token and the mode that Ray sets beside it."""
    before = _authentication(os.environ)
    with reaping(os.environ, folders):
        private_token(os.environ)
        try:
            yield
        finally:
            for name in _authentication(os.environ):
                del os.environ[name]
            os.environ.update(before)


def _authentication(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("RAY_AUTH_")}


def private_token(environment: MutableMapping[str, str]) -> None:
    """A token for the cluster that this process starts, where the user has chosen nothing: other users of the machine
    cannot use it, and none is written to the home folder. Ray itself turns token authentication on, and says so in a
    warning that a cluster of one's own does not need."""
    if not _authentication(environment):
        environment["RAY_AUTH_TOKEN"] = _own_token()
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)


@cache
def _own_token() -> str:
    """One for all clusters that this process starts: Ray keeps the first that it sees."""
    return secrets.token_hex(32)


def _unreachable(address: str, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if address:
        return (
            f"No Ray cluster answers at {address} ({first}): check cluster.address and RAY_ADDRESS, and, where the "
            f"cluster asks for a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH (docs/cluster.md)."
        )
    return f"Ray does not start on this machine ({first}): run kontrast doctor."


def nodes_of(ray: Any) -> list[Node]:
    """The living nodes of the connected cluster, with their whole resources and labels."""
    return [
        Node(
            id=str(node.get("NodeManagerHostname") or node["NodeID"][:8]) + f"/{node['NodeID'][:6]}",
            cpus=float(node["Resources"].get("CPU", 0.0)),
            gpus=float(node["Resources"].get("GPU", 0.0)),
            labels=tuple(sorted((node.get("Labels") or {}).items())),
        )
        for node in ray.nodes()
        if node.get("Alive")
    ]


def local_node() -> Node:
    """This machine as the only node, for `--dry-run` without a cluster; nothing is started for it."""
    from deploy.devices import describe_gpus

    gpus = describe_gpus()
    labels = ((("ray.io/accelerator-type", gpu_type(gpus[0]["name"])),)) if gpus else ()
    return Node("this machine", float(len(os.sched_getaffinity(0))), float(len(gpus)), labels)


def gpu_type(name: str) -> str:
    """Ray's accelerator type of a driver's device name: `NVIDIA H100 80GB HBM3` -> `H100`."""
    words = name.replace("-", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word)), words[-1] if words else "")
