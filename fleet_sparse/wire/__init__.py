"""Conversion between bytes and values, without sockets: frames of the data plane, messages of the control plane.

`docs/protocol.md` states every byte. The data plane is `frame_format`, `encode` and `decode`; the control plane is
`control` and `control.proto`.
"""
