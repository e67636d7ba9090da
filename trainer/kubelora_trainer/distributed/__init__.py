"""Ranks: topology, launch, rendezvous and the process group."""
