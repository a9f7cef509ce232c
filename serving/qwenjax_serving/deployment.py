"""Deployment files: which workers there are, on which mesh, and where they find the router. TOML."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from qwenjax.engine.build import EngineOptions, check_options
from qwenjax.text_files import read_text
from qwenjax_serving.protocol.messages import Role
from qwenjax_serving.router.router import RouterSettings

_ROLES: tuple[Role, ...] = ("prefill", "decode")
_BOTH_KEYS = ("name", "env", "staging_pages", "share_device", *_ROLES)  # beside options
_OPTIONS = set(EngineOptions.__annotations__) - {"revision"}  # that is the command's, for all workers
_OF_WEIGHTS = ("dtype", "quantization", "activation_format")  # options that say what all have in memory
_LOOPBACK = "tcp://127.0.0.1:0"


@dataclass(frozen=True)
class WorkerPlan:
    """A worker. options: of its engine. env: what its processes are started with besides. staging_pages: see Worker.
    processes: that its mesh is spread over, with as many devices each; coordinator: HOST:PORT where they find each
    other, of the first one's host, by default any port of this machine. min_tokens_per_second: of a decode worker, see
    BatchLimit.

    One of role "both" is a process with two workers, `parts`, which the router knows by their own names. share_device:
    whether both are on one device, with one copy of the weights.
    """

    name: str
    role: Role | Literal["both"]
    options: EngineOptions
    env: Mapping[str, str] = field(default_factory=dict)
    staging_pages: int | None = None
    processes: int = 1
    coordinator: str | None = None
    min_tokens_per_second: float | None = None
    parts: tuple[WorkerPlan, ...] = ()
    share_device: bool = False

    @property
    def names(self) -> list[str]:
        """Those that the router knows it by."""
        return [part.name for part in self.parts] or [self.name]

    @property
    def num_devices(self) -> int:
        if self.parts:
            return 1 if self.share_device else sum(part.num_devices for part in self.parts)
        return self.options.get("data_parallel", 1) * self.options.get("model_parallel", 1)


@dataclass(frozen=True)
class Deployment:
    """address: that the router listens on for workers; port 0 is any that is free, known only to workers that the
    router's own command starts."""

    workers: tuple[WorkerPlan, ...]
    address: str = _LOOPBACK
    settings: RouterSettings = field(default_factory=RouterSettings)

    @property
    def names(self) -> list[str]:
        """Of all workers, as the router knows them."""
        return [name for worker in self.workers for name in worker.names]

    def worker(self, name: str) -> WorkerPlan:
        """Raises ValueError for one that there is not."""
        found = [worker for worker in self.workers if worker.name == name]
        if not found:
            raise ValueError(f"there is no worker {name!r}; there are {[worker.name for worker in self.workers]}")
        return found[0]


