"""The command line: plan, check, run, show, doctor, checkpoint. Nothing here imports torch until a verb needs it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import click

from headway.errors import HeadwayError

T = TypeVar("T")

# What stands after the script belongs to the script, options too.
_SCRIPT = MappingProxyType({"ignore_unknown_options": True, "allow_interspersed_args": False})

# `plan` and `check` take their own few options on either side of the script; the rest, and all after "--", is its own.
_EITHER_SIDE = MappingProxyType({"ignore_unknown_options": True, "allow_interspersed_args": True})


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="headway", message="headway %(version)s")
def headway() -> None:
    """Train an ordinary PyTorch script on many devices: Headway decides how, says why, and does it."""


@headway.command(context_settings=dict(_SCRIPT), short_help="Run a script on N processes on this machine.")
@click.option("-n", "num_processes", type=int, required=True, metavar="N", help="Processes to start on this machine.")
@click.option("--device-memory", metavar="SIZE", help='What each process may allocate, as "512MiB": a real limit.')
@click.option("--name", metavar="NAME", help="Name of the run's directory, runs/NAME; the next free number by default.")
@click.option("--deadline", metavar="TIME", help='How long a rank may wait for another, as "300 s"; 300 s by default.')
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    num_processes: int,
    device_memory: str | None,
    name: str | None,
    deadline: str | None,
    script: Path,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT on N processes here; what stands after it are its own arguments.

    Rank 0 prints on this terminal; the others into runs/NAME/rankN.log. When one fails the others are ended, and the
    first cause is printed last.
    """
    from headway.launch.start import Job, start
    from headway.units import parse_bytes, parse_seconds

    memory = None if device_memory is None else _quantity(parse_bytes, device_memory, "--device-memory")
    seconds = None if deadline is None else _quantity(parse_seconds, deadline, "--deadline")
    return start(Job(script, arguments, num_processes, memory, name, seconds))


@headway.command(context_settings=dict(_EITHER_SIDE), short_help="Print the plan a script would train by, and why.")
@click.option("--cluster", metavar="TEXT", help='The machine to plan for, as "8xcpu:256MiB"; this one by default.')
@click.option("--fixed", multiple=True, metavar="KEY=VALUE", help="A decision that is yours, as pipeline=2. Repeat.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan there, as TOML.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(
    cluster: str | None, fixed: tuple[str, ...], save: Path | None, script: Path, arguments: tuple[str, ...]
) -> int:
    """Print the plan that SCRIPT would train by, and why; nothing is trained and no process started.

    The script runs up to its call of headway.plan. Arguments that are not options of this command are the script's
    own, and all that stands after "--".
    """
    from headway.launch.identity import PlanRequest
    from headway.launch.plan_only import plan_of_script

    made = plan_of_script(script, arguments, PlanRequest(cluster, _decisions(fixed), save))
    click.echo(made.explain())
    if save is not None:  # headway.plan has written it, as the request asks
        click.echo(f"saved    {save}")
    return 0


