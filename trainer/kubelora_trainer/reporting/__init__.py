"""What a run reports: metrics, progress, the run log, trackers and the summary."""
