"""The closing summary of a run, for first-time users: is it healthy, and where are its files."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from kubelora_api.status import HealthStatus
from kubelora_trainer.utils.text import duration_text


@dataclass(frozen=True)
class RunSummary:
    """Result of a finished run.

    Attributes:
        name: The job's name.
        steps: Optimizer steps done.
        seconds: Wall time.
        loss: Last loss.
        health: Findings and verdict.
        norm_range: Smallest and largest total gradient norm after the first steps.
        adapter_size: Norm of the adapter's update over that of the weight, of the module where it
            is largest; None if it was not measured.
        adapter: Path of the adapter.
        samples: Directory of sample images; None if there are none.
        log: Path of the run log.
        model: Path of the base model.
        prompt: Prompt of the suggested command.
        edge: Edge length of the suggested image, in pixels.
    """

    name: str
    steps: int
    seconds: float
    loss: float | None
    health: HealthStatus
    norm_range: tuple[float, float] | None
    adapter_size: float | None
    adapter: Path
    samples: Path | None
    log: Path
    model: Path
    prompt: str
    edge: int


def summary_text(summary: RunSummary) -> str:
    """Format the summary as plain lines, with the next command last."""
    loss = "" if summary.loss is None else f", last loss {summary.loss:.4f}"
    lines = [
        f"{summary.name}: {summary.steps} steps in {duration_text(summary.seconds)}{loss}",
        f"  health         {health_text(summary.health)}",
    ]
    if summary.norm_range is not None:
        low, high = summary.norm_range
        lines.append(f"  gradient norm  {low:.3g} to {high:.3g}, before clipping")
    if summary.adapter_size is not None:
        lines.append(
            f"  adapter size   {summary.adapter_size:.2g} of the weight it is added to, at most"
        )
    lines.append(f"  adapter        {summary.adapter}")
    if summary.samples is not None:
        lines.append(f"  sample images  {summary.samples}")
    lines.append(f"  metrics log    {summary.log} (one row per step and module)")
    lines += ["", "Next, generate an image with it:", next_command(summary)]
    return "\n".join(lines)


def health_text(health: HealthStatus) -> str:
    """Format the verdict, and each finding's message."""
    meaning = {
        "Healthy": "Healthy: gradients, their sums and updates stayed within their limits",
        "Unknown": "Unknown: the run was too short to judge",
        "Warning": "Warning",
        "Critical": "Critical",
    }[health.verdict]
    findings = [
        f"{f.name}{f' in {f.group}' if f.group else ''} since step {f.since_step}: {f.message}"
        for f in health.findings
    ]
    return "\n                 ".join([meaning, *findings])


def next_command(summary: RunSummary) -> str:
    """Build a command that generates one image with the new adapter."""
    return (
        f'  {interpreter()} -c "from diffusers import StableDiffusionXLPipeline as P; '
        f"p = P.from_pretrained('{summary.model}'); "
        f"p.load_lora_weights('{summary.adapter.parent}'); "
        f"p('{_quoted(summary.prompt)}', height={summary.edge}, width={summary.edge})"
        ".images[0].save('first.png')\""
    )


def interpreter() -> str:
    """Return the Python that has diffusers, as a shell in the current directory finds it.

    A plain ``python`` would be another one unless the virtual environment is activated.
    """
    python = Path(sys.executable)
    here = Path.cwd()
    return shlex.quote(str(python.relative_to(here) if python.is_relative_to(here) else python))


def _quoted(prompt: str) -> str:
    """Keep only characters that are safe inside single quotes inside a shell's double quotes."""
    return "".join(c for c in prompt if c.isalnum() or c in " ,.-")
