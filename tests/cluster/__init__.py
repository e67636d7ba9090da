"""Tests that need a real Kubernetes: the harness that makes one, its fixtures, and the tests."""
