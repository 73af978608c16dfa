"""Requests over sockets, and the replies to them."""
