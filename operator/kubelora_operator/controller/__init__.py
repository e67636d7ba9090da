"""The reconcile loop: watches, work queue, snapshot reader and plan applier."""