def read_deployment(path: Path) -> Deployment:
    """A deployment file:

        [router]             # address, and the settings of RouterSettings
        [engine]             # options of every worker's engine, as build_engine's
        [[prefill]]          # a worker: name, env, staging_pages, processes, coordinator, and options of its own
        [[decode]]           # min_tokens_per_second besides

    or, where both are one process that moves pages within itself:

        [both]               # name, env, staging_pages, share_device, and options of both
        [both.prefill]       # options of its own
        [both.decode]

    Raises ValueError, with the file and the key, for what it does not know; OSError where there is no file.
    """
    try:
        found = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        return _deployment(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _deployment(found: dict[str, Any]) -> Deployment:
    _check_keys("the file", found, {"router", "engine", "prefill", "decode", "both"})
    router, engine = found.get("router", {}), found.get("engine", {})
    numbers = {each.name: float if each.type == "float" else int for each in fields(RouterSettings)}
    _check_keys("[router]", router, {"address", *numbers})
    _check_options("[engine]", engine)
    router = dict(router)
    address = router.pop("address", _LOOPBACK)
    if not _is_address(address):
        raise ValueError(f"[router] address is {address!r}; it is tcp://HOST:PORT")
    for name, value in router.items():
        if not _is_positive(value, numbers[name]):
            kind = "an integer" if numbers[name] is int else "a number"
            raise ValueError(f"[router] {name} is {value!r}; it is {kind} above 0")
    workers = list[WorkerPlan]()
    if "both" in found:
        if others := {"prefill", "decode"} & set(found):
            raise ValueError(
                f"there are [both] and [[{min(others)}]]: pages of [both] stay in its process, so that it works alone"
            )
        _check_keys("[both]", found["both"], {*_BOTH_KEYS, *_OPTIONS})
        workers.append(_both(engine, dict(found["both"])))
    for role in () if workers else _ROLES:
        tables = found.get(role, [])
        if isinstance(tables, dict):
            raise ValueError(f"[{role}] is one table; workers are a list of them, [[{role}]]")
        if not isinstance(tables, list) or not tables:
            raise ValueError(f"there is no [[{role}]]; a deployment has at least one worker of either role")
        for place, table in enumerate(tables):
            if not isinstance(table, dict):
                raise ValueError(f"{role} has {table!r}; workers are tables, [[{role}]]")
            workers.append(_worker(role, f"{role}-{place}", engine, dict(table)))
    names = [name for worker in workers for name in worker.names]
    if len(set(names)) < len(names):
        raise ValueError(f"names of workers are not distinct: {names}")
    _check_alike([part for worker in workers for part in worker.parts or [worker]])
    return Deployment(tuple(workers), address, RouterSettings(**router))


def _check_alike(workers: list[WorkerPlan]) -> None:
    """Raises ValueError where workers would have other weights than others, or where some draft and others do not:
    pages of one kind have a layer that the other lacks."""
    first, *others = workers
    for key in (*_OF_WEIGHTS, "num_speculative_tokens"):
        value = first.options.get(key)
        for other in others:
            own = other.options.get(key)
            drafts = key == "num_speculative_tokens"
            if (value is None, bool(value)) != (own is None, bool(own)) if drafts else value != own:
                said = [
                    f"{'not given' if each is None else each} for {name}"
                    for name, each in ((first.name, value), (other.name, own))
                ]
                rule = "all workers draft or none does" if drafts else "it is one for all workers"
                raise ValueError(f"{key} is {' and '.join(said)}: {rule}, as [engine] says it")


def _both(engine: dict[str, Any], table: dict[str, Any]) -> WorkerPlan:
    own: dict[Role, Any] = {role: table.pop(role, {}) for role in _ROLES}
    name, env, staging = _common("both", "both-0", table)
    share = table.pop("share_device", False)
    if not isinstance(share, bool):
        raise ValueError(f"{name}: share_device is {share!r}; it is true or false")
    _check_options("[both]", table)
    for role, options in own.items():
        known = {*_OPTIONS, *(("min_tokens_per_second",) if role == "decode" else ())}
        _check_keys(f"[both.{role}]", options, known)
    parts = tuple(
        _worker(role, f"{name}-{role}", {**engine, **table}, {**own[role], "staging_pages": staging}) for role in _ROLES
    )
    if share and max(part.num_devices for part in parts) > 1:
        raise ValueError(f"{name}: share_device is for meshes of one device")
    return WorkerPlan(name, "both", {}, env, parts=parts, share_device=share)


def _common(role: str, name: str, table: dict[str, Any]) -> tuple[str, dict[str, str], int | None]:
    """What workers of all kinds have: name, env and staging_pages, taken out of their table."""
    name = table.pop("name", name)
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of a {role} worker is {name!r}; it is a string")
    env, staging = table.pop("env", {}), table.pop("staging_pages", None)
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise ValueError(f"{name}: env is {env!r}; it is a table of strings")
    if staging is not None and (isinstance(staging, bool) or not isinstance(staging, int) or staging < 1):
        raise ValueError(f"{name}: staging_pages is {staging!r}; it is an integer above 0")
    return name, env, staging


def _worker(role: Role, name: str, engine: dict[str, Any], table: dict[str, Any]) -> WorkerPlan:
    name, env, staging = _common(role, name, table)
    processes, coordinator = table.pop("processes", 1), table.pop("coordinator", None)
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"{name}: processes is {processes!r}; it is an integer above 0")
    if coordinator is not None and not (isinstance(coordinator, str) and coordinator.rpartition(":")[2].isdigit()):
        raise ValueError(f"{name}: coordinator is {coordinator!r}; it is HOST:PORT")
    slowest = table.pop("min_tokens_per_second", None) if role == "decode" else None
    if slowest is not None and not _is_positive(slowest, float):
        raise ValueError(f"{name}: min_tokens_per_second is {slowest!r}; it is a number above 0")
    _check_options(name, table)
    options = cast(EngineOptions, {"progress": False, **engine, **table})
    if role == "prefill" and options.get("data_parallel", 1) != 1:
        raise ValueError(f"{name}: data_parallel is {options['data_parallel']}; prefill has one data rank")
    plan = WorkerPlan(name, role, options, env, staging, processes, coordinator, slowest)
    if plan.num_devices % processes:
        raise ValueError(f"{name}: {plan.num_devices} devices do not divide over {processes} processes")
    return plan


def _is_address(value: object) -> bool:
    """Whether a value is tcp://HOST:PORT."""
    if not isinstance(value, str) or not value.startswith("tcp://"):
        return False
    try:
        return bool(urlsplit(value).hostname) and urlsplit(value).port is not None
    except ValueError:  # a port that is no number, or above 65535
        return False


def _is_positive(value: object, kind: type[float]) -> bool:
    """Whether a value is a number above 0: any, or a whole one where kind is int."""
    return not isinstance(value, bool) and isinstance(value, int | kind) and 0 < value < math.inf


def _check_options(where: str, table: dict[str, Any]) -> None:
    _check_keys(where, table, _OPTIONS)
    try:
        check_options(table)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_keys(where: str, table: Any, known: set[str]) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{where} is {table!r}; it is a table")
    if unknown := set(table) - known:
        raise ValueError(f"{where}: unknown {sorted(unknown)}; there are {sorted(known)}")
