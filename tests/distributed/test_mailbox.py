"""What ranks leave for each other in the store, also when that does not answer any more."""

import threading

from torch.distributed import HashStore

from safetrain.distributed import mailbox
from safetrain.distributed.mailbox import Mailbox


class Cut(HashStore):
    """As behind a network that was cut: a request gets no answer, and no error either."""

    def __init__(self):
        super().__init__()
        self.network = threading.Event()
        self.network.set()

    def check(self, keys):
        self.network.wait()
        return super().check(keys)


def test_a_store_that_does_not_answer_holds_up_nobody_and_may_come_back(monkeypatch):
    monkeypatch.setattr(mailbox, "ANSWER_SECONDS", 0.05)
    store = Cut()
    box = Mailbox(store)
    box.put(1, {"step": 3})
    assert box.about(1) == {"step": 3}
    assert box.about(2) is None
    store.network.clear()
    assert (box.about(1), box.answers) == (None, False)
    unanswered = box._unanswered
    box.put(1, {"step": 4})  # is not sent
    store.network.set()
    assert unanswered.done.wait(5.0)
    monkeypatch.undo()
    assert box.answers
    assert box.about(1) == {"step": 3}
    box.close()
    assert box.about(1) is None
