"""A real one-node Kubernetes for tests and for developers, from Go modules and Debian packages.

Why not kind or minikube: both want a container engine and an image registry. This harness needs
neither: it builds the control plane once, caches the binaries by version, and runs every component
as a plain process of this machine. `python -m tests.cluster.harness --help` lists its commands.
"""
