"""A load test as text for a terminal: the table of times, the run over time, the setup."""

from __future__ import annotations

from termgen.bench import plots, report
from termgen.bench.serve import ServeRun
from termgen.bench.serve_result import TITLES
from termgen.vocabulary.durations import took


def summary(run: ServeRun) -> str:
    """The whole report; the result comes first, as the report may be longer than the screen."""
    rows = report.table("termgen bench serve", result_rows(run))
    parts = [rows, "\n".join(times_table(run)), "\n".join(_over_time(run))]
    first = run.result.values_ms("ttft")
    if len(first) > 1:
        lines = plots.histogram(first)
        parts.append("\n".join(["requests by time to first token", *lines]))
    parts.append(report.table("how it was measured", setup_rows(run)))
    return "\n\n".join(parts)


def distributions(run: ServeRun) -> list[tuple[str, list[str]]]:
    """(title, lines): histograms of the times to first token and between chunks."""
    titles = (("ttft", "requests by time to first token"), ("itl", "times between chunks"))
    found = [(title, run.result.values_ms(name)) for name, title in titles]
    return [(title, plots.histogram(values)) for title, values in found if values]


def over_time(run: ServeRun) -> list[tuple[str, list[str]]]:
    """(title, lines): running requests and output tokens by second."""
    running, tokens = run.result.running_by_second(), run.result.output_tokens_by_second()
    return [
        ("requests under way, the most in each second", plots.columns(running, x_title="s")),
        ("output tokens by second", plots.columns(tokens, x_title="s")),
    ]


def rows_of(run: ServeRun) -> list[tuple[str, str]]:
    return [*result_rows(run), *setup_rows(run)]


def result_rows(run: ServeRun) -> list[tuple[str, str]]:
    result, options = run.result, run.result.options
    figures = result.as_json()
    rows = [
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        ("output tokens/s", f"{figures['output_throughput']:.2f}"),
        ("total tokens/s", f"{figures['total_token_throughput']:.2f}"),
        ("completed, failed", f"{figures['completed']}, {figures['failed']}"),
        ("duration", f"{figures['duration']:.2f} s"),
        ("input, output tokens", f"{result.num_input_tokens:,}, {result.num_output_tokens:,}"),
    ]
    if options.goodput:
        share = result.num_good / len(result.errors)
        name = f"goodput ({' '.join(options.goodput)})"
        value = f"{figures['request_goodput']:.2f} requests/s, {share:.1%} of requests"
        rows.insert(0, (name, value))
    return rows


def setup_rows(run: ServeRun) -> list[tuple[str, str]]:
    """Server, dataset and load, the server's own counts, and the load generator's figures."""
    result, options = run.result, run.result.options
    figures = result.as_json()
    seats = (
        "" if options.max_concurrency is None else f", at most {options.max_concurrency} at once"
    )
    is_trace = options.dataset_name == "trace" and options.request_rate is None
    rate = "as in the trace" if is_trace else f"{figures['request_rate']} requests/s"
    if figures["request_rate"] == "inf" and not is_trace:
        rate = "all at once"
    rows = [
        ("server", f"{run.url} ({run.model.owner}), model {run.model.model_id}"),
        ("dataset", f"{options.dataset_name}, {figures['num_prompts']} requests, seed {run.seed}"),
        ("load", f"{rate}{seats}"),
    ]
    if run.server is not None:
        cached = run.server.get("cached_tokens", 0.0)
        share = cached / max(1.0, run.server.get("prompt_tokens", 0.0))
        rows.append(("found in the prefix cache", f"{share:.1%} of prompt tokens"))
        rows.append(("preemptions", f"{run.server.get('preemptions', 0):.0f}"))
        rows += report.draft_rows(run.drafts(), run.server.get("draft_tokens", 0.0))
    client = result.client()
    rows.append(
        (
            "load generator",
            f"{client['cpu_share']:.0%} of a core, late by {took(client['p99_send_lateness_ms'])} "
            f"sending, {took(client['p99_loop_lag_ms'])} waking (p99)",
        )
    )
    observer, words = run.observer(), []
    if "engine_share" in observer:
        words.append(
            f"{100 * observer['engine_share']:.2g}% of the engine's time to tell of its steps"
        )
    if "screen_share" in observer:
        words.append(f"{observer['screen_share']:.1%} of a core to draw")
    return [*rows, ("observer", ", ".join(words))] if words else rows


def times_table(run: ServeRun) -> list[str]:
    options, found = run.result.options, run.result.statistics()
    names = ["mean", "std", *(f"p{p:g}" for p in options.percentiles())]
    titles = {metric: f"{TITLES[metric]} ({metric})" for metric in options.metrics()}
    width = max(map(len, titles.values()))
    lines = [" " * width + "".join(f"{n:>11}" for n in names)]
    for metric, title in titles.items():
        cells = "".join(f"{took(found[f'{n}_{metric}_ms']):>11}" for n in names)
        lines.append(f"{title:<{width}}" + cells)
    return lines


def _over_time(run: ServeRun) -> list[str]:
    tokens, running = run.result.output_tokens_by_second(), run.result.running_by_second()
    return [
        f"output tokens/s  {plots.sparkline(tokens)}  at most {max(tokens):,.0f}",
        f"requests         {plots.sparkline(running)}  at most {max(running)}",
    ]
