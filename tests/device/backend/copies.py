"""Copies that are still on their way, and the streams that carry them.

Operations run at once, in the order of the program, which is what one stream does. A copy on another stream is as late as it may be: it
reads its source when somebody waits for it. So a program that overwrites the source first, without making its stream wait, is caught.
"""

import contextlib

from .memory import is_ours, on_host
from .state import KNOBS

_pending = []
"""(stream, target, source): `source` is on the host already for a copy in the order of the program."""
_streams = []


class Stream:
    def __init__(self, device=None, priority=0):
        self.device = device

    def wait_stream(self, other):
        deliver(other)

    def wait_event(self, event):
        event.synchronize(is_host=False)

    def synchronize(self):
        from .waits import wait

        wait("stream")

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    def __init__(self, enable_timing=False, blocking=False):
        self._stream = None

    def record(self, stream=None):
        self._stream = stream or current()

    def wait(self, stream=None):
        self.synchronize(is_host=False)

    def query(self):
        return not any(stream is self._stream for stream, *_ in _pending)

    def synchronize(self, is_host=True):
        KNOBS.check_alive(is_wait=is_host)
        if self._stream is not None:
            deliver(self._stream)


DEFAULT = Stream()


def current(device=None):
    return _streams[-1] if _streams else DEFAULT


@contextlib.contextmanager
def use(stream):
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


def enqueue(target, source):
    stream = current()
    if stream is DEFAULT and is_ours(source):  # in the order of the program: its values are those of now
        source = on_host(source).clone()
    _pending.append((stream, target, source))


def deliver(stream=None):
    """Let the copies of a stream arrive; without one, all."""
    arriving = [each for each in _pending if stream is None or each[0] is stream]
    _pending[:] = [each for each in _pending if not (stream is None or each[0] is stream)]
    for _, target, source in arriving:
        plain = [on_host(t.detach()) if is_ours(t) else t.detach() for t in (target, source)]
        plain[0].copy_(plain[1].expand(plain[0].shape))


def deliver_to(tensors):
    """An operation needs these: what is on its way to the device for them arrives."""
    if not _pending:
        return
    needed = {t.untyped_storage().data_ptr() for t in tensors}
    arriving = [e for e in _pending if is_ours(e[1]) and e[1].untyped_storage().data_ptr() in needed]
    for each in arriving:
        _pending[:] = [e for e in _pending if e is not each]
        _, target, source = each
        on_host(target.detach()).copy_(source.expand(target.shape))
