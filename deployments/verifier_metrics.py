"""The verifiers' own figures in the gateway's /metrics, under vLLM's names where vLLM has the quantity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class VerifierMetrics:
    """A collector that shows what `update` was last given, summed over the verifiers.

    Args:
        registry: it registers itself there.
        model_name: label of every sample.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._states: Sequence[dict[str, Any]] = ()
        registry.register(self)

    def update(self, states: Sequence[dict[str, Any]]) -> None:
        """Figures of each verifier, as `Verifier.state` gives them."""
        self._states = states

    def _sum(self, name: str) -> float:
        return float(sum(state[name] for state in self._states))

    def collect(self) -> list[Metric]:
        """Asked by prometheus_client."""
        label = [self._model_name]
        counters = (
            ("vllm:spec_decode_num_drafts", "blocks resolved", "rounds"),
            ("dspark:verify_steps", "steps of the target", "steps"),
            ("dspark:verify_step_seconds", "time of steps, waits for drafts among them", "step_seconds"),
            ("dspark:draft_wait_seconds", "time steps waited for drafts", "wait_seconds"),
            ("dspark:draft_seconds", "time drafters worked", "draft_seconds"),
            ("dspark:draft_rounds_late", "rounds whose drafts came too late", "late"),
            ("dspark:draft_rounds_mismatched", "replies made with other drafter weights", "mismatched"),
            ("dspark:verified_draft_tokens", "draft tokens verified", "verified"),
            ("dspark:accepted_draft_tokens", "draft tokens accepted by verifiers", "accepted"),
            ("dspark:expected_accepted_tokens", "accepted draft tokens that plans expected", "expected_accepted"),
        )
        metrics: list[Metric] = []
        for name, text, key in counters:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric(label, self._sum(key))
            metrics.append(family)
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "draft tokens accepted at each position of a block, from 0",
            labels=["model_name", "position"],
        )
        for k in range(max((len(s["accepted_at"]) for s in self._states), default=0)):
            total = sum(s["accepted_at"][k] for s in self._states if k < len(s["accepted_at"]))
            by_position.add_metric([self._model_name, str(k)], float(total))
        metrics.append(by_position)
        gauges = (
            ("dspark:verifiers", "verifier replicas", float(len(self._states))),
            ("dspark:verifiers_without_drafter", "verifiers that have no drafter now", self._without("drafter")),
            (
                "dspark:verifiers_unprofiled",
                "verifiers without step costs: no trimming",
                self._sum("unprofiled"),
            ),
            (
                "dspark:verifiers_without_compiled_kernels",
                "verifiers whose steps run on plain torch",
                self._without("compiled_kernels"),
            ),
            ("vllm:kv_cache_usage_perc", "share of the pages in use, 0 to 1", self._page_usage()),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(label, value)
            metrics.append(gauge)
        return metrics

    def _without(self, name: str) -> float:
        return float(sum(not state[name] for state in self._states))

    def _page_usage(self) -> float:
        pages = self._sum("pages")
        return 1.0 - self._sum("free_pages") / pages if pages else 0.0
