"""Paddle's `InMemoryDataset` and `QueueDataset` behind `exe.train_from_dataset` and `exe.infer_from_dataset`."""
