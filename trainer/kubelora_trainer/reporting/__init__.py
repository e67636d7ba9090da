"""Reports of a run: metrics, progress, the run log, trackers and the summary."""
