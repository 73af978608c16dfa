"""Names under which the programs of a step benchmark are recorded. Nothing here imports Paddle."""

OURS, AHEAD, CACHED = "pservers", "pservers, looking ahead", "pservers, rows cached"
FLOOR = "rows from memory"
LOCAL, LOCAL_SPARSE = "plain Paddle", "plain Paddle, sparse gradient"
PADDLE = "PaddlePaddle 2.6.2"
PADDLE_PULLING = f"{PADDLE}, pulling dense parameters"
PADDLE_DATASET = f"{PADDLE}, InMemoryDataset"
PLAIN_TCP, TLS, UNIX_SOCKETS = "plain TCP", "TLS", "Unix sockets"
LOOP, IN_MEMORY, QUEUE = "exe.run", "InMemoryDataset", "QueueDataset"
LOADING = "InMemoryDataset and its loading"
OF_PADDLE = ("Paddle, before the first op", "forward and backward", "Paddle, after the last op")
"""Parts of a step that the floor has too."""


def floor_name(shape: object) -> str:
    """Returns the name of the floor of a model of several shapes."""
    return f"{shape}, {FLOOR}"


def behind_name(program: str, link: object) -> str:
    """Returns the name of a program whose pservers are behind a link."""
    return f"{program}, {link}"