@headway.command(context_settings=dict(_EITHER_SIDE), short_help="Say whether a script's model can be split.")
@click.option("--samples", type=click.IntRange(1), metavar="N", help="Samples to record the program for; 3 by default.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check(samples: int | None, script: Path, arguments: tuple[str, ...]) -> int:
    """Print what SCRIPT's program consists of, and what stands in the way of dividing it, with file and line.

    The script runs up to its call of headway.plan; nothing is trained and no process started. Arguments that are not
    options of this command are the script's own, and all that stands after "--". Exits with 0 when the model can be
    split, with 1 when not.
    """
    from headway.launch.identity import PlanRequest
    from headway.launch.plan_only import plan_of_script

    checked = plan_of_script(script, arguments, PlanRequest(check=True, samples=samples))
    click.echo(str(checked))
    return 0 if checked.can_be_split else 1


@headway.command(short_help="Show a run or a plan as text.")
@click.argument("path", metavar="RUN_OR_PLAN", type=click.Path(path_type=Path))
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write a Chrome trace there too.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw the timelines there too.")
def show(path: Path, trace: Path | None, svg: Path | None) -> int:
    """Show a run (runs/NAME, or NAME) or a plan (plan.toml) as text."""
    width = max(80, min(shutil.get_terminal_size((100, 24)).columns, 200))
    if path.suffix == ".toml":
        from headway.planner.plan import Plan
        from headway.report.timeline import draw

        shown = Plan.load(path)
        click.echo(shown.explain())
        timelines = {} if shown.timeline is None else {"planned": shown.timeline}
        for timeline in timelines.values():
            click.echo("\n" + draw(timeline, width=width))
    else:
        from headway.report.run import show_run, timelines_of

        directory = path if path.is_dir() or len(path.parts) != 1 else Path("runs") / path
        click.echo(show_run(directory, width=width))
        timelines = dict(timelines_of(directory)) if trace is not None or svg is not None else {}
    if not timelines and (trace is not None or svg is not None):
        raise HeadwayError("this plan has no costs to draw a timeline from", place=str(path))
    if trace is not None:
        from headway.report.trace import write_trace

        write_trace(timelines, trace)
        click.echo(f"\ntrace: {trace} (open it in chrome://tracing or ui.perfetto.dev)")
    if svg is not None:
        from headway.report.picture import write_svg

        write_svg(timelines, svg)
        click.echo(f"\npicture: {svg}")
    return 0


@headway.command(short_help="Measure this machine.")
@click.option("-n", "num_processes", type=click.IntRange(2), default=2, help="Processes between which to measure.")
@click.option("--model", metavar="SIZE", help='Also what codecs would give for gradients of this size, as "500MB".')
@click.option("--link", metavar="RATE", help='For --model: a link that is not here, as "1 Gbit/s".')
def doctor(num_processes: int, model: str | None, link: str | None) -> int:
    """Measure this machine: versions, cores, memory, links between processes, and what would be used."""
    from headway.report.doctor import examine
    from headway.units import parse_bytes, parse_rate

    if link is not None and model is None:
        raise HeadwayError("--link says over what the gradients of a model would go", remedy="add --model 500MB")
    size = None if model is None else _quantity(parse_bytes, model, "--model")
    rate = None if link is None else _quantity(parse_rate, link, "--link")
    for line in examine(num_processes, size, rate):
        click.echo(line)
    return 0


@headway.group(short_help="Look into a checkpoint, or take the weights out of it.")
def checkpoint() -> None:
    """Look into a checkpoint that headway.save wrote, or take the model's weights out of it."""


@checkpoint.command(short_help="Print what a checkpoint holds.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--all", "whole", is_flag=True, help="List all tensors of the model.")
def inspect(directory: Path, whole: bool) -> int:
    """Print what the checkpoint in DIRECTORY holds, and whether its files are there whole."""
    from headway.checkpoint.inspect import inspect as described

    click.echo(described(directory, whole=whole))
    return 0


@checkpoint.command(short_help="Write the model's weights as one safetensors file.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT.safetensors", type=click.Path(path_type=Path, dir_okay=False))
def export(directory: Path, target: Path) -> int:
    """Write the weights of the checkpoint in DIRECTORY under the model's own names, for load_state_dict."""
    from headway.checkpoint.export import export as written

    click.echo(written(directory, target))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a refusal is printed as fact, place, remedy."""
    try:
        result = headway.main(args=arguments, prog_name="headway", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except HeadwayError as error:
        click.echo(f"headway: {error}", err=True)
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("headway: stopped by Ctrl-C", err=True)
        return 130
    except BrokenPipeError:  # `headway show ... | head`
        sys.stderr.close()
        return 0


def _quantity(parse: Callable[[str], T], text: str, option: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        fact, _, remedy = str(error).partition("\n  Try: ")
        raise HeadwayError(fact, place=f"{option} {text}", remedy=remedy or None) from None


def _decisions(fixed: Sequence[str]) -> dict[str, object]:
    """Read --fixed key=value: whole numbers as such, a,b,c as a tuple, all else as text."""
    decisions: dict[str, object] = {}
    for text in fixed:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise HeadwayError(f"{text!r} is not a decision", place="--fixed", remedy="--fixed pipeline=2")
        parts = tuple(int(part) if part.lstrip("-").isdigit() else part for part in value.split(","))
        # Cuts are several by nature, so that one alone is a tuple too.
        decisions[key] = parts if len(parts) > 1 or key == "cuts" else parts[0]
    return decisions
