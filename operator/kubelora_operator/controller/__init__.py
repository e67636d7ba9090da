"""The reconcile loop: watches, work queue, snapshot, and applying a plan."""
