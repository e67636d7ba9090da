"""Manifests of one attempt: ConfigMap, Service, Job and pod spec."""
