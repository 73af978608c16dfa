"""Tables and the operations on their rows: specs, update rules, kernels. No I/O, no threads, no Paddle."""
