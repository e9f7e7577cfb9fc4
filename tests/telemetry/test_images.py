"""Images of the user's, in TensorBoard and in sinks."""

import pytest
import torch
from records import notes
from small import make_batches

from safetrain import SafeTrainer, UsageError
from safetrain.telemetry.images import pixels_of


class Showing(SafeTrainer):
    def on_commit(self, view):
        self.log_image("mine/weights", torch.full((3, 4, 5), 0.5))

    def on_epoch_end(self, epoch):
        self.log_image("mine/odd", torch.tensor([[0.0, 1.0, torch.nan]]))


def test_images_are_in_the_event_file_at_their_step(make_trainer):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging = {"console": "off", "tensorboard": True}
    result = make_trainer(None, Showing, train_data=make_batches(2), config={"logging": logging}).fit()
    events = EventAccumulator(str(result.run_dir), size_guidance={"images": 0}).Reload()
    images = events.Images("mine/weights")
    assert [(image.width, image.height) for image in images] == [(5, 4), (5, 4)]
    assert images[0].step < images[1].step
    assert len(events.Images("mine/odd")) == 1
    said = [text for text in notes(result) if "log_image" in text]
    assert said == ["log_image: mine/odd has values that are not finite; they are shown as 0"]


def test_without_tensorboard_that_is_said_once(make_trainer):
    result = make_trainer(None, Showing, train_data=make_batches(3)).fit()
    said = [text for text in notes(result) if "nothing takes images" in text]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (torch.tensor([[0.0, 0.5, 2.0]]), [[[0, 128, 255]]]),
        (torch.tensor([[[7]]], dtype=torch.uint8), [[[7]]]),
        (torch.tensor([[True, False]]), [[[255, 0]]]),
        (torch.tensor([[1.0]]).numpy(), [[[255]]]),
        (torch.tensor([[torch.inf, torch.nan]]), [[[0, 0]]]),
    ],
)
def test_pixels(image, expected):
    pixels, _ = pixels_of(image)
    assert (pixels.dtype, pixels.tolist()) == (torch.uint8, expected)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (torch.zeros(8, 3, 4, 4), r"images\[0\]"),
        (torch.zeros(8, 9, 3), r"permute\(2, 0, 1\)"),
        (torch.zeros(3, 4, 4, dtype=torch.long), "to\\(torch.uint8\\)"),
    ],
)
def test_what_is_no_image_is_an_error_that_says_what_to_pass(image, said):
    with pytest.raises(UsageError, match=said):
        pixels_of(image)
