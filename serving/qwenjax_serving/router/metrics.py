"""What /metrics shows of a router and its workers, beside the engines' own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from qwenjax_serving.metrics import buckets
from qwenjax_serving.protocol.messages import READ_TIMES, Status
from qwenjax_serving.router.router import Router


class RouterCollector(Collector):
    """Read when /metrics is."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        router = self._router
        workers = GaugeMetricFamily("qwenjax:workers", "Workers that have joined", labels=["role"])
        for role in ("prefill", "decode"):
            workers.add_metric([role], len(router.of_role(role)))
        yield workers
        yield GaugeMetricFamily("qwenjax:router_waiting", "Outputs that wait in the router", value=len(router.waiting))
        yield GaugeMetricFamily("qwenjax:router_running", "Outputs with workers", value=router.num_running)
        yield GaugeMetricFamily(
            "qwenjax:router_waiting_prompt_tokens",
            "Prompt tokens of the outputs that wait in the router",
            value=sum(len(output.work.prompt_token_ids) for output in router.waiting),
        )
        given = GaugeMetricFamily(
            "qwenjax:worker_prompt_tokens",
            "Prompt tokens of the outputs that a prefill worker has and that have no token yet",
            labels=["engine"],
        )
        for worker in router.of_role("prefill"):
            given.add_metric([worker.hello.name], worker.load)
        yield given
        for name, documentation, value in (
            ("router_retries", "Outputs that began again after a worker failed", router.num_retries),
            ("router_lost_workers", "Workers that ended or fell silent", router.num_lost),
            ("router_full", "Reservations that a decode worker had no room for", router.num_full),
        ):
            yield CounterMetricFamily(f"qwenjax:{name}", documentation, value=value)
        for kind, name, documentation, of in _OF_WORKERS:
            family = kind(f"qwenjax:{name}", documentation, labels=["engine"])
            for worker in router.workers.values():
                if worker.status is not None:
                    family.add_metric([worker.hello.name], of(worker.status))
            yield family
        times = HistogramMetricFamily(
            "qwenjax:kv_transfer_seconds",
            "Seconds of a transfer: the pages of a group of layers, of what a call has run of a prompt",
            labels=["engine"],
        )
        for worker in router.workers.values():
            if (status := worker.status) is not None:
                found = buckets((*READ_TIMES, math.inf), status.read_times)
                times.add_metric([worker.hello.name], found, status.read_seconds)
        yield times


_OF_WORKERS: tuple[
    tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, Callable[[Status], float]], ...
] = (
    (CounterMetricFamily, "kv_transfer_bytes", "Bytes of pages that a worker has read", lambda s: s.bytes_read),
    (GaugeMetricFamily, "staging_free_pages", "Pages of its staging buffer that are free", lambda s: s.staging_free),
    (GaugeMetricFamily, "worker_outputs", "Outputs that it holds something for", lambda s: s.held),
    (GaugeMetricFamily, "worker_slots", "Outputs that it takes at most", lambda s: s.num_slots),
    (CounterMetricFamily, "prefill_calls", "Prefill calls of its engine", lambda s: s.num_prefill_calls),
    (CounterMetricFamily, "decode_calls", "Decode calls of its engine", lambda s: s.num_decode_calls),
)
