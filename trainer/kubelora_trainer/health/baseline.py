"""``health.baseline``: an earlier run that this one is compared with, from its output folder.

Its manifest has the inputs and settings, its log the gradient norms. Differences are logged before
the first step; whether gradients leave the earlier run's range is judged during the run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kubelora_api.decides import declarations, select
from kubelora_api.names import OutputPath
from kubelora_api.schema import JsonObject
from kubelora_api.spec import JobSpec
from kubelora_api.status import Finding
from kubelora_api.thresholds import BASELINE_DEPARTURE
from kubelora_trainer.health.baseline_envelope import (
    Departure,
    Envelope,
    bins_of,
    envelope_of,
)
from kubelora_trainer.storage.output_dir import (
    GROUP_LOG_PARTS,
    Manifest,
    read_manifest,
)
from kubelora_trainer.storage.run_record import BaselineRecord, Difference
from kubelora_trainer.storage.run_settings import ABSENT, differing_leaves
from kubelora_trainer.utils.errors import OutputError

if TYPE_CHECKING:
    import pyarrow as pa  # 30 MiB, and only a run with a baseline reads a log

_SAME: Final = tuple(
    path for path, decides in declarations(JobSpec) if decides and "norms" in decides.effects
)
"""Settings that scale gradient norms, or decide which layers have them: if one differs, norms are
not compared."""
_LENGTHS_APART: Final = 1.5
"""Runs whose lengths differ by more than this factor are not compared: at the same progress, lora_B
of the longer run has grown for more steps, and lora_A's gradient with it. The limit of the finding
is a factor of 2."""
_SHOWN: Final = 4
"""Differences that a message names; the record has all."""


@dataclass(frozen=True)
class Baseline:
    """An earlier run.

    record: what differs, for the manifest. envelope: None if norms can't be compared.
    """

    record: BaselineRecord
    envelope: Envelope | None

    def report_lines(self) -> list[str]:
        """Return the lines to log before the first step."""
        record = self.record
        lines = [
            f"baseline {record.uri}: run {record.run_id}, {len(record.differences)} differences"
        ]
        lines += [f"  {d.field}: {d.here} here, {d.there} there" for d in record.differences]
        if record.not_compared:
            lines.append(f"  gradient norms are not compared: {record.not_compared}")
        return lines

    def finding(self, departure: Departure) -> Finding:
        """Build the finding for the status: how far off, and what is different."""
        shown = [f"{d.field} {d.here} (there {d.there})" for d in self.record.differences[:_SHOWN]]
        more = len(self.record.differences) - len(shown)
        what = "; ".join(shown) + (f" and {more} more" if more else "")
        return Finding(
            name=BASELINE_DEPARTURE.finding,
            severity=BASELINE_DEPARTURE.severity,
            group=departure.group,
            value=departure.ratio,
            threshold=departure.allowed if departure.ratio > 1 else 1 / departure.allowed,
            since_step=departure.since,
            message=f"Gradient norms in {departure.group} are {departure.ratio:.2g} times those "
            f"of the baseline {self.record.uri} at the same progress. What differs: "
            f"{what or 'no setting'}. {BASELINE_DEPARTURE.sentence}"[:1024],
        )


def load_baseline(
    uri: str,
    folder: Path,
    job: Mapping[str, Any],
    versions: Mapping[str, str],
    dataset_sha256: str,
    total_steps: int,
) -> Baseline:
    """Compare with the run whose output is in ``folder``.

    Args:
        uri: ``health.baseline``, for messages.
        folder: The output directory of that run.
        job: This run's resolved document.
        versions: Installed versions, by library.
        dataset_sha256: Fingerprint of this run's data.
        total_steps: Optimizer steps of this run.

    Raises:
        OutputError: There is no such run, or it is damaged.
    """
    try:
        manifest = read_manifest(folder)
    except OutputError:
        raise OutputError(
            f"health.baseline {uri}: {folder / OutputPath.MANIFEST} is no run's manifest, or "
            "damaged; name another run, or leave health.baseline out"
        ) from None
    if manifest is None:
        raise OutputError(
            f"health.baseline {uri}: no {OutputPath.MANIFEST} there; name the output folder of an "
            "earlier run (its spec.output.uri)"
        )
    differences = [
        *_between(_settings(manifest.job), _settings(job)),
        *_between({f"version of {k}": v for k, v in manifest.versions.items()},
                  {f"version of {k}": v for k, v in versions.items()}),
        *_between({"data (sha256)": manifest.record.dataset_sha256 or "unknown"},
                  {"data (sha256)": dataset_sha256}),
    ]  # fmt: skip
    log = _read_log(folder)
    why = _why_not(manifest, differences, log, total_steps)
    record = BaselineRecord(
        uri=uri, run_id=manifest.run_id, differences=differences, not_compared=why
    )
    if why or log is None:
        return Baseline(record, None)
    there = manifest.record.total_steps or 0
    return Baseline(record, envelope_of(_norms(log), there, bins_of(there, total_steps)))


def _why_not(
    manifest: Manifest, differences: list[Difference], log: "pa.Table | None", total_steps: int
) -> str:
    """Return why gradient norms can't be compared; empty if they can."""
    if log is None:
        return f"it has no {OutputPath.GROUP_LOG}"
    if unlike := [d.field for d in differences if _is_same(d.field)]:
        verb = "differs" if len(unlike) == 1 else "differ"
        return f"{', '.join(unlike)} {verb}, which changes gradient norms"
    there = manifest.record.total_steps
    if not there:
        return "its manifest does not say how many steps it planned"
    if not bins_of(there, total_steps):
        return f"{min(there, total_steps)} steps are too few"
    if not there / _LENGTHS_APART <= total_steps <= there * _LENGTHS_APART:
        return (
            f"it planned {there} steps and this run {total_steps}; lora_A's gradient grows with "
            "the steps done"
        )
    return ""


def _is_same(field: str) -> bool:
    return any(field == same or field.startswith(f"{same}.") for same in _SAME)


def _settings(document: Mapping[str, Any]) -> JsonObject:
    """Select the settings that affect training; sample images, output and reports are left out."""
    made_of = document.get("spec", {})
    return select(made_of, JobSpec, lambda decides: bool(decides.effects - {"samples", "nothing"}))


def _between(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Difference]:
    for field, old, new in differing_leaves(there, here):
        yield Difference(field=field, here=_text(new), there=_text(old))


def _text(value: object) -> str:
    if value is ABSENT:
        return "not set"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_log(folder: Path) -> "pa.Table | None":
    """Read step, group and gradient norm of a run, finished or not; None if it has no log."""
    whole = folder / OutputPath.GROUP_LOG
    files = [whole] if whole.exists() else sorted((folder / GROUP_LOG_PARTS).glob("*.parquet"))
    if not files:
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = ["step", "group", "grad_norm"]
    try:
        tables = [pq.read_table(file, columns=columns) for file in files]
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise OutputError(
            f"health.baseline: {files[0]} is no run's log of groups, or damaged ({error}); name "
            "another run, or leave health.baseline out"
        ) from None
    return pa.concat_tables([table.unify_dictionaries() for table in tables])


def _norms(log: "pa.Table") -> Iterator[tuple[int, str, float]]:
    for batch in log.to_batches(max_chunksize=65_536):
        steps, groups, norms = (column.to_pylist() for column in batch.columns)
        yield from (
            (s, g, n) for s, g, n in zip(steps, groups, norms, strict=True) if n is not None
        )
