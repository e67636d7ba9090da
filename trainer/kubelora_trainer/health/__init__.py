"""Findings: thresholds, the watchdog, the baseline and the health policy."""
