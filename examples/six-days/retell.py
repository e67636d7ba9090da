"""`make six-days`: six runs of the tiny model, four pictures, and a table of what each cure does.

python examples/six-days/retell.py [--output runs/six-days] [--picture PATH]
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median

from plots import distance, draw
from stories import BOTH, RESTORED, STORIES, Told, read, run

from kubelora_trainer.cli.demo import create_demo

HEAD = (
    "run",
    "gradient norm A",
    "updates lost A",
    "updates lost B",
    "error of the sums",
    "loss, last 20",
    "B·A off fp32",
    "found (since step)",
)


def table(told: Mapping[str, Told]) -> str:
    """One row a run, in Markdown."""
    lines = [" | ".join(HEAD), " | ".join(["---"] * len(HEAD))]
    for name, one in told.items():
        settled = slice(10, None)
        error = [e for e in one.mean("accumulation_error_ratio", "lora_") if e == e]
        off = (
            "" if name in (BOTH, RESTORED) or "May" in name else f"{distance(one, told[BOTH]):.1%}"
        )
        found = ", ".join(f"{what} ({step})" for what, step in one.findings) or "nothing"
        lines.append(
            " | ".join(
                (
                    name,
                    f"{median(one.mean('grad_norm', 'lora_A')[settled]):.2e}",
                    f"{median(one.mean('update_lost_ratio', 'lora_A')[settled]):.1%}",
                    f"{median(one.mean('update_lost_ratio', 'lora_B')[settled]):.1%}",
                    f"{median(error):.2%}" if error else "0",
                    f"{mean(one.loss[-20:]):.4f}",
                    off,
                    found,
                )
            )
        )
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """Run, draw, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/six-days"))
    parser.add_argument("--picture", type=Path, help="default: six-days.png in the output folder")
    parser.add_argument("--redraw", action="store_true", help="draw the runs that are there")
    options = parser.parse_args()
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    if not options.redraw:
        create_demo(output / "demo", "small")
    told: dict[str, Told] = {}
    for story in STORIES:
        print(f"{story.name} ...", flush=True)
        if options.redraw:
            told[story.name] = read(output / story.folder)
        else:
            told[story.name] = run(story, output / "demo", output)
    picture = options.picture or output / "six-days.png"
    draw(told, picture)
    print(f"\n{table(told)}\n\npictures: {picture}")


if __name__ == "__main__":
    main()
