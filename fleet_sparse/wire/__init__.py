"""Bytes to values and back, without sockets: frames of the data plane, messages of the control plane.

`docs/protocol.md` says every byte; `frames` is the data plane, `control` and `control.proto` are the control plane.
"""
