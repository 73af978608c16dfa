"""The trainer's side of the parameter server: what a worker process uses to pull and push."""
