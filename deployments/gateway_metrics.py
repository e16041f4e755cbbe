"""The gateway's Prometheus metrics, under vLLM's names wherever vLLM has the quantity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FirstTokenBuckets = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TokenBuckets = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
RequestBuckets = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
LABELS = ("model_name", "service_tier")

Finish = Literal["stop", "length", "abort", "error"]


class GatewayMetrics:
    """All metrics of one gateway, in the registry it is given. Times are seconds.

    Args:
        registry: where they are registered; one registry holds one gateway.
        model_name: value of the label of that name.
        tiers: names for which the gauges start at 0, so that they exist before the first request.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, tiers: Sequence[str]) -> None:
        self.registry = registry
        self.model_name = model_name
        self._running = Gauge(
            "vllm:num_requests_running", "Requests past their first token.", LABELS, registry=registry
        )
        self._waiting = Gauge(
            "vllm:num_requests_waiting", "Requests waiting for their first token.", LABELS, registry=registry
        )
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens admitted.", LABELS, registry=registry)
        self._generated = Counter("vllm:generation_tokens", "Tokens generated.", LABELS, registry=registry)
        self._finished = Counter(
            "vllm:request_success",
            "Requests ended; those that failed or were cancelled carry error or abort.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token.",
            LABELS,
            buckets=FirstTokenBuckets,
            registry=registry,
        )
        self._inter_token = Histogram(
            "vllm:inter_token_latency_seconds",
            "Time between the tokens of a request; tokens that come together share their wait.",
            LABELS,
            buckets=TokenBuckets,
            registry=registry,
        )
        self._per_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first, of each request.",
            LABELS,
            buckets=TokenBuckets,
            registry=registry,
        )
        self._latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From arrival to the last token.",
            LABELS,
            buckets=RequestBuckets,
            registry=registry,
        )
        self._accepted = Counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", LABELS, registry=registry
        )
        self._drafted = Counter(
            "vllm:spec_decode_num_draft_tokens",
            "Draft tokens that were accepted, refused, or dropped behind a refusal.",
            LABELS,
            registry=registry,
        )
        self._refused = Counter(
            "dspark:requests_refused",
            "Requests answered with an error status.",
            ("model_name", "status"),
            registry=registry,
        )
        for tier in tiers:
            for family in (self._running, self._waiting, self._prompt, self._generated):
                family.labels(model_name, tier)
            for family in (self._accepted, self._drafted):
                family.labels(model_name, tier)

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def refused(self, status: int) -> None:
        """A request was answered with an error status."""
        self._refused.labels(self.model_name, str(status)).inc()

    def admitted(self, tier: str, prompt_tokens: int) -> None:
        """A request begins to wait for its first token."""
        self._waiting.labels(self.model_name, tier).inc()
        self._prompt.labels(self.model_name, tier).inc(prompt_tokens)

    def first_token(self, tier: str, waited_s: float) -> None:
        """A request waits no more but runs."""
        self._waiting.labels(self.model_name, tier).dec()
        self._running.labels(self.model_name, tier).inc()
        self._first_token.labels(self.model_name, tier).observe(waited_s)

    def tokens(self, tier: str, count: int, accepted: int, rejected: int) -> None:
        """`count` tokens came, and the drafts behind them."""
        self._generated.labels(self.model_name, tier).inc(count)
        self._accepted.labels(self.model_name, tier).inc(accepted)
        self._drafted.labels(self.model_name, tier).inc(accepted + rejected)

    def token_gap(self, tier: str, count: int, seconds: float) -> None:
        """`count` tokens came `seconds` after the one before them."""
        histogram = self._inter_token.labels(self.model_name, tier)
        for _ in range(count):
            histogram.observe(seconds / count)

    def finished(self, tier: str, reason: Finish, seconds: float, per_token_s: float | None, *, ran: bool) -> None:
        """A request ended.

        Args:
            seconds: since its arrival.
            per_token_s: mean time of its tokens after the first, if there were any.
            ran: whether it had got its first token.
        """
        (self._running if ran else self._waiting).labels(self.model_name, tier).dec()
        self._finished.labels(self.model_name, tier, reason).inc()
        self._latency.labels(self.model_name, tier).observe(seconds)
        if per_token_s is not None:
            self._per_token.labels(self.model_name, tier).observe(per_token_s)
