"""`kubelora`: train, validate, explain and more. The command is the same on a laptop and in a pod.

Slow libraries are imported inside the commands that need them, so that `--help` and `validate` are
instant. Every expected failure is one message on standard error and a documented exit code.
"""

import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kubelora_api import names
from kubelora_api.claims import claims_of
from kubelora_api.job import LoraTrainingJob
from kubelora_api.suggestions import did_you_mean
from kubelora_trainer.utils.errors import ConfigurationError, RunEndedError
from kubelora_trainer.utils.paths import expand_home
from kubelora_trainer.utils.signals import StopRequest

if TYPE_CHECKING:
    from kubelora_trainer.utils.logs import LogFormat

logger = logging.getLogger(__name__)

EPILOG = """\b
Examples:
  kubelora demo runs/demo --layout small
  kubelora train job.yaml --mount model=runs/demo --set spec.training.steps=10
  kubelora validate job.yaml
  kubelora export runs/demo@500

\b
Exit codes: 0 done, 1 unexpected error, 2 wrong configuration, model, data or
output, 3 numerical failure, 4 another rank was lost, 5 suspended by
health.policy, 6 out of memory, 7 the GPU or its driver failed, 75 interrupted
after a checkpoint, 130 stopped at once by a second Ctrl-C.
"""


class Commands(click.Group):
    """A click group that turns expected failures into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RunEndedError as ended:
            click.echo(f"error: {ended}", err=True)
            ctx.exit(int(ended.exit_code))


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kubelora"), prog_name="kubelora")
def main() -> None:
    """Fine-tune SDXL with LoRA, and never lose a gradient silently."""


@main.command(
    "train",
    epilog="""\b
Examples:
  kubelora train job.yaml --mount photos=./photos --mount adapters=./runs
  kubelora train job.yaml --set spec.training.steps=10 --set spec.training.device=cpu
""",
)
@click.argument("file")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change a field, such as spec.training.steps=10. The value is YAML.",
)
@click.option(
    "--mount",
    "mounts",
    multiple=True,
    metavar="CLAIM=DIR",
    help="A local folder to use for a claim of pvc:// URIs.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help=f"Port of /metrics, /status and /healthz. Default: {names.METRICS_PORT} in a pod, "
    "a free one elsewhere.",
)
@click.option(
    "--log-format",
    type=click.Choice(["plain", "json"]),
    default="plain",
    show_default=True,
    help="json: one object per line, with time, level, rank and attempt. The operator sets it.",
)
def train_command(
    file: str,
    settings: tuple[str, ...],
    mounts: tuple[str, ...],
    metrics_port: int | None,
    log_format: "LogFormat",
) -> None:
    """Train the LoraTrainingJob in FILE (- for standard input) on this machine.

    Ctrl-C saves a checkpoint and stops; a second one stops at once. Run the same command again to
    resume.
    """
    stop = StopRequest()
    stop.install()
    from kubelora_trainer.utils.logs import configure_logging, redirect_library_logs

    attempt = parse_attempt(os.environ.get(names.ENV_ATTEMPT))
    console = configure_logging(log_format, attempt=attempt)
    with _logged_failure():
        from kubelora_trainer.cli.job_file import load_job

        folders = parse_mounts(mounts)
        job = load_job(file, settings)
        for sentence in unused_mounts(folders, job):
            logger.warning(sentence)

        from kubelora_trainer.distributed.topology import node_topology
        from kubelora_trainer.training.context import RunOptions

        termination_log = os.environ.get(names.ENV_TERMINATION_LOG)
        options = RunOptions(
            mounts=folders,
            metrics_port=metrics_port,
            attempt=attempt,
            termination_log=Path(termination_log) if termination_log else None,
            resume_command=shlex.join(["kubelora", *sys.argv[1:]]),
            log_format=log_format,
        )
        layout = node_topology(job.spec.workers, os.environ)
        if layout.size > 1:
            from kubelora_trainer.training.run_ranks import run_ranks

            configure_logging(log_format, rank=None, attempt=attempt)
            click.get_current_context().exit(run_ranks(job, options, layout, stop))
        from kubelora_trainer.utils.third_party import import_heavy_libraries

        import_heavy_libraries()
        redirect_library_logs()
        from kubelora_trainer.training.run import run_job

        run_job(job, options, stop, console)


@contextmanager
def _logged_failure() -> Iterator[None]:
    """Log a foreseen failure in the format of all other lines and exit with its code."""
    try:
        yield
    except RunEndedError as ended:
        logger.error("%s", ended)
        click.get_current_context().exit(int(ended.exit_code))


@main.command(
    epilog="""\b
