"""Generator of Alertmanager's inhibition rules: one cause gives one notification."""

from typing import Any

import yaml

from kubelora_api.thresholds import PRECEDENCE

_HEAD = """\
# Generated from kubelora_api.thresholds.PRECEDENCE by `python -m charts.generate`. Do not edit.
# Inhibition rules for Alertmanager's configuration: one cause gives one notification.
"""
_JOB = ["cluster", "job_namespace", "name"]
_FOLLOWS_FROM_OPERATOR = ("KubeloraTelemetryMissing", "KubeloraJobSilent", "KubeloraJobNotStarting")


def inhibition_rules() -> list[dict[str, Any]]:
    """Build the rules, most general first."""
    names = [f"Kubelora{f.finding}" for f in PRECEDENCE]
    return [
        # The operator's own alerts name it as the cause of what its jobs lack.
        _rule(("KubeloraOperatorAbsent",), _FOLLOWS_FROM_OPERATOR, ["cluster"]),
        # A stopped job is stopped by what was found, and that alert has the cure.
        _rule(names, ("KubeloraJobSuspended",), _JOB),
        {
            **_rule(names, ("KubeloraJobFailed",), _JOB),
            "target_matchers": ['alertname="KubeloraJobFailed"', 'reason="NumericalFailure"'],
        },
        _rule(("KubeloraPodNotEnding", "KubeloraJobSilent"), ("KubeloraTelemetryMissing",), _JOB),
        *(_rule((n,), names[i + 1 :], _JOB) for i, n in enumerate(names[:-1])),
    ]


def inhibition_page() -> str:
    """Render the rules as they appear in Alertmanager's configuration."""
    rules = {"inhibit_rules": inhibition_rules()}
    return _HEAD + yaml.safe_dump(rules, sort_keys=False, width=100_000)


def _rule(
    sources: list[str] | tuple[str, ...], targets: list[str] | tuple[str, ...], equal: list[str]
) -> dict[str, Any]:
    return {
        "source_matchers": [f'alertname=~"{"|".join(sources)}"'],
        "target_matchers": [f'alertname=~"{"|".join(targets)}"'],
        "equal": equal,
    }
