"""Tasks in order. A new stream is one file and one line in ``STREAMS``."""

from holdfast.configuration import register
from holdfast.streams.stream import Split, Stream, Task, join
from holdfast.streams.toy import Toy

__all__ = ["STREAMS", "Split", "Stream", "Task", "Toy", "join"]

STREAMS = register(Stream, "stream", {"toy": Toy})