Examples:
  kubelora validate job.yaml other.yaml
  kubelora validate new.yaml --against old.yaml
"""
)
@click.argument("files", nargs=-1, required=True)
@click.option("--local", is_flag=True, help="Accept local paths too, as `kubelora train` does.")
@click.option(
    "--against",
    metavar="OLD",
    help="The running resource (kubectl get ltj NAME -o yaml): check its change to FILES.",
)
def validate(files: tuple[str, ...], local: bool, against: str | None) -> None:
    """Check job files as the API server would, before anything is sent."""
    from kubelora_trainer.cli.validate import validate_files

    for line in validate_files(files, local=local, against=against):
        click.echo(line)


@main.command(
    epilog="""\b
Example:
  kubelora demo runs/demo --layout small
"""
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(["small", "full"]),
    default="small",
    show_default=True,
    help="small is fast; full has SDXL's blocks and depths.",
)
def demo(directory: Path, layout: str) -> None:
    """Write a tiny SDXL model (random weights) and a few real photographs to DIRECTORY."""
    from kubelora_trainer.utils.third_party import import_heavy_libraries

    import_heavy_libraries("kubelora_trainer.cli.demo")
    from kubelora_trainer.cli.demo import create_demo

    paths = create_demo(directory, "full" if layout == "full" else "small")
    click.echo(f"model:  {paths.model}\nphotos: {paths.photos}")


@main.command(
    epilog="""\b
Examples:
  kubelora explain spec.training
  kubelora explain training.learningRate
  kubelora explain spec --recursive
"""
)
@click.argument("field", default="spec")
@click.option("--recursive", is_flag=True, help="Only names and types of all fields below it.")
def explain(field: str, recursive: bool) -> None:
    """Describe a FIELD of a job, as kubectl explain does, without a cluster."""
    from kubelora_trainer.cli.explain import explanation

    click.echo(explanation(field, recursive=recursive))


@main.command(
    epilog="""\b
Examples:
  kubelora gradients runs/bottles
  kubelora gradients runs/bottles --step 12 --module attn2.to_k
"""
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(1), help="Only gradients of this optimizer step.")
@click.option(
    "--module",
    metavar="PATTERN",
    help="Only modules or factors whose name ends with this regular expression.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Maximum number of rows.",
)
def gradients(folder: Path, step: int | None, module: str | None, limit: int) -> None:
    """Show the raw gradients that health.dumpGradients wrote to FOLDER, a run's output."""
    import re

    try:
        re.compile(module or "")
    except re.error as error:
        raise ConfigurationError(f"--module {module}: not a regular expression ({error})") from None
    from kubelora_trainer.cli.gradients import Choice, gradient_lines

    for line in gradient_lines(folder, Choice(step, module, limit)):
        click.echo(line)


@main.command(
    epilog="""\b
Examples:
  kubelora export runs/bottles
  kubelora export runs/bottles@500 --output bottles-500
  kubelora export runs/bottles/checkpoints/step-000500 --mount models=./models
"""
)
@click.argument("source", metavar="RUN[@STEP]|CHECKPOINT")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that gets the adapter. Default: exports/step-NNNNNN in RUN.",
)
@click.option(
    "--mount",
    "mounts",
    multiple=True,
    metavar="CLAIM=DIR",
    help="A local folder to use for a claim of pvc:// URIs.",
)
@click.option("--model", metavar="URI", help="The base model, if the job's own URI has moved.")
def export(source: str, output: Path | None, mounts: tuple[str, ...], model: str | None) -> None:
    """Write the adapter of a checkpoint, in all formats, and verify that it loads.

    Without a step, the newest checkpoint is exported. The run may still be training.
    """
    from kubelora_trainer.utils.logs import configure_logging, redirect_library_logs
    from kubelora_trainer.utils.third_party import import_heavy_libraries

    configure_logging("plain", attempt=None)
    import_heavy_libraries("kubelora_trainer.training.export_checkpoint")
    redirect_library_logs()
    from kubelora_trainer.training.export_checkpoint import export_checkpoint, find_checkpoint

    found = find_checkpoint(source)
    for file in export_checkpoint(found, output, parse_mounts(mounts), model):
        click.echo(f"step {found.checkpoint.step}: {file}")


