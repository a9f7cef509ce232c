"""The front end beside generation: clients that leave, too many at once, the small endpoints, /metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from qwenjax_serving.api.app import Settings, create_app
from tests.serving.asgi import call, get, post
from tests.serving.fake_backend import STATS, FakeBackend

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"stream": True, "prompt": ["a", "b"]}])
def test_a_client_that_leaves_ends_its_requests(body: dict[str, Any]) -> None:
    leave = asyncio.Event()

    async def run() -> FakeBackend:
        backend = FakeBackend(pace=0.01, on_token=lambda count: leave.set() if count == 3 else None)
        await call(create_app(backend), "POST", COMPLETIONS, {"prompt": "a", **body}, leave=leave)
        return backend

    backend = asyncio.run(run())
    assert not backend.running
    assert sorted(backend.aborted) == sorted(asked.request_id for asked in backend.asked)


def test_a_finished_request_is_not_aborted() -> None:
    backend = FakeBackend()
    assert post(create_app(backend), COMPLETIONS, {"prompt": ["a", "b"]}).status == 200
    assert backend.aborted == []


def test_more_requests_than_allowed_are_turned_away_and_room_comes_back() -> None:
    async def run() -> list[int]:
        app = create_app(FakeBackend(pace=0.01), Settings(max_concurrent_requests=2))
        calls = [call(app, "POST", COMPLETIONS, {"prompt": "a"}) for _ in range(3)]
        replies = await asyncio.gather(*calls)
        assert [reply.headers.get("retry-after") for reply in replies] == [None, None, "1"]
        assert (await call(app, "GET", "/health")).status == 200
        again = await call(app, "POST", COMPLETIONS, {"prompt": "a"})
        return [reply.status for reply in (*replies, again)]

    assert asyncio.run(run()) == [200, 200, 503, 200]


def test_models_and_version_and_health() -> None:
    backend = FakeBackend()
    app = create_app(backend)
    listed = get(app, "/v1/models").json
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["small", "alias"]
    card = {"id": "small", "object": "model", "created": 1_700_000_000, "owned_by": "qwenjax", "max_model_len": 64}
    assert get(app, "/v1/models/small").json == card == listed["data"][0]
    assert set(get(app, "/version").json) == {"version"}
    assert (get(app, "/health").status, get(app, "/health").json) == (200, {"status": "ok"})
    backend.well = False
    reply = get(app, "/health")
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "unhealthy", "1")


def test_text_becomes_ids_and_ids_text() -> None:
    backend = FakeBackend()
    app, tokenizer = create_app(backend), backend.model.tokenizer
    ids = tokenizer.encode("hello w")
    assert post(app, "/tokenize", {"prompt": "hello w"}).json == {"count": 2, "max_model_len": 64, "tokens": ids}
    messages = [{"role": "user", "content": "th"}]
    found = post(app, "/tokenize", {"messages": messages}).json["tokens"]
    assert found == tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    assert post(app, "/detokenize", {"tokens": [*ids, 2]}).json == {"prompt": "hello w<|im_end|>"}


def samples(app: ASGIApp) -> dict[tuple[str, ...], float]:
    """(name, label values but model_name's …) to value, of every sample at /metrics."""
    reply = get(app, "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


def test_metrics_count_requests_tokens_and_answers() -> None:
    app = create_app(FakeBackend(pace=0.004))
    for _ in range(2):
        post(app, COMPLETIONS, {"prompt": "a", "n": 2})
    post(app, COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stream": True})
    post(app, COMPLETIONS, {"prompt": []})
    get(app, "/nothing")
    found = samples(app)
    assert found["qwenjax:request_success_total", "stop"] == 4
    assert found["qwenjax:request_success_total", "length"] == 1
    assert found["qwenjax:request_success_total", "abort"] == 0
    assert found["qwenjax:http_requests_total", COMPLETIONS, "200"] == 3
    assert found["qwenjax:http_requests_total", COMPLETIONS, "400"] == 1
    assert found["qwenjax:http_requests_total", "other", "404"] == 1
    assert found["qwenjax:time_to_first_token_seconds_count",] == 3
    assert found["qwenjax:e2e_request_latency_seconds_count",] == 3
    # Five intervals in each of four outputs of six tokens, two in the one of three.
    assert found["qwenjax:inter_token_latency_seconds_count",] == 22
    assert found["qwenjax:inter_token_latency_seconds_bucket", "0.0025"] == 0
    assert 22 * 0.004 < found["qwenjax:inter_token_latency_seconds_sum",] < 22 * 2
    assert found["qwenjax:request_queue_time_seconds_sum",] == 3 * 0.25


def test_metrics_have_what_the_engines_say() -> None:
    class Two(FakeBackend):
        def stats(self) -> Any:
            return {"prefill-0": STATS, "decode-0": STATS}

    found = samples(create_app(Two()))
    for engine in "prefill-0", "decode-0":
        for name, value in {
            "num_requests_waiting": 3,
            "num_requests_running": 2,
            "queued_prompt_tokens": 70,
            "kv_cache_usage_perc": 1 - 21 / 32,
            "num_preemptions_total": 1,
            "prompt_tokens_total": 500,
            "prefill_tokens_total": 380,
            "prefix_cache_queries_total": 500,
            "prefix_cache_hits_total": 120,
            "generation_tokens_total": 90,
            "num_aborts_total": 4,
            "spec_decode_num_drafts_total": 40,
            "spec_decode_num_draft_tokens_total": 40,
            "spec_decode_num_accepted_tokens_total": 20,
        }.items():
            assert found[f"qwenjax:{name}", engine] == pytest.approx(value), name
        assert found["qwenjax:free_pages", engine, "1"] == 11
        assert found["qwenjax:decode_batch_size", engine, "0"] == 2
        assert found["qwenjax:spec_decode_num_accepted_tokens_per_pos_total", engine, "0"] == 20


def test_metrics_of_a_backend_stand_beside_the_others() -> None:
    class Own:
        def collect(self) -> Any:
            yield GaugeMetricFamily("qwenjax:transfers_running", "", value=5)

    found = samples(create_app(FakeBackend(), collectors=[Own()]))  # type: ignore[list-item]
    assert found["qwenjax:transfers_running",] == 5
