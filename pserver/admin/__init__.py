"""The control plane of a pserver: membership, barriers, saves and loads."""
