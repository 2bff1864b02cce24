"""The commands of `weft` and their options; each does its work elsewhere, which is imported when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from weft import __version__, cli
from weft.errors import UserError
from weft.strategy import Strategy
from weft.strategy.precision import precision_of

TRAIN, PLAN, LOOK = "Train", "Plan without devices", "Look up"
KEEP = "Checkpoints"

app = typer.Typer(
    help="Train one ordinary PyTorch model on many devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

GraphFile = Annotated[
    Path, typer.Argument(metavar="GRAPH", help="The graph file that weft capture wrote.")
]
StrategyFile = Annotated[
    Path | None,
    typer.Option(
        "--strategy",
        metavar="FILE",
        help="The strategy, as Strategy.save writes it; data parallel without one.",
        show_default=False,
    ),
]
Topology = Annotated[
    str,
    typer.Option(
        metavar="NAMExN",
        help="The machine: a name of the catalogue and a number of devices, such as h100x512, a .yaml file, or here.",
    ),
]
Grid = Annotated[
    str,
    typer.Option(
        metavar="AxB",
        help="Ranks along each axis of the strategy, such as 16x8, the last axis innermost; stages cut the first one. "
        "One axis of all devices without it.",
        show_default=False,
    ),
]

Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        metavar="SECONDS",
        help="Time-out of a rank that waits for another one; 300 without it.",
        show_default=False,
    ),
]
LeastRanks = Annotated[
    int | None,
    typer.Option(
        "--min-ranks",
        min=1,
        help="Restart with one rank fewer, of several nodes without those that have gone, as long as there are so many "
        "ranks; else with as many.",
        show_default=False,
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Time for ranks to end after SIGTERM or Ctrl-C, as to write a checkpoint; a second Ctrl-C ends them at "
        "once.",
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write a page that shows it: one HTML file, which opens from disk.",
        show_default=False,
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@contextmanager
def _told() -> Iterator[None]:
    """Errors of the user's on stderr, with exit code 2."""
    try:
        yield
    except UserError as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        _refuse(
            "this command needs PyTorch, which is not installed here; install torch, or run it where it is"
        )


def _refuse(why: str) -> NoReturn:
    typer.echo(f"error: {why}", err=True)
    raise typer.Exit(2) from None


@app.callback()
def weft(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train one ordinary PyTorch model on many devices."""


# All arguments after the script belong to the script.
@app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=TRAIN)
def run(
    script: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The Python script to run.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None,
    ranks: Annotated[
        int, typer.Option("-n", "--ranks", min=1, help="Processes to start on this node.")
    ] = 1,
    nodes: Annotated[
        int, typer.Option("--nodes", "--nnodes", min=1, help="Nodes that take part.")
    ] = 1,
    rendezvous: Annotated[
        str, typer.Option(help="host:port of one node, which listens there, for several nodes.")
    ] = "",
    run_id: Annotated[
        str, typer.Option(help="Name of the run, the same on each node, for several nodes.")
    ] = "",
    timeout: Timeout = None,
    restarts: Annotated[
        int,
        typer.Option(min=0, help="Times that the ranks are started again after one has failed."),
    ] = 0,
    min_ranks: LeastRanks = None,
    grace: Grace = 5.0,
) -> None:
    """Run SCRIPT in one process for each rank; when one fails, end them all and show why.

    A script that begins with weft.Checkpoints.load_newest, as weft.fit does, continues after a restart where it was.
    Several nodes need the variable WEFT_SECRET, the same on each: who knows it belongs to the job.
    """
    if nodes > 1 and not (rendezvous and run_id):
        raise typer.BadParameter("several nodes need --rendezvous host:port and --run-id NAME")
    if min_ranks is not None and (not restarts or (nodes == 1 and min_ranks > ranks)):
        raise typer.BadParameter("--min-ranks goes with --restarts, and is at most --ranks")
    with _told():
        others = cli.Nodes(nodes, rendezvous, run_id) if nodes > 1 else None
        options = cli.RunOptions(ranks, others, timeout, restarts, min_ranks, grace)
        code = cli.run_script(script, arguments or (), options)
    raise typer.Exit(code)


@app.command(rich_help_panel=PLAN)
def measure(
    job: Annotated[
        str,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="A function that returns a weft.Job, whose distinct calls are measured; general calls without one.",
            show_default=False,
        ),
    ] = "",
    strategy: StrategyFile = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            min=1,
            help="Ranks at work at the same time; 1, 2 and 4 by default, of a job one on each core.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure this machine, once: calls, links between local ranks, the host. Needs PyTorch.

    The figures are kept for the topology "here" in the folder that WEFT_CACHE names, or that of the user for caches.
    """
    if strategy is not None and not job:
        raise typer.BadParameter("--strategy is that of a job; name one")
    with _told():
        code, text = cli.measure_here(job, ranks or 0, strategy)
        if text:
            typer.echo(text)
    raise typer.Exit(code)


@app.command(rich_help_panel=PLAN)
def capture(
    job: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns weft.Job(model, loss_fn, optimizer, example_batch).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The graph file to write; NAME.gz compresses it.")
    ],
    strategy: StrategyFile = None,
    precision: Annotated[
        str,
        typer.Option(
            help="Precision of the strategies to plan with: bf16 or fp16.", show_default=False
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="Where the step will run: cpu or cuda.")] = "cpu",
) -> None:
    """Capture a training step and write it to a file that plan and simulate read. Needs PyTorch.

    A step depends on the precision of the strategy, and on which parameters of recurrent layers it splits.
    """
    if strategy is not None and precision:
        raise typer.BadParameter("--strategy says the precision; leave --precision out")
    with _told():
        planned = (
            Strategy.load(strategy)
            if strategy
            else Strategy(precision=precision_of(precision or None))
        )
        typer.echo(cli.capture_job(job, output, planned, device))


