"""One connection to a store's server: commands, scripts, retries, and errors in words.

Invariants: every script is idempotent, so a command whose answer was lost may be sent again; no redis-py exception
leaves this module; a password never enters a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha1
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from exemplar_store.config import StoreConfig
from exemplar_store.errors import StoreError, StoreFull, StoreUnreachable, StoreUsageError
from exemplar_store.server import EmbeddedServer, last_words

log = logging.getLogger(__name__)

OLDEST_SERVER = (6, 2)
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_REQUIRES = "-- requires "


@cache
def script_text(name: str) -> tuple[str, str]:
    """A script's text with the file it requires put before it, and its SHA-1 as servers name it."""
    package = resources.files("exemplar_store")
    text = (package / f"{name}.lua").read_text()
    if text.startswith(_REQUIRES):
        shared = text.split("\n", 1)[0].removeprefix(_REQUIRES)
        text = (package / shared).read_text() + text
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


ScriptCall = tuple[str, Sequence[str], Sequence[Any]]
"""Name of a script, its keys, its arguments."""


class Connection:
    """A client of one server, cluster or sentinel-watched master; safe to share between threads."""

    def __init__(self, client: Any, place: str, server: EmbeddedServer | None = None) -> None:
        self._client = client
        self.place = place
        """Where it is, for messages; without a password."""
        self.server = server
        """The embedded server of a folder; None when connected by URL."""

    def call(self, *command: Any) -> Any:
        """The answer to one command."""
        return self._exchange(lambda: self._client.execute_command(*command))

    def calls(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """The answers to several commands in one round trip, outside a transaction."""
        return self._exchange(lambda: self._pipelined(commands).execute()) if commands else []

    def script(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """The answer of one script; the server learns its text when it does not know it."""
        from redis.exceptions import NoScriptError

        text, sha = script_text(name)

        def run() -> Any:
            try:
                return self._client.execute_command("EVALSHA", sha, len(keys), *keys, *arguments)
            except NoScriptError:
                return self._client.execute_command("EVAL", text, len(keys), *keys, *arguments)

        return self._exchange(run)

    def scripts(self, batch: Sequence[ScriptCall]) -> list[Any]:
        """The answers of several scripts in one round trip; each is atomic, the batch is not."""
        from redis.exceptions import NoScriptError, RedisError

        if not batch:
            return []
        commands = [("EVALSHA", script_text(name)[1], len(keys), *keys, *rest) for name, keys, rest in batch]
        answers = self._exchange(lambda: self._pipelined(commands).execute(raise_on_error=False))
        for at, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):
                answers[at] = self.script(*batch[at])
            elif isinstance(answer, RedisError):
                with self._in_words():
                    raise answer
        return list(answers)

    def scan(self, pattern: str) -> Iterator[str]:
        """Names of all keys of a pattern, on every node; a name may come twice."""
        with self._in_words():
            for key in self._client.scan_iter(match=pattern, count=1000):
                yield key.decode()

    def close(self) -> None:
        """Closes the connections, and the embedded server when this process runs it."""
        self._client.close()
        if self.server is not None:
            self.server.stop()

    def _pipelined(self, commands: Iterable[Sequence[Any]]) -> Any:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return pipeline

    def _exchange(self, action: Callable[[], Any]) -> Any:
        """The answer of an action; once more where another process ran the folder's server and has ended with it."""
        try:
            with self._in_words():
                return action()
        except StoreUnreachable:
            if self.server is None or not self.server.renew():
                raise
        with self._in_words():
            return action()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        from redis import exceptions

        try:
            yield
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            raise StoreError(f"the store at {self.place} refuses this user: {error}; check the URL") from error
        except exceptions.OutOfMemoryError as error:
            raise self._no_memory() from error
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        except exceptions.ResponseError as error:
            text = str(error)
            if "OOM command not allowed" in text:  # as Redis 6 says it from within a script
                raise self._no_memory() from error
            if "MISCONF" in text or "No space" in text:
                raise StoreFull(f"the store at {self.place} cannot write: {text}; free memory or disk") from error
            raise StoreError(f"the store at {self.place} refused a command: {text}") from error
        except exceptions.RedisError as error:
            raise self._unreachable(error) from error

    def _no_memory(self) -> StoreFull:
        return StoreFull(
            f"the store at {self.place} has no memory left and nothing was written: raise its maxmemory or prune it"
        )

    def _unreachable(self, error: Exception) -> StoreError:
        words = last_words(self.server.folder) if self.server is not None else ""
        if "AOF write error" in words:
            return StoreFull(
                f"the server of {self.place} stopped because it could not write its file ({words}): free disk space "
                "and start again, nothing acknowledged is lost"
            )
        said = f" (its log ends: {words})" if words else ""
        return StoreUnreachable(
            f"the store at {self.place} does not answer: {str(error).rstrip('.')}{said}; start it or name another"
        )


def connect(location: str | Path, config: StoreConfig) -> Connection:
    """Connects to a URL, or to the embedded server of a folder, which is started when nobody serves it.

    Raises StoreUnreachable, StoreLocked, StoreUsageError or StoreError, each with one sentence.
    """
    text = str(location)
    if not text:
        raise StoreUsageError("no store is named: give a redis:// URL or a folder")
    server = None
    if "://" in text:
        url, place = text, _without_password(text)
    else:
        server = EmbeddedServer(text, start_timeout_s=config.start_timeout_s).start()
        url, place = server.url, text
    try:
        connection = Connection(_client(url, config), place, server)
        if server is None and _is_cluster(connection):
            connection.close()
            client = _cluster_client(url, config)
            connection = Connection(client, place)
            nodes = {
                f"{place} (node {node.name})": client.get_redis_connection(node) for node in client.get_primaries()
            }
            weak = {_check_server(Connection(node, name)) for name, node in nodes.items()}
        else:
            weak = {_check_server(connection)}
        _warn_of(place, weak - {""})
    except BaseException:
        if server is not None:
            server.stop()
        raise
    return connection


def _options(config: StoreConfig) -> dict[str, Any]:
    from redis.backoff import EqualJitterBackoff
    from redis.exceptions import BusyLoadingError
    from redis.retry import Retry

    return {
        "socket_connect_timeout": config.connect_timeout_s,
        "socket_timeout": config.reply_timeout_s,
        "retry": Retry(EqualJitterBackoff(cap=config.retry_cap_s, base=0.02), config.retries),
        "retry_on_error": [BusyLoadingError],
        "protocol": 2,
    }


def _client(url: str, config: StoreConfig) -> Any:
    import redis

    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise StoreUsageError(f"{scheme}:// is not a store: use one of {', '.join(f'{name}://' for name in SCHEMES)}")
    try:
        if scheme.endswith("+sentinel"):
            return _sentinel_client(url, config)
        return redis.Redis.from_url(url, **_options(config))
    except ValueError as error:
        raise StoreUsageError(f"{_without_password(url)} is not a valid URL of a store: {error}") from error


class SentinelPlace(NamedTuple):
    """What a `redis+sentinel://` URL says."""

    addresses: list[tuple[str, int]]
    service: str
    sentinel_options: dict[str, Any]
    """For connections to the sentinels."""
    master_options: dict[str, Any]
    """For connections to the master."""


def read_sentinel_url(url: str) -> SentinelPlace:
    """`redis+sentinel://[user:password@]host:port,host:port/service[/database][?option=value&...]`.

    User, password and options are the master's, as in a `redis://` URL; `sentinel_username` and `sentinel_password`
    among the options are for sentinels that ask for them too. With `rediss` both are spoken to over TLS. Raises
    ValueError.
    """
    from redis.connection import parse_url

    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the path must name the master, as in redis+sentinel://host:26379/mymaster")
    addresses = []
    for entry in hosts.split(","):
        one = urlsplit(f"//{entry}")
        if not one.hostname:
            raise ValueError(f"{entry!r} is not host:port")
        addresses.append((one.hostname, one.port or 26379))
    scheme = parts.scheme.removesuffix("+sentinel")
    master = dict(parse_url(f"{scheme}://{credentials}{at}master/{database}?{parts.query}"))
    for name in ("host", "connection_class"):
        master.pop(name, None)
    sentinel = {
        name: master.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in master
    }
    if scheme == "rediss":
        sentinel |= {name: value for name, value in master.items() if name.startswith("ssl_")} | {"ssl": True}
        master["ssl"] = True
    return SentinelPlace(addresses, service, sentinel, master)


def _sentinel_client(url: str, config: StoreConfig) -> Any:
    from redis.sentinel import Sentinel

    place = read_sentinel_url(url)
    timeouts = {"socket_timeout": config.connect_timeout_s, "socket_connect_timeout": config.connect_timeout_s}
    sentinel = Sentinel(place.addresses, sentinel_kwargs=timeouts | place.sentinel_options)
    return sentinel.master_for(place.service, **(_options(config) | place.master_options))


def _cluster_client(url: str, config: StoreConfig) -> Any:
    from redis.cluster import RedisCluster

    options = _options(config)
    del options["retry_on_error"]
    return RedisCluster.from_url(url, **options)


def _is_cluster(connection: Connection) -> bool:
    return connection.call("INFO", "cluster").get("cluster_enabled", 0) == 1


def _warn_of(place: str, weak: set[str]) -> None:
    if weak:
        log.warning(
            "The server at %s can lose its last writes in a crash (%s): set appendonly yes and appendfsync always to "
            "keep every acknowledged one.",
            place, "; ".join(sorted(weak)),
        )  # fmt: skip


def _check_server(connection: Connection) -> str:
    """Refuses a server that is too old or that may evict exemplars; answers what its durability lacks, or ''."""
    version = str(connection.call("INFO", "server").get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise StoreError(f"the server at {connection.place} is Redis {version}: 6.2 or later is needed")
    try:
        settings = {
            name: str(connection.call("CONFIG GET", name).get(name, ""))
            for name in ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync")
        }
    except StoreError as error:
        return f"which cannot be checked, since {error}"
    policy = settings["maxmemory-policy"]
    if settings["maxmemory"] not in ("", "0") and policy.startswith("allkeys"):
        raise StoreError(
            f"the server at {connection.place} evicts keys when full (maxmemory-policy {policy}), which would lose "
            "exemplars: set it to noeviction"
        )
    if settings["appendonly"] == "yes" and settings["appendfsync"] == "always":
        return ""
    return f"appendonly {settings['appendonly']}, appendfsync {settings['appendfsync']}"


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    user = credentials.split(":")[0]
    return f"{parts.scheme}://{user}{at if user else ''}{hosts}{parts.path}"