@main.command(
    epilog="""\b
Examples:
  kubelora replay runs/bottles --step 120
  kubelora replay runs/bottles --step 120 --micro-step 3 --mount photos=./photos
"""
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), required=True, help="Optimizer step, from 1.")
@click.option(
    "--micro-step",
    type=click.IntRange(min=0),
    help="Also print the gradients of this micro-step of the step, from 0.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that gets the gradients of each micro-step. Default: replay-step-NNNNNN here.",
)
@click.option(
    "--mount",
    "mounts",
    multiple=True,
    metavar="CLAIM=DIR",
    help="A local folder to use for a claim of pvc:// URIs.",
)
def replay(
    run: Path, step: int, micro_step: int | None, output: Path | None, mounts: tuple[str, ...]
) -> None:
    """Compute a step of RUN again, and compare its gradients with those recorded.

    It begins at the nearest checkpoint before the step. RUN is only read.
    """
    from kubelora_trainer.utils.logs import configure_logging, redirect_library_logs
    from kubelora_trainer.utils.third_party import import_heavy_libraries

    configure_logging("plain", attempt=None)
    import_heavy_libraries("kubelora_trainer.training.replay_run")
    redirect_library_logs()
    from kubelora_trainer.cli.replay import micro_step_lines, replay_lines
    from kubelora_trainer.training.replay_run import open_run, replay_step

    target = output or Path(f"replay-step-{step:06d}")
    for line in replay_lines(replay_step(open_run(run), step, target, parse_mounts(mounts))):
        click.echo(line)
    for line in micro_step_lines(target, step, micro_step):
        click.echo(line)


@main.command(
    epilog="""\b
Examples:
  kubelora inspect bottles.safetensors
  kubelora inspect runs/bottles -o json
"""
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
def inspect(file: Path, output: str) -> None:
    """Describe the LoRA in FILE: format, layers, ranks, alpha, types, size and metadata."""
    from kubelora_trainer.utils.third_party import import_heavy_libraries

    import_heavy_libraries("kubelora_trainer.cli.inspect")
    from kubelora_trainer.cli.inspect import inspect_file, text_of

    found = inspect_file(file)
    click.echo(found.model_dump_json(indent=2) if output == "json" else text_of(found))


def parse_mounts(mounts: tuple[str, ...]) -> dict[str, Path]:
    """Parse ``claim=dir`` arguments. Raises ConfigurationError."""
    folders: dict[str, Path] = {}
    for mount in mounts:
        claim, equals, folder = mount.partition("=")
        if not (claim and equals and folder):
            raise ConfigurationError(
                f"--mount {mount}: expected CLAIM=DIR, such as photos=./photos"
            )
        folders[claim] = expand_home(folder)
    return folders


def unused_mounts(
    folders: Mapping[str, Path], job: LoraTrainingJob, claims: Path = Path(names.CLAIMS_DIRECTORY)
) -> Iterator[str]:
    """Yield a warning for each mount of a claim that the job does not use.

    Args:
        folders: The parsed ``--mount`` arguments.
        job: The job.
        claims: Directory where a pod's claims are mounted.

    Raises:
        ConfigurationError: A claim of the job has no directory: the mount is probably misspelt.
    """
    wanted = claims_of(job.spec)
    lacking = [name for name in wanted if name not in folders and not (claims / name).is_dir()]
    for claim in folders.keys() - wanted.keys():
        found = f"--mount {claim}={folders[claim]}: the job uses no claim {claim!r}"
        if lacking:
            still = " ".join(f"--mount {name}=DIR" for name in lacking)
            raise ConfigurationError(
                f"{found}{did_you_mean(claim, lacking) or '.'} Its claims are {', '.join(wanted)}; "
                f"still missing: {still}"
            )
        yield f"{found}, so nothing is read from it"


def parse_attempt(text: str | None) -> int | None:
    """Parse the operator's attempt number. Raises ConfigurationError."""
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(
            f"{names.ENV_ATTEMPT} must be an integer of at least 1, found {text!r}"
        )
    return int(text)
