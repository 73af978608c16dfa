"""A pserver that serves the snapshots of a series: two versions at once, reads of a version, and the follower."""
