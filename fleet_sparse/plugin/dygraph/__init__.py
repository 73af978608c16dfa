"""Tables in dygraph: lookups of layers, gradients between two steps, and what a step of an optimizer does."""
