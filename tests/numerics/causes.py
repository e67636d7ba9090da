"""How often a finding's cause is right: faults on one side of the replay, or on both.

    python -m tests.numerics.causes --faults 200

A device that errs does so in one pass; data and code do it in every pass. The row's seed draws the
step, the micro-step, the bit and the sample. A cause is right if it is the injected one; Unknown is
wrong here, and Hardware without a device that errs is a healthy device blamed.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kubelora_api.status import Finding
from kubelora_trainer.objective.latents import Latents, LatentSource
from kubelora_trainer.training.loop import Parts
from tests.numerics.audit_injections import one_pass_errs, with_loss
from tests.numerics.bench import Configuration, Injection, observe_run, sound
from tests.numerics.scene import Scene
from tests.trainer.fixtures.threads import use_one_thread

STEPS = 10
ACCUMULATION = 2


@dataclass(frozen=True)
class Injected:
    """A fault with the cause that must be found."""

    cause: str
    name: str
    injection: Injection = sound
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def flipped(bit: int) -> Callable[[Tensor], object]:
    """One bit of the fp32 pattern of a gradient's largest element."""

    def change(gradient: Tensor) -> None:
        flat = gradient.view(-1)
        place = int(flat.abs().argmax())
        exact = flat[place : place + 1].float()
        exact.view(torch.int32).bitwise_xor_(torch.tensor(1 << bit, dtype=torch.int32))
        flat[place : place + 1].copy_(exact)

    return change


def filled(value: float) -> Callable[[Tensor], object]:
    """One element of a gradient has ``value``."""

    def change(gradient: Tensor) -> None:
        gradient.view(-1)[1] = value

    return change


@contextmanager
def latents_of(sample: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """One image's latent is another one whenever it is drawn."""
    real = LatentSource.of

    def of(source: LatentSource, micro_step: int, draws: Sequence[Any]) -> Latents:
        drawn = real(source, micro_step, draws)
        for place, draw in enumerate(draws):
            if draw.sample == sample:
                drawn.values[place] = change(drawn.values[place])
        return drawn

    with patch.object(LatentSource, "of", of):
        yield


def injected(number: int) -> Injected:
    """The fault of a number: half of them of the device, a quarter of the data, one of the code."""
    draw = random.Random(number)
    step, place, sample = draw.randint(5, 8), draw.randrange(ACCUMULATION), draw.randrange(8)
    if number % 2 == 0:
        # Of a finite element only the highest bit is found outside of an audit; in an audit any is.
        bit = draw.choice((17, 21, 24, 27, 28, 29, 30))
        audited = draw.choice((4, 8))
        return draw.choice(
            (
                Injected("Hardware", f"bit 30 in step {step}.{place}",
                         one_pass_errs(flipped(30), step, place)),
                Injected("Hardware", f"bit {bit} in audited step {audited}",
                         one_pass_errs(flipped(bit), audited)),
                Injected("Hardware", f"NaN in step {step}.{place}",
                         one_pass_errs(filled(torch.nan), step, place)),
                Injected("Hardware", f"infinity in step {step}.{place}",
                         one_pass_errs(filled(torch.inf), step, place)),
            )
        )  # fmt: skip
    if number % 4 == 1:
        value = draw.choice((torch.nan, torch.inf, 1e30))
        how = "times 1e30" if value == 1e30 else f"with {value}"

        def changed(latent: Tensor) -> Tensor:
            return latent * value if value == 1e30 else latent.index_fill(0, _FIRST, value)

        return Injected(
            "Data", f"latent {sample} {how}", around=lambda: latents_of(sample, changed)
        )
    factor = draw.choice((1e9, torch.nan, torch.inf))
    return Injected(
        "Code", f"loss times {factor} from step {step}", with_loss(lambda loss: loss * factor, step)
    )


_FIRST = torch.tensor([0])


def cause_found(scene: Scene, fault: Injected, seed: int, output: Path) -> Finding | None:
    """The first finding that the watchdog explained."""
    explained: list[Finding] = []

    def attending(parts: Parts) -> Parts:
        parts = fault.injection(parts)
        watchdog = parts.reporter.watchdog
        real = watchdog.explain

        def explain(cause_of: Any) -> list[Finding]:
            now = real(cause_of)
            explained.extend(now)
            return now

        watchdog.explain = explain  # type: ignore[method-assign]
        return parts

    training: dict[str, object] = {"steps": STEPS, "gradientAccumulation": ACCUMULATION}
    with fault.around():
        observe_run(scene, Configuration({"training": training}), seed, output, attending)
    return explained[0] if explained else None


def main(arguments: Sequence[str]) -> int:
    """Inject the faults, print each that was judged wrongly, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--scene", type=Path)
    options = parser.parse_args(arguments)
    use_one_thread()
    right, blamed, seen = 0, 0, Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene.create(options.scene or Path(folder) / "scene")
        for number in range(options.faults):
            fault = injected(number)
            finding = cause_found(scene, fault, number, Path(folder) / "run")
            cause = (finding.cause if finding else None) or "nothing found"
            right += cause == fault.cause
            blamed += cause == "Hardware" != fault.cause
            seen[fault.cause, cause] += 1
            if cause != fault.cause:
                what = f"{finding.name}: {finding.message[-200:]}" if finding else ""
                print(f"{number}: {fault.name}: {fault.cause} judged {cause} {what}", flush=True)
    for (wanted, found), count in sorted(seen.items()):
        print(f"{wanted:<10} judged {found:<14} {count:>4}")
    print(f"causes: {right}/{options.faults} right, healthy devices blamed: {blamed}")
    return 0 if right >= 0.95 * options.faults and not blamed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
