"""The metrics again, under the names vLLM has for them: for routers and dashboards made for those.

Only what such programs read, and only what means the same here. Nothing is counted twice: values
are taken from our own metrics at the moment somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SAME_NAMES = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
        "kv_cache_usage_perc",
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        "corrupted_requests",
        *("prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source"),
        *("generation_tokens", "request_success", "iteration_tokens_total"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("e2e_request_latency_seconds", "request_time_per_output_token_seconds"),
        *("request_queue_time_seconds", "request_inference_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
        "request_max_num_generation_tokens",
        *("request_prefill_kv_computed_tokens", "request_params_n", "request_params_max_tokens"),
        *("cache_config_info", "engine_sleep_state"),
    }
)
"""`termgen_NAME` is `vllm:NAME`."""

OURS, THEIRS = "termgen_", "vllm:"


class VLLMNames(Collector):
    """Reads one registry and belongs to another."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            name = family.name.removeprefix(OURS)
            if name not in SAME_NAMES:
                continue
            renamed = Metric(THEIRS + name, family.documentation, family.type)
            renamed.samples = [_renamed(sample) for sample in family.samples]
            yield renamed


def _renamed(sample: Sample) -> Sample:
    labels = {k: v for k, v in sample.labels.items() if k != "model"}
    labels = {"model_name": sample.labels["model"], "engine": "0", **labels}
    return sample._replace(name=THEIRS + sample.name.removeprefix(OURS), labels=labels)
