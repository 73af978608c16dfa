"""The plugin behind Paddle's own parameter-server API; `install()` puts it in place."""
