"""`lorafleet bench`: load on a fleet through its router, and the figures."""

# ruff: noqa: PLC0415  (httpx and rich are imported when the command runs)

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafleet.cli.context import FleetAddress, print_json
from lorafleet.cli.resources import adapter_names
from lorafleet.service.failure import CommandFailed

if TYPE_CHECKING:
    from lorafleet.cli.bench.report import RequestOutcome
    from lorafleet.cli.client import RestClient

app = typer.Typer(no_args_is_help=True)
_LEAST_VOCABULARY = 16


@app.command()
def bench(  # noqa: PLR0917  (Typer passes by name)
    context: typer.Context,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="number of requests")] = 200,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="most requests at a time; default: no bound", show_default=False)
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="requests a second, as a Poisson process; default: all at once")
    ] = None,
    input_tokens: Annotated[int, typer.Option(min=1, help="tokens of each prompt")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="tokens of each answer")] = 32,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="first tokens of a prompt that all prompts of an adapter share")
    ] = 0,
    adapters: Annotated[
        str,
        typer.Option(help="all, base, or comma-separated names; base is the base model", autocompletion=adapter_names),
    ] = "all",
    zipf: Annotated[
        float, typer.Option(min=0, max=10, help="the n-th adapter gets 1/n^S of the first one's requests; 0: the same")
    ] = 0.0,
    model: Annotated[str, typer.Option(help="base model; default: the router's first")] = "",
    warm_up: Annotated[
        bool, typer.Option("--warm-up", help="send one request of each adapter before, uncounted")
    ] = False,
    seed: Annotated[int, typer.Option(help="the same seed sends the same requests")] = 0,
    timeout_s: Annotated[float, typer.Option(min=1, help="longest wait for the next part of an answer")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Put load on the fleet and print throughput, times to first token, hit shares and errors by code.

    Prompts are random tokens, so without --shared-prefix no cache helps; a second run with the same --seed finds them
    in the caches. Completions are streamed, of exactly --output-tokens. The status is 1 if no request succeeded.

    Examples:

      lorafleet bench --requests 500 --rate 20 --shared-prefix 256

      lorafleet bench --concurrency 16 --adapters sql-expert/v1,legal/v2,base --zipf 1

      lorafleet bench --adapters base --json > base.json
    """
    import asyncio

    from lorafleet.cli.bench.load import run_load
    from lorafleet.cli.bench.plan import planned_requests
    from lorafleet.cli.bench.report import figures, report_lines
    from lorafleet.cli.client import verify_by

    if shared_prefix > input_tokens:
        raise CommandFailed(f"--shared-prefix {shared_prefix} is above --input-tokens {input_tokens}", status=2)
    address: FleetAddress = context.obj
    with address.router() as api:
        base, known = served_models(api, model)
        models = chosen_models(adapters, base, known)
        vocabulary = prompt_vocabulary(api, base, seed)
        url = api.url

    def planned(count: int, chosen: list[str], at_rate: float | None, with_seed: int) -> Any:
        """The requests of a run of this command."""
        return planned_requests(
            chosen,
            vocabulary,
            count=count,
            rate=at_rate,
            input_tokens=input_tokens,
            shared_prefix=shared_prefix,
            zipf=zipf,
            seed=with_seed,
        )

    def run(these: Any, most: int | None, on_end: "Callable[[RequestOutcome], None]") -> Any:
        """Send requests and measure them."""
        return asyncio.run(
            run_load(
                url,
                address.token.strip(),
                these,
                output_tokens=output_tokens,
                concurrency=most,
                timeout_s=timeout_s,
                on_end=on_end,
                verify=verify_by(address.ca),
            )
        )

    if warm_up:
        # Each alone, in a plan of its own: others than those that are measured.
        run((next(planned(1, [name], None, seed + 1)) for name in models), concurrency, lambda _: None)
    with _progress(requests) as on_end:
        outcomes, duration_s = run(planned(requests, models, rate, seed), concurrency, on_end)
    found = figures(outcomes, duration_s)
    if as_json:
        print_json(found)
    else:
        typer.echo("\n".join(report_lines(found)))
    if not found["successful"]:
        first = next(iter(found["errors"])) if isinstance(found["errors"], dict) else ""
        raise CommandFailed(f"none of {requests} requests succeeded; the most frequent error: {first}")


def served_models(api: "RestClient", model: str) -> tuple[str, list[str]]:
    """The base model to use, and its adapters, as the router names them. Raises CommandFailed."""
    cards = api.call("GET", "/v1/models")["data"]
    bases = [str(card["id"]) for card in cards if not card.get("parent")]
    if not bases:
        raise CommandFailed("the router knows no base model yet")
    if model and model not in bases:
        raise CommandFailed(f"--model {model}: not a base model; there are {', '.join(bases)}", status=2)
    base = model or bases[0]
    return base, [str(card["id"]) for card in cards if card.get("parent") == base]


def chosen_models(text: str, base: str, known: list[str]) -> list[str]:
    """The models that `--adapters` names, each once; the base model alone where there is no adapter.

    Raises CommandFailed for an unknown one.
    """
    if text == "all":
        return known or [base]
    names = list(dict.fromkeys(base if name == "base" else name for part in text.split(",") if (name := part.strip())))
    if not names:
        raise CommandFailed("--adapters: expected all, base, or names", status=2)
    if unknown := [name for name in names if name not in (base, *known)]:
        raise CommandFailed(
            f"--adapters {', '.join(unknown)}: not adapters of {base} that this router has (lorafleet adapters list)",
            status=2,
        )
    return names


def prompt_vocabulary(api: "RestClient", base: str, seed: int) -> list[int]:
    """Token ids of ordinary text, which prompts are drawn from. Raises CommandFailed."""
    from lorafleet.cli.bench.plan import sample_text

    answer = api.call("POST", "/tokenize", {"model": base, "prompt": sample_text(seed), "add_special_tokens": False})
    ids = sorted(set(answer["tokens"]))
    if len(ids) < _LEAST_VOCABULARY:
        raise CommandFailed(f"{base}: its tokenizer has made {len(ids)} different tokens of 2,000 words")
    return ids


@contextmanager
def _progress(count: int) -> "Iterator[Callable[[RequestOutcome], None]]":
    """Counts ended requests on stderr: a bar on a terminal, else a line each tenth; yields what takes each outcome."""
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = failed = 0
    if not sys.stderr.isatty():

        def write_line(outcome: "RequestOutcome") -> None:
            """Count, and print a line at each tenth."""
            nonlocal done, failed
            before, done, failed = done, done + 1, failed + bool(outcome.error)
            if done * 10 // count > before * 10 // count:
                typer.echo(f"{done} of {count} requests ended, {failed} failed", err=True)

        yield write_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("requests", total=count)

        def advance(outcome: "RequestOutcome") -> None:
            """Count, and name failures beside the bar."""
            nonlocal failed
            failed += bool(outcome.error)
            bar.update(task, advance=1, description=f"requests, {failed} failed" if failed else "requests")

        yield advance