@app.command(rich_help_panel=PLAN)
def plan(
    graph: GraphFile,
    topology: Topology,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")],
    strategy: StrategyFile = None,
    grid: Grid = "",
) -> None:
    """Write the plan of a graph file: the actors and registers of one rank of each class of equal ones."""
    with _told():
        typer.echo(
            cli.plan_graph(cli.PlanOptions(graph, _loaded(strategy), topology, grid), output),
            nl=False,
        )


@app.command(rich_help_panel=PLAN)
def simulate(
    graph: GraphFile,
    topology: Topology,
    strategy: StrategyFile = None,
    grid: Grid = "",
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measured costs in place of the machine's: of ops, modules, stages and exchanges.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the timeline of a step, for Perfetto.", show_default=False
        ),
    ] = None,
    report: ReportFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict a step of a graph file: its time, communication, idle time, memory, and largest costs."""
    with _told():
        asked = cli.PlanOptions(graph, _loaded(strategy), topology, grid)
        typer.echo(cli.simulate_graph(asked, costs, cli.SimulationFiles(trace, report), as_json))


@app.command(rich_help_panel=PLAN)
def search(
    graph: GraphFile,
    topology: Topology,
    seconds: Annotated[float, typer.Option(help="Time limit of the search.")] = 60.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="The file of the best strategy to write; beside it the record of the search.",
            show_default=False,
        ),
    ] = None,
    fixed: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A strategy whose entries hold for all.", show_default=False
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A strategy that is tried first.", show_default=False),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on where the search with this -o ended; what it measured is kept."
        ),
    ] = False,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Memory limit of each device; without it, what the device has.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random moves.")] = 0,
    moves: Annotated[
        int | None,
        typer.Option(
            help="Strategies that are planned at most, in place of seconds: the same result on any machine.",
            show_default=False,
        ),
    ] = None,
    report: ReportFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search the fastest strategy of a graph file; Ctrl-C ends it with the best so far."""
    with _told():
        asked = cli.SearchOptions(graph, topology, seconds, fixed, start, memory_limit, seed, moves)
        typer.echo(cli.search_graph(asked, output, resume, as_json, report))


@app.command("report", rich_help_panel=LOOK)
def report_(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…",
            help="Pages that --report or Program.report wrote, or folders of runs with pages, timelines (.json) and "
            "logs (.jsonl).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")
    ],
) -> None:
    """Write a page of runs, or of several reports side by side: one HTML file, which opens from disk."""
    with _told():
        typer.echo(cli.join_reports(runs, output))


@app.command(rich_help_panel=PLAN)
def diff(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="The file of a strategy.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="The file of another one.")],
    graph: Annotated[
        Path, typer.Option(metavar="FILE", help="The graph file that weft capture wrote.")
    ],
    topology: Topology,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show in what two strategies differ, and what each difference costs or saves by itself."""
    with _told():
        typer.echo(cli.diff_strategies(first, second, graph, topology, as_json))


@app.command(rich_help_panel=KEEP)
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="The folder that program.save wrote.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the files go; it is not there yet.")
    ],
    megabytes: Annotated[
        int, typer.Option("--file-size", min=1, metavar="MB", help="Largest size of a file.")
    ] = 5000,
    dtype: Annotated[
        str, typer.Option(help="To round numbers to, such as bfloat16.", show_default=False)
    ] = "",
    masters: Annotated[bool, typer.Option(help="Take float32 masters where there are.")] = False,
) -> None:
    """Write the model of a checkpoint as Hugging Face has it: safetensors with an index."""
    with _told():
        typer.echo(cli.export_checkpoint(checkpoint, folder, megabytes, dtype, masters))


@app.command("import", rich_help_panel=KEEP)
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder with safetensors files.")
    ],
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="The folder; it is not there yet.")
    ],
    renamed: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="PATTERN=REPLACEMENT",
            help="Replace what a regular expression matches in names, such as ^=transformer.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a checkpoint of safetensors files, as Hugging Face has them."""
    with _told():
        typer.echo(cli.import_files(source, checkpoint, renamed or ()))


@app.command(rich_help_panel=LOOK)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look over this machine: devices, transports, compiler, folders, limits; what is missing, and what to do."""
    with _told():
        code, text = cli.check_this_machine(as_json)
        typer.echo(text)
        raise typer.Exit(code)


@app.command(rich_help_panel=LOOK)
def ops(
    op: Annotated[str, typer.Argument(help="An op such as aten.mm.default; all by default.")] = "",
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Example arguments: float32[8,4], or [8,4], for a tensor, else Python literals: (1,) for a list.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks of the axis.")] = 2,
) -> None:
    """List the ops with their sharding rules, or show the signatures of OP for example arguments."""
    with _told():
        for line in cli.show_op(op, arguments or (), ranks) if op else cli.list_ops():
            typer.echo(line)


def _loaded(strategy: Path | None) -> Strategy | None:
    return None if strategy is None else Strategy.load(strategy)
