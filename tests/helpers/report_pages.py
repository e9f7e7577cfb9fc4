"""Trains the run that is reported on, and parses reports with the standard library."""

from html.parser import HTMLParser
from pathlib import Path

import torch

from safetrain import SafeTrainer
from safetrain.config import load_config

CONFIG = Path(__file__).parents[1] / "report" / "sensors.yaml"
VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect"}


def train(run_dir, *changes, resume=False):
    torch.set_num_threads(1)
    config = load_config(CONFIG, ["logging.console=off", "logging.tensorboard=false", *changes])
    SafeTrainer(config=config, run_dir=run_dir).fit(resume=resume)


class Parsed(HTMLParser):
    """The elements of a page; fails if they are not properly nested."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.text_of: dict[str, str] = {}
        """By id, of every element that has one."""
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    @classmethod
    def file(cls, path):
        return cls(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self._open.append((tag, attributes.get("id")))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        if tag not in VOID:
            opened, _ = self._open.pop()
            assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data):
        if any(tag in ("style", "script") for tag, _ in self._open):
            return
        self.text += data
        for _, identity in self._open:
            if identity is not None:
                self.text_of[identity] = self.text_of.get(identity, "") + data

    def all(self, tag, of_class=None):
        return [
            a for t, a in self.elements if t == tag and (of_class is None or of_class in a.get("class", "").split())
        ]

    def check(self):
        """No external resources, every link has its target, ids are unique, and the only script is the report's."""
        ids = [attributes["id"] for _, attributes in self.elements if attributes.get("id")]
        assert len(ids) == len(set(ids))
        for tag, attributes in self.elements:
            for name in ("href", "src", "xlink:href", "action", "data", "srcset"):
                value = attributes.get(name, "#")
                assert value.startswith(("#", "data:,")) or tag == "a", f"<{tag} {name}={value}>"
                if value.startswith("#") and len(value) > 1:
                    assert value[1:] in ids, f"{value} has no target"
            assert not any(name.startswith("on") for name in attributes), attributes
        assert len(self.all("script")) == 1
        assert not self.all("iframe")
        assert not self.all("img")
