"""Reads, checks, compares and converts saved snapshots, without a job."""
