"""Tests of /metrics: vLLM's names have LMDeploy's values, and errors are counted."""

from __future__ import annotations

import httpx
import pytest
from fake_engine import make_engine
from prometheus_client.parser import text_string_to_metric_families
from serving import CHAT, post, serving

from lmdeploy.serve.metrics import VLLM_NAMES

# What vllm-router, the Gateway API inference extension, KEDA and production-stack read.
VLLM_SAMPLES = {
    *("num_requests_running", "num_requests_waiting", "num_preemptions_total"),
    *("kv_cache_usage_perc", "gpu_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("time_to_first_token_seconds_bucket", "time_per_output_token_seconds_bucket"),
    *("inter_token_latency_seconds_sum", "inter_token_latency_seconds_count"),
    *("request_time_per_output_token_seconds_count", "e2e_request_latency_seconds_bucket"),
    *("request_prompt_tokens_sum", "request_generation_tokens_sum"),
}

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(url: str) -> Samples:
    """Return the values of every sample by its labels."""
    response = httpx.get(f"{url}/metrics")
    assert response.status_code == 200
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for name, labels, value, *_ in family.samples:
            series = samples.setdefault(name, {})
            key = tuple(sorted(labels.items()))
            assert key not in series, f"{name}{labels} is there twice"
            series[key] = value
    return samples


@pytest.fixture
def samples() -> Samples:
    with serving(make_engine()) as url:
        for body in (CHAT, {**CHAT, "max_tokens": 3}, {**CHAT, "stream": True}):
            assert post(url, "/v1/chat/completions", body).status_code == 200
        return scrape(url)


def test_names_of_vllm_that_other_programs_read_exist(samples: Samples) -> None:
    for name in VLLM_SAMPLES:
        assert samples[f"vllm:{name}"], name
        assert all(("model_name", "m") in labels for labels in samples[f"vllm:{name}"]), name
    finished = samples["vllm:request_success_total"].items()
    assert {dict(labels)["finished_reason"]: count for labels, count in finished} == {
        **{"stop": 2, "length": 1, "tool_calls": 0, "error": 0, "abort": 0}
    }
    ((info, value),) = samples["vllm:cache_config_info"].items()
    assert value == 1
    assert dict(info) == {
        "model_name": "m",
        "block_size": "64",
        "num_gpu_blocks": "10",
        "kv_cache_size_tokens": "640",
        "cache_dtype": "nvfp4",
    }


def test_values_under_both_names_are_equal(samples: Samples) -> None:
    compared = 0
    for ours, theirs in VLLM_NAMES.items():
        suffixes = {n.removeprefix(f"lmdeploy:{ours}") for n in samples}
        for name in theirs:
            for suffix in suffixes & {"", "_total", "_bucket", "_sum", "_count"}:
                assert samples[f"vllm:{name}{suffix}"] == samples[f"lmdeploy:{ours}{suffix}"]
                compared += 1
    assert compared > len(VLLM_NAMES)
    assert samples["vllm:prefix_cache_queries_total"] == {(("model_name", "m"),): 8.0}
    assert samples["vllm:prefix_cache_hits_total"] == {(("model_name", "m"),): 4.0}
    assert samples["vllm:e2e_request_latency_seconds_count"] == {(("model_name", "m"),): 3.0}


def test_every_sample_of_vllm_is_a_copy(samples: Samples) -> None:
    copied = {name for names in VLLM_NAMES.values() for name in names}
    for name in samples:
        prefix, _, rest = name.partition(":")
        if prefix == "vllm" and rest != "cache_config_info":
            assert any(rest.startswith(known) for known in copied), name


def test_errors_are_counted_by_status() -> None:
    with serving(make_engine(), api_keys=["key"], max_concurrent_requests=1) as url:
        key = {"Authorization": "Bearer key"}
        path = "/v1/chat/completions"
        assert post(url, path, CHAT).status_code == 401
        assert post(url, path, CHAT, headers={"Origin": "https://a.test", **key}).status_code == 403
        assert post(url, path, {**CHAT, "model": "other"}, headers=key).status_code == 404
        assert post(url, path, {**CHAT, "top_p": 2}, headers=key).status_code == 400
        assert post(url, path, b"{", headers=key).status_code == 400
        assert post(url, path, CHAT, headers=key).status_code == 200
        text = httpx.get(f"{url}/metrics", headers=key).text
    for status, count in ((401, 1), (403, 1), (404, 1), (400, 2), (500, 0)):
        line = f'lmdeploy:http_errors_total{{model_name="m",status="{status}"}} {count}.0'
        assert line in text
    assert 'status="200"' not in text
