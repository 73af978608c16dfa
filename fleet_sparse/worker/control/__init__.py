"""The worker's side of the control plane."""
