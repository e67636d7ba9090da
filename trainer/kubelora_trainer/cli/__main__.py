"""Entry point of `python -m kubelora_trainer.cli`."""

from kubelora_trainer.cli.main import main

main(prog_name="kubelora")
