"""The last words of a run, for a person who has never seen one: is it healthy, where is what."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from kubelora_api.status import HealthStatus
from kubelora_trainer.utils.text import duration_text


@dataclass(frozen=True)
class RunSummary:
    """What a finished run has to show.

    norm_range: least and largest total gradient norm after the first steps.
    samples: None where none were drawn. edge: of an image to try, in pixels.
    """

    name: str
    steps: int
    seconds: float
    loss: float | None
    health: HealthStatus
    norm_range: tuple[float, float] | None
    adapter: Path
    samples: Path | None
    log: Path
    model: Path
    prompt: str
    edge: int


def summary_text(summary: RunSummary) -> str:
    """The summary as plain lines, the next command last."""
    loss = "" if summary.loss is None else f", last loss {summary.loss:.4f}"
    lines = [
        f"{summary.name}: {summary.steps} steps in {duration_text(summary.seconds)}{loss}",
        f"  health         {health_text(summary.health)}",
    ]
    if summary.norm_range is not None:
        low, high = summary.norm_range
        lines.append(f"  gradient norm  {low:.3g} to {high:.3g}, before clipping")
    lines.append(f"  adapter        {summary.adapter}")
    if summary.samples is not None:
        lines.append(f"  sample images  {summary.samples}")
    lines.append(f"  metrics log    {summary.log} (one row per step and module)")
    lines += ["", "Next, draw an image with it:", next_command(summary)]
    return "\n".join(lines)


def health_text(health: HealthStatus) -> str:
    """The verdict and, where something was found, each finding's sentence."""
    meaning = {
        "Healthy": "Healthy: every gradient was finite, none vanished, every update arrived",
        "Unknown": "Unknown: the run was too short to judge",
        "Warning": "Warning",
        "Critical": "Critical",
    }[health.verdict]
    findings = [
        f"{f.name} in {f.group} since step {f.since_step}: {f.message}" for f in health.findings
    ]
    return "\n                 ".join([meaning, *findings])


def next_command(summary: RunSummary) -> str:
    """A command that draws one image with the new adapter."""
    return (
        f'  {interpreter()} -c "from diffusers import StableDiffusionXLPipeline as P; '
        f"p = P.from_pretrained('{summary.model}'); "
        f"p.load_lora_weights('{summary.adapter.parent}'); "
        f"p('{_quoted(summary.prompt)}', height={summary.edge}, width={summary.edge})"
        ".images[0].save('first.png')\""
    )


def interpreter() -> str:
    """The Python that has diffusers, as a shell in the current folder finds it.

    A plain ``python`` would be another one wherever the virtual environment is not activated.
    """
    python = Path(sys.executable)
    here = Path.cwd()
    return shlex.quote(str(python.relative_to(here) if python.is_relative_to(here) else python))


def _quoted(prompt: str) -> str:
    """Safe inside single quotes inside double quotes of a shell."""
    return "".join(c for c in prompt if c.isalnum() or c in " ,.-")
