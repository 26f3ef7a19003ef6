"""Metrics of a server for Prometheus.

Labels are endpoints and statuses; keys, domains and texts are not shown.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from knnstore.server.engine import Observed

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ROWS = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counts and durations of one server.

    The names of metrics follow OpenTelemetry's conventions (``gen_ai_…``). Metrics that the conventions do
    not know have names of their own (``knnstore_server_…``).
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from a request to the end of its answer.",
            ["endpoint", "status"],
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._first = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from a request to the first byte of its answer. In a stream this is the first token.",
            ["endpoint"],
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._steps = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time of a step for each token that it adds to a text.",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._rows = Histogram(
            "knnstore_server_texts_per_step",
            "Texts that are decoded in one step.",
            registry=self._registry,
            buckets=_ROWS,
        )
        self._tokens = Counter(
            "knnstore_server_tokens_written", "Tokens that were generated.", registry=self._registry
        )
        self._drafted = Counter(
            "knnstore_server_tokens_drafted",
            "Draft tokens that the model has read.",
            registry=self._registry,
        )
        self._accepted = Counter(
            "knnstore_server_tokens_drafted_accepted",
            "Draft tokens that were accepted.",
            registry=self._registry,
        )
        self._turns = Counter(
            "knnstore_server_turns",
            "Number of times that explanations and other long work ran between two steps.",
            registry=self._registry,
        )
        self._waiting = Gauge(
            "knnstore_server_waiting",
            "Requests that had not begun at the last step, and explanations that were not finished.",
            registry=self._registry,
        )

    def record_turn(self, step: Observed) -> None:
        """Record the counts of one turn of the engine: a decoding step, or other work of its thread."""
        if step.rows:
            self._steps.observe(step.seconds)
            self._rows.observe(step.rows)
        self._tokens.inc(step.tokens)
        self._drafted.inc(step.drafted)
        self._accepted.inc(step.accepted)
        self._turns.inc(step.turns)
        self._waiting.set(step.waiting)

    def record_request(self, endpoint: str, status: int, seconds: float, first: float | None) -> None:
        """Record a request that was answered.

        Args:
            endpoint: the declared path, with its parameters in braces.
            status: the HTTP status of the answer.
            seconds: seconds from the request to the end of its answer.
            first: seconds from the request to the first byte of its answer; None if the answer has no body.
        """
        self._requests.labels(endpoint, str(status)).observe(seconds)
        if first is not None:
            self._first.labels(endpoint).observe(first)

    def format_metrics(self) -> bytes:
        """Return all metrics in the text format of Prometheus, encoded as UTF-8."""
        return generate_latest(self._registry)
