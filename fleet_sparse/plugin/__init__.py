"""What makes Paddle's own parameter-server API work again: `install()` and what stands behind it."""
