"""What /metrics shows, in Prometheus' form: names are vLLM's where it has them, with `qwenjax:` for `vllm:`."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from qwenjax.outputs import EngineStats, RequestOutput

_WAITS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN_TIMES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_REQUEST_TIMES = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class Histogram:
    """Counts of values by upper bound. Observed on the event loop alone, so without a lock; `count` values at once."""

    def __init__(self, name: str, documentation: str, bounds: Iterable[float]) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, model_name: str) -> Metric:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model_name"])
        family.add_metric([model_name], buckets(self._bounds, self._counts), self._sum)
        return family


def buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Prometheus' form of a histogram. counts: of values by upper bound, the last bound being infinite."""
    names = ("+Inf" if bound == math.inf else str(bound) for bound in bounds)
    return list(zip(names, accumulate(counts), strict=True))


class RequestMetrics(Collector):
    """What the front end sees of requests: times as clients have them, ends, and HTTP answers."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._first = Histogram(
            "qwenjax:time_to_first_token_seconds", "From a request's arrival to its first token", _WAITS
        )
        self._between = Histogram(
            "qwenjax:inter_token_latency_seconds",
            "Between two tokens of a sequence; those that come together share the time evenly",
            _TOKEN_TIMES,
        )
        self._whole = Histogram(
            "qwenjax:e2e_request_latency_seconds", "From a request's arrival to its last token", _REQUEST_TIMES
        )
        self._queued = Histogram(
            "qwenjax:request_queue_time_seconds",
            "From a request's arrival at the engine to its prefill",
            _REQUEST_TIMES,
        )
        self._ends: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0})
        self._answers: Counter[tuple[str, int]] = Counter()

    def watch(self, arrival: float) -> Watch:
        """To be told of a request's outputs as they come. arrival: of the request, as time.monotonic() has it."""
        return Watch(self._first, self._between, self._whole, self._queued, self._ends, arrival)

    def aborted(self) -> None:
        """A request that was accepted was given up: its client left, or it failed."""
        self._ends["abort"] += 1

    def answered(self, path: str, status: int) -> None:
        self._answers[path, status] += 1

    def collect(self) -> Iterator[Metric]:
        yield from (h.family(self._model_name) for h in (self._first, self._between, self._whole, self._queued))
        ends = CounterMetricFamily(
            "qwenjax:request_success",
            "Outputs and aborted requests by how they ended",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in self._ends.items():
            ends.add_metric([self._model_name, reason], count)
        yield ends
        answers = CounterMetricFamily("qwenjax:http_requests", "HTTP answers begun", labels=["path", "status"])
        for (path, status), count in self._answers.items():
            answers.add_metric([path, str(status)], count)
        yield answers


class Watch:
    """One request as the front end sees it."""

    def __init__(
        self,
        first: Histogram,
        between: Histogram,
        whole: Histogram,
        queued: Histogram,
        ends: Counter[str],
        arrival: float,
    ) -> None:
        self._first, self._between, self._whole, self._queued, self._ends = first, between, whole, queued, ends
        self._arrival = arrival
        self._seen: dict[int, tuple[int, float]] = {}
        self._ended: set[int] = set()

    def saw(self, result: RequestOutput) -> None:
        """An output has come."""
        now = time.monotonic()
        if not self._seen and any(part.token_ids for part in result.outputs):
            self._first.observe(now - self._arrival)
            times = result.metrics
            if times is not None and times.first_scheduled is not None:
                self._queued.observe(times.first_scheduled - times.arrival)
        for part in result.outputs:
            count, before = self._seen.get(part.index, (0, now))
            if new := len(part.token_ids) - count:
                if count:
                    self._between.observe((now - before) / new, new)
                self._seen[part.index] = (len(part.token_ids), now)
            if part.finish_reason is not None and part.index not in self._ended:
                self._ended.add(part.index)
                self._ends[part.finish_reason] += 1
        if result.finished:
            self._whole.observe(now - self._arrival)


class EngineCollector(Collector):
    """The engines' own counters and gauges, read when /metrics is."""

    def __init__(self, model_name: str, stats: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._model_name, self._stats = model_name, stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, documentation, value in _GAUGES:
            gauge = GaugeMetricFamily(f"qwenjax:{name}", documentation, labels=["model_name", "engine"])
            for engine, found in stats.items():
                gauge.add_metric([self._model_name, engine], value(found))
            yield gauge
        for name, documentation, value in _COUNTERS:
            counter = CounterMetricFamily(f"qwenjax:{name}", documentation, labels=["model_name", "engine"])
            for engine, found in stats.items():
                counter.add_metric([self._model_name, engine], value(found))
            yield counter
        for name, documentation, values in _OF_RANKS:
            gauge = GaugeMetricFamily(f"qwenjax:{name}", documentation, labels=["model_name", "engine", "rank"])
            for engine, found in stats.items():
                for rank, number in enumerate(values(found)):
                    gauge.add_metric([self._model_name, engine, str(rank)], number)
            yield gauge
        for name, documentation, values in _OF_POSITIONS:
            counter = CounterMetricFamily(f"qwenjax:{name}", documentation, labels=["model_name", "engine", "position"])
            for engine, found in stats.items():
                for position, number in enumerate(values(found)):
                    counter.add_metric([self._model_name, engine, str(position)], number)
            yield counter


def _page_usage(stats: EngineStats) -> float:
    pages = stats.num_pages * len(stats.free_pages)
    return 1 - sum(stats.free_pages) / pages if pages else 0.0


_Number = Callable[[EngineStats], float]
_Numbers = Callable[[EngineStats], Iterable[float]]

_GAUGES: tuple[tuple[str, str, _Number], ...] = (
    ("num_requests_running", "Sequences that are prefilled or decode", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait", lambda s: s.num_waiting),
    ("queued_prompt_tokens", "Prompt tokens of the sequences that wait", lambda s: s.queued_prompt_tokens),
    ("kv_cache_usage_perc", "Share of the cache's pages in use; 1 is all", _page_usage),
    ("num_pages", "Pages of the cache on each data rank", lambda s: s.num_pages),
)
_COUNTERS: tuple[tuple[str, str, _Number], ...] = (
    ("prompt_tokens", "Prompt tokens read, cached ones included", lambda s: s.prompt_tokens),
    ("prefill_tokens", "Prompt tokens computed", lambda s: s.prompt_tokens - s.cached_prompt_tokens),
    ("generation_tokens", "Tokens drawn", lambda s: s.generated_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda s: s.prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found there", lambda s: s.cached_prompt_tokens),
    ("num_preemptions", "Sequences that gave up their pages and began anew", lambda s: s.num_preemptions),
    ("num_aborts", "Requests aborted in the engine", lambda s: s.num_aborts),
    ("spec_decode_num_drafts", "Decode steps with drafts, of each sequence", lambda s: s.speculation.steps),
    ("spec_decode_num_draft_tokens", "Draft tokens", lambda s: sum(s.speculation.drafted)),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted", lambda s: sum(s.speculation.accepted)),
)
_OF_RANKS: tuple[tuple[str, str, _Numbers], ...] = (
    ("decode_batch_size", "Sequences that decode, of a data rank", lambda s: s.decode_batch),
    ("free_pages", "Pages of the cache that are free, of a data rank", lambda s: s.free_pages),
)
_OF_POSITIONS: tuple[tuple[str, str, _Numbers], ...] = (
    ("spec_decode_num_draft_tokens_per_pos", "Draft tokens at a position", lambda s: s.speculation.drafted),
    ("spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted there", lambda s: s.speculation.accepted),
)


def make_registry(
    requests: RequestMetrics,
    stats: Callable[[], Mapping[str, EngineStats]],
    model_name: str,
    collectors: Iterable[Collector] = (),
) -> CollectorRegistry:
    """Everything that /metrics shows: requests, engines, and what `collectors` add of their own."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in (requests, EngineCollector(model_name, stats), *collectors):
        registry.register(collector)
    return registry
