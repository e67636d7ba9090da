"""Benchmarks: what a step costs, beside a loop with the semantics that people are used to."""
